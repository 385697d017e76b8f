"""What the site adds to the pages of this folder: pages of the repository, notebooks, scripts, and formulas as SVG."""

import html
import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from ziamath import Latex

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md"} | {name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
FILES = ("LICENSE", "CITATION.cff", "noxfile.py", "pyproject.toml", "mkdocs.yml")
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r'<img [^>]*src="([^"]+\.png)"[^>]*>')
SIZE = 20.0  # of the letters in a formula's own units
SIZES = (r' width="([\d.]+)"', r' height="([\d.]+)"', r' viewBox="\S+ (\S+) ')


def place(path: str) -> str:
    """Where a file of the repository is in the site, by its path; a folder is its home page."""
    if (ROOT / path).is_dir():
        return "index.md"
    path = PAGES.get(path, path.removeprefix("docs/"))
    return re.sub(r"^(examples/\w+)\.(py|ipynb)$", r"\1.md", path)


def notebook(file: Path) -> str:
    """A notebook as Markdown, with its outputs."""
    parts = []
    for cell in nbformat.read(file, as_version=4).cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                parts.append(f"```text\n{output.text.rstrip()}\n```")
            elif image := output.get("data", {}).get("image/png"):
                parts.append(f"![picture](data:image/png;base64,{image.strip()})")
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what lies outside of this folder."""
    examples = (file.relative_to(ROOT) for file in sorted(ROOT.glob("examples/**/*.*")))
    for source in (*PAGES, *FILES, *(file.as_posix() for file in examples if "runs" not in file.parts)):
        file = ROOT / source
        if file.suffix == ".png" or source in FILES:
            files.append(File.generated(config, source, abs_src_path=str(file)))
        elif file.suffix == ".md":
            files.append(File.generated(config, place(source), content=file.read_text(encoding="utf-8")))
        elif file.suffix == ".ipynb":
            files.append(File.generated(config, place(source), content=notebook(file)))
        elif file.suffix == ".py" and file.parent.name == "examples":
            text = f"# {file.name}\n\n```python\n{file.read_text(encoding='utf-8')}```\n"
            files.append(File.generated(config, place(source), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between files of the repository, as they work on GitHub, into links between pages."""
    here = page.file.src_uri
    source = {site: path for path, site in PAGES.items()}.get(here, here if "examples/" in here else f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        path, anchor = match.groups(default="")
        target = place(normpath(f"{dirname(source) or '.'}/{path}"))
        return f"]({relpath(target, dirname(here) or '.')}{anchor})"

    parts = FENCE.split(markdown)  # code is left as it is
    parts[::2] = (LINK.sub(moved, part) for part in parts[::2])
    return "".join(parts)


def formula(match: re.Match[str]) -> str:
    """One formula, with its baseline on that of the text."""
    tag, tex = match[1], html.unescape(match[2]).strip()
    svg = Latex(tex.replace(r"\det ", r"\det\, "), size=SIZE, inline=tag == "span", color="currentColor").svg()
    width, height, top = (float(re.search(pattern, svg)[1]) for pattern in SIZES)  # type: ignore[index]
    style = f"width:{width / SIZE:.3f}em; height:{height / SIZE:.3f}em; vertical-align:{-(height + top) / SIZE:.3f}em"
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(tex)}" style="{style}" ', 1)
    return f'<{tag} class="formula">{svg}</{tag}>'


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Sets the formulas, for which no script and no font is loaded; a picture leads to itself in its own size."""
    return PICTURE.sub(r'<a href="\1">\g<0></a>', FORMULA.sub(formula, content))
