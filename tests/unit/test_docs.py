"""Every Python block of README and docs runs, page by page and in order; a block that ends in `# SomeError: words` must
raise exactly that."""

import re
from pathlib import Path

import pytest

from sharpwave import errors

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SOURCES = ("core", "bindings", "src", "tests", "benchmarks", "docs", "examples")
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
NEEDED = re.compile(r"^(?:import|from) (?:sharpwave\.adapters import )?(jax|minari|stable_baselines3)\b", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.(?:py|pyi|h|cpp|inc|txt|pat|md))`")
EXPECTED = re.compile(r"^# (\w+(?:Error|Ready|Handle|Full)): (.*)$")


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_every_snippet_runs(page, tmp_path, monkeypatch):
    for name in NEEDED.findall(page.read_text()):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
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


ABOUT_THE_CODE = [
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "promises.md",
    *(ROOT / "docs" / "rooms").glob("*.md"),
]


@pytest.mark.parametrize("page", ABOUT_THE_CODE, ids=lambda p: p.name)
def test_every_file_named_on_a_page_about_the_code_exists(page):
    for name in NAMED.findall(page.read_text()):
        found = [path for folder in SOURCES for path in (ROOT / folder).rglob(Path(name).name)]
        ends = [path for path in [ROOT / name, *found] if path.exists() and path.as_posix().endswith(f"/{name}")]
        assert ends, f"{page.name} names {name}"


def test_every_room_is_in_the_title_of_one_page():
    titles = [page.read_text().splitlines()[0] for page in (ROOT / "docs" / "rooms").glob("*.md")]
    folders = [path for root in ("core", "src/sharpwave") for path in (ROOT / root).iterdir() if path.is_dir()]
    for room in [path.relative_to(ROOT) for path in folders if path.name != "__pycache__"]:
        named = [title for title in titles if f"`{room.as_posix()}`" in title or f"`{room.name}`" in title]
        assert len(named) == 1, f"{room}: {named}"
