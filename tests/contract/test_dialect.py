"""One dialect (docs/decisions/0017): the same verbs on every face in every storage, from one list."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.faces import CELLS, ON_GPU, SIZE, Cell
from contract.served import close_servers

import sharpwave as sw
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StorageError

torch = pytest.importorskip("torch")

FACES = [sw.ReplayBuffer, sw.DistillationBuffer, sw.RolloutBuffer, sw.TrajectoryReplayBuffer, sw.SequenceBuffer]
EVERYWHERE = [
    "stats",
    "clear",
    "flush",
    "close",
    "save",
    "flush_async",
    "save_async",
    "__len__",
    "__enter__",
    "__exit__",
]
IN_AND_OUT = {
    sw.ReplayBuffer: ("add", "sample"),
    sw.DistillationBuffer: ("add", "sample"),
    sw.RolloutBuffer: ("add", "minibatches"),
    sw.TrajectoryReplayBuffer: ("add", "sample"),
    sw.SequenceBuffer: ("put", "get"),
}
SIZES = {
    sw.ReplayBuffer: ["capacity"],
    sw.DistillationBuffer: ["capacity"],
    sw.RolloutBuffer: ["num_envs", "num_steps"],
    sw.TrajectoryReplayBuffer: ["folder"],
    sw.SequenceBuffer: ["capacity"],
}
NAMES = [face.__name__ for face in FACES]


@pytest.fixture(params=[*CELLS, *(pytest.param(cell, marks=pytest.mark.gpu) for cell in ON_GPU)], ids=str)
def cell(request: pytest.FixtureRequest) -> Cell:
    made: Cell = request.param
    if made.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return made


@pytest.fixture
def buffer(cell: Cell, tmp_path: Path, shm_address: str) -> Iterator[Any]:
    made = cell.make(tmp_path, shm_address)
    yield made
    made.close()
    close_servers()


def methods(face: type[Any]) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(face, callable) if not name.startswith("_")}


def is_iterator(method: Any) -> bool:
    return "Iterator" in str(inspect.signature(method).return_annotation)


# ---- words: what the signatures say ----------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES, ids=NAMES)
def test_every_face_has_the_same_verbs(face: type[Any]) -> None:
    missing = [name for name in [*EVERYWHERE, *IN_AND_OUT[face]] if not callable(getattr(face, name, None))]
    assert missing == []


@pytest.mark.parametrize("face", FACES, ids=NAMES)
def test_sizes_come_first_and_the_rest_by_keyword(face: type[Any]) -> None:
    arguments = list(inspect.signature(face).parameters.values())
    assert [one.name for one in arguments if one.kind is one.POSITIONAL_OR_KEYWORD] == SIZES[face]
    assert all(one.kind is one.KEYWORD_ONLY for one in arguments[len(SIZES[face]) :])


@pytest.mark.parametrize("face", FACES, ids=NAMES)
def test_what_may_wait_waits_by_default_and_can_be_awaited(face: type[Any]) -> None:
    every = methods(face)
    waiting = {name: method for name, method in every.items() if "timeout" in inspect.signature(method).parameters}
    for name, method in waiting.items():
        assert inspect.signature(method).parameters["timeout"].default is None, name
    for name in [*waiting, "save", "flush"]:
        if name.endswith("_async") or is_iterator(every[name]):
            continue
        awaited = every.get(f"{name}_async")
        assert awaited is not None, name
        assert inspect.iscoroutinefunction(awaited)
        taken = set(inspect.signature(awaited).parameters)
        assert set(inspect.signature(every[name]).parameters) - taken == set(), name


def full(make: Any) -> Any:
    buffer = make()
    for number in range(SIZE):
        buffer.add(obs=[number], action=number, reward=0.0, next_obs=[number], done=False)
    return buffer


def queue() -> sw.ReplayBuffer:
    return sw.ReplayBuffer(SIZE, obs_shape=(1,), sampler=sw.Fifo(), pace=sw.Pace.queue(SIZE))


def samples() -> sw.SequenceBuffer:
    flow = sw.Dataflow([sw.Consumer("train", inputs={"tokens"}, batch_size=4)])
    buffer = sw.SequenceBuffer(SIZE, flow=flow)
    names = [str(number) for number in range(SIZE)]
    buffer.put(sw.SequenceSample(names, {"tokens": [1] * SIZE}, {"tokens": np.arange(SIZE)}))
    return buffer


ROW = {"obs": [0], "action": 0, "reward": 0.0, "next_obs": [0], "done": False}
ONE = sw.SequenceSample(["more"], {"tokens": [1]}, {"tokens": np.arange(1)})
WAITS: dict[str, tuple[Any, str, tuple[Any, ...], dict[str, Any], type[Exception]]] = {
    "ReplayBuffer.add": (lambda: full(queue), "add", (), ROW, NotReady),
    "ReplayBuffer.sample": (queue, "sample", (4,), {}, NotReady),
    "SequenceBuffer.put": (samples, "put", (ONE,), {}, BufferFull),
    "SequenceBuffer.get": (samples, "get", ("train",), {"batch_size": 4, "owner": "me"}, NotReady),
}


@pytest.mark.parametrize("seconds", [0, 0.05])
@pytest.mark.parametrize("name", WAITS)
def test_wait_ends_at_its_deadline_and_says_what_it_waits_for(name: str, seconds: float) -> None:
    make, verb, arguments, options, error = WAITS[name]
    with make() as buffer:
        if verb == "get":  # all that there is was given out
            kept = [buffer.get("train", timeout=0) for _ in range(SIZE // 4)]
            assert len(kept) == SIZE // 4
        held = len(buffer)
        for call in (
            lambda: getattr(buffer, verb)(*arguments, timeout=seconds, **options),
            lambda: asyncio.run(getattr(buffer, f"{verb}_async")(*arguments, timeout=seconds, **options)),
        ):
            begun = time.monotonic()
            with pytest.raises(error, match=r"\d"):
                call()
            assert time.monotonic() - begun >= seconds
        assert len(buffer) == held


def test_the_page_lists_every_verb_of_every_face() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    for face in FACES:
        section = page.split(f"## {face.__name__}\n")[1].split("\n## ")[0]
        told = set(re.findall(r"`(\w+)", section))
        public = {name for name in dir(face) if not name.startswith("_")}
        assert public - told == set(), face.__name__


# ---- behaviour -------------------------------------------------------------------------------------------------------


def test_len_capacity_and_stats_count_alike(cell: Cell, buffer: Any) -> None:
    assert (len(buffer), buffer.capacity) == (0, SIZE)
    cell.add(buffer, 0, 6)
    assert len(buffer) == 6
    stats = buffer.stats()
    assert (stats["size"], stats["capacity"]) == (6, SIZE)
    assert all(isinstance(value, int) for name, value in stats.items() if name.endswith("_bytes"))
    assert any(name.endswith("_bytes") for name in stats)
    assert stats.get("rows_added", stats.get("added")) == 6
    assert cell.held(buffer) == [0, 1, 2, 3, 4, 5]


def test_batches_are_dicts_of_arrays(cell: Cell, buffer: Any) -> None:
    cell.add(buffer, 0, 6)
    kind = np.ndarray if cell.device is None else torch.Tensor

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for part in value.values():
                yield from leaves(part)
        else:
            yield value

    batches = cell.out(buffer)
    if hasattr(buffer, "sample"):
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves(buffer.sample(4, device=cell.device or "cpu")))
    for batch in batches:
        assert type(batch) is dict
        assert [type(leaf) for leaf in leaves(batch)] == [kind] * len(list(leaves(batch)))


def test_cleared_buffer_is_empty_and_takes_more(cell: Cell, buffer: Any) -> None:
    cell.add(buffer, 0, 6)
    buffer.clear()
    assert len(buffer) == buffer.stats()["size"] == 0
    cell.add(buffer, 6, 3)
    assert cell.held(buffer) == [6, 7, 8]


def test_saved_buffer_opens_as_a_copy_in_memory(cell: Cell, buffer: Any, tmp_path: Path) -> None:
    cell.add(buffer, 0, 6)
    buffer.flush()
    buffer.save(tmp_path / "saved")
    with sw.open(tmp_path / "saved") as copy:
        assert type(copy) is cell.face
        assert copy.capacity in (SIZE, None)
        assert cell.held(copy) == cell.held(buffer) == [0, 1, 2, 3, 4, 5]
        cell.add(copy, 6, 3)
        assert len(copy) == 9
    assert len(buffer) == 6
    asyncio.run(buffer.save_async(tmp_path / "again"))
    asyncio.run(buffer.flush_async())
    with sw.open(tmp_path / "again") as copy:
        assert len(copy) == 6


def test_save_takes_a_path_and_no_address(cell: Cell, buffer: Any, tmp_path: Path) -> None:
    cell.add(buffer, 0, 3)
    for wrong in (f"file://{tmp_path}/saved", "shm://saved", 3, None, "", "a\0b"):
        with pytest.raises(StorageError, match=r"save\(\)"):
            buffer.save(wrong)
    buffer.save(tmp_path / "new" / "folders" / "saved")
    with sw.open(tmp_path / "new" / "folders" / "saved") as copy:
        assert len(copy) == 3


def test_nothing_to_draw_is_not_ready_at_once(cell: Cell, buffer: Any) -> None:
    if cell.face is sw.RolloutBuffer:
        with pytest.raises(NotReady):
            next(buffer.minibatches(1))
    elif cell.face is sw.SequenceBuffer:
        with pytest.raises(NotReady):
            buffer.get("train", timeout=0)
    else:
        with pytest.raises(NotReady):
            buffer.sample(4)


def test_impossible_sizes_are_schema_errors(cell: Cell, buffer: Any) -> None:
    cell.add(buffer, 0, 3)
    calls = {
        sw.RolloutBuffer: [lambda: buffer.minibatches(0)],
        sw.SequenceBuffer: [
            lambda: buffer.get("train", batch_size=0),
            lambda: buffer.get("train", batch_size=SIZE + 1),
            lambda: put_too_many(cell, buffer),
        ],
    }.get(cell.face, [lambda: buffer.sample(0), lambda: buffer.sample(-1), lambda: buffer.sample("4")])
    for call in calls:
        with pytest.raises(SchemaError):
            call()
    assert len(buffer) == 3


def put_too_many(cell: Cell, buffer: Any) -> None:
    cell.add(buffer, 100, SIZE + 1)


def test_repr_tells_place_and_state(cell: Cell, buffer: Any) -> None:
    cell.add(buffer, 0, 3)
    told = repr(buffer)
    assert told.startswith(f"<{cell.face.__name__} ")
    assert told.endswith(">")
    held = "1 of 4 steps x 3" if cell.face is sw.RolloutBuffer else "3 trajectories" if "Traj" in told else "3 of 12 "
    assert f": {held}" in told or "cuda" in told
    buffer.close()
    assert repr(buffer).endswith(": closed>")


def test_closed_buffer_refuses_every_verb_but_close(cell: Cell, tmp_path: Path, shm_address: str) -> None:
    with cell.make(tmp_path, shm_address) as buffer:
        cell.add(buffer, 0, 3)
    calls = {
        "stats": buffer.stats,
        "clear": buffer.clear,
        "flush": buffer.flush,
        "save": lambda: buffer.save(tmp_path / "saved"),
        "len": lambda: len(buffer),
        "in": lambda: cell.add(buffer, 3, 3),
        "out": lambda: cell.out(buffer),
    }
    for call in calls.values():
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert not (tmp_path / "saved").exists()
    buffer.close()
    close_servers()
