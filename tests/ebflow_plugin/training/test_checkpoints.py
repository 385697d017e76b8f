"""Checkpoints: atomic, exact, and suspicious of every file."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ebflow_plugin as ebf
from ebflow_plugin.errors import InputError
from ebflow_plugin.training import checkpoints, fit
from ebflow_plugin.training.checkpoints import CheckpointFolder, atomic_write, load_best
from processes import SCRIPTS
from randomness import rng
from training_models import CrashError, checkpointed_run, crash_at, make_data, make_model, same, weights, without_timing

run = partial(checkpointed_run, checkpoint_every=3, ema=True)


class Noisy(Dataset):
    """Items that draw from torch's global generator, as augmentations do."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return make_data(50)[index] + 0.1 * torch.randn(4)


def loader(**options):
    return DataLoader(TensorDataset(make_data(50)), batch_size=8, **options)


SOURCES = {
    "tensor": lambda: make_data(50),
    "dataset with noise": Noisy,
    "loader": lambda: loader(shuffle=True),
    "loader with a generator": lambda: loader(shuffle=True, generator=rng(3)),
    "loader with noise": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
    "loader with workers": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, kind):
    expected, model = run(tmp_path / "whole", SOURCES[kind]())
    for step in (8, 16):
        with pytest.raises(CrashError):
            run(tmp_path / "parts", SOURCES[kind](), callbacks=[crash_at(step)])
    result, resumed = run(tmp_path / "parts", SOURCES[kind]())
    assert without_timing(result.history) == without_timing(expected.history)
    assert same(weights(resumed), weights(model))
    lines = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert without_timing(lines) == without_timing(expected.history)
    assert result.best_nll == expected.best_nll
    assert same(result.best_state, expected.best_state)


def test_killed_processes_leave_no_trace_in_the_metrics(tmp_path):
    path = os.pathsep.join([str(SCRIPTS), *sys.path])
    done = subprocess.run(
        [sys.executable, SCRIPTS / "killed_runs.py", tmp_path, "4", "0"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) >= 2, "the processes were killed at different places of the run"
    peace, war = (
        without_timing(json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        for name in ("peace", "war")
    )
    assert len(peace) == 15
    assert war == peace
    best = [CheckpointFolder(tmp_path / name).load_best() for name in ("peace", "war")]
    assert same(best[0][0], best[1][0])
    assert best[0][1] == best[1][1]


def test_the_last_two_are_kept_and_need_no_unsafe_pickle(tmp_path):
    run(tmp_path, make_data(50))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.safetensors", "metrics.jsonl", "step-00000018.pt", "step-00000020.pt"]
    state = torch.load(tmp_path / "step-00000020.pt", weights_only=True)
    assert state["step"] == 20
    assert {"model", "ema", "optimizer", "scheduler", "ranks", "history"} <= set(state)


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_flip(path):
    content = bytearray(path.read_bytes())
    at = content.index(b"data/0") + 200
    content[at] ^= 0xFF
    path.write_bytes(bytes(content))


def damage_foreign(path):
    torch.save({"weights": torch.zeros(3)}, path)


def damage_pickle(path):
    torch.save({"format": "ebflow_plugin.fit", "function": damage_foreign}, path)


def damage_empty(path):
    path.write_bytes(b"")


DAMAGES = {
    damage_truncate: "truncated",
    damage_flip: "damaged",
    damage_foreign: "is no checkpoint of ebflow_plugin.fit",
    damage_pickle: "cannot be read",
    damage_empty: "truncated",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_older_checkpoint_stands_in_for_a_damaged_one(tmp_path, damage):
    _, model = run(tmp_path / "whole", make_data(50))
    run(tmp_path / "parts", make_data(50), steps=17)
    damage(CheckpointFolder(tmp_path / "parts").files()[0])
    with pytest.warns(ebf.ResumeWarning, match=rf"{DAMAGES[damage]}.*going on from step-00000015.pt"):
        _, resumed = run(tmp_path / "parts", make_data(50))
    assert same(weights(resumed), weights(model))


def test_an_error_if_none_can_be_read(tmp_path):
    run(tmp_path, make_data(50))
    for path in CheckpointFolder(tmp_path).files():
        damage_truncate(path)
    with pytest.raises(InputError, match="(?s)no checkpoint in .* can be read.*00020.*00018.*resume=False"):
        run(tmp_path, make_data(50))
    result, _ = run(tmp_path, make_data(50), resume=False)
    assert result.steps == 20


def other_model(tmp_path):
    run(tmp_path, make_data(50, size=6), validation=None, model=make_model(6))


def other_objective(tmp_path):
    fit(
        ebf.objectives.DSM(make_model(), sigma=0.25), make_data(50), steps=20, ema=True, checkpoint=tmp_path,
        progress=False,
    )  # fmt: skip


def other_optimizer(tmp_path):
    run(tmp_path, make_data(50), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def other_rate(tmp_path):
    run(tmp_path, make_data(50), optimizer=lambda p: torch.optim.Adam(p, lr=0.25))


@pytest.mark.parametrize("kernel", [{}, {"fused": True}, {"foreach": True}])
def test_a_run_resumes_with_another_kernel_of_its_optimizer(tmp_path, kernel):
    run(tmp_path, make_data(50), steps=3, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3, **kernel))
    assert run(tmp_path, make_data(50), steps=6)[0].steps == 6


def other_ema(tmp_path):
    run(tmp_path, make_data(50), ema=None)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (other_model, r"model: .*_transforms.1.weight \(4, 4\)"),
        (other_objective, r"objective: DSM\(sigma=0.5.* there, DSM\(sigma=0.25"),
        (other_optimizer, r"optimizer: .*Adam"),
        (other_rate, "optimizer: only there lr=0.001; only here lr=0.25"),
        (other_ema, "ema: decay=0.999.* there, none here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(tmp_path, other, words):
    run(tmp_path, make_data(50), steps=3)
    with pytest.raises(InputError, match=f"(?s)is of another run.*{words}.*resume=False"):
        other(tmp_path)


def test_other_data_are_a_warning(tmp_path):
    run(tmp_path, make_data(50), steps=6)
    with pytest.warns(ebf.ResumeWarning, match="(?s)other settings.*data: 50 rows, batches of 8 there, 40 rows"):
        result, _ = run(tmp_path, make_data(40))
    assert result.steps == 20


def test_a_finished_run_is_not_trained_again(tmp_path):
    expected, model = run(tmp_path, make_data(50))
    called = []
    result, again = run(tmp_path, make_data(50), callbacks=[called.append])
    assert not called
    assert same(weights(again), weights(model))
    assert result.history == expected.history
    assert same(result.best_state, expected.best_state)


def test_the_best_weights_are_those_of_the_average_at_the_best_step(tmp_path):
    seen = {}

    def keep(event):
        with event.ema.applied() as averaged:
            seen[event.step] = weights(averaged)

    result, model = run(tmp_path, make_data(50), callbacks=[keep])
    facts = load_best(model, tmp_path)
    assert facts["step"] == result.best_step
    assert facts["nll"] == result.best_nll == min(record["nll"] for record in result.history)
    assert same(weights(model), seen[result.best_step])
    with torch.no_grad():
        assert -model.log_prob(make_data(30, seed=1)).mean() == pytest.approx(result.best_nll, rel=1e-5)
    with pytest.raises(InputError, match="another model"):
        load_best(make_model(6), tmp_path)
    with pytest.raises(InputError, match="holds no best weights"):
        load_best(model, tmp_path / "nowhere")


def test_without_safetensors_the_best_weights_are_a_plain_file(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    result, model = run(tmp_path, make_data(50))
    assert (tmp_path / "best.pt").exists()
    assert not (tmp_path / "best.safetensors").exists()
    assert load_best(model, tmp_path)["nll"] == result.best_nll
    assert same(weights(model), result.best_state)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, fail)
    assert path.read_bytes() == b"old"
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".step-00000003.pt.abc.tmp").write_bytes(b"half")
    run(tmp_path, make_data(50), steps=3)
    assert not list(tmp_path.glob(".*"))


def test_a_scheduler_that_cannot_be_saved_is_refused_before_any_work():
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self):
            return {"function": damage_foreign}

    model = make_model()
    with pytest.raises(InputError, match="state of the scheduler cannot be saved"):
        fit(ebf.objectives.ML(model), make_data(50), steps=2, scheduler=lambda o: Odd(o, lambda step: 1.0))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="cannot be written to"):
        run(tmp_path / "inside", make_data(50))


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("mine")
    model = make_model(actnorm=False)
    before = weights(model)
    with pytest.raises(InputError, match=r"the checkpoint folder .*taken cannot be written to"):
        run(tmp_path / "taken", make_data(50), model=model)
    assert same(weights(model), before)
