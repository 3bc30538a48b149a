"""Compressed and ragged fields: the same values out, fewer bytes kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.compat.replay_buffer import BufferConfig
from sharpwave.compat.replay_buffer import ReplayBuffer as ServiceBuffer
from sharpwave.errors import NotReady, SchemaError, StaleHandle

CODECS = ["lz4", "zstd"]
# A row's worth of bytes of every temper; `n` numbers the row.
CONTENTS: dict[str, Any] = {
    "one value": lambda size, n: np.full(size, n % 256, np.uint8),
    "zeros": lambda size, n: np.zeros(size, np.uint8),
    "ramp": lambda size, n: (np.arange(size) // 16 + n).astype(np.uint8),
    "noise": lambda size, n: np.random.default_rng(n).integers(0, 256, size, np.uint8),
    "half noise": lambda size, n: np.where(
        np.arange(size) % 64 < 32, np.random.default_rng(n).integers(0, 256, size, np.uint8), 7
    ).astype(np.uint8),
}
SHAPES = [
    ((), "uint8"),
    ((1,), "float64"),
    ((3,), "float32"),
    ((84, 84), "uint8"),
    ((5, 7, 3), "int16"),
    ((33,), "bool"),
]


def make(shape: tuple[int, ...], dtype: str, codec: str | None, capacity: int = 20, **options: Any) -> sw.ReplayBuffer:
    schema = {"obs": sw.Field(shape, dtype, compression=codec), "action": sw.Field((), "int64")}
    return sw.ReplayBuffer(capacity, schema=schema, **{"seed": 3, **options})


def frame(shape: tuple[int, ...], dtype: str, content: str, number: int) -> np.ndarray:
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    raw = CONTENTS[content](size, number)
    return (raw & 1 if dtype == "bool" else raw).view(dtype).reshape(shape)


# ---- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", list(CONTENTS))
@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("codec", CODECS)
def test_compressed_rows_equal_plain_rows(codec: str, shape: tuple[int, ...], dtype: str, content: str) -> None:
    plain, packed = make(shape, dtype, None), make(shape, dtype, codec)
    for number in range(0, 70, 2):
        obs, after = (frame(shape, dtype, content, number + i) for i in range(2))
        for buffer in (plain, packed):
            buffer.add(obs=obs, action=number, reward=0.0, next_obs=after, done=False)
    assert len(plain) == len(packed) == 20
    for first, second in zip(plain.rows(6), packed.rows(6), strict=True):
        for name in ("obs", "next_obs", "action"):
            assert first[name].dtype == second[name].dtype
            assert first[name].shape == second[name].shape
            assert first[name].tobytes() == second[name].tobytes()
    for size in (1, 100):
        batch = packed.sample(size)
        for i in range(size):
            number = int(batch["action"][i])
            assert batch["obs"][i].tobytes() == frame(shape, dtype, content, number).tobytes()
            assert batch["next_obs"][i].tobytes() == frame(shape, dtype, content, number + 1).tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_changing_temper_keep_the_capacity(codec: str) -> None:
    """Noise takes more room than was hoped for: rows may not be lost for it."""
    buffer = make((40, 40), "uint8", codec, capacity=50)
    stream = np.random.default_rng(0)
    kinds = list(CONTENTS)
    told = {}
    for number in range(400):
        kind = kinds[int(stream.integers(len(kinds)))] if number % 100 < 50 else "noise"
        told[number] = frame((40, 40), "uint8", kind, number)
        buffer.add(obs=told[number], action=number, reward=0.0, next_obs=told[number], done=False)
    assert len(buffer) == 50
    (rows,) = buffer.rows()
    assert rows["action"].tolist() == list(range(350, 400))
    assert all(np.array_equal(rows["obs"][i], told[350 + i]) for i in range(50))


@pytest.mark.parametrize("codec", CODECS)
def test_large_batches_are_unpacked_whole(codec: str) -> None:
    buffer = make((84, 84, 4), "uint8", codec, capacity=200, num_envs=4, next_obs="derived")
    for step in range(60):
        numbers = np.arange(4) + 4 * step
        obs = np.stack([frame((84, 84, 4), "uint8", "ramp", int(n)) for n in numbers])
        after = np.stack([frame((84, 84, 4), "uint8", "ramp", int(n) + 4) for n in numbers])
        buffer.add(obs=obs, action=numbers, reward=np.zeros(4), next_obs=after, done=np.zeros(4, bool))
    out = None
    for size in (512, 512, 3):
        batch = buffer.sample(size, out=out if size == 512 else None)
        out = batch
        for i, number in enumerate(batch["action"].tolist()):
            assert np.array_equal(batch["obs"][i], frame((84, 84, 4), "uint8", "ramp", number))
            assert np.array_equal(batch["next_obs"][i], frame((84, 84, 4), "uint8", "ramp", number + 4))


@pytest.mark.parametrize("codec", CODECS)
def test_fewer_bytes_are_kept(codec: str, shm_address: str, tmp_path: Path) -> None:
    kept = {}
    rows = 12_000
    for name in (None, codec):
        # What the engine uses: a file system may give neighbours of a page too, as it likes.
        buffer = make((84, 84), "uint8", name, capacity=rows, storage=shm_address, exist="replace", next_obs=None)
        for number in range(rows):
            buffer.add(obs=frame((84, 84), "uint8", "ramp", number), action=number, reward=0.0, done=False)
        buffer.save(tmp_path / f"{name}.snapshot")
        stats = buffer.stats()
        live = stats["heap_bytes"] + rows * stats["row_bytes"]
        kept[name] = live, (tmp_path / f"{name}.snapshot").stat().st_size
        buffer.close()
    assert kept[codec][0] < kept[None][0] / 3
    assert kept[codec][1] < kept[None][1] / 3


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_of_a_value_do_not_depend_on_values_before_it(codec: str) -> None:
    def heap_bytes(shape: tuple[int, ...]) -> int:
        buffer = make(shape, "uint8", codec, next_obs=None)
        for number in range(20):
            buffer.add(obs=frame(shape, "uint8", "ramp", number), action=number, reward=0.0, done=False)
        return int(buffer.stats()["heap_bytes"])

    with ThreadPoolExecutor(1) as fresh:  # compressors are a thread's own: this one has seen nothing
        alone, _, after = fresh.map(heap_bytes, [(84, 84), (8, 9), (84, 84)])
    assert after == alone


@pytest.mark.parametrize("place", ["memory", "shm", "file"])
@pytest.mark.parametrize("codec", CODECS)
def test_compressed_rows_survive_save_and_open(codec: str, place: str, shm_address: str, tmp_path: Path) -> None:
    storage = {"memory": None, "shm": shm_address, "file": f"file://{tmp_path}/live.sw"}[place]
    buffer = make((30, 30), "uint8", codec, storage=storage)
    for number in range(33):
        obs = frame((30, 30), "uint8", "half noise", number)
        buffer.add(obs=obs, action=number, reward=0.0, next_obs=obs, done=False)
    buffer.save(tmp_path / "snapshot")
    copies = [sw.open(tmp_path / "snapshot")]
    if storage is not None:
        copies.append(sw.open(storage))
    for copy in copies:
        assert copy.schema == buffer.schema
        assert copy.schema["obs"].compression == codec  # type: ignore[union-attr]
        (rows,) = copy.rows()
        assert rows["action"].tolist() == list(range(13, 33))
        for i, number in enumerate(rows["action"].tolist()):
            assert np.array_equal(rows["obs"][i], frame((30, 30), "uint8", "half noise", number))
    for copy in copies:
        copy.close()
    buffer.close(unlink=True)


@pytest.mark.parametrize("codec", CODECS)
def test_get_of_rows_that_left_is_stale(codec: str) -> None:
    buffer = make((10,), "float32", codec, capacity=5)
    for number in range(12):
        obs = frame((10,), "float32", "ramp", number)
        buffer.add(obs=obs, action=number, reward=0.0, next_obs=obs, done=False)
        if number == 0:
            first = buffer.sample(1)["indices"]
    with pytest.raises(StaleHandle):
        buffer.get(first)


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_rows_are_whole_while_a_writer_wraps(codec: str) -> None:
    buffer = make((60, 60), "uint8", codec, capacity=40, next_obs=None, writers=4)
    stop = threading.Event()
    errors: list[BaseException] = []
    drawn = 0
    frames = {kind: [frame((60, 60), "uint8", kind, n) for n in range(50)] for kind in ("noise", "ramp")}

    def write(first: int) -> None:
        with buffer.writer() as writer:
            number = first
            while not stop.is_set():
                obs = frames["noise" if number % 3 else "ramp"][number % 50]
                writer.add(obs=obs, action=number, reward=0.0, done=False)
                number += 1

    def read() -> None:
        nonlocal drawn
        while not stop.is_set():
            try:
                batch = buffer.sample(32)
            except NotReady:
                continue
            for obs, number in zip(batch["obs"], batch["action"].tolist(), strict=True):
                assert np.array_equal(obs, frames["noise" if number % 3 else "ramp"][number % 50])
            drawn += 1

    def guarded(job: Any, *args: Any) -> None:
        try:
            job(*args)
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=job) for job in [(write, 0), (write, 10**6), (read,), (read,)]]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    until(lambda: drawn > 0 or stop.is_set())
    stop.set()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    assert drawn > 0


@pytest.mark.parametrize("codec", ["gzip", "LZ4", "", 1, True, b"lz4"])
def test_unknown_compression_is_refused_with_those_there_are(codec: Any) -> None:
    with pytest.raises(SchemaError, match=r"compression.*'lz4'.*'zstd'"):
        sw.Field((2,), compression=codec)


def test_field_tells_how_it_is_kept() -> None:
    field = sw.Field((4, 2), "uint8", compression="zstd")
    assert eval(repr(field), {"Field": sw.Field}) == field
    assert field != sw.Field((4, 2), "uint8")
    assert len({field, sw.Field((4, 2), "uint8"), sw.Field((4, 2), "uint8", compression="zstd")}) == 2
    for other in (sw.Field((4,), stack=3), sw.Field((4,), ragged=True), sw.Field((4,), ragged="padded")):
        assert eval(repr(other), {"Field": sw.Field}) == other
        assert other != sw.Field((4,))


def test_service_config_compresses() -> None:
    obs = np.random.default_rng(0).integers(0, 255, (12, 12, 4)).astype(np.uint8)
    buffer = ServiceBuffer(BufferConfig(capacity=10, enable_compression=True), obs_shape=(12, 12, 4), action_dim=6)
    buffer.add(obs, 2, 1.0, obs + 1, False)
    batch = buffer.sample(5)
    assert np.array_equal(batch["obs"][3], obs)
    assert np.array_equal(batch["next_obs"][3], obs + 1)
    assert buffer.inner is not None
    assert buffer.inner.schema["obs"].compression in CODECS  # type: ignore[union-attr]


# ---- ragged ----------------------------------------------------------------------------------------------------------


def ragged_buffer(ragged: Any = True, capacity: int = 12, **options: Any) -> sw.ReplayBuffer:
    field = sw.Field((5, 2), "float32", ragged=ragged, compression=options.pop("codec", None))
    return sw.ReplayBuffer(capacity, schema={"obs": field, "action": sw.Field((), "int64")}, **{"seed": 0, **options})


def points(number: int) -> np.ndarray:
    """0 to 5 points, by the row's number."""
    return np.arange(number % 6 * 2, dtype=np.float32).reshape(-1, 2) + number


def add_ragged(buffer: sw.ReplayBuffer, number: int) -> None:
    buffer.add(obs=points(number), action=number, reward=0.0, next_obs=points(number + 1), done=False)


@pytest.mark.parametrize("codec", [None, *CODECS])
@pytest.mark.parametrize("next_obs", ["stored", "derived"])
def test_ragged_batches_give_values_and_offsets(next_obs: Any, codec: str | None) -> None:
    buffer = ragged_buffer(next_obs=next_obs, codec=codec)
    for number in range(31):
        add_ragged(buffer, number)
    for batch in (buffer.sample(50), buffer.sample(1), *buffer.rows(5)):
        for name, shift in (("obs", 0), ("next_obs", 1)):
            values, offsets = batch[name]["values"], batch[name]["offsets"]
            assert values.dtype == np.float32
            assert offsets.dtype == np.int64
            assert len(offsets) == len(batch["action"]) + 1
            assert offsets[0] == 0
            assert values.shape == (offsets[-1], 2)
            for i, number in enumerate(batch["action"].tolist()):
                assert np.array_equal(values[offsets[i] : offsets[i + 1]], points(number + shift))
    assert len(buffer) == 12


@pytest.mark.parametrize("codec", [None, *CODECS])
def test_padded_batches_give_values_and_a_mask(codec: str | None) -> None:
    buffer = ragged_buffer("padded", codec=codec)
    for number in range(31):
        add_ragged(buffer, number)
    for batch in (buffer.sample(50), buffer.sample(1), *buffer.rows(5)):
        values, mask = batch["obs"]["values"], batch["obs"]["mask"]
        assert values.shape == (len(batch["action"]), 5, 2)
        assert mask.dtype == bool
        assert mask.shape == (len(batch["action"]), 5)
        for i, number in enumerate(batch["action"].tolist()):
            assert np.array_equal(values[i][mask[i]], points(number))
            assert mask[i].tolist() == [k < number % 6 for k in range(5)]
            assert not values[i][~mask[i]].any()


@pytest.mark.parametrize("num_envs", [None, 3])
def test_several_ragged_rows_come_as_a_list(num_envs: int | None) -> None:
    buffer = ragged_buffer(num_envs=num_envs)
    for first in range(0, 24, 6):
        numbers = range(first, first + 6)
        buffer.add(
            obs=[points(n) for n in numbers],
            action=np.array(numbers),
            reward=np.zeros(6),
            next_obs=[points(n + 1) for n in numbers],
            done=np.zeros(6, bool),
        )
    (rows,) = buffer.rows()
    assert rows["action"].tolist() == list(range(12, 24))
    offsets = rows["obs"]["offsets"]
    for i in range(12):
        assert np.array_equal(rows["obs"]["values"][offsets[i] : offsets[i + 1]], points(12 + i))


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((6, 2)), np.zeros((3, 3)), np.zeros(2), np.zeros((1, 3, 2)), 1.0, [np.zeros((2, 2))], "text"],
    ids=repr,
)
def test_ragged_values_that_do_not_fit_are_refused(wrong: Any) -> None:
    buffer = ragged_buffer()
    add_ragged(buffer, 3)
    with pytest.raises(SchemaError, match="obs"):
        buffer.add(obs=wrong, action=0, reward=0.0, next_obs=points(1), done=False)
    assert len(buffer) == 1
    lists = {"action": np.zeros(2, int), "reward": np.zeros(2), "done": np.zeros(2, bool)}
    with pytest.raises(SchemaError, match="obs"):
        buffer.add(obs=[points(1), np.zeros((6, 2))], next_obs=[points(1)] * 2, **lists)
    with pytest.raises(SchemaError, match="obs"):
        buffer.add(obs=[points(1)], next_obs=[points(1)] * 2, **lists)
    assert len(buffer) == 1


def test_wrong_ragged_fields_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"ragged.*stack|stack.*ragged"):
        sw.Field((5, 2), ragged=True, stack=2)
    with pytest.raises(SchemaError, match="ragged"):
        sw.Field((), ragged=True)
    for wrong in ("yes", 1.5, None):
        with pytest.raises(SchemaError, match="ragged"):
            sw.Field((5,), ragged=wrong)  # type: ignore[arg-type]


def test_ragged_rows_survive_save_and_open(tmp_path: Path) -> None:
    buffer = ragged_buffer(storage=f"file://{tmp_path}/live.sw")
    for number in range(20):
        add_ragged(buffer, number)
    buffer.save(tmp_path / "snapshot")
    for copy in (sw.open(tmp_path / "snapshot"), sw.open(f"file://{tmp_path}/live.sw")):
        (ours,), (theirs,) = buffer.rows(), copy.rows()
        assert ours["obs"]["values"].tobytes() == theirs["obs"]["values"].tobytes()
        assert ours["obs"]["offsets"].tolist() == theirs["obs"]["offsets"].tolist()
        assert copy.sample(9)["action"].shape == (9,)
        copy.close()
    buffer.close(unlink=True)


def test_snapshot_of_empty_ragged_values_alone_opens(tmp_path: Path) -> None:
    buffer = sw.ReplayBuffer(4, schema={"obs": sw.Field((5,), ragged=True)}, next_obs=None, seed=0)
    buffer.add(obs=np.zeros(0, np.float32), reward=1.0, done=False)
    buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot")
    assert copy.get([0])["obs"]["offsets"].tolist() == [0, 0]
