"""Every link of the documents leads somewhere: relative ones are followed, those to other sites are only read.

And every list is one, on the site too: Python's Markdown wants a blank line before it.
"""

import re
from urllib.parse import unquote, urlparse

import pytest

from documents import DOCUMENTS, ROOT, anchors_of, links_of


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_links(file):
    for link in links_of(file.read_text(encoding="utf-8")):
        parts = urlparse(link)
        if parts.scheme:
            assert parts.scheme in ("https", "http", "mailto"), link
            assert "." in parts.netloc, link
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if parts.fragment:
            assert parts.fragment in anchors_of(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_lists(file):
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    item = r" *(?:[-*]|\d+\.) "
    assert re.findall(rf"^(?!{item}|  ).*\S.*\n{item}.*", text, flags=re.MULTILINE) == []


def test_what_is_a_link_and_what_is_an_anchor():
    text = "[a](b.md#c-d)\n![p](q.png)\n`[no](no)`\n```python\n[x](y)\n```\n"
    assert links_of(text) == ["b.md#c-d", "q.png"]
    headings = "# Table 1: `a`, b\n```bash\n# no\n```\n## 3 × 3\n### 3 × 3\n## [Text](to.md) and_more"
    assert anchors_of(headings) == {"table-1-a-b", "3--3", "3--3-1", "text-and_more"}
