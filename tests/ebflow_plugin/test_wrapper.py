"""What the front door takes, gives and refuses."""

import copy
import io

import pytest
import torch
from nflows import transforms
from torch import nn

import ebflow_plugin as ebf
from ebflow_nflows import FullLinear
from nflows_small import flow_of, smooth_net
from randomness import randn

D = 4


def make_flow(context=None):
    return flow_of(
        lambda: transforms.ActNorm(D),
        lambda: transforms.LULinear(D, using_cache=True, identity_init=False),
        lambda: transforms.AffineCouplingTransform([1, 0, 1, 0], smooth_net(context)),
        lambda: transforms.NaiveLinear(D, orthogonal_initialization=False),
        shape=(D,),
    )


@pytest.fixture
def x():
    return randn(6, D)


@pytest.fixture
def model(x):
    model = ebf.wrap(make_flow())
    model.initialize(x)
    return model


def test_calling_the_model_is_its_energy(model, x):
    assert torch.equal(model(x), model.energy(x))


def test_train_and_eval_pass_through(model):
    assert model.training
    assert not model.eval().flow.training
    assert not any(module.training for module in model.flow.modules())
    assert model.train().flow.training
    assert not ebf.wrap(make_flow().eval()).training


def test_to_and_double_pass_through(model, x):
    exact = model.log_prob(x)
    single = model.float()
    assert next(single.flow.parameters()).dtype == torch.float32
    assert torch.allclose(single.log_prob(x.float()).double(), exact, atol=1e-4)
    assert torch.allclose(model.double().log_prob(x), exact, atol=1e-4)


def test_cached_layers_score_twice_in_eval_mode_and_copy(model, x):
    model.eval()
    model.flow.log_prob(x)  # fills nflows' caches, with a graph
    for _ in range(2):
        point = x.clone().requires_grad_()
        model.score(point).sum().backward()
    check = torch.load(saved(model.state_dict()), weights_only=True)
    assert set(check) == {f"flow.{name}" for name in model.flow.state_dict()}
    assert torch.equal(copy.deepcopy(model).log_prob(x), model.log_prob(x))


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_state_dict_goes_through_a_file(model, x):
    other = ebf.wrap(make_flow())
    with torch.no_grad():
        for parameter in model.flow.parameters():
            parameter.add_(0.1)
    other.load_state_dict(torch.load(saved(model.state_dict()), weights_only=True))
    assert torch.equal(other.log_prob(x), model.log_prob(x))


def test_score_under_every_grad_mode(model, x):
    expected = model.score(x).detach()
    assert model.score(x).requires_grad  # so that losses of the score can be trained
    with torch.no_grad():
        assert not model.score(x).requires_grad
        assert torch.allclose(model.score(x), expected)
    with torch.inference_mode():
        assert torch.allclose(model.score(x.clone()), expected)
    assert not x.requires_grad


def test_gradients_reach_parameters_and_embedding_nets(x):
    layer = transforms.MaskedAffineAutoregressiveTransform(D, 8, context_features=3, activation=torch.tanh)
    flow = flow_of(layer, shape=(D,), embedding_net=nn.Linear(5, 3))
    context = torch.randn(6, 5, dtype=torch.float64)
    model = ebf.wrap(flow)
    assert torch.allclose(model.log_prob(x, context), flow.log_prob(x, context))
    model.score(x, context).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in flow._embedding_net.parameters())


# Input


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda x: x[0], r"shape \(B, 4\), got \(4,\); add the batch dimension with x.unsqueeze\(0\)"),
        (lambda x: x[:, :3], r"shape \(B, 4\), got \(6, 3\)"),
        (lambda x: x[:, :, None], r"shape \(B, 4\), got \(6, 4, 1\)"),
        (lambda x: x.long(), r"floating point, got torch.int64; .*Dequantize"),
        (lambda x: x.float(), r"x is torch.float32, the flow is torch.float64; cast"),
        (lambda x: x.to("meta"), r"x is on meta, the flow is on cpu; move"),
        (lambda x: x.numpy(), r"x must be a tensor, got ndarray"),
        (lambda x: x.tolist(), r"x must be a tensor, got list"),
    ],
)
def test_bad_x_is_refused_before_torch_sees_it(model, x, bad, message):
    for method in (model.energy, model.score, model.log_prob, model.initialize):
        with pytest.raises(ebf.InputError, match=message):
            method(bad(x))


def test_an_error_inside_of_a_step_says_which(x):
    model = ebf.wrap(make_flow(context=3))
    with pytest.raises(Exception) as error:  # noqa: PT011
        model.energy(x, torch.zeros(6, 7, dtype=torch.float64))
    assert any("in step _transform._transforms.2  AffineCouplingTransform" in note for note in error.value.__notes__)


def test_check_finite_finds_nan_and_energy_alone_does_not_wait(x):
    x[2, 1], x[4, 0] = float("nan"), float("inf")
    flow = make_flow().eval()
    assert torch.isnan(ebf.wrap(flow).energy(x)).any()
    with pytest.raises(ebf.InputError, match=r"x holds 2 NaN or inf in 2 of 6 rows, the first at \[2, 1\]"):
        ebf.wrap(flow, check_finite=True).energy(x)


# Data-dependent initialisation


def test_energy_in_training_mode_initialises_as_the_library_does(x):
    ours, theirs = make_flow(), make_flow()
    model = ebf.wrap(ours)
    assert not ours._transform._transforms[0].initialized
    energy = model.energy(x)
    log_prob = theirs.log_prob(x)
    assert torch.allclose(-energy - model.log_z(), log_prob)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name


def test_initialize_runs_once_and_survives_save_and_load(x):
    flow = make_flow().eval()
    model = ebf.wrap(flow)
    model.energy(x)
    assert not flow._transform._transforms[0].initialized  # not in eval mode, as in nflows
    model.initialize(x)
    scale = flow._transform._transforms[0].log_scale.detach().clone()
    hidden = (x * scale.exp() + flow._transform._transforms[0].shift).detach()
    assert torch.allclose(hidden.mean(0), torch.zeros(D, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(hidden.std(0), torch.ones(D, dtype=torch.float64))
    for other in (model, ebf.wrap(make_flow())):
        other.load_state_dict(torch.load(saved(model.state_dict()), weights_only=True))
        other.train()
        other.initialize(3.0 * x + 1.0)
        other.energy(3.0 * x + 1.0)
        assert torch.equal(other.flow._transform._transforms[0].log_scale, scale)


def test_layers_behind_others_are_initialised_from_what_reaches_them(x):
    model = ebf.wrap(flow_of(transforms.ActNorm(D), transforms.Tanh(), transforms.ActNorm(D), shape=(D,)))
    model.initialize(x)
    (latents,), _ = model.plan.encode(x)
    assert torch.allclose(latents.std(0), torch.ones(D, dtype=torch.float64))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda x: x[:1], "cannot be initialised from a batch of 1"),
        (lambda x: torch.cat([x[:, :1] * 0, x[:, 1:]], 1), r"features \[0\] are constant"),
        (lambda x: x / 0.0 * 0.0, "not finite"),
    ],
)
def test_a_batch_that_would_poison_actnorm_is_refused(x, batch, message):
    flow = make_flow()
    model = ebf.wrap(flow)
    for call in (model.energy, model.initialize):
        with pytest.raises(ebf.InputError, match=message) as error:
            call(batch(x))
        assert "_transform._transforms.0  ActNorm" in str(error.value)
        assert not flow._transform._transforms[0].initialized


def test_energy_waits_for_the_device_once_for_the_flag_of_actnorm(model, x):
    model.energy(x)
    with no_waiting():
        model.energy(x)
        model.score(x)


def no_waiting():
    from ebflow_plugin.testing import _Watch

    def look(func, leaves):
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"), name

    return _Watch(look)


# Changes that come later


def test_a_hook_that_comes_later_is_seen():
    flow = flow_of(FullLinear(3), transforms.Tanh(), shape=(3,))
    model, x = ebf.wrap(flow), torch.rand(5, 3, dtype=torch.float64) - 0.5
    handle = flow._transform._transforms[1].register_forward_hook(lambda module, x, y: (2 * y[0], y[1] + 1.0))
    assert torch.allclose(model.log_prob(x), flow.log_prob(x))
    handle.remove()
    assert torch.allclose(model.log_prob(x), flow.log_prob(x))


def test_a_flag_that_was_reset_through_data_is_read_anew(x):
    flow = make_flow()
    model, norm = ebf.wrap(flow), flow._transform._transforms[0]
    model.initialize(x)
    model.energy(x)  # which looks at the flag, and remembers it
    norm.initialized.data.fill_(False)
    model.initialize(7.0 * x + 1.0)
    assert norm.initialized  # else the module would do it itself in the next line
    assert torch.allclose(norm(7.0 * x + 1.0)[0].std(0), torch.ones(D, dtype=torch.float64))
    model.energy(x)
    norm.initialized.data = torch.tensor(False)
    model.initialize(x)
    assert norm.initialized
    assert torch.allclose(norm(x)[0].std(0), torch.ones(D, dtype=torch.float64))


# A flow that is wrapped already


def calibrated(x):
    model = ebf.wrap(make_flow(), preprocess=ebf.Rescale(0.0, 3.0))
    model.initialize(x)
    model.calibrate(torch.randn(100, D, dtype=torch.float64))
    return model


@pytest.mark.parametrize(
    "hold", [lambda model: nn.ModuleDict({"inner": model}), lambda model: ebf.objectives.ML(model)]
)
@pytest.mark.parametrize("call", [ebf.wrap, ebf.unconstrain, ebf.smooth])
def test_what_is_around_a_flow_is_never_dropped(call, hold, x):
    model = calibrated(x)
    with pytest.raises(ebf.InputError, match=r"EBFlow, or holds one(?s:.*)would be lost"):
        call(hold(model))
    with pytest.raises(ebf.InputError, match="EBFlow already" if call is ebf.wrap else "would be lost"):
        call(model)
    assert len(ebf.describe(model)) == 6


def test_the_model_keeps_what_is_around_its_flow_when_that_is_unconstrained(x):
    model = calibrated(x)
    before = model.log_prob(x)
    ebf.unconstrain(model.flow, in_place=True)
    assert [row.class_name for row in model.report].count("FullLinear") == 1
    assert torch.allclose(model.log_prob(x), before)


def test_the_score_can_be_differentiated_in_the_weights(model, x):
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    model.forward = model.score  # what functional_call calls

    def loss(values):
        return torch.func.functional_call(model, values, (x,)).square().sum()

    gradients, options = torch.func.grad(loss)(weights), {"allow_unused": True, "materialize_grads": True}
    expected = torch.autograd.grad(model.score(x).square().sum(), list(model.parameters()), **options)
    for found, wanted in zip(gradients.values(), expected, strict=True):
        assert torch.allclose(found, wanted)
