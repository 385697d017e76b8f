"""The matrix of the continuous integration, to run locally: ``nox --list``, then ``nox -s alone``."""

from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "tests", "alone", "build"]

PYTHONS = ["3.11", "3.12", "3.13"]
LOWEST = ["torch==2.6.0", "torchvision==0.21.0"]  # the lowest versions that pyproject.toml allows


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The README's test command, with the newest torch."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The tests of the packages, with the lowest torch."""
    session.install("-e", ".[dev]", *LOWEST)
    session.run("python", "-m", "pytest", *(session.posargs or ["tests/ebflow_plugin", "tests/ebflow_nflows"]))


@nox.session(python="3.11")
@nox.parametrize("library", ["nflows", "normflows", "zuko", "none"])
def alone(session: nox.Session, library: str) -> None:
    """The built wheel with one flow library alone, or none: what works, and what says that it is missing."""
    session.install("build")
    folder = session.create_tmp()
    session.run("python", "-m", "build", "--wheel", "--outdir", folder, silent=True)
    wheel = max(Path(folder).glob("*.whl"), key=lambda path: path.stat().st_mtime)
    session.install(str(wheel) if library == "none" else f"{wheel}[{library}]", *session.posargs)
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
