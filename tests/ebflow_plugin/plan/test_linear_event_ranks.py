"""Linear steps on events of every rank: the true density of the library's own map, or a clear refusal."""

from contextlib import contextmanager

import pytest
import torch
from nflows import flows, transforms

import ebflow_nflows
import ebflow_normflows
import ebflow_plugin as ebf
from autograd_oracle import log_prob_by_jacobian
from case import perturb
from compositions import NFLOWS, NORMFLOWS
from nflows_small import flow_of

D = 4
SHAPES = [(D,), (1, D), (3, D), (D, 3), (D, D), (2, 3, D), (D, 3, 2), (D, D, D), (D, 1, 1)]
LINEAR = {  # of compositions.py
    *("lu", "inner lu", "naive", "qr", "svd", "householder", "full", "permutation", "permute"),
    *("affine", "lu affine", "const", "actnorm"),
}
LAYERS = [
    *((NFLOWS, name, make) for name, make in NFLOWS.vectors.items() if name in LINEAR),
    *((NORMFLOWS, name, make) for name, make in NORMFLOWS.vectors.items() if name in LINEAR),
    *((library, "1x1", library.images["1x1"]) for library in (NFLOWS, NORMFLOWS)),
    (NFLOWS, "batch norm", lambda: transforms.BatchNorm(D)),
    (
        NFLOWS,
        "affine map of vectors",
        lambda: transforms.PointwiseAffineTransform(torch.ones(D), torch.arange(1.0, D + 1)),
    ),
    (NFLOWS, "squeeze", transforms.SqueezeTransform),
    (NFLOWS, "1x1 conv", lambda: ebflow_nflows.FullConv2d(D, kernel_size=1)),
    (NORMFLOWS, "lu 1x1", NORMFLOWS.images["lu 1x1"]),
    (NORMFLOWS, "1x1 conv", lambda: ebflow_normflows.FullConv2d(D, kernel_size=1)),
]


@contextmanager
def at(shape):
    """Notes the shape in what is raised inside the block: a test goes through all of them."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"at {shape}")
        raise


def own_map(flow, x):
    """What the library itself makes of x in the density direction."""
    if isinstance(flow, flows.Flow):
        return flow._transform(x)[0]
    return flow.flows[0].inverse(x)[0]


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize(("library", "name", "make"), LAYERS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_density_is_true_or_refused(library, name, make, turned):
    for shape in SHAPES:
        with at(shape):
            torch.manual_seed(0)
            layer = make()
            flow = library.flow(library.inverse(layer) if turned else layer, shape).double().eval()
            assert_true_or_refused(flow, torch.randn(3, *shape, dtype=torch.float64), name)


def assert_true_or_refused(flow, x, name):
    perturb(flow)
    if name == "batch norm":
        flow.apply(lambda part: part.running_var.fill_(1.0) if hasattr(part, "running_var") else None)
    try:
        theirs = own_map(flow, x)
    except Exception:  # a layer that does not fit, or that the library cannot invert
        theirs = None
    try:
        model = ebf.wrap(flow)
        value = model.log_prob(x)
    except ebf.InputError:
        assert theirs is None or theirs.shape != x.shape, "refused what the library takes"
        return
    if theirs is not None:
        (ours,), _ = model.plan.encode(x)
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(value, log_prob_by_jacobian(model, x))
    (latents,), _ = model.plan.encode(x)
    torch.testing.assert_close(model.plan.decode((latents,)), x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, D), (2, 3, D)])
def test_verify_says_that_the_library_counts_one_row(shape):
    torch.manual_seed(0)
    flow = NFLOWS.flow(NFLOWS.vectors["lu"](), shape).double()
    report = ebf.verify(flow, torch.randn(4, *shape, dtype=torch.float64))
    (own,) = (check for check in report if check.name == "log_prob equals the flow's own")
    assert own.passed is None
    assert f"counts one of the {torch.Size(shape[:-1]).numel()} rows of 4 features" in own.detail


@pytest.mark.parametrize("shape", [(3, D), (2, 3, D)])
def test_starts_whiten_the_rows_of_such_events(shape):
    torch.manual_seed(0)
    full, bend = ebflow_nflows.FullLinear(D), ebflow_nflows.SmoothLeakyReLU(0.3)
    flow = flow_of(full, bend, ebflow_nflows.FullLinear(D), shape=shape)
    layers = flow._transform
    x = 1.0 + 3.0 * torch.randn(300, *shape, dtype=torch.float64)
    model = ebf.wrap(flow)
    model.initialize(x, whiten=True)
    rows = full.transform(x).flatten(0, -2)
    torch.testing.assert_close(rows.mean(0), torch.zeros(D, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.cov(rows.mT), torch.eye(D, dtype=torch.float64), rtol=0, atol=1e-6)
    before = model.log_prob(x).mean()
    model.initialize(x, gaussianize=True)
    assert model.log_prob(x).mean() > before
    weight = layers._transforms[-1].weight.clone()
    assert model.calibrate(5.0 * x).kind == "full"
    assert torch.equal(layers._transforms[-1].weight, weight)


class Flat(transforms.Transform):
    """A reshape of the user's own."""

    def forward(self, inputs, context=None):
        return inputs.flatten(1), inputs.new_zeros(len(inputs))

    def inverse(self, inputs, context=None):
        return inputs.unflatten(1, (3, D)), inputs.new_zeros(len(inputs))


@pytest.mark.filterwarnings("ignore:1 of")
@pytest.mark.parametrize("turned", [False, True])
def test_a_reshape_of_the_users_own_before_a_matrix(turned):
    """Nobody knows its shapes, which the log-det after it depends on, until data pass it."""
    torch.manual_seed(0)
    before, after = ((3 * D,), (3, D)) if turned else ((3, D), (3 * D,))
    first = transforms.InverseTransform(Flat()) if turned else Flat()
    matrix = transforms.NaiveLinear(after[-1], orthogonal_initialization=False)
    model = ebf.wrap(flow_of(first, matrix, shape=after))
    x = torch.randn(2, *before, dtype=torch.float64)
    torch.testing.assert_close(model.log_prob(x), log_prob_by_jacobian(model, x))
