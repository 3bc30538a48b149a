"""What the entries of a contest are called, and who counts as what."""

from __future__ import annotations

NAMES = {
    "sharpwave": "Sharpwave",
    "sharpwave/keyword": "Sharpwave, by keyword",
    "sharpwave/out": "Sharpwave, out=",
    "sharpwave/torch": 'Sharpwave, device="cpu"',
    "engine": "Sharpwave's engine from C++",
    "numpy_ring": "NumPy ring",
    "numpy_ring/take": "NumPy ring with take",
    "c_limit": "bare C copies, one thread",
    "empty_loop": "the timing loop itself",
    "sb3": "Stable-Baselines3",
    "reverb": "Reverb",
}
KINDS = {"w1": "small rows", "atari": "image rows"}
# They store nothing that one could get back; a rival is someone whom a user could choose instead.
YARDSTICKS = ("engine", "c_limit", "empty_loop")


def name(label: str) -> str:
    return NAMES.get(label, label)


def contender_of(label: str) -> str:
    """`numpy_ring` of `numpy_ring/take`."""
    return label.partition("/")[0]


def is_rival(contender: str) -> bool:
    return contender != "sharpwave" and contender not in YARDSTICKS


def is_library(contender: str) -> bool:
    return is_rival(contender) and contender != "numpy_ring"


def case_name(case: str) -> str:
    """`sample(256)` of `sample_256`."""
    verb, count = case.split("_")
    return f"sample({count})" if verb == "sample" else "add 1 row" if count == "1" else f"add {count} rows"
