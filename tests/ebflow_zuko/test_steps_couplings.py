"""The couplings of zuko in closed form: against autograd, and what must not be followed."""

from functools import partial

import pytest
import torch
import zuko
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from zuko.flows import GeneralCouplingTransform
from zuko.lazy import Flow, LazyInverse
from zuko.transforms import AdditiveTransform, MonotonicAffineTransform, SoftclipTransform

import ebflow_plugin as ebf
from autograd_oracle import assert_as_autograd, assert_close, is_closed, moved
from ebflow_plugin.errors import ContextError
from ebflow_plugin.objectives import SSM
from ebflow_plugin.plan.derivatives import closed_steps
from zuko_parts import normal

D = 4
NET = {"hidden_features": (5,), "activation": nn.SiLU}
ADDITIVE = {"univariate": AdditiveTransform, "shapes": [()]}
many = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def coupling(features=D, context=0, **options):
    return GeneralCouplingTransform(features, context, **{**NET, **options})


def wrapped(*transforms, shape=(D,)):
    return ebf.wrap(moved(Flow(list(transforms), normal(*shape)), 0.5))


@given(
    features=st.integers(2, 5),
    context=st.integers(0, 3),
    additive=st.booleans(),
    turned=st.booleans(),
    randmask=st.booleans(),
    count=st.integers(0, 3),
    gradient=st.booleans(),
    hidden=st.lists(st.integers(1, 6), max_size=2),
)
@many
def test_couplings(features, context, additive, turned, randmask, count, gradient, hidden):
    options = {**NET, **(ADDITIVE if additive else {}), "hidden_features": hidden}
    flow = zuko.flows.RealNVP(features, context, transforms=2, randmask=randmask, **options)
    if turned:
        flow.transform.transforms[0] = LazyInverse(flow.transform.transforms[0])
    model = ebf.wrap(moved(flow, 0.5))
    assert is_closed(model)
    given = torch.randn(6, context, dtype=torch.float64) if context else None
    assert_as_autograd(model, (features,), given, count, gradient)


@pytest.mark.parametrize("activation", [None, nn.ELU, nn.Tanh, nn.GELU, nn.Softplus, nn.LeakyReLU])
def test_activations(activation):
    model = wrapped(coupling(activation=activation), coupling(mask=torch.arange(D) < 1, activation=activation))
    assert is_closed(model)
    assert_as_autograd(model, (D,), count=2)


@pytest.mark.parametrize("options", [{}, {"slope": 1e-2}, {"slope": 0.5}])
def test_the_bound_of_the_scales(options):
    model = wrapped(coupling(univariate=partial(MonotonicAffineTransform, **options)))
    assert is_closed(model)
    assert_as_autograd(model, (D,), count=2)


def test_scales_at_zero():
    """A kit that starts from zeros: the clip has a kink there."""
    transform = coupling()
    for parameter in transform.hyper.parameters():
        nn.init.zeros_(parameter)
    model = ebf.wrap(Flow([transform], normal(D)).double())
    assert_as_autograd(model, (D,))


@pytest.mark.parametrize("options", [{}, ADDITIVE])
def test_on_the_last_dimension_of_images(options):
    shape = (2, 3, D)
    model = wrapped(coupling(**options), LazyInverse(coupling(**options)), shape=shape)
    assert is_closed(model)
    assert_as_autograd(model, shape, count=2)


@pytest.mark.parametrize("shape", [(6, 1, 3), (6, 2, 3)])
def test_a_context_for_the_rows_of_images(shape):
    model = wrapped(coupling(context=3), shape=(2, D))
    assert is_closed(model)
    assert_as_autograd(model, (2, D), torch.randn(shape, dtype=torch.float64), count=2)


def test_a_context_of_integers():
    model = wrapped(coupling(context=3))
    assert is_closed(model)
    assert_as_autograd(model, (D,), torch.randint(5, (6, 3)), count=2)


def test_a_missing_or_surplus_context_raises_as_before():
    x = torch.randn(6, D, dtype=torch.float64)
    with pytest.raises(ContextError, match="is conditional, and failed without a context"):
        SSM(wrapped(coupling(context=3)))(x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        SSM(wrapped(coupling()))(x, torch.randn(6, 3, dtype=torch.float64))


class Own(MonotonicAffineTransform):
    def _call(self, x):
        return 2 * super()._call(x)


OPAQUE = {
    "splines": {"univariate": zuko.transforms.MonotonicRQSTransform, "shapes": [(4,), (4,), (3,)]},
    "a class of one's own": {"univariate": Own},
    "a function": {"univariate": lambda shift, scale: MonotonicAffineTransform(shift, scale)},
    "a tensor as slope": {"univariate": partial(MonotonicAffineTransform, slope=torch.tensor(0.1))},
    "no contraction": {"univariate": partial(MonotonicAffineTransform, slope=2.0)},
    "LayerNorm": {"normalize": True},
    "in place": {"activation": partial(nn.SiLU, inplace=True)},
    "unknown activation": {"activation": nn.Softsign},
}


@pytest.mark.filterwarnings("ignore::ebflow_plugin.errors.UnknownStepWarning")
@pytest.mark.parametrize("name", OPAQUE)
def test_what_is_not_followed(name):
    model = wrapped(coupling(**OPAQUE[name]))
    assert closed_steps(model.plan) == 0
    assert [row.second_derivatives for row in model.report] == ["double backward"]
    assert_as_autograd(model, (D,))


def hooked(step):
    step.hyper[0].register_forward_hook(lambda module, args, out: 2 * out)


def network_hooked(step):
    step.hyper.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def patched(step):
    layer = step.hyper[2]
    layer.forward = lambda x: 2 * F.linear(x, layer.weight)


def parametrized(step):
    parametrizations.weight_norm(step.hyper[0])


def subclassed(step):
    class Doubled(zuko.nn.MLP):
        def forward(self, x):
            return 2 * super().forward(x)

    step.hyper.__class__ = Doubled


def stacked(step):
    class Stacked(nn.Module):
        """Two layers that are averaged, by one stack of zuko."""

        def __init__(self, inputs, outputs):
            super().__init__()
            self.in_features, self.out_features = inputs, outputs
            self.layers = zuko.nn.Linear(inputs, outputs, stack=2).double()

        def forward(self, x):
            return self.layers(x[..., None, :].expand(*x.shape[:-1], 2, -1)).mean(-2)

    step.hyper = Stacked(2, 4)


def preceded(step):
    """The context would have to pass the first part beside the features."""
    step.hyper.insert(0, nn.Tanh())


@pytest.mark.parametrize(
    "change",
    [hooked, network_hooked, patched, parametrized, subclassed, stacked, preceded],
    ids=lambda one: one.__name__,
)
def test_what_somebody_changed_is_differentiated_as_it_is(change):
    """After wrapping, too: the networks are looked at for each batch."""
    step = coupling()
    model = wrapped(step)
    assert is_closed(model)
    change(step)
    assert closed_steps(model.plan) == 0
    assert_as_autograd(model, (D,))


def test_one_activation_at_two_places():
    shared = nn.Tanh()
    model = wrapped(coupling(hidden_features=(5, 5), activation=lambda: shared))
    assert is_closed(model)
    assert_as_autograd(model, (D,))


def test_a_coupling_that_somebody_changed_after_the_walk():
    step = coupling()
    plan = wrapped(step).plan
    step.meta = lambda context, x: GeneralCouplingTransform.meta(step, context, x)
    assert closed_steps(plan) == 0


def test_what_comes_after_a_coupling_that_is_not_followed():
    clip = zuko.lazy.UnconditionalTransform(SoftclipTransform, bound=9.0)
    model = wrapped(coupling(), coupling(normalize=True), clip)
    assert closed_steps(model.plan) == 1
    assert_as_autograd(model, (D,))


def test_a_loss_and_its_gradients(monkeypatch):
    model = ebf.wrap(moved(zuko.flows.RealNVP(D, 3, **NET)))
    x, context = torch.randn(7, D, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)

    def found():
        loss = SSM(model, generator=torch.Generator().manual_seed(3))(x, context)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]

    ours = found()
    monkeypatch.setattr("ebflow_plugin.plan.couplings.followed", lambda operations: None)
    assert closed_steps(model.plan) == 0
    assert_close(ours, found(), 1e-10)


def test_gradients_can_be_differentiated_again():
    assert_as_autograd(wrapped(coupling(), coupling(**ADDITIVE)), (D,), again=True)


def test_half_precision_goes_its_own_way():
    model = wrapped(coupling()).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        SSM(model)(torch.randn(4, D)).backward()
