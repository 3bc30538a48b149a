"""A saved RolloutBuffer is opened as it was, continues as it would have, and a damaged file is refused."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError

torch = pytest.importorskip("torch")
DEVICES = [None, "cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENVS, STEPS = 3, 4


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return request.param


def there(value: Any, device: Any) -> Any:
    if isinstance(value, dict):
        return {key: there(part, device) for key, part in value.items()}
    return value if device is None else torch.from_numpy(np.asarray(value)).to(device)


def here(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else value.cpu().numpy()


def make(device: Any, **options: Any) -> sw.RolloutBuffer:
    shape = {"image": sw.Field((2, 2), "uint8"), "state": (3,)}
    options = {"extras": {"mean": (2,)}, "hidden_states": {"actor": (2,)}, "seed": 0, **options}
    return sw.RolloutBuffer(ENVS, STEPS, obs_shape=shape, device=device, **options)


def add(roll: sw.RolloutBuffer, device: Any, t: int, **more: Any) -> None:
    stream = np.random.default_rng(t)
    row = (t * ENVS + np.arange(ENVS)).astype(np.float32)
    given = {
        "observations": {"image": np.full((ENVS, 2, 2), t, np.uint8), "state": stream.normal(size=(ENVS, 3))},
        "actions": row.astype(np.int64),
        "rewards": stream.normal(size=ENVS),
        "dones": stream.random(ENVS) < 0.4,
        "values": stream.normal(size=ENVS),
        "log_probs": row,
        "mean": np.stack([row, row], 1),
        "hidden_states": {"actor": np.stack([row, row], 1)},
        **more,
    }
    roll.add(**there(given, device))


def learn(roll: sw.RolloutBuffer, device: Any) -> list[Any]:
    """The rest of a rollout and two epochs: everything that a training loop would get."""
    for t in range(roll.step, STEPS):
        add(roll, device, t)
    roll.compute_returns_and_advantages(there(np.ones(ENVS, np.float32), device))
    batches = [*roll.minibatches(2, epochs=2), *roll.recurrent_minibatches(2)]
    seen = [{name: here(batch[name]).tolist() for name in ("actions", "advantages", "mean")} for batch in batches]
    roll.clear()
    return seen


@pytest.mark.parametrize("steps", [0, 2, STEPS])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_opened_rollout_is_equal_and_continues_with_the_same_batches(
    device: Any, autoreset: Any, steps: int, tmp_path: Path
) -> None:
    roll = make(device, autoreset=autoreset)
    learn(roll, device)  # the random state is no longer that of the seed
    for t in range(steps):
        add(roll, device, t)
    if steps:
        roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device), partial=True)
    roll.save(tmp_path / "new" / "roll.sw")
    again = sw.open(tmp_path / "new" / "roll.sw", device=device)
    assert isinstance(again, sw.RolloutBuffer)
    assert again.stats() == roll.stats()
    assert again.stats()["rows_added"] == (STEPS + steps) * ENVS
    assert repr(again) == repr(roll)
    assert again.device == roll.device
    if steps:
        one, other = again.all(), roll.all()
        assert set(one) == set(other)
        for name in ("actions", "advantages", "returns", "mean", "values"):
            np.testing.assert_array_equal(here(one[name]), here(other[name]))
        np.testing.assert_array_equal(here(one["observations"]["image"]), here(other["observations"]["image"]))
    else:
        with pytest.raises(NotReady, match="advantages are not computed yet"):
            again.all()
    assert [learn(again, device) for _ in range(2)] == [learn(roll, device) for _ in range(2)]
    assert again.stats() == roll.stats()


def test_rollout_is_opened_on_another_device(tmp_path: Path) -> None:
    roll = make("cpu", autoreset="next_step")
    add(roll, "cpu", 0)
    roll.save(tmp_path / "roll.sw")
    assert isinstance(sw.open(tmp_path / "roll.sw").rewards, np.ndarray)
    made = [sw.open(tmp_path / "roll.sw") for _ in range(2)]
    assert learn(made[0], None) == learn(made[1], None)
    np.testing.assert_array_equal(sw.open(tmp_path / "roll.sw").rewards, roll.rewards.numpy())


def test_any_reader_of_safetensors_reads_the_arrays(tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    roll = make(None)
    add(roll, None, 0)
    roll.save(tmp_path / "roll.sw")
    arrays = numpy_reader.load_file(tmp_path / "roll.sw")
    np.testing.assert_array_equal(arrays["observations/image"], roll.observations["image"])
    np.testing.assert_array_equal(arrays["rewards"], roll.rewards)


def test_saving_in_an_event_loop_keeps_the_instant_of_the_call(device: Any, tmp_path: Path) -> None:
    roll = make(device)
    add(roll, device, 0)

    async def run() -> None:
        saving = asyncio.ensure_future(roll.save_async(tmp_path / "roll.sw"))
        await asyncio.sleep(0)
        roll.clear()
        add(roll, device, 1)
        await saving
        await roll.flush_async()

    asyncio.run(run())
    again = sw.open(tmp_path / "roll.sw")
    assert again.step == 1
    assert again.actions[0].tolist() == [0, 1, 2]


def test_older_rollouts_are_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "roll.sw"
    roll = make(None)
    roll.save(path)
    add(roll, None, 0)
    roll.save(path)
    assert sw.open(path).step == 1
    path.write_text("my thesis")
    with pytest.raises(StorageError, match=r"save\(\): .*roll.sw' exists and is no rollout"):
        roll.save(path)
    assert path.read_text() == "my thesis"
    with pytest.raises(StorageError, match=r"leave out the 'file://'"):
        roll.save(f"file://{path}")
    with pytest.raises(StorageError, match="path: expected a path, got 5"):
        roll.save(5)  # type: ignore[arg-type]


def test_dtypes_that_the_format_lacks_are_refused_by_save(tmp_path: Path) -> None:
    roll = sw.RolloutBuffer(2, 2, obs_shape=sw.Field((), "longdouble"))
    with pytest.raises(SchemaError, match=r"save\(\): 'observations': safetensors has no"):
        roll.save(tmp_path / "roll.sw")
    assert list(tmp_path.iterdir()) == []


def test_failed_save_leaves_the_older_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "roll.sw"
    roll = make(None)
    add(roll, None, 0)
    roll.save(path)
    before = path.read_bytes()
    add(roll, None, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))  # as a full disk: the write fails halfway
    try:
        with pytest.raises(StorageError, match=r"^save\(\): "):
            roll.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_damaged_files_are_refused(tmp_path: Path, autoreset: Any) -> None:
    path = tmp_path / "roll.sw"
    roll = make("cpu", autoreset=autoreset)
    for t in range(2):
        add(roll, "cpu", t)
    roll.save(path)
    raw = path.read_bytes()
    stream = np.random.default_rng(0)
    for at in {0, 7, 8, 9, len(raw) - 1, *stream.integers(len(raw), size=200).tolist()}:
        damaged = bytearray(raw)
        damaged[at] ^= 1 << int(stream.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(StorageError):
            sw.open(path)
    for size in {0, 4, 8, 9, 500, len(raw) - 1, *stream.integers(len(raw), size=20).tolist()}:
        path.write_bytes(raw[:size])
        with pytest.raises(StorageError):
            sw.open(path, device="cpu")
    path.write_bytes(raw + b"\0")
    with pytest.raises(StorageError, match=r"expected .* bytes, got"):
        sw.open(path)


def forge(raw: bytes, change: Any) -> bytes:
    """The file with another header, and a checksum that holds."""
    from sharpwave.files import named_arrays

    (length,) = struct.unpack_from("<Q", raw)
    header = named_arrays.parse(raw[8 : 8 + length], len(raw))
    body = raw[8 + length :]
    names = {short: long for long, short in named_arrays.DTYPES.items()}
    arrays = {
        name: (names[place.dtype], place.shape, [memoryview(body[place.start : place.end])])
        for name, place in header.places.items()
    }
    about = json.loads(json.dumps(header.about))
    change(about, arrays)
    return b"".join(bytes(piece) for piece in named_arrays.encode(arrays, about, checksum=True))


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("step: expected a whole number", lambda about, _: about.update(step=9)),
        ("num_envs: expected a whole number", lambda about, _: about.update(num_envs=0)),
        ("the arrays and their description differ", lambda about, _: about.update(num_steps=10**15)),
        ("the arrays and their description differ", lambda about, _: about["fields"]["mean"][0].append(10**15)),
        ("its fields are", lambda about, _: about["fields"].pop("rewards")),
        ("its fields are", lambda about, _: about.update(extras=["mean", "more"])),
        ("field 'rewards': expected a number", lambda about, _: about["fields"].update(rewards=[[], "<i4"])),
        ("the arrays and their description differ", lambda _, arrays: arrays.pop("rewards")),
        ("expected version 1 of the format, got 2", lambda about, _: about.update(version=2)),
        ("expected a file of a RolloutBuffer", lambda about, _: about.update(face="RolloutBufferX")),
        ("damaged", lambda about, _: about["stream"].update(bit_generator="MT19937")),
        ("damaged", lambda about, _: about.update(fields=[1])),
        ("field .mean/x.: expected a name", lambda about, _: about["fields"].update({"mean/x": [[], "<f4"]})),
        ("seed: expected", lambda about, _: about.update(seed=-1)),
    ],
)
def test_forged_headers_are_refused_before_memory_is_taken(tmp_path: Path, says: str, change: Any) -> None:
    path = tmp_path / "roll.sw"
    roll = make(None)
    add(roll, None, 0)
    roll.save(path)
    whole = forge(path.read_bytes(), lambda about, arrays: None)
    path.write_bytes(whole)
    assert sw.open(path).step == 1
    path.write_bytes(forge(whole, change))
    with pytest.raises(StorageError, match=says):
        sw.open(path)


def test_foreign_files_and_views_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "roll.sw"
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(StorageError, match="not a Sharpwave table"):
        sw.open(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="is not a file"):
        sw.open(tmp_path / "pipe")
    make(None).save(tmp_path / "own.sw")
    with pytest.raises(SchemaError, match="is a RolloutBuffer, which has no view"):
        sw.open(tmp_path / "own.sw", view=sw.Transitions())
    with pytest.raises(SchemaError, match="device: expected a torch device"):
        sw.open(tmp_path / "own.sw", device="toaster")
    with pytest.raises(StorageError, match="is a saved rollout, which is loaded into memory; leave out the 'file://'"):
        sw.open(f"file://{tmp_path / 'own.sw'}")


# ---- facts and life ----------------------------------------------------------------------------------------------


def test_stats_count_rollouts_and_rows(device: Any) -> None:
    roll = make(device)
    for _ in range(2):
        learn(roll, device)
    add(roll, device, 0)
    stats = roll.stats()
    assert all(isinstance(value, (int, str)) for value in stats.values())
    assert stats["size"] == len(roll) == ENVS
    assert stats["capacity"] == roll.capacity == ENVS * STEPS
    assert (stats["rows_added"], stats["rollouts"], stats["step"]) == ((2 * STEPS + 1) * ENVS, 2, 1)
    assert stats["storage_bytes"] > ENVS * STEPS * 4 * 8
    assert stats["seed"] == 0
    assert stats["device"] == ("numpy" if device is None else str(roll.device))
    assert isinstance(sw.RolloutBuffer(1, 1, obs_shape=1).stats()["seed"], int)
    for t in range(1, STEPS):
        add(roll, device, t)
    assert roll.stats()["rollouts"] == 3


def test_repr_tells_place_and_state(device: Any) -> None:
    where = "in memory" if device is None else f"on {torch.empty(0, device=device).device}"
    with make(device) as roll:
        add(roll, device, 0)
        assert repr(roll).startswith(
            f"<RolloutBuffer {where}: 1 of 4 steps x 3 environments, fields observations, mean, hidden_states,"
        )
    assert repr(roll) == f"<RolloutBuffer {where}: closed>"


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_after_close_every_verb_raises(device: Any, autoreset: Any, tmp_path: Path) -> None:
    roll = make(device, autoreset=autoreset)
    learn(roll, device)
    for t in range(STEPS):
        add(roll, device, t)
    zeros = there(np.zeros(ENVS, np.float32), device)
    roll.compute_returns_and_advantages(zeros)
    begun = roll.minibatches(2), roll.recurrent_minibatches(2)
    for batches in begun:
        next(batches)
    memory = weakref.ref(roll.observations["state"])
    roll.close()
    roll.close()
    verbs = [
        lambda: add(roll, device, 0),
        lambda: roll.clear(),
        lambda: roll.compute_returns_and_advantages(zeros),
        lambda: roll.all(),
        lambda: roll.minibatches(2),
        lambda: roll.recurrent_minibatches(2),
        lambda: len(roll),
        lambda: roll.step,
        lambda: roll.is_full,
        lambda: roll.stats(),
        lambda: roll.flush(),
        lambda: asyncio.run(roll.flush_async()),
        lambda: roll.save(tmp_path / "roll.sw"),
        lambda: asyncio.run(roll.save_async(tmp_path / "roll.sw")),
        lambda: roll.rewards,
        lambda: setattr(roll, "advantages", zeros),
        lambda: pickle.dumps(roll),
        lambda: next(begun[0]),
        lambda: next(begun[1]),
    ]
    for verb in verbs:
        with pytest.raises(ClosedError, match="the buffer is closed"):
            verb()
    begun = ()  # type: ignore[assignment]
    assert memory() is None, "the memory was let go"
    assert list(tmp_path.iterdir()) == []
    assert roll.capacity == ENVS * STEPS
