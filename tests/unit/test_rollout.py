"""RolloutBuffer: what goes in comes out, once an epoch, with the right numbers beside it."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import BufferFull, NotReady, SchemaError

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
import returns_oracle as oracle

torch = pytest.importorskip("torch")
HAS_GPU = torch.cuda.is_available()
DEVICES = [None, "cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS, ENVS = 5, 4


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and not HAS_GPU:
        pytest.skip("no GPU here")
    return request.param


def there(value: Any, device: Any) -> Any:
    if isinstance(value, dict):
        return {key: there(part, device) for key, part in value.items()}
    return value if device is None or value is None else torch.from_numpy(np.asarray(value)).to(device)


def here(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else value.cpu().numpy()


def step(t: int, stream: np.random.Generator, **more: Any) -> dict[str, Any]:
    """Every number of a row names the row: t * ENVS + n."""
    row = (t * ENVS + np.arange(ENVS)).astype(np.float32)
    return {
        "observations": np.stack([row] * 3, 1),
        "actions": row.astype(np.int64),
        "rewards": stream.normal(size=ENVS).astype(np.float32),
        "dones": stream.random(ENVS) < 0.3,
        "values": stream.normal(size=ENVS).astype(np.float32),
        "log_probs": row / 100,
    } | more


def fill(roll: sw.RolloutBuffer, device: Any, seed: int = 0, steps: int = STEPS, **more: Any) -> dict[str, Any]:
    """Adds steps; what went in, stacked."""
    stream = np.random.default_rng(seed)
    added = []
    for t in range(steps):
        row = step(t, stream, **{name: value(t) if callable(value) else value for name, value in more.items()})
        roll.add(**there(row, device))
        added.append(row)
    return {name: np.stack([row[name] for row in added]) for name in added[0] if not isinstance(added[0][name], dict)}


def make(device: Any, **options: Any) -> sw.RolloutBuffer:
    return sw.RolloutBuffer(ENVS, STEPS, obs_shape=(3,), device=device, seed=0, **options)


# ---- the whole rollout -------------------------------------------------------------------------------------------


def test_all_data_is_time_major_and_has_the_keys(device: Any) -> None:
    roll = make(device)
    added = fill(roll, device)
    last = np.ones(ENVS, np.float32)
    roll.compute_returns_and_advantages(there(last, device))
    data = roll.all()
    assert set(data) == {
        "observations",
        "actions",
        "old_log_probs",
        "advantages",
        "returns",
        "values",
    }
    assert here(data["actions"]).tolist() == list(range(STEPS * ENVS))
    assert here(data["observations"]).shape == (STEPS * ENVS, 3)
    np.testing.assert_array_equal(here(data["observations"])[:, 1], here(data["actions"]))
    advantages, returns = oracle.gae(added | {"last_values": last}, 0.99, 0.95)
    np.testing.assert_allclose(here(data["advantages"]), advantages.ravel(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(here(data["returns"]), returns.ravel(), rtol=1e-5, atol=1e-5)
    assert here(roll.advantages).shape == (STEPS, ENVS)
    assert here(roll.observations).shape == (STEPS, ENVS, 3)
    assert len(roll) == STEPS * ENVS


def test_truncated_ends_take_their_final_values(device: Any) -> None:
    roll = make(device)
    stream = np.random.default_rng(9)
    added = []
    for t in range(STEPS):
        row = step(t, stream)
        row["truncated"] = row["dones"] & (np.arange(ENVS) % 2 == 0)
        row["final_values"] = np.where(row["truncated"], 7.0, np.nan).astype(np.float32)
        if t == 2:  # a step without any: nothing stays from before
            row["truncated"] = row["final_values"] = None
        roll.add(**there(row, device))
        none = {"truncated": np.zeros(ENVS, bool), "final_values": np.zeros(ENVS, np.float32)}
        added.append({name: none.get(name) if value is None else value for name, value in row.items()})
    r = {name: np.stack([row[name] for row in added]) for name in added[0]}
    r["last_values"] = np.full(ENVS, 3.0, np.float32)
    roll.compute_returns_and_advantages(there(r["last_values"], device), gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(here(roll.advantages), oracle.gae(r, 0.9, 0.8)[0], rtol=1e-5, atol=1e-5)


def test_a_rollout_shows_nothing_of_the_one_before(device: Any) -> None:
    roll = make(device)
    cut = {"truncated": np.ones(ENVS, bool), "final_values": np.full(ENVS, 50.0, np.float32)}
    fill(roll, device, seed=1, **cut)
    roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    memory = dict(roll._columns.arrays)
    roll.clear()
    assert len(roll) == 0
    added = fill(roll, device, seed=2)
    last = np.ones(ENVS, np.float32)
    roll.compute_returns_and_advantages(there(last, device))
    np.testing.assert_allclose(
        here(roll.advantages), oracle.gae(added | {"last_values": last}, 0.99, 0.95)[0], rtol=1e-5, atol=1e-5
    )
    assert all(roll._columns.arrays[name] is array for name, array in memory.items())  # the same memory


def test_columns_of_one_are_numbers(device: Any) -> None:
    roll = make(device)
    row = step(0, np.random.default_rng(0))
    for name in ("rewards", "dones", "values", "log_probs"):
        row[name] = row[name][:, None]
    roll.add(**there(row, device))
    roll.compute_returns_and_advantages(there(np.zeros((ENVS, 1), np.float32), device), partial=True)
    assert here(roll.all()["values"]).shape == (ENVS,)


# ---- what may be in a row ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("dtype", ["int64", "float32", "int32"])
def test_actions_are_what_the_first_ones_are(device: Any, shape: tuple[int, ...], dtype: str) -> None:
    roll = make(device)
    actions = np.arange(ENVS * int(np.prod(shape, dtype=int))).reshape(ENVS, *shape).astype(dtype)
    fill(roll, device, actions=actions)
    assert here(roll.actions).dtype == dtype
    assert here(roll.actions).shape == (STEPS, ENVS, *shape)
    roll.clear()
    row = step(0, np.random.default_rng(0), actions=np.zeros((ENVS, *shape, 5), dtype))
    with pytest.raises(SchemaError, match=r"actions: expected shape"):
        roll.add(**there(row, device))
    assert len(roll) == 0


def test_dict_observations_keep_a_dtype_each(device: Any) -> None:
    shape = {"image": sw.Field((2, 2), "uint8"), "state": (3,), "deep": {"flag": sw.Field((), "bool")}}
    roll = sw.RolloutBuffer(ENVS, STEPS, obs_shape=shape, device=device, seed=0)

    def seen(t: int) -> dict[str, Any]:
        row = t * ENVS + np.arange(ENVS)
        image = np.broadcast_to(row[:, None, None], (ENVS, 2, 2)).astype(np.uint8)
        return {"image": image, "state": np.ones((ENVS, 3), np.float32), "deep": {"flag": row % 2 == 0}}

    fill(roll, device, observations=seen)
    roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    for batch in roll.minibatches(3):
        rows = here(batch["actions"])
        assert here(batch["observations"]["image"]).dtype == np.uint8
        assert here(batch["observations"]["image"])[:, 1, 1].tolist() == rows.tolist()
        assert here(batch["observations"]["deep"]["flag"]).tolist() == (rows % 2 == 0).tolist()


def test_privileged_observations_must_come_once_declared(device: Any) -> None:
    roll = make(device, privileged_obs_shape=2)
    row = step(0, np.random.default_rng(0))
    with pytest.raises(SchemaError, match="missing privileged_observations"):
        roll.add(**there(row, device))
    roll.add(**there(row | {"privileged_observations": np.ones((ENVS, 2), np.float32)}, device))
    with pytest.raises(SchemaError, match="declare it with privileged_obs_shape="):
        make(device).add(**there(row | {"privileged_observations": np.ones((ENVS, 2), np.float32)}, device))


def test_extras_come_back(device: Any) -> None:
    roll = make(device, extras={"mean": (2,), "std": sw.Field((2,))})
    mean = np.arange(ENVS * 2, dtype=np.float32).reshape(ENVS, 2)
    fill(roll, device, mean=mean, std=mean + 1)
    roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    for batch in roll.minibatches(2):
        np.testing.assert_array_equal(here(batch["mean"]) + 1, here(batch["std"]))
        np.testing.assert_array_equal(here(batch["mean"])[:, 0], here(batch["actions"]) % ENVS * 2)


# ---- minibatches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "drop"), [(1, False), (3, False), (3, True), (20, False)])
def test_each_row_once_an_epoch_in_another_order(device: Any, count: int, drop: bool) -> None:
    roll = make(device)
    fill(roll, device)
    roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    batches = list(roll.minibatches(count, epochs=2, drop_remainder=drop))
    rows = [here(batch["actions"]) for batch in batches]
    assert len(batches) == 2 * count
    sizes = {len(part) for part in rows}
    assert sizes == ({20 // count} if drop or 20 % count == 0 else {20 // count, 20 // count + 1})
    epochs = [np.concatenate(rows[:count]), np.concatenate(rows[count:])]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == len(epoch) == (20 // count * count if drop else 20)
    assert epochs[0].tolist() != epochs[1].tolist()
    for batch in batches:
        np.testing.assert_array_equal(here(batch["observations"])[:, 2], here(batch["actions"]))
        np.testing.assert_allclose(here(batch["old_log_probs"]), here(batch["actions"]) / 100, rtol=1e-6)
        np.testing.assert_array_equal(
            here(batch["advantages"]), here(roll.advantages).reshape(-1)[here(batch["actions"])]
        )


def test_seed_tells_the_order(device: Any) -> None:
    orders = []
    for _ in range(2):
        roll = make(device)
        fill(roll, device)
        roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
        orders.append([here(batch["actions"]).tolist() for batch in roll.minibatches(4, epochs=2)])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("over", ["rollout", "minibatch"])
def test_normalised_advantages_are_copies(device: Any, over: Any) -> None:
    roll = make(device)
    fill(roll, device)
    roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    before = here(roll.advantages).copy()
    batches = list(roll.minibatches(2, normalize_advantages=over))
    np.testing.assert_array_equal(here(roll.advantages), before)
    flat = before.ravel()
    for batch in batches:
        stored = flat[here(batch["actions"])]
        among = flat if over == "rollout" else stored
        np.testing.assert_allclose(
            here(batch["advantages"]), (stored - among.mean()) / (among.std(ddof=1) + 1e-8), rtol=1e-4, atol=1e-5
        )
    whole = here(roll.all(normalize_advantages=True)["advantages"])
    assert abs(whole.mean()) < 1e-5
    np.testing.assert_array_equal(here(roll.advantages), before)


def test_one_row_normalises_to_nothing(device: Any) -> None:
    roll = sw.RolloutBuffer(1, 1, obs_shape=(3,), device=device)
    row = {name: value[:1] for name, value in step(0, np.random.default_rng(0)).items()}
    roll.add(**there(row, device))
    roll.compute_returns_and_advantages(there(np.zeros(1, np.float32), device))
    (batch,) = roll.minibatches(1, normalize_advantages="minibatch")
    assert here(batch["advantages"]).tolist() == [0.0]


def test_change_during_an_iteration_is_noticed(device: Any) -> None:
    roll = make(device)
    fill(roll, device)
    roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    batches = roll.minibatches(2)
    next(batches)
    roll.clear()
    with pytest.raises(NotReady, match="has changed since the iteration began"):
        next(batches)
    fill(roll, device, steps=2)
    roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device), partial=True)
    late = roll.minibatches(1), roll.recurrent_minibatches(1)
    roll.compute_returns_and_advantages(there(np.ones(ENVS, np.float32), device), partial=True)
    for batches in late:  # also where it has not begun yet
        with pytest.raises(NotReady, match="has changed since the iteration began"):
            next(batches)


# ---- recurrent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pieces_are_cut_behind_ends_with_their_first_hidden_state(device: Any, count: int) -> None:
    roll = make(device, hidden_states={"actor": (2,), "critic": {"h": (1,), "c": (1,)}})

    def hidden(t: int) -> dict[str, Any]:
        row = (t * ENVS + np.arange(ENVS)).astype(np.float32)
        one = row[:, None]
        return {"actor": np.stack([row, -row], 1), "critic": {"h": one, "c": one + 0.5}}

    added = fill(roll, device, seed=3, hidden_states=hidden)
    roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    ends = added["dones"]
    assert 0 < ends.sum() < ends.size
    for _ in range(2):
        seen, pieces = [], 0
        for batch in roll.recurrent_minibatches(count):
            mask, rows = here(batch["mask"]), here(batch["actions"])
            assert mask.any(axis=0).all()
            assert not here(batch["observations"])[~mask].any()  # padding is zeros
            assert not rows[~mask].any()
            pieces += mask.shape[1]
            for piece in range(mask.shape[1]):
                length = mask[:, piece].sum()
                assert mask[:length, piece].all()  # from the start on
                steps = rows[:length, piece]
                assert (np.diff(steps) == ENVS).all()  # one env, in order
                over = ends[steps // ENVS, steps % ENVS]
                assert not over[:-1].any()
                assert over[-1] or steps[-1] // ENVS == STEPS - 1
                assert here(batch["hidden_states"]["actor"])[piece].tolist() == [steps[0], -steps[0]]
                assert here(batch["hidden_states"]["critic"]["c"])[piece].tolist() == [steps[0] + 0.5]
                seen += steps.tolist()
        assert sorted(seen) == list(range(STEPS * ENVS))
        assert pieces == ENVS + ends[:-1].sum()


def test_hidden_states_must_come_once_declared(device: Any) -> None:
    roll = make(device, hidden_states={"actor": (2,)})
    with pytest.raises(SchemaError, match="missing hidden_states"):
        roll.add(**there(step(0, np.random.default_rng(0)), device))


# ---- autoreset ---------------------------------------------------------------------------------------------------


def test_rows_that_only_reset_are_masked(device: Any) -> None:
    roll = make(device, autoreset="next_step")
    was_over = np.zeros(ENVS, bool)
    for rollout in range(2):
        stream, added = np.random.default_rng(rollout), []
        for t in range(STEPS):
            row = step(t, stream)
            row["dones"] = row["dones"] & ~was_over  # a reset ends nothing
            row["truncated"] = row["dones"] & (stream.random(ENVS) < 0.5)
            row["mask"] = ~was_over
            was_over = row["dones"].copy()
            added.append(row)
            roll.add(**there({name: value for name, value in row.items() if name != "mask"}, device))
        r = {name: np.stack([row[name] for row in added]) for name in added[0]}
        r |= {"last_values": np.full(ENVS, 2.0, np.float32), "final_values": "next"}
        roll.compute_returns_and_advantages(there(r["last_values"], device))
        np.testing.assert_allclose(here(roll.advantages), oracle.gae(r, 0.99, 0.95)[0], rtol=1e-5, atol=1e-5)
        data = roll.all(normalize_advantages=True)
        mask = here(data["mask"])
        np.testing.assert_array_equal(mask, r["mask"].ravel())
        assert not mask.all()
        assert abs(here(data["advantages"])[mask].mean()) < 1e-5
        assert not here(data["advantages"])[~mask].any()
        assert abs(here(data["advantages"])[mask].std(ddof=1) - 1) < 1e-3
        for batch in roll.minibatches(3):
            np.testing.assert_array_equal(here(batch["mask"]), mask[here(batch["actions"])])
        seen = [here(batch["actions"])[here(batch["mask"])] for batch in roll.recurrent_minibatches(2)]
        assert sorted(np.concatenate(seen).tolist()) == np.flatnonzero(mask).tolist()
        roll.clear()
    roll.clear(reset=True)
    roll.add(**there(step(0, np.random.default_rng(0)), device))
    assert here(roll.mask)[0].all()


def test_both_autoreset_modes_of_gymnasium_give_the_same_advantages() -> None:
    """The same episodes, cut at 12 steps: rows that only reset come to nothing."""
    gym = pytest.importorskip("gymnasium")
    modes = gym.vector.AutoresetMode

    def value(obs: Any) -> Any:
        return (obs @ np.arange(1.0, 5.0)).astype(np.float32)

    def play(mode: Any) -> tuple[list[Any], list[Any]]:
        kwargs = {"vector_kwargs": {"autoreset_mode": mode}, "vectorization_mode": "sync", "max_episode_steps": 12}
        envs = gym.make_vec("CartPole-v1", 3, **kwargs)
        same = mode == modes.SAME_STEP
        roll = sw.RolloutBuffer(3, 200, obs_shape=(4,), autoreset="same_step" if same else "next_step")
        obs, _ = envs.reset(seed=5)
        while not roll.is_full:
            actions = (obs @ np.array([350.0, 50.0, -150.0, 100.0])).astype(int) % 2
            following, rewards, terminated, truncated, info = envs.step(actions)
            more = {}
            if same:
                final = following.copy()
                for env in np.flatnonzero(terminated | truncated):
                    final[env] = info["final_obs"][env]
                more["final_values"] = value(final)
            roll.add(
                observations=obs,
                actions=actions,
                rewards=rewards,
                dones=terminated | truncated,
                values=value(obs),
                log_probs=np.zeros(3),
                truncated=truncated & ~terminated,
                **more,
            )
            obs = following
        roll.compute_returns_and_advantages(value(obs))
        mask = np.ones((200, 3), bool) if same else roll.mask
        envs.close()
        return [roll.advantages[mask[:, n], n] for n in range(3)], [roll.observations[mask[:, n], n] for n in range(3)]

    ours, seen = play(modes.SAME_STEP)
    theirs, seen_too = play(modes.NEXT_STEP)
    for n in range(3):
        count = len(theirs[n]) - 20  # the last episode goes on in one of the two
        assert 100 < count < 190
        np.testing.assert_array_equal(seen[n][:count], seen_too[n][:count])
        np.testing.assert_allclose(ours[n][:count], theirs[n][:count], rtol=1e-6)


# ---- copies and modes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda roll: pickle.loads(pickle.dumps(roll))], ids=["copy", "pickle"]
)
def test_a_copy_is_a_buffer_of_its_own(device: Any, copied: Any) -> None:
    roll = make(device)
    fill(roll, device, steps=2)
    other = copied(roll)
    other.clear()
    added = fill(other, device, seed=5)
    other.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    np.testing.assert_array_equal(here(other.rewards), added["rewards"])
    assert len(roll) == 2 * ENVS
    orders = [[here(batch["actions"]).tolist() for batch in copied(other).minibatches(2)] for _ in range(2)]
    assert orders[0] == orders[1]  # the random stream is copied too


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rollouts_of_inference_mode_can_be_learnt_from(device: Any) -> None:
    if device == "cuda" and not HAS_GPU:
        pytest.skip("no GPU here")
    roll = make(device)
    cut = {"truncated": np.zeros(ENVS, bool), "final_values": np.zeros(ENVS, np.float32)}
    actions = np.ones((ENVS, 2), np.float32)
    with torch.inference_mode():
        fill(roll, device, actions=actions, **cut)
        roll.compute_returns_and_advantages(there(np.zeros(ENVS, np.float32), device))
    weight = torch.ones(2, device=device, requires_grad=True)
    for batch in roll.minibatches(1):
        (weight * batch["actions"]).sum().backward()
    assert weight.grad is not None
    roll.clear()
    fill(roll, device, actions=actions, **cut)


# ---- refusals ----------------------------------------------------------------------------------------------------


def test_full_partial_and_empty_are_told(device: Any) -> None:
    roll = make(device)
    zeros = there(np.zeros(ENVS, np.float32), device)
    with pytest.raises(NotReady, match="the rollout has 0 of 5 steps"):
        roll.compute_returns_and_advantages(zeros)
    added = fill(roll, device, steps=3)
    with pytest.raises(NotReady, match=r"3 of 5 steps; add the others.*partial=True"):
        roll.compute_returns_and_advantages(zeros)
    with pytest.raises(NotReady, match=r"compute_returns_and_advantages\(\) first"):
        roll.all()
    roll.compute_returns_and_advantages(zeros, partial=True)
    data = roll.all()
    assert here(data["actions"]).tolist() == list(range(3 * ENVS))
    want, _ = oracle.gae(added | {"last_values": np.zeros(ENVS)}, 0.99, 0.95)
    np.testing.assert_allclose(here(data["advantages"]), want.ravel(), rtol=1e-5, atol=1e-5)
    roll.clear()
    fill(roll, device)
    with pytest.raises(BufferFull, match=r"full: 5 of 5 steps; use it, then clear\(\)"):
        roll.add(**there(step(5, np.random.default_rng(0)), device))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"observations": np.zeros((ENVS, 4), np.float32)}, r"observations: expected shape \(4, 3\), got \(4, 4\)"),
        ({"rewards": np.zeros(3, np.float32)}, r"rewards: expected shape \(4,\), got \(3,\)"),
        ({"log_probs": np.zeros((ENVS, 2), np.float32)}, r"log_probs: expected shape \(4,\)"),
        ({"values": None}, "missing values"),
        ({"entropy": np.zeros(ENVS)}, "entropy: the buffer has no such field; declare it with extras="),
        ({"truncated": np.zeros(ENVS, bool)}, "truncated: needs final_values="),
        ({"final_values": np.zeros(ENVS, np.float32)}, "final_values: needs truncated="),
    ],
)
def test_refused_steps_change_nothing(device: Any, change: dict[str, Any], says: str) -> None:
    roll = make(device)
    row = step(0, np.random.default_rng(0))
    with pytest.raises(SchemaError, match=says):
        roll.add(**there(row | change, device))
    assert len(roll) == 0
    roll.add(**there(row | {"actions": np.zeros((ENVS, 7), np.float32)}, device))  # nothing was decided either


def test_numbers_that_would_lose_what_they_say_are_refused(device: Any) -> None:
    roll = sw.RolloutBuffer(ENVS, STEPS, obs_shape=sw.Field((3,), "uint8"), device=device)
    row = step(0, np.random.default_rng(0))
    with pytest.raises(SchemaError, match=r"observations: expected uint8, got .*float32, and the cast would lose"):
        roll.add(**there(row, device))


@pytest.mark.parametrize(("dtype", "value"), [("uint8", 300), ("int8", 300), ("bool", 3), ("int64", 0.5)])
def test_no_number_wraps_or_loses_its_fraction(device: Any, dtype: str, value: Any) -> None:
    roll = make(device, action_shape=(), action_dtype=dtype)
    row = step(0, np.random.default_rng(0), actions=np.full(ENVS, value))
    with pytest.raises(SchemaError, match=f"actions: expected {dtype}"):
        roll.add(**there(row, device))
    assert len(roll) == 0


def test_what_is_no_array_decides_nothing() -> None:
    roll = make(None)
    row = step(0, np.random.default_rng(0))
    with pytest.raises(SchemaError, match="observations: expected an array, got list"):
        roll.add(**(row | {"observations": [[1.0], [1.0, 2.0]], "actions": np.zeros((ENVS, 7))}))
    roll.add(**row)
    with pytest.raises(SchemaError, match="reset: expected True or False"):
        roll.clear(reset="yes")  # type: ignore[arg-type]
    assert len(roll) == ENVS


def test_arrays_of_another_place_are_refused() -> None:
    row = step(0, np.random.default_rng(0))
    with pytest.raises(SchemaError, match="expected a NumPy array, got a torch tensor; give the buffer device='cpu'"):
        make(None).add(**there(row, "cpu"))
    make("cpu").add(**row)  # the same memory: taken as it is


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_envs": 0}, "num_envs: expected a whole number"),
        ({"device": "toaster"}, "device: expected a torch device"),
        ({"autoreset": "never"}, "autoreset: expected 'same_step' or 'next_step'"),
        ({"extras": {"values": (2,)}}, "the name 'values' is taken"),
        ({"extras": {"a/b": (2,)}}, "extras: expected names without '/', got 'a/b'"),
        ({"action_dtype": "int64"}, "action_dtype: needs action_shape="),
        ({"obs_shape": {"a": sw.Field((2,), stack=4)}}, "expected a plain Field"),
        ({"obs_shape": {"a/b": (2,)}}, "expected names without '/'"),
    ],
)
def test_wrong_buffers_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        sw.RolloutBuffer(**{"num_envs": 4, "num_steps": 5, "obs_shape": (3,), **options})


def test_minibatches_refuse_what_cannot_be() -> None:
    roll = make(None)
    fill(roll, None)
    roll.compute_returns_and_advantages(np.zeros(ENVS))
    with pytest.raises(SchemaError, match="num_minibatches: expected at most the 20 rows, got 21"):
        roll.minibatches(21)
    with pytest.raises(SchemaError, match="num_minibatches: expected at most the 4 envs, got 5"):
        roll.recurrent_minibatches(5)
    with pytest.raises(SchemaError, match="normalize_advantages: expected 'rollout' or 'minibatch'"):
        roll.minibatches(2, normalize_advantages="all")  # type: ignore[arg-type]


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
def test_nothing_waits_for_the_device() -> None:
    roll = sw.RolloutBuffer(ENVS, STEPS, obs_shape=(3,), device="cuda", seed=0, autoreset="next_step")
    rows = [there(step(t, np.random.default_rng(t)), "cuda") for t in range(STEPS)]
    last = torch.zeros(ENVS, device="cuda")

    def cycle() -> None:
        roll.clear()
        for row in rows:
            roll.add(**row, truncated=row["dones"])
        roll.compute_returns_and_advantages(last)
        for _ in roll.minibatches(3, epochs=2, normalize_advantages="minibatch"):
            pass

    cycle()  # kernels are compiled once
    torch.cuda.set_sync_debug_mode("error")
    try:
        cycle()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
def test_a_cycle_in_a_cuda_graph_replays_equal() -> None:
    roll = sw.RolloutBuffer(64, 8, obs_shape=(3,), device="cuda", seed=0)
    stream = torch.Generator("cuda").manual_seed(0)
    source = {
        "observations": torch.zeros(8, 64, 3, device="cuda"),
        "actions": torch.zeros(8, 64, dtype=torch.int64, device="cuda"),
        **{name: torch.zeros(8, 64, device="cuda") for name in ("rewards", "dones", "values", "log_probs")},
    }
    last = torch.zeros(64, device="cuda")

    def cycle() -> None:
        roll.clear()
        for t in range(8):
            roll.add(**{name: value[t] for name, value in source.items()})
        roll.compute_returns_and_advantages(last)

    cycle()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cycle()
    for _ in range(3):
        for name in ("rewards", "values"):
            source[name].normal_(generator=stream)
        source["dones"].copy_((torch.rand(8, 64, generator=stream, device="cuda") < 0.2).float())
        last.normal_(generator=stream)
        graph.replay()
        replayed = {name: value.clone() for name, value in roll.all().items() if value is not None}
        want, _ = sw.returns.gae(source["rewards"], source["values"], source["dones"], last)
        torch.testing.assert_close(roll.advantages, want)
        cycle()
        assert all(torch.equal(roll.all()[name], value) for name, value in replayed.items())


# ---- usual steps are copied by C++, others are checked in Python -----------------------------------------------------

FORMS: dict[str, Any] = {
    "as it is": lambda a: a,
    "float64": lambda a: a.astype(np.float64),
    "float16": lambda a: a.astype(np.float16),
    "int32": lambda a: a.astype(np.int32),
    "int64": lambda a: a.astype(np.int64),
    "bool": lambda a: a.astype(bool),
    "longdouble": lambda a: a.astype(np.longdouble),
    "complex64": lambda a: a.astype(np.complex64),
    "strided": lambda a: np.repeat(a, 2, axis=0)[::2],
    "swapped": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "column": lambda a: a.reshape(ENVS, -1),
    "list": lambda a: a.tolist(),
    "short": lambda a: a[:-1],
    "nan": lambda a: np.full(a.shape, np.nan),
    "infinite": lambda a: np.full(a.shape, np.inf),
    "large": lambda a: np.full(a.shape, 1e39),
    "large whole": lambda a: np.full(a.shape, 2**40),
    "half": lambda a: np.full(a.shape, 0.5),
    "masked": lambda a: np.ma.masked_array(a, mask=np.ones(a.shape, bool)),
    "none": lambda a: None,
    "tensor": torch.from_numpy,
    "tensor with a graph": lambda a: torch.from_numpy(a.astype(np.float32)).requires_grad_(),
    "negated view": lambda a: torch._neg_view(torch.from_numpy(a.astype(np.float32))),
    "bfloat16": lambda a: torch.from_numpy(a.astype(np.float32)).bfloat16(),
    "on meta": lambda a: torch.from_numpy(a).to("meta"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", [None, "cpu"])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_both_ways_of_a_step_store_the_same_or_refuse_alike(
    form: str, place: Any, autoreset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> sw.RolloutBuffer:
        roll = sw.RolloutBuffer(
            ENVS, 6, obs_shape=(3,), device=place, extras={"level": sw.Field((), "int16")}, autoreset=autoreset, seed=0
        )
        for t in range(2):
            roll.add(**{name: there(value, place) for name, value in plain(t).items()})
        return roll

    def plain(t: int) -> dict[str, Any]:
        more: dict[str, Any] = {"level": np.full(ENVS, t, np.int16), "truncated": np.zeros(ENVS, bool)}
        if autoreset == "same_step":
            more["final_values"] = np.zeros(ENVS, np.float32)
        return step(t, np.random.default_rng(t), **more)

    def outcome(roll: sw.RolloutBuffer, changed: dict[str, Any]) -> Any:
        told = ""
        try:
            roll.add(**changed)
        except Exception as error:  # torch's own errors are passed on
            told = f"{type(error).__name__}: {error}"
        stored = {name: here(array).tobytes() for name, array in roll._columns.arrays.items()}
        return told, stored, roll._step

    quick = {name: build() for name in plain(0)}
    assert all(roll._columns.writer is not None for roll in quick.values())
    monkeypatch.setattr("sharpwave.rows.columns.Columns.use_writer", lambda *_: None)
    for name, roll in quick.items():
        twin = build()
        assert twin._columns.writer is None
        changed = plain(2) | {name: FORMS[form](plain(2)[name])}
        changed = {key: value for key, value in changed.items() if value is not None or key == name}
        first, second = outcome(roll, changed), outcome(twin, changed)
        assert first == second, name


def test_usual_steps_take_no_check_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: list[Any] = ["as it is", "float64", "float16", "strided", "swapped"]
    lends = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    for place in (None, "cpu"):
        roll = sw.RolloutBuffer(ENVS, 20, obs_shape=(3,), device=place, seed=0)
        roll.add(**step(0, np.random.default_rng(0)))
        if roll._columns.writer is None:
            pytest.skip("this torch cannot tell that its memory was written to")
        with monkeypatch.context() as patch:
            patch.setattr("sharpwave.rows.columns.Columns.check", None)
            for form in [*forms, *(["tensor", "tensor with a graph"] if place and lends else [])]:
                values = step(roll._step, np.random.default_rng(0))
                roll.add(**values | {name: FORMS[form](values[name]) for name in ("observations", "rewards", "values")})
        assert here(roll.log_probs)[roll._step - 1].tolist() == values["log_probs"].tolist()


def test_a_graph_over_a_rollout_notices_later_steps() -> None:
    roll = sw.RolloutBuffer(ENVS, 4, obs_shape=(3,), device="cpu")
    for t in range(2):
        roll.add(**there(step(t, np.random.default_rng(t)), "cpu"))
    weight = torch.ones(3, requires_grad=True)
    loss = (roll.observations[:2] * weight).sum()
    roll.add(**there(step(2, np.random.default_rng(2)), "cpu"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
