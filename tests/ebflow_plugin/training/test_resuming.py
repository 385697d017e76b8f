"""Runs in Lightning that are cut, killed, interrupted, or whose files are damaged."""

import os
import resource
import signal
import stat
import threading

import pytest
import torch

import ebflow_plugin as ebf
from ebflow_plugin.errors import EBFlowError, InputError, TrainingError, WriteError
from ebflow_plugin.lightning import (
    AtomicCheckpointIO,
    Checkpoints,
    ExactNLL,
    LitObjective,
    Loader,
    trainer,
)
from ebflow_plugin.objectives import DSM, FDSSM, ML, NoiseSchedule
from ebflow_plugin.objectives.schedule import AddedNoise
from ebflow_plugin.training import guards
from lightning_models import Cut, run
from training_models import CrashError, make_data, make_model, same, weights


@pytest.fixture(autouse=True)
def default_handler():
    """Python's own handler, which processes of pytest-xdist do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def resumed(folder, step, **options):
    """A run that is cut after a step, and goes on."""
    with pytest.raises(CrashError):
        run(folder, Cut(step), **options)
    return run(folder, **options)


# --- resuming

RUNS = {
    "steps": {"evaluate_every": 4},
    "the last step is no validation": {"steps": 17, "evaluate_every": 7},
    "validations at the ends of epochs": {"steps": 18, "evaluate_every": 6, "calibrate": "full", "ema": False},
    "epochs": {"epochs": 3, "evaluate_every": None, "calibrate": "diagonal"},
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("presses", [0, 1], ids=["killed", "Ctrl-C"])
def test_a_run_that_is_cut_after_any_step_equals_an_uninterrupted_one(tmp_path, kind, presses):
    expected, rows, whole = run(tmp_path / "whole", **RUNS[kind])
    best = ebf.load_best(make_model(), tmp_path / "whole")
    for step in range(1, whole.global_step, 3 if kind == "steps" else 5):
        folder = tmp_path / str(step)
        with pytest.raises((CrashError, SystemExit)) as caught:
            run(folder, Cut(step, presses), **RUNS[kind])
        assert getattr(caught.value, "code", 130) == 130
        found, again, _ = run(folder, **RUNS[kind])
        assert again == rows, step
        assert same(found, expected), step
        assert ebf.load_best(make_model(), folder) == best


def test_the_statistics_of_an_objective_resume_too(tmp_path):
    options = {"objective": lambda model: ML(model, log_det="stochastic"), "model": None}
    expected, rows, _ = run(tmp_path / "whole", **options)
    found, again, _ = resumed(tmp_path / "parts", 9, **options)
    assert again == rows
    assert same(found, expected)


@pytest.mark.parametrize("start", [None, 2.0])
def test_shrinking_noise_goes_on_where_it_was(tmp_path, start, monkeypatch):
    schedule = NoiseSchedule(start=start, end=0.25, steps=15)

    def objective(model):
        return DSM(model, sigma=schedule, latent_weight=0.5) + 0.5 * FDSSM(model, sigma=schedule)

    expected, rows, _ = run(tmp_path / "whole", objective=objective)
    found, again, _ = resumed(tmp_path / "parts", 9, objective=objective)
    assert again == rows
    assert same(found, expected)
    monkeypatch.setattr(AddedNoise, "load_state", lambda noise, state: None)
    assert not same(resumed(tmp_path / "forgetful", 9, objective=objective)[0], expected)


def test_the_last_two_are_kept_and_the_best_with_its_nll(tmp_path):
    _, rows, _ = run(tmp_path)
    assert names(tmp_path) == ["best.ckpt", "step-00000016.ckpt", "step-00000020.ckpt"]
    model = make_model()
    facts = ebf.load_best(model, tmp_path)
    step, nll = min(((row[0], row[1]) for row in rows), key=lambda row: row[1])
    assert facts == {"step": step, "nll": nll}
    with torch.no_grad():
        assert -model.log_prob(make_data(60, seed=1)).mean() == pytest.approx(nll, rel=1e-5)
    with pytest.raises(InputError, match="another model"):
        ebf.load_best(make_model(6), tmp_path)


def test_the_start_may_be_the_best(tmp_path):
    model = make_model(actnorm=False)
    start = weights(model)
    with torch.no_grad():
        expected = -model.log_prob(make_data(60, seed=1)).mean().item()
    _, rows, made = run(tmp_path, model=model, objective=lambda model: -1.0 * ML(model), rate=1e-3)
    assert all(row[1] > expected for row in rows)
    facts = ebf.load_best(model, tmp_path)
    assert facts["step"] == 0
    assert facts["nll"] == pytest.approx(expected, rel=1e-5)
    assert same(weights(model), start)
    assert next(each.start_nll for each in made.callbacks if isinstance(each, ExactNLL)) == facts["nll"]


def test_a_finished_run_is_not_trained_again_and_a_longer_one_goes_on(tmp_path):
    expected, rows, _ = run(tmp_path / "whole", steps=23)
    run(tmp_path / "parts", steps=11)
    before = names(tmp_path / "parts")
    _, again, _ = run(tmp_path / "parts", steps=11)
    assert names(tmp_path / "parts") == before
    assert [row[0] for row in again] == [4, 8, 11]
    found, again, _ = run(tmp_path / "parts", steps=23)
    assert same(found, expected)
    assert [row for row in again if row[0] != 11] == rows


@pytest.mark.parametrize("cut", [None, 14])
def test_patience_stops_and_a_stopped_run_stays_stopped(tmp_path, cut):
    options = {"objective": lambda model: -1.0 * ML(model), "rate": 1e-3, "patience": 3, "model": None}
    expected, rows, made = run(tmp_path / "whole", **options)
    assert [row[0] for row in rows] == [4, 8, 12, 16]  # an ActNorm waited for the first batch
    assert next(each.stopped for each in made.callbacks if isinstance(each, Checkpoints)) == "patience"
    if cut is not None:
        with pytest.raises(CrashError):
            run(tmp_path / "parts", Cut(cut), **options)
    for _ in range(2):
        found, again, _ = run(tmp_path / ("whole" if cut is None else "parts"), **options)
        assert again == rows
        assert cut is None or same(found, expected)


def test_a_new_run_is_refused_where_there_is_one(tmp_path):
    run(tmp_path)
    before = names(tmp_path)
    made = trainer(tmp_path, steps=4, accelerator="cpu", enable_progress_bar=False)
    module = LitObjective(ML(make_model()))
    with pytest.raises(InputError, match=r"holds a run already: trainer.fit\(…, ckpt_path=.*00020"):
        made.fit(module, Loader(make_data(50), 8), Loader(make_data(60), shuffle=False))
    assert names(tmp_path) == before


def test_other_batches_begin_the_epoch_anew(tmp_path):
    with pytest.raises(CrashError):
        run(tmp_path, Cut(9))
    _, rows, made = run(tmp_path, batch=10, steps=20)
    assert made.global_step == 20
    assert rows[-1][0] == 20


# --- Ctrl-C


def test_ctrl_c_completes_the_step_says_how_to_go_on_and_exits_with_130(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, Cut(6, presses=1))
    assert caught.value.code == 130
    said = capsys.readouterr().err
    assert "Ctrl-C again stops at once" in said
    assert "stopped after step 6; trainer.fit(…, ckpt_path=" in said
    assert names(tmp_path)[-1] == "step-00000006.ckpt"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(SystemExit):
        run(tmp_path, Cut(8, presses=1), hint="do this")  # a validation is due: it comes first
    assert "stopped after step 8; do this" in capsys.readouterr().err
    assert names(tmp_path)[-1] == "step-00000008.ckpt"


def test_a_second_one_stops_at_once(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, Cut(6, presses=2))
    assert caught.value.code == 130
    assert "step-00000006.ckpt" not in names(tmp_path)
    assert "stopped at once" in capsys.readouterr().err


def test_what_fails_because_of_it_is_it(tmp_path):
    """The terminal sends Ctrl-C to the workers of a loader too, and they die first."""

    class Dies(Cut):
        def on_train_batch_end(self, *arguments):
            super().on_train_batch_end(*arguments)
            if arguments[0].global_step == self.step:
                raise RuntimeError("DataLoader worker exited unexpectedly")

    with pytest.raises(SystemExit) as caught:
        run(tmp_path, Dies(6, presses=1))
    assert caught.value.code == 130


def test_a_handler_of_ones_own_stays_and_other_threads_are_left_alone(tmp_path):
    heard = []

    def mine(*_):
        heard.append("it")

    signal.signal(signal.SIGINT, mine)
    run(tmp_path / "one", Cut(6, presses=1))
    assert heard == ["it"]
    assert signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=run, args=(tmp_path / "two",))
    thread.start()
    thread.join()
    assert "step-00000020.ckpt" in names(tmp_path / "two")


def test_steps_that_nobody_looked_at_are_not_saved(tmp_path):
    """On a GPU the loss is looked at now and then. A checkpoint with NaN in it would be the end of the run."""

    class Spoils(Cut):
        def on_train_batch_end(self, trainer, module, *rest):
            if trainer.global_step == 5:
                with torch.no_grad():
                    next(module.objective.model.parameters()).fill_(float("nan"))
            super().on_train_batch_end(trainer, module, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "CHECK_EVERY", {"cpu": 1000})
        with pytest.raises(TrainingError, match="step 6: the loss is not finite"):
            run(tmp_path, Spoils(6, presses=1), ema=False)
    assert "step-00000006.ckpt" not in names(tmp_path)


# --- damage


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"data/0") + 200] ^= 0xFF
    path.write_bytes(bytes(content))


def foreign(path):
    torch.save({"state_dict": {}, "weights": torch.zeros(3)}, path)


def hostile(path):
    class Code:
        def __reduce__(self):
            return os.system, (f"touch {path.parent / 'hacked'}",)

    torch.save({"ebflow_plugin": {}, "state_dict": {}, "code": Code()}, path)


def empty(path):
    path.write_bytes(b"")


DAMAGES = {
    truncate: "is truncated, or no checkpoint",
    flip: "is damaged",
    foreign: "is no checkpoint of ebflow_plugin",
    hostile: "cannot be read: it holds more than tensors,",
    empty: "is truncated, or no checkpoint",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_older_checkpoint_stands_in_for_a_damaged_one(tmp_path, damage):
    expected, rows, _ = run(tmp_path / "whole")
    folder = tmp_path / "parts"
    with pytest.raises(CrashError):
        run(folder, Cut(17))
    damage(folder / "step-00000016.ckpt")
    with pytest.warns(ebf.ResumeWarning, match=rf"{DAMAGES[damage]}.*going on from step-00000012.ckpt"):
        found, again, _ = run(folder)
    assert same(found, expected)
    assert again == rows
    for name in names(folder):
        damage(folder / name)
    with pytest.raises(InputError, match=f"(?s)no checkpoint can be read: .*00020.*{DAMAGES[damage]}.*00016") as caught:
        run(folder)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(InputError, match=DAMAGES[damage]):
        ebf.load_best(make_model(), folder)
    assert not (folder / "hacked").exists()


@pytest.mark.parametrize("damage", [truncate, flip, lambda path: path.unlink()])
def test_lost_best_weights_do_not_stop_a_run_that_can_go_on(tmp_path, damage):
    _, rows, _ = run(tmp_path)
    damage(tmp_path / "best.ckpt")
    with pytest.warns(ebf.ResumeWarning, match="best weights so far are lost"):
        run(tmp_path)  # a finished run
    assert ebf.load_best(make_model(), tmp_path) == {"step": 20, "nll": rows[-1][1]}
    damage(tmp_path / "best.ckpt")
    with pytest.warns(ebf.ResumeWarning, match="best weights so far are lost"):
        _, rows, _ = run(tmp_path, steps=24)
    best = min(rows[-2:], key=lambda row: row[1])
    assert ebf.load_best(make_model(), tmp_path) == {"step": best[0], "nll": best[1]}


def test_what_cannot_be_read_back_is_not_saved(tmp_path):
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self):
            return {"function": truncate}

    with pytest.raises(InputError, match="state of this run cannot be read back.*schedulers"):
        run(tmp_path, scheduler=lambda optimizer: Odd(optimizer, lambda step: 1.0))
    assert names(tmp_path) == []


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".step-00000003.ckpt.abc.tmp").write_bytes(b"half")
    run(tmp_path, steps=4)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_umask_says_who_may_read_the_files(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        run(tmp_path, steps=4)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}


@pytest.fixture
def full_disk():
    """Lets no file grow beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_one_short_error_and_harms_nothing(tmp_path, full_disk):
    expected, _, _ = run(tmp_path / "whole")
    with pytest.raises(CrashError):
        run(tmp_path / "parts", Cut(9))
    before = names(tmp_path / "parts")
    full_disk(3000)
    with pytest.raises(WriteError, match=r"cannot be written: File too large. Make room") as caught:
        run(tmp_path / "parts")
    full_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert len(str(caught.value).splitlines()) == 1
    assert isinstance(caught.value, EBFlowError)
    assert names(tmp_path / "parts") == before
    found, _, _ = run(tmp_path / "parts")
    assert same(found, expected)


def test_a_folder_that_is_a_file_is_refused_before_any_work(tmp_path):
    (tmp_path / "taken").write_text("mine")
    model = make_model(actnorm=False)
    before = weights(model)
    with pytest.raises(InputError, match=r"the checkpoint folder .*taken cannot be written to"):
        run(tmp_path / "taken", model=model)
    assert same(weights(model), before)


def test_what_trainer_refuses(tmp_path):
    for options, words in (({}, "either steps or epochs"), ({"steps": 1, "epochs": 1}, "either steps or epochs"),
                           ({"steps": 0}, "steps must be an integer, at least 1"),
                           ({"steps": 1, "patience": 2}, "patience needs a folder")):  # fmt: skip
        with pytest.raises(InputError, match=words):
            trainer(accelerator="cpu", **options)
    with pytest.raises(InputError, match="patience must be an integer"):
        trainer(tmp_path, steps=1, patience=0, accelerator="cpu")


def test_without_a_folder_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, rows, _ = run(None, objective=lambda model: DSM(model), steps=8)
    assert [row[0] for row in rows] == [4, 8]
    assert names(tmp_path) == []
    assert AtomicCheckpointIO()._readable is False
