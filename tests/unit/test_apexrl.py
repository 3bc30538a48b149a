"""ApexRL's names: its two forms of arguments, nested observations, its slots, draws and state dicts.

Its own tests and algorithms run on these classes in ``tests/originals/apexrl.py``.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError

torch = pytest.importorskip("torch")
from sharpwave.compat.apexrl import ReplayBuffer, RolloutBuffer, TensorLeafSpec  # noqa: E402

SPEC = {"image": TensorLeafSpec((1, 2, 2), torch.uint8), "body": {"joints": (3,)}}


@dataclass(frozen=True)
class OtherSpec:
    """A leaf spec of another package."""

    shape: tuple[int, ...]
    dtype: Any


def nested(first: int, rows: int) -> dict[str, Any]:
    numbers = torch.arange(first, first + rows)
    image = (numbers % 256).to(torch.uint8).reshape(-1, 1, 1, 1).repeat(1, 1, 2, 2)
    return {"image": image, "body": {"joints": numbers.float()[:, None].repeat(1, 3)}}


def add(buffer: ReplayBuffer, first: int, rows: int, **further: Any) -> None:
    """Rows whose every number says which row it is."""
    numbers = torch.arange(first, first + rows)
    plain = not isinstance(buffer.obs_shape, dict)
    obs = numbers.float()[:, None] if plain else nested(first, rows)
    next_obs = numbers.float()[:, None] + 1 if plain else nested(first + 1, rows)
    buffer.add(
        observations=obs,
        actions=numbers,
        rewards=numbers.float(),
        next_observations=next_obs,
        dones=(numbers % 3 == 0).float(),
        **further,
    )


class Ring:
    """The slots of a ring, as slow and as plain as they can be."""

    def __init__(self, capacity: int) -> None:
        self.slots, self.pos = [0.0] * capacity, 0
        self.size = 0

    def add(self, first: int, rows: int) -> None:
        for number in range(first, first + rows):
            self.slots[self.pos] = float(number)
            self.pos = (self.pos + 1) % len(self.slots)
            self.size = min(self.size + 1, len(self.slots))


def filled(capacity: int, rows: int, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, (1,), **options)
    for first in range(0, rows, 3):
        add(buffer, first, min(3, rows - first))
    return buffer


# ---- leaf specs ------------------------------------------------------------------------------------------------------


def test_leaf_spec_equals_one_of_another_package_whichever_side_it_stands_on() -> None:
    ours, other = TensorLeafSpec((3,), torch.uint8), OtherSpec((3,), torch.uint8)
    assert ours == other
    assert other == ours
    assert (other != ours) is False
    assert {"a": other} == {"a": ours}
    assert ours != OtherSpec((4,), torch.uint8)
    assert ours != OtherSpec((3,), torch.float32)
    assert ours != (3,)
    assert len({ours, TensorLeafSpec((3,), torch.uint8)}) == 1
    assert pickle.loads(pickle.dumps(ours)) == ours
    with pytest.raises(AttributeError, match="'dtype' cannot be changed"):
        ours.dtype = torch.float32


def test_wrong_observation_shape_is_refused_by_the_constructor_with_its_place() -> None:
    for make in (lambda shape: ReplayBuffer(4, shape), lambda shape: RolloutBuffer(2, 2, shape)):
        with pytest.raises(SchemaError, match=r"obs_shape\['a'\]: .*shape"):
            make({"a": ("three",)})


# ---- replay: nested observations -------------------------------------------------------------------------------------


def test_nested_observations_keep_their_dtypes_and_their_rows() -> None:
    buffer = ReplayBuffer(50, SPEC, critic_obs_shape={"goal": (2,)})
    goal = torch.arange(50.0)[:, None].repeat(1, 2)
    add(buffer, 0, 50, critic_observations={"goal": goal}, next_critic_observations={"goal": goal + 1})
    batch = buffer.sample(30)
    rows = batch["rewards"]
    assert batch["observations"]["image"].dtype == torch.uint8
    assert batch["observations"]["body"]["joints"].dtype == torch.float32
    assert torch.equal(batch["observations"]["image"][:, 0, 1, 1].float(), rows)
    assert torch.equal(batch["observations"]["body"]["joints"][:, 2], rows)
    assert torch.equal(batch["next_observations"]["body"]["joints"][:, 0], rows + 1)
    assert torch.equal(batch["critic_observations"]["goal"][:, 0], rows)
    assert torch.equal(batch["next_critic_observations"]["goal"][:, 1], rows + 1)
    assert torch.equal(batch["dones"], (rows % 3 == 0).float())


def test_tensordicts_are_taken_and_given_where_the_package_is_installed() -> None:
    tensordict = pytest.importorskip("tensordict")
    buffer = ReplayBuffer(8, SPEC)
    obs = tensordict.TensorDict(nested(0, 4), batch_size=[])
    buffer.add(obs, torch.arange(4), torch.arange(4.0), obs, torch.zeros(4))
    batch = buffer.sample(4)
    assert isinstance(batch["observations"], tensordict.TensorDict)
    assert torch.equal(batch["observations"]["body", "joints"][:, 0], batch["rewards"])
    rollout = RolloutBuffer(4, 1, SPEC, (), torch.int64, "cpu")
    rollout.add(obs, None, torch.arange(4), *[torch.ones(4)] * 4)
    assert rollout.observations.batch_size == (1, 4)
    assert rollout.get_all_data()["observations"][2]["image"].flatten().tolist() == [2, 2, 2, 2]


def test_critic_observations_come_if_and_only_if_they_are_declared() -> None:
    critic = torch.zeros(3, 2)
    buffer = ReplayBuffer(5, (1,))
    with pytest.raises(SchemaError, match=r"critic_observations: the buffer has none; give it critic_obs_shape="):
        add(buffer, 0, 3, critic_observations=critic, next_critic_observations=critic)
    buffer = ReplayBuffer(5, (1,), critic_obs_shape=(2,))
    with pytest.raises(SchemaError, match=r"add\(\): next_critic_observations: missing"):
        add(buffer, 0, 3, critic_observations=critic)
    assert len(buffer) == 0


def test_bfloat16_is_taken_and_dtypes_without_a_numpy_one_are_refused() -> None:
    buffer = ReplayBuffer(5, (1,))
    numbers = torch.tensor([[0.5], [3.0]])
    buffer.add(numbers.bfloat16(), torch.arange(2), torch.ones(2, dtype=torch.bfloat16), numbers, torch.zeros(2))
    assert buffer.observations[:2].tolist() == numbers.tolist()
    with pytest.raises(
        SchemaError, match=r"add\(\): next_observations: expected a dtype that NumPy has too, got torch.float8"
    ):
        buffer.add(numbers, torch.arange(2), torch.ones(2), numbers.to(torch.float8_e5m2), torch.zeros(2))
    assert len(buffer) == 2


def test_batch_sizes_and_devices_that_make_no_sense_are_refused_by_name() -> None:
    buffer = filled(5, 3)
    for wrong in (2.5, True, "2", None, 0, 4):
        with pytest.raises(SchemaError, match=r"sample\(\): batch_size: expected 1 to the 3 rows held, got"):
            buffer.sample(wrong)
    with pytest.raises(SchemaError, match=r"ReplayBuffer\(\): device: expected a torch device, got 'nowhere'"):
        ReplayBuffer(5, (1,), device="nowhere")


# ---- replay: slots and draws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 2, 5, 7, 64, 1003, 2050])
def test_slots_and_draws_are_those_of_a_plain_ring_drawn_by_torch(capacity: int) -> None:
    torch.manual_seed(capacity)
    buffer, ring = ReplayBuffer(capacity, (1,)), Ring(capacity)
    first = 0
    for turn in range(12):
        rows = int(torch.randint(1, capacity + 1, ()))
        add(buffer, first, rows)
        ring.add(first, rows)
        first += rows
        assert (buffer.pos, buffer.size, buffer.full) == (ring.pos, ring.size, ring.size == capacity)
        assert buffer.rewards.tolist() == ring.slots
        torch.manual_seed(turn)
        drawn = buffer.sample(ring.size)
        after = torch.rand(1)
        torch.manual_seed(turn)
        slots = torch.randint(0, ring.size, (ring.size,))
        assert drawn["rewards"].tolist() == [ring.slots[slot] for slot in slots.tolist()]
        assert torch.equal(drawn["next_observations"][:, 0], drawn["rewards"] + 1)
        assert torch.equal(torch.rand(1), after), "as many numbers are taken from torch's generator"
        if turn == 5:
            buffer.clear()
            ring = Ring(capacity)
            assert (buffer.pos, buffer.size, buffer.full) == (0, 0, False)
        if turn == 8:
            other = ReplayBuffer(capacity, (1,))
            other.load_state_dict(buffer.state_dict())
            buffer = other


def test_seed_makes_draws_independent_of_torch() -> None:
    batches = []
    for torch_seed in (1, 2):
        torch.manual_seed(torch_seed)
        before = torch.get_rng_state()
        batches.append(filled(20, 20, seed=3).sample(20)["rewards"].tolist())
        assert torch.equal(torch.get_rng_state(), before)
    assert batches[0] == batches[1]


def test_threads_may_sample_while_others_add() -> None:
    buffer = filled(40, 40)
    errors: list[BaseException] = []
    stop = threading.Event()

    def draw() -> None:
        try:
            while not stop.is_set():
                batch = buffer.sample(32)
                assert torch.equal(batch["next_observations"][:, 0], batch["rewards"] + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=draw) for _ in range(3)]
    for thread in threads:
        thread.start()
    for first in range(40, 6_000, 15):
        add(buffer, first, 15)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not errors


def test_settings_of_a_replay_buffer_are_told_by_upstreams_names() -> None:
    buffer = ReplayBuffer(5, SPEC, (2,), "cpu", torch.float64)
    assert (buffer.capacity, buffer.action_shape, buffer.device) == (5, (2,), torch.device("cpu"))
    assert buffer.obs_shape is SPEC
    assert (buffer.obs_dtype, buffer.action_dtype, buffer.critic_obs_shape) == (torch.float64, None, None)
    assert buffer.observations["body"]["joints"].shape == (5, 3)
    assert buffer.observations["body"]["joints"].dtype == torch.float64
    assert buffer.critic_observations is None
    assert filled(5, 2).action_dtype == torch.int64


# ---- replay: columns -------------------------------------------------------------------------------------------------

WRITES: list[Callable[[Any], Any]] = [
    lambda column: column.add_(1),
    lambda column: column.__setitem__(0, 9.0),
    lambda column: column.__iadd__(1),
    lambda column: column[1:3].mul_(0),
    lambda column: column.view(5, 1)[2].zero_(),
    lambda column: column.unbind()[0].fill_(9),
    lambda column: torch.add(torch.ones(5), 1, out=column),
    lambda column: column.detach().copy_(torch.ones(5)),
    lambda column: setattr(column, "data", torch.ones(5)),
    lambda column: column.numpy().__setitem__(0, 9.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_columns_refuse_to_be_written_to_since_they_are_copies(write: Any) -> None:
    buffer = filled(5, 7)
    with pytest.raises(ValueError, match=r"ReplayBuffer.rewards is a copy: assign the changed values|read-only"):
        write(buffer.rewards)
    assert buffer.rewards.tolist() == [5, 6, 2, 3, 4]


def test_what_is_computed_from_columns_is_a_plain_tensor() -> None:
    rewards = filled(5, 7).rewards
    for made in (rewards * 2, rewards.clone(), rewards.mean(), torch.stack([rewards, rewards]), rewards[[0, 1]]):
        assert type(made) is torch.Tensor
        made.zero_()
    other = torch.zeros(5)
    other += rewards
    other.copy_(rewards)
    assert other.tolist() == rewards.tolist() == [5, 6, 2, 3, 4]


def test_assigned_column_is_what_batches_hold() -> None:
    buffer = filled(5, 7)
    buffer.rewards = buffer.rewards * 10
    assert buffer.rewards.tolist() == [50, 60, 20, 30, 40]
    assert buffer.observations[:, 0].tolist() == [5, 6, 2, 3, 4]
    assert set(buffer.sample(5)["rewards"].tolist()) <= {20.0, 30.0, 40.0, 50.0, 60.0}
    assert (buffer.pos, buffer.full) == (2, True)
    add(buffer, 7, 1)
    assert buffer.rewards.tolist() == [50, 60, 7, 30, 40]
    tree = ReplayBuffer(4, SPEC)
    add(tree, 0, 2)
    changed = nested(100, 4)
    tree.observations = changed
    assert tree.size == 2
    assert tree.observations["body"]["joints"][:2, 0].tolist() == [100, 101]


def test_column_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    buffer = filled(5, 7)
    with pytest.raises(SchemaError, match=r"ReplayBuffer.rewards: expected 5 rows, as many as its capacity, got 3"):
        buffer.rewards = torch.zeros(3)
    with pytest.raises(SchemaError):
        buffer.actions = torch.full((5,), 0.5)
    with pytest.raises(SchemaError, match="give it critic_obs_shape="):
        buffer.critic_observations = torch.zeros(5, 1)
    assert buffer.rewards.tolist() == [5, 6, 2, 3, 4]
    assert buffer.actions.tolist() == [5, 6, 2, 3, 4]


# ---- replay: state dicts ---------------------------------------------------------------------------------------------


def test_state_dict_has_upstreams_keys_and_slots() -> None:
    state = filled(5, 7).state_dict()
    keys = "capacity obs_shape action_shape obs_dtype action_dtype critic_obs_shape pos full size observations actions"
    assert set(state) == {*keys.split(), "rewards", "next_observations", "dones", "critic_observations"} | {
        "next_critic_observations"
    }
    assert (state["capacity"], state["pos"], state["full"], state["size"]) == (5, 2, True, 5)
    assert state["rewards"].tolist() == [5, 6, 2, 3, 4]
    assert type(state["rewards"]) is torch.Tensor
    part = filled(5, 2).state_dict()
    assert (part["pos"], part["full"], part["size"], part["rewards"].tolist()) == (2, False, 2, [0, 1])
    assert len(ReplayBuffer(5, (1,)).state_dict()["rewards"]) == 0


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6, 13])
def test_loaded_buffer_goes_on_at_the_same_slot(rows: int) -> None:
    buffer, other = filled(5, rows), filled(5, 3)
    other.load_state_dict(buffer.state_dict())
    for each in (buffer, other):
        add(each, 100, 3)
    assert other.state_dict()["rewards"].tolist() == buffer.state_dict()["rewards"].tolist()
    assert (other.pos, other.full, other.size) == (buffer.pos, buffer.full, buffer.size)


def test_state_with_the_leaf_specs_of_another_package_is_loaded() -> None:
    buffer = ReplayBuffer(6, {"image": OtherSpec((1, 2, 2), torch.uint8), "body": {"joints": (3,)}})
    add(buffer, 0, 4)
    other = ReplayBuffer(6, SPEC)
    other.load_state_dict(buffer.state_dict())
    assert other.observations["body"]["joints"][:4, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(SchemaError, match="obs_shape: expected"):
        ReplayBuffer(6, {**SPEC, "image": (1, 2, 2)}).load_state_dict(buffer.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 6}, "capacity: expected 5, got 6"),
        ({"obs_shape": (2,)}, r"obs_shape: expected \(1,\), got \(2,\)"),
        ({"action_shape": (1,)}, r"action_shape: expected \(\), got \(1,\)"),
        ({"critic_obs_shape": (1,)}, r"critic_obs_shape: expected None, got \(1,\)"),
        ({"size": 6}, "size: expected a whole number, 0 to 5, got 6"),
        ({"pos": 5}, "pos: expected a whole number, 0 to 4, got 5"),
        ({"size": 3}, "pos: expected 3, as size says, got 2"),
        ({"full": False}, "full: expected True, as size says, got False"),
        ({"rewards": torch.zeros(4)}, r"rewards: expected 5 rows, as size says, got shape \(4,\)"),
        ({"dones": None}, "dones: missing"),
        ({"actions": torch.full((5, 2), 1)}, "action"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    buffer = filled(5, 2)
    with pytest.raises(SchemaError, match=message):
        buffer.load_state_dict({**filled(5, 7).state_dict(), **change})
    assert buffer.rewards.tolist() == [0, 1, 0, 0, 0]
    assert (buffer.pos, buffer.size, buffer.full) == (2, 2, False)


# ---- rollout ---------------------------------------------------------------------------------------------------------


def step(buffer: RolloutBuffer, number: float, privileged: Any = None) -> None:
    numbers = torch.full((2,), number)
    buffer.add(numbers[:, None], privileged, numbers, numbers, torch.zeros(2), numbers, numbers)


def test_both_orders_of_constructor_arguments_are_taken() -> None:
    first = RolloutBuffer(2, 3, (1,), torch.device("cpu"), 4)
    newest = RolloutBuffer(2, 3, (1,), (2,), torch.float64, torch.device("cpu"), 4, {"a": (3,), "b": (1,)})
    named = RolloutBuffer(num_envs=2, num_steps=3, obs_shape=(1,), action_shape=(), action_dtype=torch.long)
    assert (first.action_shape, first.action_dtype) == (None, None)
    assert (newest.action_shape, newest.action_dtype) == ((2,), torch.float64)
    assert (named.action_shape, named.action_dtype, named.device) == ((), torch.int64, torch.device("cpu"))
    assert (first.num_privileged_obs, newest.num_privileged_obs, named.num_privileged_obs) == (4, 4, 0)
    assert first.privileged_observations.shape == (3, 2, 4)
    assert newest.privileged_observations["a"].shape == (3, 2, 3)
    assert named.privileged_observations is None
    assert (first.obs_shape, newest.privileged_obs_shape) == ((1,), {"a": (3,), "b": (1,)})
    step(first, 1.0, torch.zeros(2, 4))
    assert (first.action_shape, first.action_dtype) == ((), torch.float32)
    with pytest.raises(SchemaError, match="device: given by position and by name"):
        RolloutBuffer(2, 3, (1,), "cpu", device="cpu")
    with pytest.raises(SchemaError, match="at most 5 positional arguments, got 6"):
        RolloutBuffer(2, 3, (1,), "cpu", 4, (2,))
    with pytest.raises(SchemaError, match="num_envs_: expected one of action_shape"):
        RolloutBuffer(2, 3, (1,), num_envs_=3)


def test_first_rollout_is_read_whole_with_zeros_for_steps_that_are_missing() -> None:
    buffer = RolloutBuffer(2, 3, (1,), (), torch.float32, "cpu")
    step(buffer, 1.0)
    data = buffer.get_all_data()
    assert data["actions"].tolist() == [1, 1, 0, 0, 0, 0]
    assert data["advantages"].tolist() == [0] * 6
    assert len(buffer.get_minibatch(50)[0]) == 50


def test_rows_and_advantages_of_the_last_rollout_are_not_handed_out_as_this_ones() -> None:
    buffer = RolloutBuffer(2, 2, (1,), (), torch.float32, "cpu")
    for number in (1.0, 2.0):
        step(buffer, number)
    buffer.compute_returns_and_advantages(torch.ones(2))
    assert buffer.get_all_data()["advantages"].abs().min() > 0
    buffer.clear()
    step(buffer, 3.0)
    for read in (buffer.get_all_data, lambda: buffer.get_minibatch(2)):
        with pytest.raises(NotReady, match="1 of 2 steps, and the other rows are of the last rollout"):
            read()
    step(buffer, 4.0)
    assert buffer.get_all_data()["values"].tolist() == [3, 3, 4, 4]
    assert buffer.get_all_data()["advantages"].tolist() == [0] * 4


def test_advantages_that_are_assigned_instead_of_computed_come_back() -> None:
    buffer = RolloutBuffer(2, 2, SPEC["body"], (), torch.float32, "cpu")
    for number in (1.0, 2.0):
        numbers = torch.full((2,), number)
        buffer.add({"joints": torch.ones(2, 3)}, None, numbers, numbers, torch.zeros(2), numbers, numbers)
    buffer.advantages = torch.arange(4.0).reshape(2, 2)
    buffer.returns = torch.arange(4.0, 8).reshape(2, 2)
    buffer.observations = {"joints": torch.full((2, 2, 3), 7.0)}
    data = buffer.get_all_data()
    assert data["advantages"].tolist() == [0, 1, 2, 3]
    assert data["returns"].tolist() == [4, 5, 6, 7]
    assert data["observations"]["joints"].tolist() == [[7, 7, 7]] * 4


def test_number_of_privileged_observations_alone_waits_for_the_first_step_in_the_newest_form() -> None:
    # What upstream's PPO passes where the environment tells a number and gives no such observations.
    without = RolloutBuffer(2, 2, (1,), (), torch.float32, "cpu", 3)
    step(without, 1.0)
    with pytest.raises(SchemaError, match="privileged_observations: the buffer has no such field"):
        step(without, 1.0, torch.zeros(2, 3))
    step(without, 1.0)
    assert without.get_all_data()["privileged_observations"] is None
    given = RolloutBuffer(2, 2, (1,), (), torch.float32, "cpu", 3)
    with pytest.raises(SchemaError, match=r"privileged_observations: expected shape \(2, 3\), got \(2, 4\)"):
        step(given, 1.0, torch.zeros(2, 4))
    assert given.privileged_observations is None
    step(given, 1.0, torch.full((2, 3), 5.0))
    with pytest.raises(SchemaError, match="missing privileged_observations"):
        step(given, 1.0)
    step(given, 1.0, torch.full((2, 3), 6.0))
    assert given.privileged_observations[0].tolist() == [[5, 5, 5]] * 2


def test_minibatches_of_nested_rollouts_cover_each_row_once() -> None:
    buffer = RolloutBuffer(2, 3, SPEC, (), torch.int64, "cpu", 0, {"goal": (2,)}, seed=0)
    for number in range(3):
        rows = torch.arange(2.0) + 2 * number
        goal = {"goal": rows[:, None].repeat(1, 2)}
        buffer.add(nested(2 * number, 2), goal, rows.long(), rows, torch.zeros(2), rows, rows)
    buffer.compute_returns_and_advantages(torch.zeros(2))
    seen = []
    for batch in buffer.minibatches(2):
        assert torch.equal(batch["observations"]["body"]["joints"][:, 0], batch["values"])
        assert torch.equal(batch["privileged_observations"]["goal"][:, 1], batch["values"])
        seen += batch["values"].tolist()
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]


def test_minibatch_is_drawn_by_torchs_generator() -> None:
    buffer = RolloutBuffer(2, 3, (1,), (), torch.float32, "cpu")
    for number in range(3):
        step(buffer, float(number))
    torch.manual_seed(5)
    drawn = buffer.get_minibatch(10)
    torch.manual_seed(5)
    rows = torch.randint(0, 6, (10,))
    assert torch.equal(drawn[2], buffer.actions.reshape(-1)[rows])


def test_saved_rollout_opens_as_ours_and_a_closed_one_raises(tmp_path: Any) -> None:
    buffer = RolloutBuffer(2, 2, {"a": (1,)}, (), torch.float32, "cpu", 3, seed=0)
    given = {name: torch.rand(2) for name in ("actions", "rewards", "values", "log_probs")}
    for _ in range(2):
        buffer.add(
            observations={"a": torch.rand(2, 1)},
            privileged_observations=torch.rand(2, 3),
            dones=torch.zeros(2),
            **given,
        )
    buffer.compute_returns_and_advantages(torch.ones(2))
    buffer.save(tmp_path / "roll.sw")
    again = sw.open(tmp_path / "roll.sw", device="cpu")
    assert type(again) is sw.RolloutBuffer
    ours, theirs = again.all(), buffer.get_all_data()
    for name in ("privileged_observations", "actions", "advantages", "returns", "old_log_probs"):
        assert torch.equal(ours[name], theirs[name])
    assert torch.equal(ours["observations"]["a"], theirs["observations"]["a"])
    assert [b["actions"].tolist() for b in again.minibatches(2)] == [
        b["actions"].tolist() for b in buffer.minibatches(2)
    ]
    buffer.close()
    for verb in (buffer.get_all_data, lambda: buffer.get_minibatch(1), lambda: buffer.to("cpu"), buffer.clear):
        with pytest.raises(ClosedError, match="the buffer is closed"):
            verb()
    assert repr(buffer) == "<RolloutBuffer on cpu: closed>"
