"""The committed text of the interfaces is that of the built package, and a change of either is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from interfaces import API, STUB, api_lines, built_stub, difference, signature_text

import sharpwave as sw
from sharpwave import _core


@pytest.fixture
def _optional_packages() -> None:
    """The public modules of adapters and compat import these."""
    for name in ("torch", "stable_baselines3", "zmq", "jax", "safetensors", "transformers"):
        pytest.importorskip(name)


@pytest.mark.usefixtures("_optional_packages")
def test_public_names_and_signatures_are_those_of_the_committed_file(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = api_lines(sw)
    changed = difference(API, "\n".join(lines) + "\n")
    assert not changed, f"the public interface changed; if this is meant: make api\n{changed}"

    def sample(self: Any, batch_size: int, *, replace: bool = True) -> dict[str, Any]:
        raise NotImplementedError

    monkeypatch.setattr(sw.ReplayBuffer, "sample", sample)
    monkeypatch.delattr(sw.SequenceBuffer, "stats")
    monkeypatch.setattr(sw.errors, "__all__", [*sw.errors.__all__, "annotations"])
    changed = difference(API, "\n".join(api_lines(sw)) + "\n")
    begins = [line.partition("(")[0] for line in changed.splitlines() if line.startswith(("+s", "-s"))]
    assert begins == [
        "-sharpwave.ReplayBuffer.sample",
        "+sharpwave.ReplayBuffer.sample",
        "-sharpwave.SequenceBuffer.stats",
        "+sharpwave.errors.annotations = _Feature",
    ]
    assert "+sharpwave.ReplayBuffer.sample(batch_size: int, *, replace: bool = True) -> dict[str, Any]" in changed


def test_stub_of_the_engine_is_the_committed_one() -> None:
    changed = difference(STUB, built_stub())
    assert not changed, f"the engine's interface to Python changed; if this is meant: make api\n{changed}"


def test_stub_names_what_the_compiled_module_has() -> None:
    """The stub lies beside the module, and may be of an older build."""
    names = {name for name in dir(_core) if not name.startswith("_")}
    stub = built_stub()
    declared = set(re.findall(r"^(?:class|def) (\w+)", stub, re.MULTILINE))
    assert names - declared == {"shared_memory_folder"}


def test_difference_names_the_lines(tmp_path: Path) -> None:
    committed = tmp_path / "api.txt"
    assert "+one()" in difference(committed, "one()\n")
    committed.write_text("one()\ntwo()\n")
    assert difference(committed, "one()\ntwo()\n") == ""
    changed = difference(committed, "one()\ntwo(x: int)\n").splitlines()
    assert changed[-2:] == ["-two()", "+two(x: int)"]


def test_signatures_are_the_same_text_in_every_run() -> None:
    def every_kind(a: int, /, b: int = 1, *c: int, d: object = object(), e=print, **f: Any) -> None: ...  # type: ignore

    def by_name(self: Any, *, a: float = float("inf")) -> None: ...

    text = "(a: int, /, b: int = 1, *c: int, d: object = ..., e=print, **f: Any) -> None"
    assert signature_text(every_kind, bound=False) == text
    assert signature_text(by_name, bound=True) == "(*, a: float = inf) -> None"


@pytest.mark.parametrize(
    "settings",
    [
        *(sw.Field, sw.Fifo, sw.Hindsight, sw.Lifo, sw.Linear, sw.Pace, sw.Prioritized, sw.Recent, sw.Shuffle),
        *(sw.Transitions, sw.Uniform, sw.Windows),
    ],
)
def test_settings_have_no_methods_but_presets(settings: type) -> None:
    methods = {name for name in dir(settings) if not name.startswith("_") and callable(getattr(settings, name))}
    assert methods == ({"min_size", "queue", "samples_per_insert"} if settings is sw.Pace else set())


@pytest.mark.usefixtures("_optional_packages")
def test_attributes_of_a_writer_are_listed() -> None:
    writer = sw.ReplayBuffer(4, obs_shape=(1,)).writer()
    public = {name for name in vars(writer) if not name.startswith("_")}
    assert "add" in public
    listed = {line.partition(".")[2].partition(":")[0] for line in api_lines(sw) if line.startswith("returned Writer.")}
    assert public <= listed
