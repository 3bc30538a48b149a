"""Every Python block of README and docs runs, page by page and in order; a block that ends in `# SomeError: words` must
raise exactly that."""

import re
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
EXPECTED = re.compile(r"^# (\w+(?:Error|Ready|Handle|Full)): (.*)$")


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_every_snippet_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__snippet__"}
    for block in BLOCK.findall(page.read_text()):
        expected = EXPECTED.match(block.rstrip().splitlines()[-1])
        try:
            exec(compile(block, str(page), "exec"), names)
        except Exception as error:
            if not expected:
                pytest.fail(f"{page.name}: this block fails:\n{block}\n{traceback.format_exc()}")
            assert (type(error).__name__, str(error)) == expected.groups()
        else:
            assert not expected, f"{page.name}: this block should raise {expected[1]}:\n{block}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
