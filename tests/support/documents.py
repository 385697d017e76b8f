"""The Markdown of this repository: the code that it shows, and the links that it has."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    file
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for file in ROOT.glob(pattern)
    if "runs" not in file.parts
)
FENCE = re.compile(r"^( *)```(\w*).*?^\1```$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>[^\n]*?) -->\n)?^```(?P<language>python|text)\n(?P<code>.*?)^```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\(([^)\s]+)(?:\s[^)]*)?\)")


class Block(NamedTuple):
    """A block of a document.

    Attributes:
        kind: "run", "skip" (shown, not run) or "output" (of the block before it).
        code: Its text.
        line: The number of its first line.
    """

    kind: str
    code: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """The blocks that a reader would run, in order.

    A comment in the line before a block changes what happens: ``<!-- not run: reason -->``, and ``<!-- output -->`` for
    a text that the block before it must print. ``<!-- setup`` … ``-->`` has code that is run and not shown.
    """
    blocks = []
    for match in BLOCK.finditer(text):
        comment, code = match["comment"] or "", match["code"] if match["setup"] is None else match["setup"]
        kind = "run"
        if match["language"] == "text":
            kind = "output" if comment == "output" else ""
        elif comment.startswith("not run"):
            assert re.fullmatch(r"not run: \w.*", comment), f"say why: <!-- {comment} -->"
            kind = "skip"
        start = match.start("code") if match["setup"] is None else match.start("setup")
        if kind:
            blocks.append(Block(kind, code, text.count("\n", 0, start) + 1))
    return blocks


def links_of(text: str) -> list[str]:
    """The targets of all links and pictures, but those in code."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text)))


def anchors_of(text: str) -> set[str]:
    """The anchors of all headings, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ +(.+)$", FENCE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip())
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        count = next(n for n in range(100) if (f"{slug}-{n}" if n else slug) not in anchors)
        anchors.add(f"{slug}-{count}" if count else slug)
    return anchors
