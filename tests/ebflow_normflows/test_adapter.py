"""What is special about normflows. What holds for every library is in tests/ebflow_plugin/test_testing.py."""

import copy
import inspect
import sys
from importlib import import_module
from pkgutil import walk_packages

import normflows as nf
import pytest
import torch
from normflows import flows
from normflows.distributions import DiagGaussian, GaussianMixture
from torch import nn

import ebflow_plugin as ebf
from case import perturb
from ebflow_normflows.adapter import RULES
from ebflow_normflows.linear import halves, joined
from ebflow_plugin.testing import no_factorisation
from normflows_parts import IMG, D, glow_levels, lu_permute, masked, net, residual
from normflows_small import model_of
from randomness import randn

# Abstract: each raises in forward or inverse until a subclass says what it does.
KNOWINGLY_OPAQUE = {"Flow", "_Linear", "Autoregressive", "Coupling", "PiecewiseCoupling"}


def rows(flow: nn.Module) -> list[tuple[str, str, str]]:
    return [(row.path, row.class_name, row.linearity) for row in ebf.describe(flow)]


# Containers


def test_a_glow_block_is_three_steps_with_their_paths():
    assert rows(model_of(flows.GlowBlock(4, 8), base=DiagGaussian(IMG))) == [
        ("flows.0.flows.2", "ActNorm", "linear"),
        ("flows.0.flows.1", "Invertible1x1Conv", "linear"),
        ("flows.0.flows.0.flows.1", "AffineCoupling", "nonlinear"),
    ]


def test_containers_are_walked_into():
    inner = flows.Composite([lu_permute(), flows.AffineCouplingBlock(net(3, 6))])
    spline = flows.CoupledRationalQuadraticSpline(D, 1, 8)
    autoregressive = flows.AutoregressiveRationalQuadraticSpline(D, 1, 8)
    assert rows(model_of(flows.Reverse(inner), lu_permute(), spline, autoregressive)) == [
        ("flows.3.mprqat", "MaskedPiecewiseRationalQuadraticAutoregressive", "nonlinear"),
        ("flows.2.prqct", "PiecewiseRationalQuadraticCoupling", "nonlinear"),
        ("flows.1.permutation", "_RandomPermutation", "linear"),
        ("flows.1.linear", "_LULinear", "linear"),
        ("flows.0.flow._flows.0.linear", "_LULinear", "linear"),
        ("flows.0.flow._flows.0.permutation", "_RandomPermutation", "linear"),
        ("flows.0.flow._flows.1.flows.1", "AffineCoupling", "nonlinear"),
    ]


def test_a_multiscale_flow_is_walked_from_the_last_level_to_the_first():
    flow = nf.MultiscaleFlow([DiagGaussian((8, 1, 1)), DiagGaussian((2, 2, 2))], *glow_levels(), class_cond=False)
    names = [(path, name) for path, name, _ in rows(flow)]
    assert names[0] == ("flows.1.1", "Squeeze")
    assert names[4:6] == [("merges.0", "Merge"), ("flows.0.1", "Squeeze")]


def test_the_density_direction_of_an_lu_layer_is_made_of_products():
    plan = ebf.wrap(model_of(lu_permute())).plan
    assert [step.inverted for step in plan.steps] == [False, False]
    plan = ebf.wrap(model_of(flows.Reverse(lu_permute()))).plan
    assert [step.inverted for step in plan.steps] == [True, True]


@pytest.mark.parametrize("mode", ["channel", "channel_inv", "checkerboard", "checkerboard_inv"])
@pytest.mark.parametrize("shape", [(3, 6), (3, 2, 4), (3, 3, 2, 4)])
def test_halves_are_those_of_the_library(mode: str, shape: tuple[int, ...]):
    x = randn(*shape)
    ours, (theirs, _) = halves(x, mode), flows.Split(mode)(x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(joined(*ours, mode), x)


def test_an_unknown_split_mode_is_refused():
    with pytest.raises(ebf.InputError, match="no split mode 'diagonal'"):
        halves(randn(2, 4), "diagonal")


def test_a_changed_coupling_is_kept_exact_between_its_split_and_merge():
    class Doubled(flows.AffineCoupling):
        def inverse(self, z):
            (z1, z2), log_det = super().inverse(z)
            return [z1, 2 * z2], log_det + z2[0].numel() * torch.log(torch.tensor(2.0)).to(z2)

        def forward(self, z):
            (z1, z2), log_det = super().forward([z[0], z[1] / 2])
            return [z1, z2], log_det - z2[0].numel() * torch.log(torch.tensor(2.0)).to(z2)

    block = flows.AffineCouplingBlock(net(3, 6))
    block.flows[1] = Doubled(net(3, 6))
    flow = model_of(block, flows.Split("checkerboard"), Doubled(net(3, 6)), flows.Merge("checkerboard"))
    with pytest.warns(UserWarning, match=r"flows.0.flows.1  Doubled .*overrides (forward|inverse) of AffineCoupling"):
        model = ebf.wrap(flow)
    x = randn(5, D)
    assert torch.allclose(model.log_prob(x), flow.log_prob(x), rtol=1e-10)
    latents, _ = model.plan.encode(x)
    assert torch.allclose(model.plan.decode(latents), x, rtol=1e-10)


def test_any_flow_can_be_the_merge_of_a_multiscale_flow():
    levels = [[lu_permute(2)], [lu_permute(4)]]
    flow = nf.MultiscaleFlow(
        [DiagGaussian(2), DiagGaussian(2)], levels, [flows.Reverse(flows.Split())], class_cond=False
    ).double()
    perturb(flow, 0.2)
    with pytest.warns(UserWarning, match=r"merges.0  Reverse"):
        model = ebf.wrap(flow)
    x = randn(5, 4)
    assert torch.allclose(model.log_prob(x), flow.log_prob(x, None), rtol=1e-10)
    assert torch.allclose(model.plan.decode(model.plan.encode(x)[0]), x, rtol=1e-10)


# Linear layers


@pytest.mark.parametrize("use_lu", [False, True])
@pytest.mark.parametrize("cls", [flows.Invertible1x1Conv, flows.InvertibleAffine])
def test_energy_of_a_mixing_layer_is_one_product(cls: type, use_lu: bool):
    image = cls is flows.Invertible1x1Conv
    shape = IMG if image else (D,)
    flow = model_of(cls(shape[0], use_lu=use_lu), base=DiagGaussian(shape))
    x, model = randn(5, *shape), ebf.wrap(flow)
    expected = -flow.log_prob(x) - model.log_z()
    with no_factorisation():
        energy = model.energy(x)
        model.score(x)
    assert torch.allclose(energy, expected, rtol=1e-10)


def test_a_mixing_layer_behind_reverse_needs_its_inverse_and_no_log_det():
    flow = model_of(flows.Reverse(flows.InvertibleAffine(D, use_lu=False)), flows.Reverse(flows.InvertibleAffine(D)))
    x = randn(5, D)
    assert torch.allclose(ebf.wrap(flow).log_prob(x), flow.log_prob(x), rtol=1e-10)


def test_a_permutation_of_the_wrong_size_is_refused():
    for mode in ("shuffle", "swap"):  # normflows drops two features, silently
        model = ebf.wrap(nf.NormalizingFlow(GaussianMixture(2, 4).float(), [flows.Permute(4, mode)]))
        with pytest.raises(ebf.InputError, match="4"):
            model.plan.encode(torch.zeros(3, 6))


def test_cached_layers_can_be_copied_and_are_never_stale():
    flow, x = model_of(lu_permute(cached=True)), randn(5, D)
    model = ebf.wrap(flow)
    flow.log_prob(x)  # fills the cache, with a graph
    copy.deepcopy(model)
    before = model.log_prob(x)
    perturb(flow, 0.5, seed=1)
    assert not torch.allclose(model.log_prob(x), before)
    assert torch.allclose(model.log_prob(x), ebf.wrap(flow).adapter.own_log_prob(flow, x, None), rtol=1e-6)


# ActNorm


@pytest.mark.parametrize("turn", [lambda flow: flow, flows.Reverse])
@pytest.mark.parametrize(("shape", "data_shape"), [((D,), (D,)), ((4, 1, 1), IMG), (IMG, IMG), ((1, 1, 1), (1, 2, 4))])
def test_act_norm_starts_as_the_librarys_own(turn, shape: tuple[int, ...], data_shape: tuple[int, ...]):
    flow = nf.NormalizingFlow(DiagGaussian(data_shape), [turn(flows.ActNorm(shape))]).double()
    twin = copy.deepcopy(flow)
    x = 2.0 + 3.0 * randn(16, *data_shape)
    assert torch.allclose(ebf.wrap(flow).log_prob(x), twin.log_prob(x), rtol=1e-10)


def test_act_norm_starts_once_and_survives_its_state_dict():
    flow = nf.NormalizingFlow(DiagGaussian(D), [flows.ActNorm(D)]).double()
    model, layer = ebf.wrap(flow), flow.flows[0]
    flag, scale = layer.data_dep_init_done, layer.s
    model.initialize(2.0 + 3.0 * randn(16, D))
    assert layer.data_dep_init_done is flag
    assert layer.s is scale
    assert flag.dtype == torch.float64
    assert flag == 1.0
    started = copy.deepcopy(flow.state_dict())
    model.initialize(randn(16, D, seed=1))
    model.energy(randn(16, D, seed=1))
    assert all(torch.equal(value, started[name]) for name, value in flow.state_dict().items())

    other = nf.NormalizingFlow(DiagGaussian(D), [flows.ActNorm(D)]).double()
    loaded = ebf.wrap(other)
    other.load_state_dict(started)
    x = randn(5, D, seed=2)
    assert torch.equal(loaded.log_prob(x), model.log_prob(x))
    assert all(torch.equal(value, started[name]) for name, value in other.state_dict().items())


def test_sampling_does_not_start_an_act_norm_from_noise():
    flow = nf.NormalizingFlow(DiagGaussian(D), [flows.ActNorm(D)])
    ebf.wrap(flow).sample(8)
    assert flow.flows[0].data_dep_init_done == 0.0


def test_act_norm_refuses_a_batch_of_one():
    model = ebf.wrap(nf.NormalizingFlow(DiagGaussian(D), [flows.ActNorm(D)]))
    with pytest.raises(ebf.InputError, match=r"flows.0  ActNorm"):
        model.energy(torch.zeros(1, D))


# Nothing of the user's changes


def test_no_step_writes_into_x():
    class InPlace(flows.Flow):
        def forward(self, z):
            z -= 1
            return z, 0

        def inverse(self, z):
            z += 1
            return z, 0

    shift, plane = nf.transforms.Shift(), {"base": DiagGaussian(2)}
    with pytest.warns(UserWarning, match="InPlace"):
        models = [ebf.wrap(model_of(InPlace()))]
    models += [ebf.wrap(model_of(shift)), ebf.wrap(model_of(residual(2), **plane))]
    for model in models:
        x = randn(5, *model.plan.base.shapes[0])
        before = x.clone()
        model.energy(x)
        model.log_prob(x)
        model.adapter.own_log_prob(model.flow, x, None)
        assert torch.equal(x, before)
        assert not x.requires_grad
        model.score(x)  # a leaf that requires a gradient can be written into even less
        (z,), _ = model.plan.encode(x)
        kept = z.clone()
        model.plan.decode((z,))
        assert torch.equal(z, kept)


# Smoothness


@pytest.mark.parametrize(
    ("make", "smoothness"),
    [
        (lambda: masked(net(D, D), net(D, D)), "smooth"),
        (lambda: masked(net(D, D, nn.ReLU), net(D, D)), "score jumps"),
        (lambda: masked(nf.nets.MLP([D, D], output_fn="clampexp"), None), "score jumps"),
        (lambda: flows.AffineCouplingBlock(net(3, 6)), "smooth"),
        (lambda: flows.MaskedAffineAutoregressive(D, 8), "score jumps"),
        (lambda: flows.CoupledRationalQuadraticSpline(D, 1, 8, activation=nn.Tanh), "score jumps"),
        (lambda: flows.PeriodicWrap([0, 2]), "density jumps"),
        (lambda: flows.PeriodicShift([0, 2], shift=0.3), "density jumps"),
        (lambda: flows.Planar((D,), act="leaky_relu"), "density jumps"),
        (lambda: flows.Reverse(flows.Planar((D,))), "smooth"),
        (lambda: flows.Reverse(flows.Radial((D,))), "smooth"),
        (lambda: flows.Reverse(flows.Radial((1,))), "score jumps"),
        (lambda: nf.transforms.Logit(), "smooth"),
        (lambda: flows.GlowBlock(4, 8).flows[0], "score jumps"),
    ],
)
def test_smoothness(make, smoothness: str):
    (row,) = ebf.describe(model_of(make()))
    assert (row.linearity, row.smoothness) == ("nonlinear", smoothness)


def test_logit_is_sensitive_where_data_passes_through_it():
    for turn, sensitive in ((lambda flow: flow, True), (flows.Reverse, False)):
        (step,) = ebf.wrap(model_of(turn(nf.transforms.Logit()))).plan.steps
        assert step.match_after is sensitive


# Coverage


def test_every_flow_of_the_library_is_known():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pytest"])
        modules = [
            import_module(module.name)
            for module in walk_packages(nf.__path__, "normflows.")
            if not module.name.endswith("_test")
        ]
    found = {
        name
        for module in modules
        for name, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, flows.Flow) and cls.__module__.startswith("normflows")
    }
    assert found == (set(RULES) - {"FullLinear", "FullConv2d", "SmoothLeakyReLU", "SinhArcsinh"}) | KNOWINGLY_OPAQUE


def test_an_image_flow_of_all_linear_parts_has_one_constant_log_z():
    flow = model_of(
        flows.Invertible1x1Conv(4), flows.Squeeze(), flows.AffineConstFlow((1, 1, 1)), base=DiagGaussian(IMG)
    )
    model, x = ebf.wrap(flow), randn(5, 1, 4, 8)
    assert model.plan.event_shape == (1, 4, 8)
    assert torch.allclose(model.log_prob(x), flow.log_prob(x), rtol=1e-10)
    assert torch.allclose(model.log_z((1, 4, 8)), -model.log_prob(x)[0] - model.energy(x)[0], rtol=1e-8)
