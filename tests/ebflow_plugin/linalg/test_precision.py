"""Full precision: the settings are put back, and differences survive TF32, emulated as cuDNN and cuBLAS compute it."""

import copy

import pytest
import torch
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.transforms import CompositeTransform
from torch.utils._python_dispatch import TorchDispatchMode

import ebflow_plugin as ebf
from ebflow_nflows import FullConv2d, SmoothLeakyReLU
from ebflow_plugin.linalg import precision
from ebflow_plugin.linalg.precision import full_precision
from ebflow_plugin.objectives import DSM, FDSSM
from randomness import rng

MATMULS = ("mm", "addmm", "bmm", "baddbmm")


def settings():
    return [getattr(owner, name) for owner, name, _ in precision._settings()]


def to_tf32(tensor):
    """Rounded to 10 bits of the mantissa."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        return tensor
    bits = tensor.detach().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class TF32(TorchDispatchMode):
    """Rounds what a GPU would round, by torch's settings of this moment."""

    rounded = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        matmul, conv = (value in ("tf32", True) for value in settings())
        if (name in MATMULS and matmul) or (name.startswith("convolution") and conv):
            self.rounded += 1
            args = [to_tf32(arg) for arg in args]
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tf32(monkeypatch):
    """A CPU that has TF32, for both kinds of products."""
    monkeypatch.setattr(precision, "WITH_TF32", {"cpu"})
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in precision._settings()]
    new = "tf32" if isinstance(saved[0][2], str) else True
    precision._restore([(owner, name, new) for owner, name, _ in saved])
    yield TF32()
    precision._restore(saved)


def test_the_settings_are_put_back(tf32):
    before = settings()
    with full_precision(torch.ones(2)):
        assert settings() != before
        with full_precision(torch.ones(2)):
            pass
        assert settings() != before
    assert settings() == before
    with pytest.raises(ZeroDivisionError), full_precision(torch.ones(2)):
        raise ZeroDivisionError
    assert settings() == before


def test_a_device_without_tf32_is_left_alone():
    before = settings()
    with full_precision(torch.ones(2)):
        assert settings() == before


def cnn():
    torch.manual_seed(0)
    steps = [FullConv2d(1, kernel_size=5), SmoothLeakyReLU(0.3), FullConv2d(1, kernel_size=5), SmoothLeakyReLU(0.3)]
    flow = Flow(CompositeTransform(steps), StandardNormal([1, 12, 12]))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return flow


def found(kind, flow, x, mode=None, **options):
    objective = kind(ebf.wrap(flow), generator=rng(1), **options)
    parameters = list(flow.parameters())
    if mode is None:
        loss = objective(x)
        gradients = torch.autograd.grad(loss, parameters)
    else:
        with mode:
            loss = objective(x)
            gradients = torch.autograd.grad(loss, parameters)
    return loss.double(), torch.cat([gradient.flatten().double() for gradient in gradients])


class SameNoise(FDSSM):
    """Noise in single precision for models in both."""

    def per_sample(self, plan, u, context, generator):
        state = torch.get_rng_state()
        torch.manual_seed(5)
        try:
            return super().per_sample(plan, u, context, None)
        finally:
            torch.set_rng_state(state)


def test_fdssm_is_right_under_tf32(tf32, monkeypatch):
    """Without it the loss is off by more than its size: the reason for all of this."""
    flow = cnn()
    x = 2.0 * torch.randn(8, 1, 12, 12, generator=rng(2))
    loss, gradient = found(SameNoise, flow, x, eps=0.1)  # in single precision
    before = settings()
    ours, ours_gradient = found(SameNoise, flow, x, tf32, eps=0.1)
    assert tf32.rounded == 0
    assert settings() == before
    torch.testing.assert_close(ours, loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours_gradient, gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))
    monkeypatch.setattr(precision, "WITH_TF32", set())
    wrong, _ = found(SameNoise, flow, x, tf32, eps=0.1)
    assert tf32.rounded > 0
    assert (wrong - loss).abs() > 0.1 * loss.abs()
    dsm, rounded = (found(DSM, copy.deepcopy(flow), x, mode)[0] for mode in (None, tf32))
    assert (dsm - rounded).abs() < 3e-3 * dsm.abs()  # which subtracts nothing


def test_autocast_is_off_in_differences():
    flow, x = cnn(), torch.randn(8, 1, 12, 12, generator=rng(2))
    expected, gradient = found(SameNoise, flow, x, eps=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        ours, ours_gradient = found(SameNoise, flow, x, eps=0.1)
    assert torch.equal(ours, expected)
    assert torch.equal(ours_gradient, gradient)


def test_half_precision_weights_are_refused():
    model = ebf.wrap(cnn().to(torch.bfloat16))
    with pytest.raises(ebf.InputError, match="leaves nothing; train in float32 with autocast"):
        FDSSM(model)(torch.randn(4, 1, 12, 12, dtype=torch.bfloat16))
