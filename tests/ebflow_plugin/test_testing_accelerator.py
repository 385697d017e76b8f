"""The contracts of DESIGN.md on a pretend accelerator, which refuses what CUDA refuses (support/accelerator.py)."""

import pytest
import torch
from nflows import distributions, flows, transforms

import accelerator as pretend
import ebflow_plugin as ebf
from cases import SUPPORTED, first_of_each_class
from ebflow_nflows import FullLinear
from ebflow_plugin import testing

# The inverse of nflows' linear spline makes a tensor on the CPU.
BROKEN_INVERSES = "PiecewiseLinear"


@pytest.mark.parametrize("case", first_of_each_class(SUPPORTED), ids=str)
def test_every_contract(case, accelerator):
    """Against the library's own numbers on the CPU: a sixth of the cases could not compute them here themselves."""
    flow, x, context = case.build().to(accelerator), case.x(3).to(accelerator), case.context(3)
    if case.own_log_prob:
        plain = case.build()
        ebf.wrap(plain).initialize(case.x(3), context)
        theirs = case.own(plain, case.x(3), context)
        own = lambda: theirs.to(accelerator)  # noqa: E731
    context = None if context is None else context.to(accelerator)
    testing.check_untouched(flow, x, context)
    if case.own_log_prob:
        testing.check_invariant(flow, x, context, own=own, tolerance=max(case.own_tol, 1e-9))
    if case.own_inverse and BROKEN_INVERSES not in str(case):
        testing.check_inverse(flow, x, context, tolerance=max(case.inverse_tol, 1e-6))
    testing.check_copies(flow, x, context)


def small(accelerator):
    torch.manual_seed(0)
    steps = [FullLinear(3), transforms.LULinear(3)]
    return flows.Flow(transforms.CompositeTransform(steps), distributions.StandardNormal([3])).double().to(accelerator)


def forgets_the_device(module, x):
    return x * 1.0 + torch.zeros(3, dtype=x.dtype)


def draws_on_the_cpu(module, x):
    return x + 0.0 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype, device=x.device)


def goes_through_numpy(module, x):
    return torch.from_numpy(x.detach().numpy()).to(x)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (forgets_the_device, "same device.*pretend:0 and cpu"),
        (draws_on_the_cpu, "'pretend' device type for generator but found 'cpu'"),
        (goes_through_numpy, "can't convert pretend:0 device type tensor to numpy"),
    ],
)
def test_a_mistake_in_a_path_is_caught(accelerator, monkeypatch, mistake, message):
    flow, x = small(accelerator), torch.randn(4, 3, dtype=torch.float64).to(accelerator)
    testing.check_invariant(flow, x)
    monkeypatch.setattr(FullLinear, "transform", mistake)
    with pytest.raises(AssertionError, match=message):  # what the library's own log_prob raised is in the message
        testing.check_invariant(flow, x)


def test_two_devices_are_two(accelerator):
    other = torch.device(accelerator.type, 1)
    x = torch.ones(2, 3, device=other)
    assert (x + 1).device == x.mT.device == torch.randn_like(x).device == other
    with pytest.raises(RuntimeError, match="pretend:1 and pretend:0"):
        x + torch.ones(3, device=accelerator)
    assert (x.to(accelerator) + torch.tensor(1.0)).device == accelerator  # a CPU number, as on CUDA


WAITS = {
    "number": lambda x: x.sum().item(),
    "branch": lambda x: bool(x.any()),
    "mask": lambda x: x[x > 0],
    "copy": lambda x: x.cpu(),
    "list": lambda x: x.tolist(),
    "from a float": lambda x: torch.tensor(2.0, device=x.device),
    "checked inverse": lambda x: torch.linalg.inv(x),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x),
    "fresh event": lambda x: fresh_event(x).synchronize(),
    "the device": lambda x: torch.get_device_module(x.device).synchronize(),
}
FREE = {
    "arithmetic": lambda x: (x + 2.0).mean().sqrt(),
    "copy on its way": lambda x: x.to("cpu", non_blocking=True),
    "unchecked inverse": lambda x: torch.linalg.inv_ex(x),
    "slogdet": lambda x: torch.linalg.slogdet(x),
    "indices": lambda x: x[torch.zeros(2, dtype=torch.int64, device=x.device)],
    "old event": lambda x: old_event(x).synchronize(),
}


def fresh_event(x):
    event = torch.Event(x.device)
    event.record()
    return event


def old_event(x):
    event = fresh_event(x)
    for _ in range(30):
        x + 1
    return event


@pytest.mark.parametrize("name", [*WAITS, *FREE])
def test_what_makes_the_host_wait_is_put_down(accelerator, name):
    x = torch.eye(3, device=accelerator)
    with pretend.watch() as waits:
        {**WAITS, **FREE}[name](x)
    assert bool(waits) == (name in WAITS), waits
    assert all(wait.line.startswith(__file__) for wait in waits)


def test_waits_name_our_line(accelerator):
    model = ebf.wrap(small(accelerator))
    with pretend.watch() as waits:
        ebf.fit(ebf.objectives.DSM(model), torch.randn(8, 3, dtype=torch.float64), steps=1, progress=False)
    assert any(wait.line.startswith("ebflow_plugin/training/fitting.py:") for wait in waits)


def test_complex_numbers_and_their_lazy_conjugates(accelerator):
    x = torch.randn(3, 4, device=accelerator)
    found = torch.fft.ifft(x)
    assert found.is_conj()
    torch.testing.assert_close(found.cpu(), torch.fft.ifft(x.cpu()))
    torch.testing.assert_close(found.imag.cpu(), torch.fft.ifft(x.cpu()).imag)
    torch.testing.assert_close(found.clone().cpu(), torch.fft.ifft(x.cpu()))
