"""Batches of rows on the host for a GPU: the kernel reads what the engine would have copied, whatever the view makes of
it; and what happens when rows are written over meanwhile, or memory cannot be registered."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from contract.cases import flatten
from contract.device_place import HAS_GPU, PLACES, device_of, here

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError

torch = pytest.importorskip("torch")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU here")

VIEWS: dict[str, Any] = {
    "one step": sw.Transitions(),
    "three steps": sw.Transitions(n_step=3, gamma=0.9, truncated=True),
    "windows": sw.Windows(3, burn_in=2, bootstrap=1),
    "windows of sums": sw.Windows(3, burn_in=2, n_step=2, gamma=0.9, truncated=True, place_indices=True),
}
ROWS = list(itertools.product(("stored", "derived", None), (1, 3), (None, "lz4")))


def make(next_obs: Any, stack: int, compression: Any, view: str, sampler: Any = None, **more: Any) -> sw.ReplayBuffer:
    image = sw.Field((8, 9), "uint8", stack=stack, compression=compression)
    return sw.ReplayBuffer(
        40,
        schema={"obs": {"state": sw.Field((3,)), "image": image}, "action": sw.Field((), "int64")},
        next_obs=next_obs,
        view=VIEWS[view],
        sampler=sampler,
        num_envs=2,
        writers=2,
        seed=7,
        **more,
    )


def fill(buffers: list[sw.ReplayBuffer], steps: int, next_obs: Any, seed: int = 0) -> None:
    stream = np.random.default_rng(seed)
    now = stream.integers(0, 255, (2, 8, 9)).astype(np.uint8)
    for step in range(steps):
        then = stream.integers(0, 255, (2, 8, 9)).astype(np.uint8)
        row: dict[str, Any] = {
            "obs": {"state": np.full((2, 3), step, np.float32), "image": now},
            "action": np.full(2, step),
            "reward": np.full(2, step, np.float32),
            "terminated": stream.random(2) < 0.2,
            "truncated": stream.random(2) < 0.1,
        }
        if next_obs:
            row["next_obs"] = {"state": np.full((2, 3), step + 1, np.float32), "image": then}
        for buffer in buffers:
            buffer.add(**row)
        now = then


class Direct:
    """The feed of a buffer, on a GPU or in the interpreter."""

    def __init__(self, buffer: sw.ReplayBuffer, device: str) -> None:
        from sharpwave.device.row_reader import RowReader
        from sharpwave.rows.feed import GpuFeed
        from sharpwave.rows.host import HostRows

        rows = buffer._rows
        assert isinstance(rows, HostRows)
        self.outer = GpuFeed(rows, device)
        if device == "cpu":
            extras = set(self.outer.extras)
            schema, n_step = rows.spec.schema, rows.spec.n_step
            self.outer.feed = RowReader(
                rows.table, schema, torch.device("cpu"), n_step, self.outer.window, extras, None
            )

    def sample(self, size: int) -> Any:
        ticket = self.outer.feed.begin(size, None, True)
        tensors = self.outer.feed.end(ticket)
        return None if tensors is None else self.outer._tree(tensors)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("next_obs", "stack", "compression"), ROWS)
def test_kernel_reads_what_the_engine_copies(
    place: str, view: str, next_obs: Any, stack: int, compression: Any
) -> None:
    device = device_of(place)
    for sampler in (sw.Uniform(), sw.Prioritized()):
        one, other = (make(next_obs, stack, compression, view, sampler) for _ in range(2))
        fill([one, other], 3, next_obs)
        direct = Direct(other, device)
        for step in range(6):
            assert flatten(here(direct.sample(6))) == flatten(one.sample(6))
            fill([one, other], 5, next_obs, seed=step + 1)  # round the ring


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("next_obs", ["stored", "derived", None])
@pytest.mark.parametrize("padding", ["repeat", "zero"])
def test_kernel_pads_stacks_as_the_engine_does(
    place: str, view: str, compression: Any, next_obs: Any, padding: Any
) -> None:
    """Also next observations that start the next episode, and a second stack of another depth and padding."""
    pytest.importorskip("gymnasium")
    from gymnasium.vector import AutoresetMode
    from stacked_envs import FRAME, StackedEnvs

    other: Any = "repeat" if padding == "zero" else "zero"
    obs_field = {
        "image": sw.Field(FRAME, "uint8", stack=4, padding=padding),
        "sound": sw.Field((9, 12), "uint8", stack=3, padding=other, compression=compression),
    }
    envs = StackedEnvs(2, 4, padding, AutoresetMode.SAME_STEP)
    options: dict[str, Any] = {"next_obs": next_obs, "view": VIEWS[view], "num_envs": 2, "writers": 1, "seed": 7}
    one, twin = (sw.ReplayBuffer(40, schema={"obs": obs_field}, **options) for _ in range(2))
    direct = None
    stream = np.random.default_rng(1)
    image, _ = envs.reset(seed=2)
    sounds = stream.integers(0, 9, (2, 1, 9, 12)).astype(np.uint8)
    sound = np.concatenate([sounds if other == "repeat" else 0 * sounds] * 2 + [sounds], axis=1)
    for step in range(60):
        next_image, reward, terminated, truncated, _ = envs.step(np.zeros(2, int))
        sounds = stream.integers(0, 9, (2, 1, 9, 12)).astype(np.uint8)
        next_sound = np.concatenate([sound[:, 1:], sounds], axis=1)
        over = terminated | truncated
        next_sound[over, :-1] = sounds[over] if other == "repeat" else 0
        row = {"obs": {"image": image, "sound": sound}, "reward": reward, "done": terminated, "truncated": truncated}
        if next_obs:
            row["next_obs"] = {"image": next_image, "sound": next_sound}
        for buffer in (one, twin):
            buffer.add(**row)
        image, sound = next_image, next_sound
        direct = direct or Direct(twin, device_of(place))
        if step in (24, 59):
            assert flatten(here(direct.sample(10))) == flatten(one.sample(10))


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_changed_on_the_way_are_noticed(place: str) -> None:
    buffer = make("stored", 1, None, "one step")
    fill([buffer], 20, "stored")
    direct = Direct(buffer, device_of(place))
    feed = direct.outer.feed
    ticket = feed.begin(8, None, True)
    fill([buffer], 1, "stored")  # over the two oldest
    held = feed.end(ticket)
    drawn_over = set(ticket.sent.arrays["indices"].tolist()) & {0, 1}
    assert (held is None) == bool(drawn_over)
    ticket = feed.begin(8, None, True)
    fill([buffer], 20, "stored")
    assert feed.end(ticket) is None
    assert direct.sample(8) is not None


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_cannot_be_reached_are_given_back(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpwave.device.registered_memory import Unregistered

    buffer = make("stored", 1, None, "one step", pace=sw.Pace.samples_per_insert(4.0, min_size=8, error=40.0))
    fill([buffer], 8, "stored")
    feed = Direct(buffer, device_of(place)).outer.feed

    def refuse() -> None:
        raise Unregistered("full")

    monkeypatch.setattr(feed, "_reach", refuse)
    for _ in range(20):  # more than the pace lets out
        with pytest.raises(Unregistered):
            feed.begin(16, 0, False)
    assert buffer.stats()["pace_samples"] == 0


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_a_batch_that_cannot_be_fetched_are_given_back(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of(place)
    buffer = make("stored", 1, None, "one step", pace=sw.Pace(min_size=10, min_diff=0))
    fill([buffer], 10, "stored")
    direct = Direct(buffer, device)

    def fail(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(direct.outer.feed, "fetch", fail)
        for _ in range(30):  # each would keep its turn
            with pytest.raises(MemoryError):
                direct.outer.feed.begin(8, 0, False)
    assert direct.sample(8) is not None


@pytest.mark.parametrize("place", PLACES)
def test_fields_of_a_batch_are_not_views_of_one_another(place: str) -> None:
    device = device_of(place)
    buffer = make("stored", 1, None, "one step")
    fill([buffer], 10, "stored")
    direct = Direct(buffer, device)
    with torch.inference_mode():  # a stream may draw a batch here that is learned from elsewhere
        batch = direct.sample(8)
    scale = torch.ones(3, device=device, requires_grad=True)
    loss = (batch["obs"]["state"] * scale).sum()
    batch["reward"].clamp_(-1, 1)
    batch["next_obs"]["state"].mul_(0)
    loss.backward()
    assert scale.grad is not None
    assert torch.equal(scale.grad, batch["obs"]["state"].sum(0))


def test_without_a_device_a_stream_is_batches() -> None:
    buffer = make("stored", 1, None, "one step")
    fill([buffer], 5, "stored")
    stream = buffer.stream(4)
    assert isinstance(next(stream)["action"], np.ndarray)
    stream.close()  # type: ignore[attr-defined]
    stream = buffer.stream(4, device="cpu")
    assert isinstance(next(stream)["action"], torch.Tensor)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(SchemaError, match="prefetch"):
        buffer.stream(4, prefetch=0)
    with pytest.raises(SchemaError, match="batch_size"):
        buffer.stream(0)


def test_buffer_for_the_cpu_gives_tensors() -> None:
    buffer = make("stored", 1, None, "one step", device="cpu")
    fill([buffer], 5, "stored")
    assert isinstance(buffer.sample(4)["obs"]["image"], torch.Tensor)
    assert isinstance(buffer.sample(4, device="cpu")["action"], torch.Tensor)
    assert isinstance(next(buffer.batches(4))["action"], torch.Tensor)


def test_device_that_is_none_is_refused() -> None:
    with pytest.raises(SchemaError, match="expected a torch device"):
        sw.ReplayBuffer(8, obs_shape=(3,), device="nonsense")
    if not HAS_GPU:
        with pytest.raises(SchemaError, match="torch finds no CUDA here"):
            sw.ReplayBuffer(8, obs_shape=(3,), device="cuda")


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@gpu
@needs_gpu
@pytest.mark.parametrize("storage", ["memory", "shm", "file"])
def test_every_storage_is_read_directly(storage: str, shm_address: str, tmp_path: Any) -> None:
    address = {"memory": None, "shm": shm_address, "file": f"file://{tmp_path}/live.sw"}[storage]
    one, other = make("derived", 3, None, "one step"), make("derived", 3, None, "one step", storage=address)
    fill([one, other], 30, "derived")
    for _ in range(5):
        assert flatten(here(other.sample(16, device="cuda"))) == flatten(one.sample(16))
    feed = other.stats()["feeds"]["cuda"]
    assert (feed["way"], feed["retries"]) == ("direct", 0), feed
    assert feed["registered_bytes"] > 0
    other.close(unlink=True)


@gpu
@needs_gpu
def test_stream_gives_what_sample_gives_and_counts_what_it_handed_out() -> None:
    one, other = (make("stored", 1, None, "three steps", sw.Prioritized()) for _ in range(2))
    fill([one, other], 20, "stored")
    stream = other.stream(16, device="cuda", prefetch=2)
    for _ in range(10):
        batch = here(next(stream))
        assert flatten(batch) == flatten(one.sample(16))
    stream.close()  # type: ignore[attr-defined]
    assert len(other) == 40


@gpu
@needs_gpu
def test_stream_keeps_its_buffer(tmp_path: Any) -> None:
    buffer = make("stored", 1, None, "one step")
    fill([buffer], 20, "stored")
    buffer.save(tmp_path / "snapshot")
    for batch in itertools.islice(sw.open(tmp_path / "snapshot").stream(16, device="cuda"), 10):
        np.testing.assert_array_equal(here(batch["obs"]["state"])[:, 0], here(batch["action"]))


@gpu
@needs_gpu
def test_stream_keeps_a_pace() -> None:
    buffer = make("stored", 1, None, "one step", pace=sw.Pace.samples_per_insert(4.0, min_size=8, error=40.0))
    with pytest.raises(NotReady):
        next(buffer.stream(16, device="cuda", timeout=0.05))
    fill([buffer], 8, "stored")
    stream = buffer.stream(16, device="cuda", prefetch=2, timeout=0.2)
    got = 0
    try:
        for _ in range(100):
            next(stream)
            got += 1
    except NotReady:
        pass
    assert 3 <= got <= 8
    assert buffer.stats()["pace_samples"] == 16 * got


@gpu
@needs_gpu
def test_memory_that_cannot_be_registered_is_staged_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpwave.device import registered_memory

    def refuse(self: Any, size: int) -> None:
        raise registered_memory.Unregistered(
            "the CUDA driver cannot register 1 MiB of the host's memory: CUDA_ERROR_OUT_OF_MEMORY"
        )

    one, other = (make("derived", 1, None, "one step") for _ in range(2))
    fill([one, other], 20, "derived")
    monkeypatch.setattr(registered_memory.RegisteredMemory, "reach", refuse)
    for _ in range(4):
        assert flatten(here(other.sample(16, device="cuda"))) == flatten(one.sample(16))
    stream = other.stream(8, device="cuda")
    for _ in range(4):
        assert flatten(here(next(stream))) == flatten(one.sample(8))
    feed = other.stats()["feeds"]["cuda"]
    assert feed["way"] == "staged"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in feed["reason"]


@gpu
@needs_gpu
def test_a_writer_that_laps_the_ring_never_tears_a_batch() -> None:
    """Every byte of a row names the row; a thread writes the whole time."""
    import threading

    buffer = sw.ReplayBuffer(256, obs_shape=(4096,), obs_dtype="int32", seed=0)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            rows = np.arange(number, number + 8, dtype=np.int32)
            obs = np.repeat(rows[:, None], 4096, 1)
            buffer.add(obs, rows.astype(np.float32), rows.astype(np.float32), obs, rows < 0)
            number += 8

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while len(buffer) < 256:
            pass
        for batch in itertools.islice(buffer.stream(64, device="cuda"), 200):
            obs = batch["obs"]
            assert bool((obs == obs[:, :1]).all())
            assert bool((batch["next_obs"] == obs).all())
    finally:
        stop.set()
        thread.join()
    assert buffer.stats()["feeds"]["cuda"]["way"] == "direct"


@gpu
@needs_gpu
def test_batch_that_was_drawn_again_has_arrived_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pull is said to have failed: what is handed out was copied in the stream beside."""
    from sharpwave.device.row_reader import RowReader

    end = RowReader.end
    monkeypatch.setattr(RowReader, "end", lambda self, ticket: end(self, ticket) and None)
    buffer = sw.ReplayBuffer(512, obs_shape=(40_000,), obs_dtype="int32", seed=0)
    for first in range(0, 512, 64):
        rows = np.arange(first, first + 64, dtype=np.int32)
        obs = np.repeat(rows[:, None], 40_000, 1)
        buffer.add(obs, rows, rows, obs, rows < 0)
    for batch in itertools.islice(buffer.stream(128, device="cuda"), 20):
        wanted = batch["indices"].to(torch.int32)[:, None]
        assert bool((batch["obs"] == wanted).all())
        assert bool((batch["next_obs"] == wanted).all())
    assert buffer.stats()["feeds"]["cuda"]["retries"] == 20


@gpu
@needs_gpu
def test_threads_may_be_the_first_together() -> None:
    import threading

    buffer = make("stored", 1, None, "one step")
    fill([buffer], 20, "stored")
    meet = threading.Barrier(6)
    failures = []

    def draw() -> None:
        meet.wait()
        try:
            for _ in range(20):
                batch = here(buffer.sample(16, device="cuda"))
                np.testing.assert_array_equal(batch["obs"]["state"][:, 0], batch["action"])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=draw) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert buffer.stats()["feeds"]["cuda"]["way"] == "direct"


@gpu
@needs_gpu
@pytest.mark.parametrize("view", [sw.Transitions(), sw.Windows(3)])
def test_errors_on_a_gpu_update_rows_on_the_host(view: Any) -> None:
    buffer = sw.ReplayBuffer(100, obs_shape=(2,), action_shape=(), sampler=sw.Prioritized(), view=view, num_envs=1)
    for step in range(20):
        at = np.full((1, 2), step, np.float32)
        buffer.add(at, [step], [step], at, [False])
    batch = buffer.sample(8, device="cuda")
    errors = batch["reward"].abs() + 1.0
    told = (
        buffer.update_priorities(batch["indices"], errors)
        if errors.ndim == 1
        else buffer.update_priorities(batch["indices"], errors, mask=batch["mask"])
    )
    assert told == {"applied": 8, "stale": 0}
