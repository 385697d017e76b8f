"""A pretend accelerator, device ``pretend`` (torch's PrivateUse1, two of them): what CUDA refuses, without a GPU.

Its memory is the CPU's, and every operator computes the CPU's numbers, but the device is another. It refuses what CUDA
refuses: tensors of two devices (CPU numbers excepted), a CPU generator for its tensors, ``.numpy()`` without
``.cpu()``. :func:`watch` records what would make the host wait for CUDA, with the line of ours that asked.

The C++ beside this file is compiled once for each version of it and of torch, by g++ alone, in the temporary folder.
It is loaded before the first backward of a process, since autograd counts the devices then: see conftest.py.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import NamedTuple

import torch
from torch.utils import cpp_extension

__all__ = ["DEVICE", "Wait", "load", "missing", "watch"]

DEVICE = torch.device("cpu")  # replaced by load(): torch does not know the name before
NAME = "pretend"
OLDEST = (2, 13)  # of torch, whose C++ interface for devices changes
SOURCE = Path(__file__).with_suffix(".cpp")
ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT / part}{os.sep}" for part in ("ebflow_plugin", "adapters", "examples"))


class Wait(NamedTuple):
    """What the host waited for: its kind, the operator, and the line of ours that asked for it."""

    kind: str
    what: str
    line: str


def missing() -> str | None:
    """Why there is no accelerator here; None if there can be one."""
    if sys.platform != "linux":
        return "the pretend accelerator is compiled for Linux"
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        return f"the pretend accelerator is written for torch {OLDEST[0]}.{OLDEST[1]} and newer"
    return None if which(compiler()) else f"the pretend accelerator needs a C++ compiler, and there is no {compiler()}"


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def build() -> Path:
    """The compiled library. Two processes at once compile it twice, and the last one wins: both are whole."""
    key = f"{SOURCE.read_text()}{torch.__version__}{sys.version}{compiler()}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ebflow-accelerator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"pretend_{digest}.so"
    with locked(folder / "lock"):
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}.tmp")
            includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
            libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
            options = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", abi, "-DTORCH_EXTENSION_NAME=pretend_library"]
            linked = [*libraries, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
            command = [compiler(), *options, *includes, str(SOURCE), "-o", str(made), *linked]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the pretend accelerator does not compile\n{done.stderr[-3000:]}")
            made.rename(library)
    return library


@contextmanager
def locked(path):
    """One process at a time: the others of a test session wait for the compiler."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def load() -> None:
    """Registers the device. Call it before the first backward of a process; again, it does nothing."""
    global DEVICE
    if DEVICE.type == NAME:
        return
    library = build()
    torch.utils.rename_privateuse1_backend(NAME)
    spec = importlib.util.spec_from_file_location("pretend_library", library)
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    torch._register_device_module(NAME, device_module(extension))
    extension.start(record)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    DEVICE = torch.device(NAME, 0)


def device_module(extension):
    """What ``torch.cuda`` is to CUDA."""

    def index(device=None):
        if isinstance(device, int):
            return device
        number = None if device is None else torch.device(device).index
        return extension.current() if number is None else number

    @contextmanager
    def on(device):
        before = extension.current()
        extension.set_current(index(device))
        try:
            yield
        finally:
            extension.set_current(before)

    module = types.ModuleType(f"torch.{NAME}")
    module.device = on
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = extension.current
    module.set_device = lambda device: extension.set_current(index(device))
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.synchronize = lambda device=None: record("synchronize", "the device")
    module.manual_seed = lambda seed: extension.default_generator(index()).manual_seed(seed)
    module.manual_seed_all = lambda seed: [extension.default_generator(place).manual_seed(seed) for place in range(2)]
    module.get_rng_state = lambda device=None: extension.default_generator(index(device)).get_state()
    module.set_rng_state = lambda state, device=None: extension.default_generator(index(device)).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


_watching: list[list[Wait]] = []


def record(kind: str, what: str) -> None:
    if _watching:
        _watching[-1].append(Wait(kind, what, line_of_ours()))


def line_of_ours() -> str:
    """The innermost line of our packages in the stack; else the innermost one that is not torch's."""
    other, frame = "", sys._getframe(1)
    while frame is not None:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if name.startswith(OURS):
            return f"{name.removeprefix(f'{ROOT}{os.sep}')}:{line}"
        if not other and name != __file__ and f"{os.sep}torch{os.sep}" not in name:
            other = f"{name}:{line}"
        frame = frame.f_back
    return other or "autograd"


@contextmanager
def watch():
    """Yields a list, in which each wait of the host inside the block is put down."""
    waits: list[Wait] = []
    _watching.append(waits)
    try:
        yield waits
    finally:
        _watching.remove(waits)
