"""The code that README and the pages show runs, in order, and prints what they say."""

import copy
import functools

import pytest
import torch
from matplotlib import pyplot as plt

import ebflow_plugin.lightning
from documents import DOCUMENTS, ROOT, Block, blocks_of
from ebflow_plugin.objectives import registration

README = ROOT / "README.md"
PAGES = [README, *(file for file in DOCUMENTS if file.parent == ROOT / "docs")]
WITHOUT_CODE = {"gallery.md", "paper.md"}
NOT_RUN = 1  # blocks of a page that need what no test has
TRAINER = ebflow_plugin.lightning.trainer


@functools.wraps(TRAINER)
def short_trainer(folder, *, steps, **options):
    """A run of README's is long, and shows its progress."""
    return TRAINER(folder, steps=min(steps, 3), **options | {"accelerator": "cpu", "enable_progress_bar": False})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    assert bool(blocks) == (page.name not in WITHOUT_CODE)
    assert sum(block.kind == "skip" for block in blocks) <= NOT_RUN
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registration, "OBJECTIVES", copy.deepcopy(registration.OBJECTIVES))  # pages register their own
    plt.switch_backend("Agg")
    scope: dict = {"__name__": page.stem}
    if page == README:  # whose reader has data
        scope |= {"train": torch.randn(256, 784), "test": torch.randn(64, 784)}
        monkeypatch.setattr(ebflow_plugin.lightning, "trainer", short_trainer)
    for block in blocks:
        if block.kind == "run":
            capsys.readouterr()
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), scope)  # our own page
        elif block.kind == "output":
            assert capsys.readouterr().out.strip() == block.code.strip(), f"{page}:{block.line}"
    plt.close("all")


def test_the_blocks_of_a_page():
    text = """
```python
a = 1
```
```bash
no
```
<!-- not run: it needs a GPU -->
```python
b
```
<!-- setup
c
-->
<!-- output -->
```text
d
```
```text
no
```
"""
    assert blocks_of(text) == [
        Block("run", "a = 1\n", 3),
        Block("skip", "b\n", 10),
        Block("run", "c\n", 13),
        Block("output", "d\n", 17),
    ]
    with pytest.raises(AssertionError, match="say why"):
        blocks_of("<!-- not run -->\n```python\nb\n```\n")
