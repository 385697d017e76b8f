"""ebflow bench: the timer compares only what took turns, the plain rivals compute what ours compute."""

import json
from itertools import count, product

import pytest
import torch
from torch import Generator

import ebflow_plugin as ebf
from ebflow_examples import bench
from ebflow_examples.bench import contenders, growth, models, plain, report, timing, wrapper
from ebflow_examples.bench.memory import peak_bytes
from ebflow_examples.bench.results import Settings, Table, compare
from ebflow_examples.bench.timing import Samples, Spread, estimate, exponent, interleaved, ratio
from ebflow_examples.models import build
from ebflow_plugin.errors import InputError, UnknownNameError
from ebflow_plugin.linalg.random import signs_like
from ebflow_plugin.objectives import score_matching

CPU = torch.device("cpu")


def run(**seconds):
    token = object()
    return {name: Samples(name, tuple(times), token) for name, times in seconds.items()}


# -- timing --


def test_contenders_take_turns_in_an_order_that_changes():
    calls = []
    times = interleaved(
        {name: lambda name=name: calls.append(name) or torch.ones(600, 600).mm(torch.ones(600, 600)) for name in "abc"},
        seconds=0,
        least=8,
        warmup=1,
    )
    assert [len(times[name].seconds) for name in "abc"] == [8, 8, 8]
    assert len({id(samples.run) for samples in times.values()}) == 1
    turns = [name for place, name in enumerate(calls[3:]) if place == 0 or calls[3:][place - 1] != name]
    assert len(turns) >= 2 * 8  # nobody runs all rounds at once, though a name may end one round and begin the next
    assert turns != list("abc") * 8


def test_a_run_stops_at_its_time_and_at_its_rounds():
    ticks = []
    assert len(interleaved({"a": lambda: None}, seconds=0, least=3)["a"].seconds) == 3
    assert len(interleaved({"a": lambda: None}, seconds=1e9, rounds=6, tick=ticks.append)["a"].seconds) == 6
    assert ticks == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InputError, match="rounds >= least"):
        interleaved({"a": lambda: None}, seconds=1, rounds=2, least=3)


def test_a_short_call_is_repeated_within_a_sample(monkeypatch):
    clock = count(step=0.001)  # a call takes a millisecond, and so does a look at the clock
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock))
    calls = []
    times = interleaved({"a": lambda: calls.append(next(clock))}, seconds=0, least=2, warmup=1)
    assert len(calls) == 1 + 2 * 3  # 5 ms a sample, at 2 ms a call as the warm-up saw it
    assert times["a"].seconds == pytest.approx((0.004 / 3,) * 2)


def test_the_collector_is_on_again_after_a_failure():
    import gc

    calls = []

    def fails():
        calls.append(gc.isenabled())
        if len(calls) > 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleaved({"a": fails}, seconds=0, warmup=1)
    assert calls == [True, False]
    assert gc.isenabled()


def test_a_ratio_of_sides_that_were_not_interleaved_is_refused():
    one, other = run(ours=[1.0, 2.0]), run(plain=[1.0, 2.0])
    for attempt in (ratio, lambda a, b: compare("x", a, b), lambda a, b: exponent([1, 2], [a, b])):
        with pytest.raises(InputError, match="not interleaved.*ours, plain"):
            attempt(one["ours"], other["plain"])


def test_a_ratio_is_of_medians_and_its_spread_resamples_rounds():
    times = run(ours=[1.0, 2.0, 30.0, 3.0, 4.0], other=[2.0, 4.0, 60.0, 6.0, 8.0])
    assert ratio(times["ours"], times["other"]) == Spread(0.5, 0.5, 0.5)  # a slow round slows both
    apart = run(ours=[1.0, 2.0, 3.0, 4.0, 5.0], other=[3.0, 3.0, 3.0, 3.0, 3.0])
    found = ratio(apart["ours"], apart["other"])
    assert found.value == 1.0
    assert 1 / 3 <= found.low < 1.0 < found.high <= 5 / 3


def test_the_exponent_of_a_power_law_is_found():
    sizes = [256, 512, 1024]
    times = run(**{str(size): [3e-9 * size**2.5 * noise for noise in (1.0, 1.1, 0.9)] for size in sizes})
    found = exponent(sizes, [times[str(size)] for size in sizes])
    assert (found.value, found.low, found.high) == pytest.approx((2.5, 2.5, 2.5))
    with pytest.raises(InputError, match="two sizes"):
        exponent([1], [times["256"]])


def test_estimates_are_repeatable():
    times = list(run(a=[1.0, 2.0, 5.0, 3.0], b=[2.0, 2.5, 1.0, 4.0]).values())
    assert estimate(lambda m: m[..., 0] - m[..., 1], times) == estimate(lambda m: m[..., 0] - m[..., 1], times)


# -- the plain rivals compute what ours compute --


def pair(model):
    if model == "fc":
        flow, by_hand, shape = build("fc", (12,), init="normal"), plain.FullyConnected(12, 0.3), (12,)
    else:
        flow, by_hand, shape = build("cnn", (2, 8, 8), init="normal"), plain.Convolutional(2, 0.3, 7), (2, 8, 8)
    for parameter in flow.double().parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # biases too
    plain.copy_parameters(flow, by_hand.double())
    return ebf.wrap(flow), by_hand, torch.randn(5, *shape, dtype=torch.float64)


@pytest.mark.parametrize(("model", "name"), [*product(["fc", "cnn"], ["SSM", "DSM", "FDSSM"]), ("fc", "ML")])
def test_plain_losses_and_gradients_equal_ours(model, name):
    torch.manual_seed(0)
    ours, by_hand, x = pair(model)
    losses = {
        "SSM": lambda: plain.ssm(by_hand, x, signs_like(x, Generator().manual_seed(1))),
        "DSM": lambda: plain.dsm(
            by_hand, x, score_matching.gaussian_like(x, Generator().manual_seed(1)), contenders.SIGMA
        ),
        "FDSSM": lambda: plain.fdssm(by_hand, x, score_matching.sphere(x, Generator().manual_seed(1)), contenders.EPS),
        "ML": lambda: plain.ml(by_hand, x),
    }
    objective = contenders.objective(name, ours)
    objective.generator = Generator().manual_seed(1)
    loss, expected = objective(x), losses[name]()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(ours.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if theirs.grad is None else theirs.grad)


def test_plain_noise():
    x = torch.empty(400, 3, 2, 2)
    torch.manual_seed(0)
    assert set(plain.rademacher(x).unique().tolist()) == {-1.0, 1.0}
    assert abs(plain.rademacher(x).mean()) < 0.05
    torch.testing.assert_close(plain.sphere(x).square().sum((1, 2, 3)), torch.full((400,), 12.0))


@pytest.mark.parametrize("flow", ["alternating", "realnvp"])
def test_the_loop_by_hand_is_the_energy(flow):
    flow = wrapper.alternating(3) if flow == "alternating" else build("realnvp", (wrapper.DIM,), blocks=2)
    x = torch.randn(4, wrapper.DIM)
    model = ebf.wrap(flow)
    model.initialize(x)
    torch.testing.assert_close(wrapper.loop_by_hand(flow)(x), model.energy(x))


def test_a_training_step_trains_and_leaves_no_gradient():
    layer = torch.nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    contenders.training_step(layer, lambda x: layer(x).sum(), torch.ones(3, 2))()
    assert layer.weight.grad is None
    assert not torch.equal(layer.weight, before)
    torch.testing.assert_close(layer.weight, before, atol=1e-6, rtol=0)


# -- memory and operations --


def test_peak_memory_of_a_known_call():
    def prepare():
        kept = torch.empty(1000)  # 4,000 bytes

        def call():
            a = torch.empty(50_000)  # 200,000
            b = torch.empty(25_000)  # 100,000
            del a
            c = torch.empty(10_000)  # 40,000
            return kept is b or c is None

        return call

    assert peak_bytes(prepare, CPU) == 304_000


# -- groups, with everything small --


@pytest.fixture
def small(monkeypatch):
    """Sizes at which a group takes no time."""
    monkeypatch.setattr(models, "DIM", 8)
    monkeypatch.setattr(models, "BATCH", 4)
    monkeypatch.setattr(growth, "OBJECTIVES", ("DSM", "ML"))
    monkeypatch.setattr(Settings, "time", lambda self, what, steps, **how: interleaved(steps, seconds=0, least=2))
    monkeypatch.setattr(Settings, "choose", lambda self, quick, full: (8, 16) if quick == (256, 512, 1024) else quick)


def test_fc_has_a_row_for_each_objective(small):
    (table,) = models.fc(Settings())
    assert [row["what"] for row in table.rows] == ["SSM", "DSM", "FDSSM", "ML"]


def test_both_exponents_are_shown_with_the_sizes_they_are_over(small):
    table = next(growth.growth(Settings()))
    assert {"exponent, all sizes", "exponent, last doubling"} <= set(table.rows[0])
    assert "over D = 8 … 16, and from D = 8 to D = 16 alone" in table.note


# -- the command --


def test_groups_are_there():
    for name in bench.GROUPS:
        assert callable(bench.group(name))


def test_convolutions_are_measured(small):
    """The first table of the group: its contenders are built as the command builds them."""
    first = next(models.cnn(Settings(quick=True)))
    assert first.title == "training step of the paper's cnn on 1 x 28 x 28, batch 4"
    assert "Six 7 x 7 convolutions" in first.note
    assert len(first.rows) == 9


def test_the_benchmark_has_every_objective(monkeypatch):
    monkeypatch.setattr(models, "QUICK_SIDES", (4, 8))
    monkeypatch.setattr(models, "NEW_BATCH", 4)
    monkeypatch.setattr(Settings, "time", lambda self, what, steps, **how: interleaved(steps, seconds=0, least=2))
    (growth,) = models.likelihood(Settings())
    assert [row["objective"] for row in growth.rows] == ["ML stochastic", "ML", "DSM", "SSM"]
    for row in growth.rows:
        assert row["D = 48, ms"] > 0
        assert row["D = 192, ms"] > 0
    assert "time ~ D^p" in report.as_text(growth)


def test_main_prints_and_writes(small, tmp_path, capsys):
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    bench.main(quick=True, only=["fc", "growth"], out=tmp_path, threads=1)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    shown = capsys.readouterr()
    assert "fc: training step of the paper's fc model" in shown.out
    assert "growth.png" in shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md", "growth.png"]
    content = json.loads((tmp_path / "bench.json").read_text())
    times = content["tables"][1]["rows"]
    assert [row["objective"] for row in times] == ["DSM", "ML"]
    exponents = ("exponent, all sizes", "exponent, last doubling")
    assert all(row[key]["low"] <= row[key]["value"] <= row[key]["high"] for row in times for key in exponents)
    row = content["tables"][0]["rows"][0]
    assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]
    assert content["options"]["only"] == ["fc", "growth"]
    assert (tmp_path / "growth.png").stat().st_size > 10_000
    assert "| SSM | plain SSM |" in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"only": ["grwth"]}, UnknownNameError, "Did you mean 'growth'"),
        ({"threads": 0}, InputError, "threads must be an integer, at least 1"),
        ({"device": "toaster"}, InputError, "the device 'toaster' cannot be used"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(options, error, text, tmp_path):
    with pytest.raises(error, match=text):
        bench.main(out=tmp_path / "bench", **options)
    assert not (tmp_path / "bench").exists()


def test_columns_without_values_are_left_out():
    table = Table("fc", "title", [{"what": "a", "ms": 123.4, "note": None}, {"what": "b", "ms": 0.5, "note": None}])
    assert report.cells(table) == (["what", "ms"], [["a", "123"], ["b", "0.5"]])
