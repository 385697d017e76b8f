"""Properties of random compositions of either library: depth, order, inverses, vectors and images, dtype."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ebflow_plugin as ebf
from autograd_oracle import log_prob_by_jacobian
from compositions import LIBRARIES, build, data, specs
from ebflow_plugin import testing

kinds = pytest.mark.parametrize(
    ("library", "images"),
    [(library, images) for library in LIBRARIES for images in (False, True)],
    ids=lambda value: (
        value if isinstance(value, str) else getattr(value, "name", "images" if value is True else "vectors")
    ),
)


@kinds
@given(draw=st.data(), seed=st.integers(0, 1000), batch=st.integers(1, 5))
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_composition_keeps_every_promise(library, images, draw, seed, batch):
    spec = draw.draw(specs(library, images))
    flow, x = build(library, images, spec, seed), data(images, batch, seed)
    model = ebf.wrap(flow, strict=True)
    assert model.plan.event_shape == tuple(x.shape[1:])
    try:
        own = model.adapter.own_log_prob(flow, x.clone(), None)
    except RuntimeError as error:  # NaiveLinear's inverse is gone in nflows
        assert "torch.solve" in str(error)
        own = log_prob_by_jacobian(model, x)
    scale = 1.0 + own.abs().max()
    log_prob = model.log_prob(x)
    assert (log_prob - own).abs().max() < 1e-6 * scale
    assert (log_prob + model.energy(x) + model.log_z()).abs().max() < 1e-10 * scale
    latents, _ = model.plan.encode(x)
    size = 1.0 + x.abs().max() + latents[0].abs().max()
    assert (model.plan.decode(latents) - x).abs().max() < 1e-6 * size
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.log_prob(point).sum(), point)
    assert torch.allclose(model.score(x), gradient, rtol=1e-8, atol=1e-8)
    full = ebf.wrap(ebf.unconstrain(flow)).log_prob(x)
    assert ((full - log_prob).abs() < 1e-6 * (1.0 + log_prob.abs())).all(), "unconstrain() changes the density"
    for check in (testing.check_untouched, testing.check_copies):
        check(build(library, images, spec, seed), data(images, 3, seed))
    single = ebf.wrap(flow.float())
    found = single.log_prob(x.float())
    assert found.dtype == single.score(x.float()).dtype == torch.float32
    assert ((found - log_prob).abs() <= 1e-2 * (1.0 + log_prob.abs())).all(), "single precision is far off"


@kinds
@given(draw=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_log_z_is_the_sum_of_the_linear_jacobians(library, images, draw, seed):
    """Against autograd: at two points, the linear steps' Jacobians are equal and their log-dets sum to -log Z."""
    spec = draw.draw(specs(library, images).filter(lambda spec: not images or spec != "squeeze"))
    model = ebf.wrap(build(library, images, spec, seed))
    x = data(images, 1, seed)
    totals = []
    for point in (x, x + 1.0):
        total = torch.zeros((), dtype=torch.float64)

        def visit(step, value, total=total):
            if step.linearity == "linear" and isinstance(value, torch.Tensor):
                output = step.encode(value, None)[0]
                if isinstance(output, torch.Tensor):
                    jacobian = torch.autograd.functional.jacobian(lambda v: step.encode(v, None)[0].flatten(), value)
                    total += torch.linalg.slogdet(jacobian.reshape(value.numel(), -1))[1]

        model.plan.encode(point, visit=visit)
        totals.append(total)
    assert torch.allclose(totals[0], totals[1], rtol=1e-9, atol=1e-9)
    assert torch.allclose(-model.log_z(), totals[0], rtol=1e-7, atol=1e-7)
