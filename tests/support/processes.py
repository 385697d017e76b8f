"""Scripts of tests/support/scripts, loaded as modules or run in two processes."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

SCRIPTS = Path(__file__).parent / "scripts"


def load_script(name):
    """The module of a script, which may import its neighbours."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def run_together(name, folder):
    """What each of two processes under torchrun found: the script writes it into the folder."""
    paths = os.pathsep.join([str(SCRIPTS), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    log = folder / "log"
    with log.open("w") as file:
        running = subprocess.Popen(
            [*command, SCRIPTS / f"{name}.py", folder],
            env=environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code = running.wait(timeout=240)
        except subprocess.TimeoutExpired:  # torchrun and its workers, which are a session of their own
            os.killpg(running.pid, signal.SIGKILL)
            raise
    assert code == 0, log.read_text()[-3000:]
    return [torch.load(folder / f"found-{rank}.pt") for rank in range(2)]
