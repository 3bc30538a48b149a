"""DistillationBuffer: pairs go in, the same pairs come out; on the engine and on a GPU alike."""

from __future__ import annotations

import asyncio
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.device_place import HAS_GPU  # sets up the interpreter of kernels

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StaleHandle, StorageError
from sharpwave.rows.device import DeviceRows

torch = pytest.importorskip("torch")
# "ring": the rows of a GPU, kept on the CPU, where every machine can test them.
PLACES = ["numpy", "cpu", "ring", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda" and not HAS_GPU:
        pytest.skip("no GPU here")
    if request.param == "ring":
        monkeypatch.setattr(sw.DistillationBuffer, "_is_on_gpu", property(lambda self: self.device is not None))
    return str(request.param)


def device(place: str) -> Any:
    return {"numpy": None, "ring": "cpu"}.get(place, place)


def there(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {key: there(part, place) for key, part in value.items()}
    return value if place == "numpy" else torch.from_numpy(np.asarray(value)).to(device(place))


def here(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else value.cpu().numpy()


def make(place: str, capacity: int = 12, **options: Any) -> sw.DistillationBuffer:
    return sw.DistillationBuffer(capacity, obs_shape=(3,), device=device(place), seed=0, **options)


def pairs(first: int, count: int) -> tuple[Any, Any]:
    """Every number of a row names the row."""
    row = np.arange(first, first + count, dtype=np.float32)
    return np.stack([row] * 3, 1), np.stack([row, row + 0.5], 1)


def add(dist: sw.DistillationBuffer, place: str, first: int, count: int, **more: Any) -> None:
    obs, action = pairs(first, count)
    dist.add(there(obs, place), there(action, place), **there(more, place))


def test_pairs_stay_together(place: str) -> None:
    dist = make(place)
    add(dist, place, 0, 10)
    batch = dist.sample(batch_size=200)
    assert list(batch) == ["obs", "action", "done", "indices"]
    assert all(isinstance(value, np.ndarray if place == "numpy" else torch.Tensor) for value in batch.values())
    obs, actions = batch["obs"], batch["action"]
    assert not here(batch["done"]).any()
    assert here(batch["indices"]).dtype == np.int64
    assert here(obs).shape == (200, 3)
    assert here(actions).shape == (200, 2)
    np.testing.assert_array_equal(here(obs)[:, 0], here(actions)[:, 0])
    np.testing.assert_array_equal(here(obs)[:, 0] + 0.5, here(actions)[:, 1])
    assert set(here(obs)[:, 0].tolist()) == set(range(10))


def test_the_oldest_go_first(place: str) -> None:
    dist = make(place)
    for first in range(0, 30, 5):
        add(dist, place, first, 5)
    assert len(dist) == 12
    assert dist.is_full
    seen = np.concatenate([here(batch["obs"])[:, 0] for batch in dist.batches(5)])
    assert sorted(seen.tolist()) == list(range(18, 30))


def test_one_pair_is_one_row(place: str) -> None:
    dist = make(place)
    dist.add(there(np.ones(3, np.float32), place), there(np.int64(2), place))
    assert len(dist) == 1
    actions = dist.sample(4)["action"]
    assert here(actions).tolist() == [2] * 4
    assert here(actions).dtype == np.int64


def test_teacher_and_observation_groups(place: str) -> None:
    groups = {"student": (2,), "teacher": sw.Field((4,), "float32")}
    dist = sw.DistillationBuffer(
        8, obs_shape=groups, device=device(place), teacher={"mean": (2,), "logits": (5,)}, seed=0
    )
    row = np.arange(6, dtype=np.float32)
    obs = {"student": np.stack([row] * 2, 1), "teacher": np.stack([row] * 4, 1)}
    said = {"mean": np.stack([row] * 2, 1) * 10, "logits": np.stack([row] * 5, 1)}
    dist.add(there(obs, place), there(row, place), **there(said, place))
    batch = dist.sample(50)
    assert set(batch) == {"obs", "action", "mean", "logits", "done", "indices"}
    seen, actions = batch["obs"], batch["action"]
    np.testing.assert_array_equal(here(seen["student"])[:, 1], here(actions))
    np.testing.assert_array_equal(here(seen["teacher"])[:, 3], here(actions))
    np.testing.assert_array_equal(here(batch["mean"])[:, 0], here(actions) * 10)
    with pytest.raises(SchemaError, match="missing logits"):
        dist.add(there(obs, place), there(row, place), mean=there(said["mean"], place))
    with pytest.raises(SchemaError, match="confidence: the buffer has no such field; declare it with teacher="):
        dist.add(there(obs, place), there(row, place), confidence=there(row, place), **there(said, place))


@pytest.mark.parametrize(("size", "drop", "batches"), [(4, False, [4, 4, 2]), (4, True, [4, 4]), (10, False, [10])])
def test_each_row_once_an_epoch(place: str, size: int, drop: bool, batches: list[int]) -> None:
    dist = make(place)
    add(dist, place, 0, 10)
    rows = [here(batch["obs"])[:, 0] for batch in dist.batches(size, epochs=2, drop_remainder=drop)]
    assert [len(part) for part in rows] == batches * 2
    epochs = [np.concatenate(rows[: len(batches)]), np.concatenate(rows[len(batches) :])]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == len(epoch)
    assert epochs[0].tolist() != epochs[1].tolist()


def test_steps_come_in_order_with_their_ends(place: str) -> None:
    dist = make(place, num_envs=3)
    for t in range(6):
        add(dist, place, t * 3, 3, done=np.arange(3) == t % 3)
    parts = list(dist.steps(length=3))
    assert all(set(part) == {"obs", "action", "done", "indices"} for part in parts)
    assert [here(part["obs"]).shape for part in parts] == [(3, 3, 3), (1, 3, 3)]
    assert [here(part["indices"]).shape for part in parts] == [(3, 3), (1, 3)]
    rows = np.concatenate([here(part["obs"])[:, :, 0] for part in parts])
    np.testing.assert_array_equal(rows, np.arange(6, 18).reshape(4, 3))
    dones = np.concatenate([here(part["done"]) for part in parts])
    np.testing.assert_array_equal(dones, np.arange(3)[None] == (np.arange(2, 6) % 3)[:, None])


def test_saved_and_loaded_on_any_place(place: str, tmp_path: Path) -> None:
    dist = make(place, num_envs=2, teacher={"std": (1,)})
    for t in range(9):
        add(dist, place, t * 2, 2, std=np.full((2, 1), t, np.float32))
    path = tmp_path / "teacher.sw"
    dist.save(path)
    dist.close()
    for loaded in (
        sw.open(path),
        sw.open(path, device="cpu"),
        sw.open(path, device="cuda" if place == "cuda" else "cpu"),
    ):
        assert isinstance(loaded, sw.DistillationBuffer)
        assert len(loaded) == 12
        rows = np.concatenate([here(part["obs"])[:, :, 0] for part in loaded.steps()])
        np.testing.assert_array_equal(rows, np.arange(6, 18).reshape(6, 2))
        batch = loaded.sample(9)
        obs, actions = batch["obs"], batch["action"]
        np.testing.assert_array_equal(here(obs)[:, 0] + 0.5, here(actions)[:, 1])
        np.testing.assert_array_equal(here(batch["std"])[:, 0], here(obs)[:, 0] // 2)
        said = np.concatenate([here(part["std"])[:, :, 0] for part in loaded.steps()])
        np.testing.assert_array_equal(said, np.arange(6, 18).reshape(6, 2) // 2)
        more = {"std": np.zeros((2, 1), np.float32)}
        where = "numpy" if loaded.device is None else str(loaded.device.type)
        add(loaded, where, 0, 2, **more)
        assert len(loaded) == 12


def test_same_seed_same_draws(place: str) -> None:
    draws = []
    for _ in range(2):
        dist = make(place)
        add(dist, place, 0, 10)
        draws.append([here(dist.sample(8)["obs"]).tolist(), [here(batch["obs"]).tolist() for batch in dist.batches(3)]])
    assert draws[0] == draws[1]


def test_same_file_same_epochs(tmp_path: Path) -> None:
    with make("numpy") as dist:
        add(dist, "numpy", 0, 10)
        dist.save(tmp_path / "teacher.sw")
    orders = [[batch["obs"].tolist() for batch in sw.open(tmp_path / "teacher.sw").batches(3)] for _ in range(2)]
    assert orders[0] == orders[1]


def test_refused_pairs_change_nothing(place: str) -> None:
    dist = make(place)
    obs, actions = (there(value, place) for value in pairs(0, 4))
    with pytest.raises(NotReady, match="the buffer is empty"):
        dist.sample(1)
    with pytest.raises(SchemaError, match=r"obs: expected shape \(3,\)"):
        dist.add(there(np.zeros((4, 5), np.float32), place), actions)
    with pytest.raises(SchemaError, match=r"action: expected leading axes \(4,\)"):
        dist.add(obs, actions[:3])
    assert len(dist) == 0
    dist.add(obs, there(np.zeros((4, 7), np.int64), place))  # nothing was decided
    with pytest.raises(SchemaError):
        dist.add(obs, actions)
    assert len(dist) == 4
    dist.clear()
    assert len(dist) == 0


def test_in_shared_memory(shm_address: str) -> None:
    dist = sw.DistillationBuffer(8, obs_shape=(3,), action_shape=(2,), storage=shm_address)
    add(dist, "numpy", 0, 4)
    other = sw.open(shm_address)
    assert isinstance(other, sw.DistillationBuffer)
    add(other, "numpy", 4, 2)
    assert len(dist) == 6
    other.close()
    dist.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity": 0}, "capacity: expected a whole number"),
        ({"teacher": {"obs": (2,)}}, "the name 'obs' is taken"),
        ({"action_dtype": "int64"}, "action_dtype: needs action_shape="),
        ({"device": "toaster"}, "device: expected a torch device"),
    ],
)
def test_wrong_buffers_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        sw.DistillationBuffer(**{"capacity": 12, "obs_shape": (3,), **options})


def test_capacity_is_rounded_up_to_whole_steps_and_told() -> None:
    with pytest.warns(UserWarning, match=r"capacity=12 is not a multiple of num_envs=5: the buffer keeps 15 rows"):
        dist = sw.DistillationBuffer(12, obs_shape=(3,), num_envs=5)
    assert dist.capacity == dist.stats()["capacity"] == 15


def test_steps_need_to_know_what_follows_what() -> None:
    dist = make("numpy")
    add(dist, "numpy", 0, 4)
    with pytest.raises(SchemaError, match="give the buffer num_envs="):
        dist.steps()


def test_a_ring_on_a_device_is_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sw.DistillationBuffer, "_is_on_gpu", property(lambda self: True))
    dist = make("cpu")
    add(dist, "cpu", 0, 4)
    assert isinstance(dist._rows, DeviceRows)
    with pytest.raises(SchemaError, match="got 13 rows, the capacity is 12"):
        add(dist, "cpu", 0, 13)
    with pytest.raises(SchemaError, match="storage: rows on cpu belong to one process"):
        make("cpu", storage="shm://never")


def test_refused_pairs_leave_older_ones_together(place: str) -> None:
    dist = make(place, capacity=4)
    add(dist, place, 0, 4)
    add(dist, place, 4, 2)
    obs, actions = pairs(9, 3)
    with pytest.raises(SchemaError):
        dist.add(there(obs, place), there(actions[:2], place))
    batch = dist.sample(50)
    np.testing.assert_array_equal(here(batch["obs"])[:, 0], here(batch["action"])[:, 0])
    assert here(batch["obs"]).max() == 5


def test_epoch_whose_rows_are_written_over_ends_with_an_error(place: str) -> None:
    dist = make(place, capacity=4)
    add(dist, place, 0, 2)
    batches = dist.batches(1)
    add(dist, place, 2, 2)  # beside them
    assert here(next(batches)["obs"])[0, 0] in (0, 1)
    add(dist, place, 4, 2)
    with pytest.raises(StaleHandle):
        list(batches)


def test_numbers_that_would_wrap_are_refused(place: str) -> None:
    dist = sw.DistillationBuffer(8, obs_shape=sw.Field((3,), "uint8"), device=device(place), action_shape=())
    with pytest.raises(SchemaError):
        dist.add(there(np.full((2, 3), 300), place), there(np.zeros(2, np.float32), place))
    assert len(dist) == 0


def test_steps_end_where_somebody_stopped_and_where_rows_are_missing(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'teacher.sw'}"
    with sw.DistillationBuffer(16, obs_shape=(3,), action_shape=(2,), num_envs=2, storage=address) as dist:
        for t in range(3):
            add(dist, "numpy", 2 * t, 2)
    with sw.open(address) as again:
        for t in range(3, 6):
            add(again, "numpy", 2 * t, 2)
        dones = np.concatenate([part["done"] for part in again.steps()])
        assert dones.tolist() == [[t == 2] * 2 for t in range(6)]
        handles = again._rows.handles()
        again._rows.handles = lambda: np.delete(handles, [3, 8])  # rows that recovery had to give up
        rows = np.concatenate([part["obs"][:, :, 0] for part in again.steps(2)])
        dones = np.concatenate([part["done"] for part in again.steps(2)])
    assert rows.tolist() == [[0, 1], [4, 5], [6, 7], [10, 11]]
    assert dones.tolist() == [[True] * 2, [True] * 2, [True] * 2, [False] * 2]


def test_shared_one_pickles_as_its_address(shm_address: str) -> None:
    dist = sw.DistillationBuffer(8, obs_shape=(3,), device="cpu", storage=shm_address)
    with pytest.raises(NotReady, match="the action's shape is not known yet"):
        pickle.dumps(dist)
    add(dist, "cpu", 0, 4)
    with pickle.loads(pickle.dumps(dist)) as other:
        add(other, "cpu", 4, 2)
        assert isinstance(other.sample(3)["obs"], torch.Tensor)
        assert len(list(other.batches(4))) == 2
    assert len(dist) == 6
    dist.close(unlink=True)
    with pytest.raises(ClosedError):
        dist.sample(1)
    with pytest.raises(TypeError, match="give storage='shm://name'"):
        pickle.dumps(make("numpy"))


def test_threads_that_begin_at_once_lose_nothing() -> None:
    for _ in range(20):
        dist = make("numpy", capacity=100)
        threads = [threading.Thread(target=add, args=(dist, "numpy", 10 * i, 10)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(dist) == 40


def test_wrong_storage_is_refused_at_once(place: str) -> None:
    with pytest.raises(StorageError):
        make(place, storage="nonsense")
    with pytest.raises(SchemaError, match="the name is reserved"):
        make(place, teacher={"mask": ()})


@pytest.mark.parametrize("exist", ["attach", "replace"])
def test_first_add_that_fails_leaves_the_file_that_was_there(tmp_path: Path, exist: str) -> None:
    address = f"file://{tmp_path / 'teacher.sw'}"
    with sw.DistillationBuffer(8, obs_shape=(3,), action_shape=(2,), storage=address) as dist:
        add(dist, "numpy", 0, 4)
    late = sw.DistillationBuffer(8, obs_shape=(3,), storage=address, exist=exist)  # type: ignore[arg-type]
    with pytest.raises(SchemaError):
        late.add(np.full((2, 3), "x"), np.zeros((2, 2), np.float32))  # type: ignore[call-overload]
    with sw.open(address) as again:
        assert len(again) == 4
    if exist == "attach":
        with pytest.raises(SchemaError, match="has another schema"):
            late.add(np.zeros((2, 3)), np.zeros((2, 5), np.float32))
        with sw.open(address) as again:
            assert len(again) == 4
    add(late, "numpy", 4, 2)
    assert len(late) == (6 if exist == "attach" else 2)
    late.close()


def test_first_add_that_fails_leaves_no_file(tmp_path: Path) -> None:
    late = sw.DistillationBuffer(8, obs_shape=(3,), storage=f"file://{tmp_path / 'teacher.sw'}")
    with pytest.raises(SchemaError):
        late.add(np.full((2, 3), "x"), np.zeros((2, 2), np.float32))
    assert list(tmp_path.iterdir()) == []


def test_steps_go_on_over_the_end_of_the_ring() -> None:
    """The last block of a ring may be shorter than the others: serials jump there, and time does not."""
    dist = sw.DistillationBuffer(1001, obs_shape=(3,), action_shape=(2,), num_envs=1)
    for t in range(1300):
        add(dist, "numpy", t, 1)
    steps = list(dist.steps(100))
    rows = np.concatenate([part["obs"][:, 0, 0] for part in steps])
    assert rows.tolist() == list(range(299, 1300))
    assert not any(part["done"].any() for part in steps)


# ---- the one dialect ---------------------------------------------------------------------------------------------


def test_batches_have_the_keys_of_a_replay_batch(place: str) -> None:
    dist = make(place, num_envs=2, teacher={"std": (1,)})
    for t in range(3):
        add(dist, place, 2 * t, 2, std=np.ones((2, 1), np.float32))
    kind = np.ndarray if place == "numpy" else torch.Tensor
    for batch in (dist.sample(4), next(dist.batches(4)), next(dist.steps(2)), asyncio.run(dist.sample_async(4))):
        assert list(batch) == ["obs", "action", "done", "std", "indices"]
        assert all(isinstance(value, kind) for value in batch.values())


def test_batches_go_to_the_device_that_a_call_names() -> None:
    dist = make("numpy", num_envs=2)
    for t in range(3):
        add(dist, "numpy", 2 * t, 2)
    asked = dist.sample(4, device="cpu"), next(dist.batches(4, device="cpu")), next(dist.steps(2, device="cpu"))
    for batch in asked:
        assert all(isinstance(value, torch.Tensor) for value in batch.values())
    assert asked[2]["done"].shape == (2, 2)
    out = dist.sample(4)
    assert dist.sample(4, out=out) is out
    with pytest.raises(SchemaError, match="device: expected a torch device"):
        dist.batches(4, device="toaster")


def test_batches_of_shared_memory_are_dicts_too(shm_address: str) -> None:
    with sw.DistillationBuffer(8, obs_shape=(3,), device="cpu", storage=shm_address) as dist:
        add(dist, "cpu", 0, 4)
        with sw.open(shm_address, device="cpu") as other:
            assert isinstance(other, sw.DistillationBuffer)
            for one in (dist, other):
                batch = one.sample(4, timeout=5)
                assert list(batch) == ["obs", "action", "done", "indices"]
                assert all(isinstance(value, torch.Tensor) for value in batch.values())
            assert repr(other) == f"<DistillationBuffer {shm_address}: 4 of 8 rows, fields obs, action, done>"
        dist.close(unlink=True)


def test_stats_and_repr_tell_the_state(place: str) -> None:
    dist = make(place, teacher={"std": (1,)})
    stats = dist.stats()
    assert (stats["size"], stats["capacity"], stats["rows_added"], stats["storage_bytes"]) == (0, 12, 0, 0)
    add(dist, place, 0, 5, std=np.ones((5, 1), np.float32))
    after = dist.stats()
    assert (after["size"], after["capacity"], after["rows_added"]) == (5, 12, 5)
    assert after["storage_bytes"] > 12 * 6 * 4
    assert after["seed"] == stats["seed"] == 0
    assert after["storage"] == stats["storage"]
    assert isinstance(sw.DistillationBuffer(4, obs_shape=1).stats()["seed"], int)
    if place in ("numpy", "cpu"):
        assert repr(dist) == "<DistillationBuffer in memory: 5 of 12 rows, fields obs, action, done, std>"
    else:
        assert repr(dist) == f"<DistillationBuffer on {dist.device}: capacity 12, fields obs, action, done, std>"


def test_opened_one_continues_with_the_same_draws(place: str, tmp_path: Path) -> None:
    dist = make(place)
    add(dist, place, 0, 10)
    dist.sample(5)

    async def run() -> None:
        await dist.save_async(tmp_path / "new" / "teacher.sw")
        await dist.flush_async()

    asyncio.run(run())
    again = sw.open(tmp_path / "new" / "teacher.sw", device="cuda" if place == "cuda" else None)
    for _ in range(3):
        assert here(again.sample(7)["obs"]).tolist() == here(dist.sample(7)["obs"]).tolist()
    assert again.stats()["rows_added"] == 10


def test_rows_come_by_an_event_loop(place: str) -> None:
    dist = make(place)
    obs, action = (there(value, place) for value in pairs(0, 4))

    async def run() -> Any:
        await dist.add_async(obs, action, timeout=1)
        await dist.add_async(obs, action)
        return await dist.sample_async(3, timeout=1)

    assert here(asyncio.run(run())["obs"]).shape == (3, 3)
    assert len(dist) == 8
    with pytest.raises(SchemaError, match="timeout: expected a number"):
        dist.add(obs, action, timeout=-1)
    assert len(dist) == 8


def test_saving_needs_to_know_the_action(place: str, tmp_path: Path) -> None:
    with pytest.raises(NotReady, match="the action's shape is not known yet; give action_shape="):
        make(place).save(tmp_path / "teacher.sw")
    with pytest.raises(StorageError, match="leave out the 'file://'"):
        make(place, action_shape=2).save("file://teacher.sw")
    assert list(tmp_path.iterdir()) == []
    empty = make(place, action_shape=2)
    empty.save(tmp_path / "teacher.sw")
    assert len(sw.open(tmp_path / "teacher.sw")) == 0


def test_after_close_every_verb_raises(place: str, tmp_path: Path) -> None:
    for is_filled in (False, True):
        dist = make(place, num_envs=2)
        if is_filled:
            add(dist, place, 0, 2)
        dist.close()
        dist.close()
        verbs = [
            lambda dist=dist: add(dist, place, 0, 2),
            lambda dist=dist: asyncio.run(dist.add_async(*pairs(0, 2))),
            lambda dist=dist: dist.sample(1),
            lambda dist=dist: asyncio.run(dist.sample_async(1)),
            lambda dist=dist: dist.batches(1),
            lambda dist=dist: dist.steps(),
            lambda dist=dist: dist.clear(),
            lambda dist=dist: len(dist),
            lambda dist=dist: dist.is_full,
            lambda dist=dist: dist.stats(),
            lambda dist=dist: dist.flush(),
            lambda dist=dist: asyncio.run(dist.flush_async()),
            lambda dist=dist: dist.save(tmp_path / "teacher.sw"),
            lambda dist=dist: asyncio.run(dist.save_async(tmp_path / "teacher.sw")),
            lambda dist=dist: pickle.dumps(dist),
        ]
        for verb in verbs:
            with pytest.raises(ClosedError, match="the buffer is closed"):
                verb()
        where = f"on {dist.device}" if place in ("ring", "cuda") else "in memory"
        assert repr(dist) == f"<DistillationBuffer {where}: closed>"
        assert list(tmp_path.iterdir()) == []


def test_apexrls_batches_are_tuples(tmp_path: Path) -> None:
    from sharpwave.compat.apexrl import DistillationBuffer

    dist = DistillationBuffer(8, (3,), num_envs=2, seed=0)
    add(dist, "cpu", 0, 4)
    obs, actions = dist.sample(batch_size=5)
    assert torch.equal(obs[:, 0], actions[:, 0])
    assert [len(pair) for pair in dist.batches(2)] == [2, 2]
    assert [len(step) for step in dist.steps()] == [3, 3]
    dist.save(tmp_path / "teacher.sw")
    again = DistillationBuffer.load(tmp_path / "teacher.sw")
    assert isinstance(again.sample(2), tuple)
    sw.ReplayBuffer(4, obs_shape=1).save(tmp_path / "replay.sw")
    with pytest.raises(StorageError, match="expected a DistillationBuffer"):
        DistillationBuffer.load(tmp_path / "replay.sw")
