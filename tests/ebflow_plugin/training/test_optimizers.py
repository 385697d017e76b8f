"""parameter_groups(): kernels have a rate of their own, everywhere by default, and an upgraded Glow gets no worse."""

import copy

import normflows as nf
import pytest
import torch
from nflows.distributions.normal import StandardNormal
from nflows.flows.base import Flow
from nflows.transforms import CompositeTransform
from torch.nn.functional import interpolate
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import ebflow_plugin as ebf
from ebflow_examples.models import build
from ebflow_nflows import FullConv2d, FullLinear
from ebflow_plugin.lightning import LitObjective
from ebflow_plugin.objectives import ML
from randomness import rng

RATES = [1.0, 1 / 3, 1 / 5]  # of 1, 3 and 5 pixels


def convolutions():
    layers = [FullConv2d(2, kernel_size=1), FullConv2d(2, kernel_size=(1, 3)), FullConv2d(2, kernel_size=3)]
    layers.append(FullConv2d(2, kernel_size=5))
    return ebf.wrap(Flow(CompositeTransform(layers), StandardNormal([2, 4, 4])))


def names(model, groups):
    known = {id(parameter): name.rpartition("_transforms.")[2] for name, parameter in model.named_parameters()}
    return [[known[id(parameter)] for parameter in group["params"]] for group in groups]


def test_kernels_of_k_pixels_have_1_over_k_of_the_rate():
    model = convolutions()
    groups = ebf.parameter_groups(model, 0.5)
    assert [group["lr"] for group in groups] == pytest.approx([0.5 * rate for rate in RATES])
    assert names(model, groups) == [
        ["0.weight", "0.bias", "1.bias", "2.bias", "3.bias"],
        ["1.weight", "2.weight"],
        ["3.weight"],
    ]
    assert names(model, ebf.parameter_groups(model.flow, 0.5)) == names(model, groups)  # of any module
    slower = ebf.parameter_groups(model, 0.5, trained=True)
    assert [group["lr"] for group in slower] == pytest.approx([0.5 * rate**2 for rate in RATES])
    assert names(model, slower) == names(model, groups)


def test_what_is_frozen_is_in_no_group_and_no_group_is_empty():
    model = convolutions()
    layers = model.flow._transform._transforms
    layers[1].requires_grad_(False)
    assert names(model, ebf.parameter_groups(model, 1e-3))[1] == ["2.weight"]
    layers[2].weight.requires_grad_(False)
    layers[3].weight.requires_grad_(False)
    (group,) = ebf.parameter_groups(model, 1e-3)
    assert names(model, [group]) == [["0.weight", "0.bias", "2.bias", "3.bias"]]
    (group,) = ebf.parameter_groups(FullLinear(3), 1e-3)
    assert len(group["params"]) == 2


@pytest.mark.parametrize("rate", [0, -1e-3, float("nan"), "fast"])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ebf.InputError, match="lr must be a positive number"):
        ebf.parameter_groups(convolutions(), rate)


@pytest.mark.parametrize("optimizer", [Adam, SGD])
def test_schedulers_keep_the_ratio(optimizer):
    made = optimizer(ebf.parameter_groups(convolutions(), 0.1))
    schedule = CosineAnnealingLR(made, 5)
    for _ in range(4):
        made.step()
        schedule.step()
        rates = schedule.get_last_lr()
        assert rates == pytest.approx([rates[0] * share for share in RATES])


def test_fit_and_lightning_have_them_by_default():
    """One step of Adam moves each number by its rate."""
    x = torch.randn(8, 2, 4, 4, generator=rng())
    model = convolutions()
    before = copy.deepcopy(model.flow.state_dict())
    ebf.fit(ML(model), x, steps=1, batch_size=8, progress=False)
    for name, value in model.flow.state_dict().items():
        step = 1e-3 / (max(value.shape[2:]) if value.dim() == 4 else 1)
        torch.testing.assert_close((value - before[name]).abs().amax(), torch.tensor(step), rtol=1e-3, atol=0.0)
    found = LitObjective(ML(convolutions())).configure_optimizers().param_groups
    assert [group["lr"] for group in found] == pytest.approx([1e-3 * share for share in RATES])
    own = LitObjective(ML(convolutions()), lambda parameters: Adam(parameters, lr=0.1)).configure_optimizers()
    assert [group["lr"] for group in own.param_groups] == [0.1]


def test_upgrading_a_trained_glow_makes_it_no_worse():
    """Neither at once nor in the next 100 steps, at the rate at which it was trained: kernels at that rate do."""
    model = small_glow(kernel=1)
    train(model, 100, "exact")
    trained = nll(model)
    upgraded = ebf.wrap(ebf.unconstrain(model.flow, 3))
    assert nll(upgraded) == pytest.approx(trained, rel=1e-4)
    for _ in range(4):
        train(upgraded, 25, "auto")
        assert nll(upgraded) < trained


@pytest.mark.parametrize("kernel", [3, 5])
def test_an_upgraded_glow_is_no_worse_than_one_that_goes_on_as_it_is_in_any_step(kernel):
    """With a new Adam at its full rate, which harms both for some steps: 1/k is worse than no upgrade in these."""
    plain = small_glow(kernel=1)
    train(plain, 100, "exact")
    upgraded = ebf.wrap(ebf.unconstrain(plain.flow, kernel))
    left = [followed(model, [1, 1, 3, 5, 15]) for model in (upgraded, plain)]
    assert all(ours < theirs for ours, theirs in zip(*left, strict=True))


@pytest.mark.parametrize("library", ["nflows", "normflows"])
def test_kernels_that_go_into_a_flow_in_use_are_careful_by_default(library):
    """Whether it is in use, its ActNorms tell."""
    for started, share in ((False, 1 / 3), (True, 1 / 9)):
        flow = build("glow", (2, 8, 8), levels=1, blocks=2, hidden=4) if library == "nflows" else blocks_of_normflows()
        if started:
            ebf.wrap(flow).initialize(smooth_images(64, 1)[..., :8, :8])
        model = ebf.wrap(copy.deepcopy(ebf.unconstrain(flow, 3)))
        assert [each["lr"] for each in ebf.parameter_groups(model, 1.0)] == pytest.approx([1.0, share])
        for told, power in ((False, 1), (True, 2)):
            groups = ebf.parameter_groups(model, 1.0, trained=told)
            assert [each["lr"] for each in groups] == pytest.approx([1.0, 3.0**-power])


def blocks_of_normflows():
    blocks = [nf.flows.GlowBlock(8, 4), nf.flows.GlowBlock(8, 4), nf.flows.Squeeze()]
    return nf.MultiscaleFlow([nf.distributions.DiagGaussian((8, 4, 4))], [blocks], [], class_cond=False)


def test_kernels_of_a_new_glow_learn_more_than_at_a_tenth():
    """At which they hardly move: a Glow on CIFAR-10 lost most of what 3 × 3 kernels gain."""
    found, slow = small_glow(kernel=3), small_glow(kernel=3)
    train(found, 80, "auto")
    train(slow, 80, "auto", [0.1])
    assert nll(found) < nll(slow) - 50.0


def small_glow(kernel):
    torch.manual_seed(0)
    model = ebf.wrap(ebf.unconstrain(build("glow", (2, 16, 16), levels=1, blocks=2, hidden=8, linear="lu"), kernel))
    model.initialize(smooth_images(256, 1))
    return model


def smooth_images(count, seed):
    """Neighbouring pixels are alike."""
    generator = rng(seed)
    coarse = torch.randn(count, 2, 3, 3, generator=generator)
    fine = interpolate(coarse, size=(16, 16), mode="bicubic")
    return fine + 0.05 * torch.randn(fine.shape, generator=generator)


def train(model, steps, log_det, shares=()):
    """Adam, with other shares of the rate for kernels on request."""
    optimizer = Adam(ebf.parameter_groups(model, 6e-3))
    for group, share in zip(optimizer.param_groups[1:], shares, strict=False):
        group["lr"] = 6e-3 * share
    go_on(ML(model, log_det=log_det, generator=rng(1)), optimizer, steps, rng(2))


def followed(model, parts, **options):
    """The NLL after each part of a training run, of so many steps."""
    objective, order = ML(model, log_det="auto", generator=rng(1)), rng(2)
    optimizer = Adam(ebf.parameter_groups(model, 6e-3, **options))
    left = []
    for steps in parts:
        go_on(objective, optimizer, steps, order)
        left.append(nll(model))
    return left


def go_on(objective, optimizer, steps, order):
    x = smooth_images(1000, 1)
    for _ in range(steps):
        loss = objective(x[torch.randint(len(x), (16,), generator=order)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def nll(model):
    return -model.log_prob(smooth_images(100, 2)).mean().item()
