"""A compiled loss: the same values, gradients and random numbers as an uncompiled one, from one graph."""

import copy

import pytest
import torch
from nflows import distributions, flows, transforms
from torch import nn
from torch._dynamo.utils import counters

import ebflow_plugin as ebf
from ebflow_plugin.errors import InputError, UnsupportedStepError
from ebflow_plugin.objectives import DSM, FDSSM, ML, SM, SML, SSM, LatentMatch, NoiseSchedule, Objective
from randomness import rng

pytestmark = pytest.mark.filterwarnings("ignore::ebflow_plugin.errors.BiasWarning")


class Bare(nn.Module):
    """A conditioner of a few operations, so that its graph is small."""

    def __init__(self, inputs, outputs, context=0):
        super().__init__()
        self.layer = nn.Linear(inputs + context, outputs)

    def forward(self, x, context=None):
        return torch.tanh(self.layer(x if context is None else torch.cat([x, context], 1)))


def make(*more, context=0):
    torch.manual_seed(0)
    coupling = transforms.AffineCouplingTransform([-1, 1], lambda i, o: Bare(i, o, context))
    steps = transforms.CompositeTransform([transforms.LULinear(2), *more, coupling])
    return ebf.wrap(flows.Flow(steps, distributions.StandardNormal([2])).double())


def data(rows=6):
    return torch.randn(rows, 2, dtype=torch.float64, generator=rng(5))


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were traced, and run as they are: torch's compiler takes seconds for each."""
    found = []
    monkeypatch.setattr(torch, "compile", lambda graph, **options: found.append(graph) or graph)
    return found


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(one, other):
    for name, gradient in gradients(one).items():
        torch.testing.assert_close(gradient, gradients(other)[name], msg=lambda text, name=name: f"{name}: {text}")


KINDS = {
    "ml": ML,
    "sml": SML,
    "sm": SM,
    "ssm": lambda model: SSM(model, projections=2, sigma=0.1, energy_weight=0.5),
    "fdssm": lambda model: FDSSM(model, energy_weight=0.5),
    "dsm": lambda model: DSM(model, sigma_range=(0.1, 1.0), latent_weight=0.5),
    "latents": lambda model: LatentMatch(model, sigma=0.1),
    "sum": lambda model: 0.9 * DSM(model) + 0.1 * ML(model),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_loss_equals_an_uncompiled_one(kind, graphs):
    plain, compiled = make(), make()
    one, other = KINDS[kind](plain), KINDS[kind](compiled).compile(backend="eager")
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    for _ in range(2):  # accumulated, and scaled
        expected, found = (each(data(), weights=weights, generator=rng(1)) for each in (one, other))
        torch.testing.assert_close(found.detach(), expected.detach())
        (3.0 * expected).backward()
        (3.0 * found).backward()
    same(plain, compiled)
    with torch.no_grad():
        torch.testing.assert_close(other(data(), generator=rng(1)), one(data(), generator=rng(1)))
    assert len(graphs) == 1


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 1.0, 2.0)])
def test_a_graph_that_is_retained_gives_its_gradients_again(scales, graphs):
    plain, compiled = make(), make()
    for objective in (ML(plain), ML(compiled).compile(backend="eager")):
        loss = objective(data())
        for scale in scales:
            (scale * loss).backward(retain_graph=True)
    same(plain, compiled)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_no_gradient_shares_memory_with_another_one(graphs):
    """The shifts of both have one and the same gradient, which an optimiser may clip in place."""

    class Twice(Objective):
        def per_sample(self, plan, u, context, generator):
            raise NotImplementedError

        def draw(self, plan, u, context, generator):
            return ()

        def value(self, plan, u, context, drawn):
            one, other = (step.module.bias for step in plan.steps[:2])
            return ((one + other) * u).sum(1)

    model = make(transforms.LULinear(2).double())
    Twice(model).compile(backend="eager")(data()).backward()
    one, other = (step.module.bias.grad for step in model.plan.steps[:2])
    torch.testing.assert_close(one, data().mean(0))
    assert one.data_ptr() != other.data_ptr()


def test_gradients_reach_a_context_and_leave_out_what_is_frozen(graphs):
    found = []
    for compiled in (False, True):
        model, context = make(context=3), torch.randn(6, 3, dtype=torch.float64, generator=rng(2)).requires_grad_()
        model.flow._transform._transforms[0].bias.requires_grad_(False)
        objective = SSM(model)
        if compiled:
            objective.compile(backend="eager")
        objective(data(), context.exp(), generator=rng(1)).backward()
        found.append((context.grad, model))
    torch.testing.assert_close(found[0][0], found[1][0])
    same(found[0][1], found[1][1])
    assert found[1][1].flow._transform._transforms[0].bias.grad is None


def test_a_context_that_is_trained_itself_makes_two_graphs_too():
    """Each call must look to torch as the one that was compiled did, or it compiles again, for one size alone."""
    torch.compiler.reset()
    counters.clear()
    plain, compiled = make(context=3), make(context=3)
    one, other = (ML(model) + SSM(model) for model in (plain, compiled))
    other.compile(backend="eager")
    for rows in (6, 9, 4, 7):
        found = []
        for objective in (one, other):
            context = torch.randn(rows, 3, dtype=torch.float64, generator=rng(2)).requires_grad_()
            objective(data(rows), context, generator=rng(1)).backward()
            found.append(context.grad)
        torch.testing.assert_close(found[1], found[0])
    same(plain, compiled)
    assert counters["stats"]["unique_graphs"] == 2


def test_two_graphs_serve_all_sizes_and_steps_trace_nothing(graphs):
    model = make()
    objective = LatentMatch(model, sigma=NoiseSchedule(start=1.0, end=0.1, steps=5)).compile(backend="eager")
    optimizer, average = torch.optim.Adam(model.parameters(), lr=0.1), ebf.EMA(model)
    for step in range(20):
        optimizer.zero_grad()
        objective(data((6, 6, 9, 4, 7)[step // 4])).backward()
        optimizer.step()
        average.update()
        with average.applied(), torch.no_grad():
            objective(data())
        if step == 10:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
            model.eval()
            model.train()
    assert len(graphs) == 2
    reference = copy.deepcopy(objective)
    reference._compiled = None
    torch.testing.assert_close(objective(data(5), generator=rng(1)), reference(data(5), generator=rng(1)))


def test_steps_of_adam_have_the_same_losses(graphs):
    losses = []
    for compiled in (False, True):
        model = make()
        objective = SSM(model, generator=rng(3))
        if compiled:
            objective.compile(backend="aot_eager")
        result = ebf.fit(
            objective, data(24), steps=30, batch_size=8, evaluate_every=1, compile=compiled, progress=False
        )
        losses.append([record["loss"] for record in result.history])
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ml", "dsm", "ssm"])
def test_three_hundred_steps_of_adam_through_inductor(kind):
    torch.compiler.reset()
    losses = []
    for compiled in (False, True):
        objective = KINDS[kind](make(transforms.ActNorm(2)))
        if compiled:
            objective.compile()
        optimizer, noise = torch.optim.Adam(objective.parameters(), lr=0.01), rng(3)
        rows = data(300).view(30, 10, 2)
        losses.append([])
        for step in range(300):
            optimizer.zero_grad()
            loss = objective(rows[step % 30], generator=noise)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-30:] != losses[0][:30]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_changed_flow_is_compiled_anew(graphs):
    model = make()
    objective = ML(model).compile(backend="eager")
    for change in (
        lambda: None,
        lambda: model.flow._transform._transforms.append(transforms.LULinear(2).double()),
        lambda: setattr(model.flow._transform._transforms[1], "transform_net", Bare(1, 2).double()),
        lambda: setattr(model.flow._transform._transforms[1].transform_net, "layer", nn.Linear(1, 2).double()),
        lambda: model.flow._transform._transforms[1].transform_net.layer.register_forward_hook(lambda *a: a[2] + 1),
        lambda: model.flow._transform._transforms[0].requires_grad_(False),
    ):
        change()
        model.zero_grad()
        objective(data()).backward()
        plain = copy.deepcopy(model) if not model.flow._transform._transforms[0].training else model
        torch.testing.assert_close(objective(data()).detach(), ML(plain)(data()).detach())
    assert len(graphs) == 6
    assert model.flow._transform._transforms[0].bias.grad is None


def test_parameters_can_be_replaced_and_shared(graphs):
    model = make(transforms.LULinear(2).double())
    first, second = model.flow._transform._transforms[:2]
    objective = ML(model).compile(backend="eager")

    def share():
        second.bias = first.bias

    for count, change in (
        (1, lambda: None),
        (1, lambda: setattr(first, "bias", nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64)))),
        (2, share),
    ):
        change()
        model.zero_grad()
        objective(data()).backward()
        (expected,) = torch.autograd.grad(ML(model)(data()), first.bias)
        torch.testing.assert_close(first.bias.grad, expected)
        assert len(graphs) == count


def test_a_start_from_data_and_a_calibration_are_no_part_of_the_graph(graphs):
    model = make(transforms.ActNorm(2)).train()
    objective = ML(model).compile(backend="eager")
    objective(data()).backward()
    assert bool(model.flow._transform._transforms[1].initialized)
    model.calibrate(data(40))
    torch.testing.assert_close(objective(data()).detach(), -model.log_prob(data()).mean().detach())


class Deciding(transforms.Transform):
    def forward(self, inputs, context=None):
        return (2.0 * inputs if inputs.sum() > 0 else inputs), inputs.new_zeros(len(inputs))


@pytest.mark.filterwarnings("ignore:1 of 3")
def test_a_step_that_reads_values_is_named():
    flow = make().flow
    flow._transform._transforms.append(Deciding())
    with pytest.warns(ebf.errors.UnknownStepWarning):
        model = ebf.wrap(flow)
    with pytest.raises(UnsupportedStepError, match=r"_transform\._transforms\.2  Deciding .* cannot be compiled"):
        ML(model).compile(backend="eager")(data())


def test_what_cannot_be_compiled_says_so():
    model = make()
    with pytest.raises(InputError, match="ReverseKL cannot be compiled"):
        (ebf.objectives.ReverseKL(model, lambda x: -x.square().sum(1)) + ML(model)).compile()
    from ebflow_nflows import FullLinear

    full = ebf.wrap(flows.Flow(FullLinear(16), distributions.StandardNormal([16])).double())
    with pytest.raises(UnsupportedStepError, match=r"_transform  FullLinear .*solver"):
        ML(full, log_det="stochastic").compile(backend="eager")(torch.randn(6, 16, dtype=torch.float64))


def test_an_objective_of_ones_own_is_compiled_as_it_is(graphs):
    class Spread(Objective):
        def per_sample(self, plan, u, context, generator):
            return plan.energy(u, context).square()

    plain, compiled = make(), make()
    Spread(plain)(data()).backward()
    Spread(compiled).compile(backend="eager")(data()).backward()
    same(plain, compiled)


def test_what_is_no_parameter_of_the_model_is_not_left_out_in_silence():
    model = make()
    del model.flow._transform._transforms[0]._parameters["bias"]
    model.flow._transform._transforms[0].bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UnsupportedStepError, match=r"shape \(2,\) requires a gradient and is no parameter"):
        ML(model).compile(backend="eager")(data())


def test_torch_compile_takes_the_graph():
    plain, compiled = make(), make()
    ML(plain)(data()).backward()
    ML(compiled).compile(backend="aot_eager")(data()).backward()
    same(plain, compiled)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_tensor_in_two_places_makes_two_graphs_for_four_sizes(backend):
    torch.compiler.reset()
    counters.clear()
    plain, compiled = make(), make()
    one, other = SSM(plain), SSM(compiled).compile(backend=backend)
    for rows in (6, 9, 4, 7):
        for _ in range(5):
            for model, objective in ((plain, one), (compiled, other)):
                model.zero_grad()
                objective(data(rows), generator=rng(1)).backward()
        same(plain, compiled)
    assert counters["stats"]["unique_graphs"] == 2
