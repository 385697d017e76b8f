"""The matrix of the continuous integration, to run locally: ``nox --list``, then ``nox -s alone``."""

from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "tests", "alone", "build"]

PYTHONS = ["3.11", "3.12", "3.13"]
LOWEST = ["torch==2.6.0", "torchvision==0.21.0"]  # the lowest versions that pyproject.toml allows
LIBRARIES = ["nflows", "normflows", "zuko", "none"]


@nox.session(python=PYTHONS)
@nox.parametrize("torch", ["newest", "lowest"])
def tests(session: nox.Session, torch: str) -> None:
    """The README's test command; with the lowest torch those of the packages, without the command and the pages."""
    session.install("-e", ".[dev]", *(LOWEST if torch == "lowest" else []))
    parts = ["tests/ebflow_plugin", "tests/ebflow_nflows"] if torch == "lowest" else []
    session.run("python", "-m", "pytest", *(session.posargs or parts))


@nox.session(python=PYTHONS)
@nox.parametrize("torch", ["newest", "lowest"])
@nox.parametrize("library", LIBRARIES)
def alone(session: nox.Session, torch: str, library: str) -> None:
    """The built wheel with one flow library alone, or none: what works, and what says that it is missing."""
    session.install("build")
    folder = session.create_tmp()
    session.run("python", "-m", "build", "--wheel", "--outdir", folder, silent=True)
    wheel = max(Path(folder).glob("*.whl"), key=lambda path: path.stat().st_mtime)
    wanted = str(wheel) if library == "none" else f"{wheel}[{library}]"
    session.install(wanted, *(LOWEST[:1] if torch == "lowest" else session.posargs))
    session.run("python", "tests/support/scripts/smoke.py", library)


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Ruff and mypy."""
    session.install("-e", ".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """The pages, without a warning."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "mkdocs", "build", "--strict")


@nox.session(python="3.11")
def build(session: nox.Session) -> None:
    """The source distribution and the wheel, checked by twine."""
    session.install("build", "twine")
    folder = session.create_tmp()
    session.run("python", "-m", "build", "--outdir", folder)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, Path(folder).iterdir()))
