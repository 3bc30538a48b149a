"""Every Python block of README and docs runs, page by page and in order; a block that ends in `# SomeError: words` must
raise exactly that."""

import re
from pathlib import Path

import pytest

from sharpwave import errors

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
NEEDED = re.compile(r"^(?:import|from) (jax|stable_baselines3)\b", re.MULTILINE)
EXPECTED = re.compile(r"^# (\w+(?:Error|Ready|Handle|Full)): (.*)$")


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_every_snippet_runs(page, tmp_path, monkeypatch):
    for name in NEEDED.findall(page.read_text()):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__snippet__"}
    for block in BLOCK.findall(page.read_text()):
        expected = EXPECTED.match(block.rstrip().splitlines()[-1])
        code = compile(block, str(page), "exec")
        if not expected:
            exec(code, names)
            continue
        with pytest.raises(getattr(errors, expected[1])) as raised:
            exec(code, names)
        assert str(raised.value) == expected[2]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
