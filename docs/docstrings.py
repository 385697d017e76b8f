"""Docstrings have Sphinx's roles and formulas, as zuko's have; here they become Markdown, before griffe parses them."""

import re
from textwrap import dedent
from typing import Any

import griffe

ROLE = re.compile(r":(class|func|meth|mod|data|attr):`(?:[^`<]*<)?(~?)([\w.]+)>?`")
BLOCK = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*| *$))*)", re.MULTILINE)


TABLE = re.compile(r"^(=+ [= ]+)\n(.*\n)\1\n((?:.*\n)*?)\1$", re.MULTILINE)


def table(match: re.Match[str]) -> str:
    """A table, with the columns that its rules show."""
    columns = [slice(*column.span()) for column in re.finditer("=+", match[1])]
    columns[-1] = slice(columns[-1].start, None)
    head, *lines = [[line[column].strip() for column in columns] for line in (match[2] + match[3]).splitlines()]
    rows: list[list[str]] = []
    for line in lines:
        if line[0]:
            rows.append(line)
        else:  # goes on from the line before
            rows[-1] = [f"{before} {more}".strip() for before, more in zip(rows[-1], line, strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(columns), *rows))


def formula(match: re.Match[str]) -> str:
    """A block of formulas; several lines are aligned at their &."""
    indent, tex = match.groups()
    tex = " ".join(line.strip() for line in dedent(tex).strip().splitlines())
    if "&" in tex:
        tex = rf"\begin{{aligned}} {tex} \end{{aligned}}"
    return f"\n{indent}$$\n{indent}{tex}\n{indent}$$\n"


def reference(match: re.Match[str]) -> str:
    """A link to what a role names, if a page has it."""
    short, name = match[2], match[3]
    words = f"<code>{name.rsplit('.', 1)[-1] if short else name}</code>"
    return f'<autoref identifier="{name}" optional>{words}</autoref>' if name.startswith("ebflow_") else words


def markdown(text: str) -> str:
    """The text of a docstring as Markdown."""
    text = BLOCK.sub(formula, TABLE.sub(table, text))
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = ROLE.sub(reference, text)
    return re.sub(r"^( *)Example:$", r"\1Examples:", text.replace("``", "`"), flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites each docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of a module, a class, a function or an attribute."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)
