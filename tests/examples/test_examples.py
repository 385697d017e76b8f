"""Every script under examples/ runs, in its small mode, from any folder; and so do the notebooks."""

import copy
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from matplotlib import pyplot as plt
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NUMBER = r"-?\d+\.\d+"
# What the output of each script must hold, beside numbers that only a long run makes good.
EXPECTED = {
    "bridge": [
        r"exact +log Z +0\.000",
        rf"reverse KL +log Z +{NUMBER}",
        rf"bridge, forward KL +log Z +{NUMBER} ± \S+, wells",
    ],
    "custom_transform": ["same log_prob: True", r"Filter +linear +256 × 256", rf"NLL after +{NUMBER}, .* {NUMBER}\n"],
    "double_well": [r"exact +log Z 1\.1748", rf"forward +log Z {NUMBER} ± \S+, right well {NUMBER}"],
    "evidence": [rf"4 +-12\.5523\d* +{NUMBER} ± \S+ +{NUMBER} +off by {NUMBER}"],
    "glow_3x3": [
        rf"1 x 1: {NUMBER} -> {NUMBER} bits/dim of test patches",
        rf"3 x 3: {NUMBER} -> {NUMBER} bits/dim of test patches",
    ],
    "lightning_flow": [rf"by likelihood +exact test NLL {NUMBER}\n", rf"by score matching +exact test NLL {NUMBER}\n"],
    "log_z": [r"importance .*\(warned\)", rf"products alone +{NUMBER} ± {NUMBER}", rf"lanczos +{NUMBER} ± {NUMBER}"],
    "own_objective": [r"paired_dsm loss", rf"KL to the density of the data {NUMBER} -> {NUMBER}"],
    "phi4": [
        rf"full +accepted {NUMBER}, effective {NUMBER}, mean action",
        rf"couplings +accepted {NUMBER}, effective {NUMBER}, mean action",
        rf"HMC +mean action {NUMBER} ± {NUMBER}",
    ],
    "sbi_posterior": [r"posterior mean.* known" if find_spec("sbi") else r"^skipped: .*pip install sbi\n$"],
    "cuda_graphs": [rf"DSM: loss {NUMBER} -> {NUMBER} in 20 steps", rf"SSM: loss {NUMBER} -> {NUMBER}"],
    "several_devices": ["processes: 1, rows of a batch in each: 256", rf"exact test NLL {NUMBER}; start"],
    "unconstrain": [r"_transform\._transforms\.0: LULinear -> FullLinear", rf"full, .* NLL +{NUMBER}"],
    "wrap_nflows": [r"LULinear +linear", r"\d+ checks of this model hold", rf"exact test NLL {NUMBER} -> {NUMBER}"],
    "wrap_zuko": [
        r"FullLinear +linear +3 × 3",
        r"checks of this model hold",
        rf"own log_prob: {NUMBER}\), .* {NUMBER}\n",
    ],
    "wrap_normflows": [r"merges\.0 +Merge", r"checks of this model hold", rf"bits/dim calibrated +{NUMBER}"],
}
WRITTEN = {
    "several_devices": {f"runs/several_devices/{name}.ckpt" for name in ("best", "step-00000003", "step-00000004")},
    "wrap_nflows": {"runs/wrap_nflows.png"},
    "wrap_normflows": {"runs/wrap_normflows.png"},
}


def same_density(output):
    assert float(re.search(r"difference of log_prob (\S+)", output).group(1)) < 1e-5


def one_expectation(output):
    """Both denoising losses have the same mean, and the one in pairs hardly any noise."""
    losses = re.findall(rf"loss +({NUMBER}) ± ({NUMBER})", output)
    (dsm, error), (paired, smaller) = ((float(value), float(spread)) for value, spread in losses)
    assert abs(dsm - paired) < 4 * (error + smaller)
    assert smaller < 0.01 * error


def lanczos_beats_importance(output):
    found = re.findall(rf"(exact|importance|lanczos|alone) +({NUMBER}) ± (\d+\.\d+) ", output)[:4]
    value, error = ({line[0]: float(line[place]) for line in found} for place in (1, 2))
    assert error["lanczos"] < error["importance"] < error["alone"]
    assert all(abs(value[name] - value["exact"]) <= 4 * error[name] for name in value)


NOTEBOOKS = {
    "quickstart": ["102 checks, 0 failures", rf"step +4  NLL {NUMBER}, calibrated {NUMBER}"],
    "glow": ["4 convolutions, .*FullConv2d", "the same density: True", rf"3 × 3 convolutions: .* {NUMBER} nats"],
}
CHECKS = {"unconstrain": same_density, "own_objective": one_expectation, "log_z": lanczos_beats_importance}


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """The small mode, in a folder of its own."""
    monkeypatch.setenv("EBFLOW_SMOKE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs(script, tmp_path, capsys):
    plt.switch_backend("Agg")
    try:  # in this process: importing torch takes longer than most of them
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0
    finally:
        plt.close("all")
    output = capsys.readouterr().out
    for pattern in EXPECTED[script.stem]:
        assert re.search(pattern, output), f"{pattern} is not in\n{output}"
    CHECKS.get(script.stem, str)(output)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == WRITTEN.get(script.stem, set())
    for path in written:
        assert not path.endswith(".png") or plt.imread(path).std() > 0.05


def test_the_same_script_runs_in_two_processes_and_goes_on():
    """Started twice in each process: importing torch and Lightning takes most of the time."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    twice, script = Path("twice.py"), str(EXAMPLES / "several_devices.py")
    twice.write_text(f"import runpy\nfor _ in range(2):\n    runpy.run_path({script!r})\n")
    done = subprocess.run([*launcher, twice], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("processes: 2, rows of a batch in each: 128") == 2
    assert done.stdout.count("of 4\n") == 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_short_and_says_how_to_run_it(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 70
    docstring = text.split('"""')[1]
    assert f"examples/{script.name} " in docstring
    assert re.search(r"(second|minute)s? on (one core|two cores)", docstring)


@pytest.fixture(params=sorted(NOTEBOOKS))
def notebook(request):
    return request.param, nbformat.read(EXAMPLES / f"{request.param}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def test_a_notebook_has_its_outputs(notebook):
    """All cells were run once, in order, without an error, and there is a picture in it."""
    name, stored = notebook
    cells = code_cells(stored)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert {output.output_type for output in outputs(stored)} == {"stream", "display_data"}
    assert {output.name for output in outputs(stored) if output.output_type == "stream"} == {"stdout"}
    assert any("image/png" in output.get("data", {}) for output in outputs(stored))
    assert (EXAMPLES / f"{name}.ipynb").stat().st_size < 300_000


def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own, which puts figures into the notebook
    name, stored = notebook
    fresh = copy.deepcopy(stored)
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output.get("text", "") for output in outputs(fresh))
    for pattern in NOTEBOOKS[name]:
        assert re.search(pattern, text), f"{pattern} is not in\n{text}"
    assert any("image/png" in output.get("data", {}) for output in outputs(fresh))
