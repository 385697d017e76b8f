"""Losses and gradients under autocast are near those in float32; a GradScaler finds a scale for float16."""

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_examples.models import build
from ebflow_plugin.errors import EBFlowWarning
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM, LatentMatch, ReverseKL
from randomness import randn, rng

SHAPES = {"fc": (16,), "cnn": (1, 8, 8)}
OBJECTIVES = {
    "SM": SM,
    "SSM": SSM,
    "DSM": DSM,
    "FDSSM": FDSSM,
    "ML": ML,
    "ML stochastic": lambda model, **o: ML(model, log_det="stochastic", **o),
    "SML": SML,
    "LatentMatch": LatentMatch,
    "ReverseKL": lambda model, **o: ReverseKL(model, lambda x: -0.5 * x.flatten(1).square().sum(1), n=64, **o),
}


def step(kind, name, dtype):
    """The loss and gradients of the first step that a GradScaler does not skip."""
    torch.manual_seed(0)
    model = ebf.wrap(build(kind, SHAPES[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    noise = rng(2)
    objective, begin = OBJECTIVES[name](model, generator=noise), noise.get_state()
    x = () if name == "ReverseKL" else (randn(64, *SHAPES[kind], dtype=torch.float32),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=2.0**9)
    for _ in range(10):
        noise.set_state(begin)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = objective(*x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        scaler.step(optimizer)
        scaler.update()
        if gradient.isfinite().all():
            return loss.detach(), gradient
    raise AssertionError("no scale is low enough")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.05)], ids=["bf16", "f16"])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_in_half_precision_is_near(name, kind, dtype, tolerance):
    loss, gradient = step(kind, name, torch.float32)
    found, direction = step(kind, name, dtype)
    torch.testing.assert_close(found.float(), loss, rtol=tolerance, atol=0.0)
    assert (direction - gradient).norm() <= tolerance * gradient.norm()


def test_a_compiled_loss_in_float16_warns():
    objective = DSM(ebf.wrap(build("fc", (4,)))).compile(backend="eager")
    with torch.autocast("cpu", dtype=torch.float16):
        with pytest.warns(EBFlowWarning, match="GradScaler .* bfloat16"):
            objective(torch.randn(5, 4)).backward()
