"""What the commands share: how they speak, and how they fail.

Results go to the standard output, everything else to the standard error. Exit codes: 0 fine, 1 a run that failed,
2 bad input, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import typer
from typer.core import TyperGroup

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
# Of [examples].
EXTRA = ("lightning", "matplotlib", "nflows", "normflows", "rich", "safetensors", "sklearn", "torchvision")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Commands(TyperGroup):
    """The commands, with one line in the place of a traceback for everything that a user can put right."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        with warnings.catch_warnings():
            _quiet_libraries()
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as stop:
                note(f"stopped. {stop}".rstrip(), "bold yellow")
                raise typer.Exit(INTERRUPTED) from None
            except Exception as error:
                code = exit_code(error)
                if code is None or ctx.params.get("traceback"):
                    raise
                note(
                    "\n".join([f"error: {_words(error, ctx.invoked_subcommand)}", *getattr(error, "__notes__", ())]),
                    "bold red",
                )
                raise typer.Exit(code) from None


def exit_code(error: Exception) -> int | None:
    """The exit code of an error that can be told in a line; None for one that is a fault of ours.

    Example:
        >>> exit_code(ZeroDivisionError()) is None
        True
    """
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):  # a full disk names no file
        return FAILED
    errors = sys.modules.get("ebflow_plugin.errors")
    if errors is not None and isinstance(error, errors.EBFlowError):
        return FAILED if isinstance(error, (errors.TrainingError, errors.SingularError)) else REFUSED
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRA:
        return FAILED
    return None


def _words(error: Exception, command: str | None = None) -> str:
    """What an error of a command says, and what to do about those that Python words for programmers."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRA:
        return f"this command needs {error.name}: pip install 'ebflow-plugin[examples]', or '.[examples]' in a checkout"
    if isinstance(error, OSError) and error.errno in FULL:
        where = f" ({error.filename})" if error.filename else ""
        again = {"train": ", and `--resume` goes on with it", "reproduce": ", and the same command goes on with it"}
        return f"{error.strerror}{where}. Make room; what was written before is whole{again.get(command or '', '')}."
    return str(error)


def first_process() -> bool:
    """Whether this process writes and speaks, among those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str = "") -> None:
    """Prints a result."""
    typer.echo(text)


def note(text: str, style: str = "") -> None:
    """Prints a word to the person in front of the screen; the first word carries the style."""
    from rich.console import Console
    from rich.text import Text

    first, colon, rest = text.partition(" ")
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text.assemble((first, style), colon, rest))


def say_json(value: Any) -> None:
    """Prints a result for programs."""
    typer.echo(to_json(value))


def to_json(value: Any) -> str:
    """Strict JSON, of dataclasses too: null for what it has no number for.

    Example:
        >>> to_json([1.5, float("inf")]).split()
        ['[', '1.5,', 'null', ']']
    """
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def as_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    r"""Records as JSON, a line each: what is no number there is a word.

    Example:
        >>> as_lines([{"step": 1}, {"step": 2, "loss": float("nan")}])
        b'{"step": 1}\n{"step": 2, "loss": "nan"}\n'
    """
    return "".join(f"{json.dumps(_finite(record, str), allow_nan=False)}\n" for record in records).encode()


def _finite(value: Any, instead: Callable[[float], str | None] = lambda number: None) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: _finite(part, instead) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part, instead) for part in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, remarks: bool = False) -> str:
    """Lines up cells: the first ``left`` columns, and the last if it holds remarks, to the left, numbers to the right.

    Example:
        >>> print(table(("loss", "NLL"), [("ssm", "1.5"), ("ml", "-10.25")]))
        loss     NLL
        ────  ──────
        ssm      1.5
        ml    -10.25
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for line in (head, ["─" * width for width in widths], *rows):
        cells = [
            cell.ljust(width) if place < left or (remarks and place == len(head) - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same cells for a Markdown file."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


@dataclass(frozen=True)
class Grid:
    """A table of text. The first ``left`` columns are names."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    def markdown(self) -> str:
        """For a Markdown file."""
        return f"**{self.title}**\n\n{markdown(self.head, self.rows)}"

    def screen(self) -> str:
        """For a terminal."""
        return f"{self.title}\n{table(self.head, self.rows, left=self.left)}"


def _quiet_libraries() -> None:
    """Shows our warnings as plain lines, and leaves out those of libraries about their own inner life."""
    for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    warnings.filterwarnings("ignore", message=".*(triangular_solve|torch.lu is deprecated).*")

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        note(f"warning: {message}", "bold yellow")

    warnings.showwarning = show
