"""Measured figures stand where the benchmark writes them, between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`, and
nowhere else: what is typed by hand is not measured again when the code changes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = re.compile(r"<!-- bench:(\w+) -->.*?<!-- /bench:\1 -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```|^ {4,}\S[^\n]*|`[^`\n]*`", re.DOTALL | re.MULTILINE)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
# Times, rates, shares, and how many times as fast: "84x84" is a size.
UNIT = r"(?:[num]?s|µs|seconds|minutes|(?:[kMGT]i?B|\w+)/s|%|percent|x|times|-fold)"
FIGURE = re.compile(rf"(?<![\w.-]){NUMBER}(?:\s*(?:to|and|-)\s*{NUMBER})?[\s-]?{UNIT}(?![\w/])")
# Not measured: what is set, allowed or defined, word for word and on its page alone.
CONSTANTS = {
    "docs/compatibility.md": ("allow 10 to 100 ms", "(10 s by default)"),
    "docs/decisions/0013-trajectories.md": ("at most 2 % of the saving thread's time",),
    "docs/format.md": ("block_rows + 2 x width places", "more than 16 times the bytes of their file"),
    "docs/promises.md": ("within 100 ms of work at 1M rows", "leaves after 2 seconds"),
    "docs/rooms/engine-storage.md": ("look for signals every 0.1 s",),
}


def without_what_is_written(text: str) -> str:
    """The text that people typed, without code."""
    return CODE.sub("", WRITTEN.sub("", text))


def typed_figures(text: str, constants: tuple[str, ...] = ()) -> list[str]:
    """The figures outside of the marked places, each with the words around it."""
    typed = " ".join(without_what_is_written(text).split())
    for constant in constants:
        assert constant in typed, f"no such words any more: {constant!r}"
        typed = typed.replace(constant, "")
    return [typed[max(0, found.start() - 40) : found.end() + 20] for found in FIGURE.finditer(typed)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_measured_figure_is_typed_by_hand(page):
    found = typed_figures(page.read_text(), CONSTANTS.get(page.relative_to(ROOT).as_posix(), ()))
    assert not found, f"{page.name}: say it in words, or let benchmarks/report.py write it between markers: {found}"


@pytest.mark.parametrize(
    "words",
    [
        "takes 1.5 µs",
        "4 to 20 us",
        "1.4 times the time",
        "is 2.3x as fast",
        "9 % more",
        "0.3 s then",
        "55.0 GB/s",
        "1,150 us",
    ],
)
def test_the_check_knows_a_figure(words):
    assert typed_figures(f"An `add` {words}, see below.")


@pytest.mark.parametrize(
    "text",
    [
        "frames of 84x84, 512 KiB, 64 rows, 1M rows, twice as fast, about half",
        "<!-- bench:x -->1.5x<!-- /bench:x -->",
        "```\nwait 5 s\n```",
        "`timeout=5 s`",
        "step 3 samples",
    ],
)
def test_the_check_leaves_alone_what_is_no_figure(text):
    assert not typed_figures(text)
