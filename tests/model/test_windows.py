"""Windows: of one piece at every seam, masked rightly, every legal anchor and no other, with every sampler."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from order_model import (
    RANDOM,
    Draw,
    OrderModel,
    OrderPair,
    Single,
    Slices,
    chi_square,
    enough,
    eta_mix,
    letters,
    pairwise,
)
from replay_model import Step

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError

SAMPLERS: dict[str, Draw] = {
    "Uniform": Draw("Uniform"),
    "Uniform newest": Draw("Uniform", newest=2),
    "Prioritized": Draw("Prioritized", settings={"alpha": 0.5}),
    "Prioritized ranks": Draw("Prioritized", settings={"rank_based": True, "alpha": 0.0}),
    "Recent": Draw("Recent", n=5),
    "Shuffle": Draw("Shuffle"),
    "Fifo": Draw("Fifo"),
    "Lifo": Draw("Lifo"),
}


def schema(stack: int = 1, compression: str | None = None) -> dict[str, Any]:
    return {
        "obs": {
            "image": sw.Field((3, 2), "uint8", stack=stack, compression=compression),
            "sound": sw.Field((2,), "int16", stack=stack, padding="zero" if stack > 1 else "repeat"),
            "state": sw.Field((2,)),
        },
        "action": sw.Field((), "int64"),
        "memory": sw.Field((2,), "uint32"),  # a recurrent network's state before the step
    }


def feed(pair: OrderPair, stream: np.random.Generator, steps: int, kinds: str = "........TURBM") -> None:
    """Environments step in turn where nobody said how many there are."""
    if pair.buffer.num_envs is None:
        for code in letters(stream, steps, kinds):
            pair.add(code, ())
    else:
        pair.add(letters(stream, steps * pair.model.width, kinds))


# ---- the model, by hand ----------------------------------------------------------------------------------------------


def by_hand(codes: str, view: Single | Slices, capacity: int = 100, draw: Draw | None = None) -> OrderModel:
    """A model with one stream; row i has the serial i."""
    draw = Draw() if draw is None else draw
    model = OrderModel(capacity, {"obs": sw.Field(())}, view=view, draw=draw, next_obs=None)
    for number, code in enumerate(codes):
        frames = {"obs": np.float32(number), "reward": np.float32(number)}
        step = Step(number, frames, terminated=code == "T", truncated=code == "U", masked=code == "M")
        step.serial = number
        model.add(None, [step])
    return model


def starts(model: OrderModel) -> list[int]:
    return [step.number for step in model.legal_starts()]


@pytest.mark.parametrize(
    ("view", "wanted"),
    [
        # Six rows and an end, two rows and an end, three rows so far.
        (Slices(3), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (Slices(3, stride=2), [0, 2, 4, 6, 8, 10]),
        (Slices(3, end="stop"), [0, 1, 2, 3, 6, 8]),
        (Slices(3, stride=2, end="stop"), [0, 2, 6, 8]),
        (Slices(4, end="stop"), [0, 1, 2, 6]),
        (Slices(7, end="stop"), [0, 6]),
        (Slices(3, end="cross"), [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (Slices(3, stride=4, end="cross"), [0, 4, 8]),
        (Slices(3, bootstrap=1, end="stop"), [0, 1, 2, 3, 6, 8]),
        (Slices(12, end="cross"), []),
        (Slices(3, start="episode"), [0, 6, 8]),
        (Slices(3, end="stop", start="episode"), [0, 6, 8]),
        (Slices(4, end="stop", start="episode"), [0, 6]),
        (Slices(4, end="cross", start="episode"), [0, 6]),
        (Slices(3, start="per_episode"), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
    ids=str,
)
def test_starts_worked_out_by_hand(view: Slices, wanted: list[int]) -> None:
    assert starts(by_hand(".....T.U...", view)) == wanted


def test_starts_of_a_wrapped_ring_worked_out_by_hand() -> None:
    # Rows 4 to 10 are left: two of an episode of six, two of one of two, three of an open one.
    wrapped = {"codes": ".....T.U...", "capacity": 7}
    assert starts(by_hand(view=Slices(3, end="stop"), **wrapped)) == [6, 8]  # type: ignore[arg-type]
    assert starts(by_hand(view=Slices(2, end="stop"), **wrapped)) == [4, 6, 8, 9]  # type: ignore[arg-type]
    assert starts(by_hand(view=Slices(3, end="cross"), **wrapped)) == [4, 5, 6, 7, 8]  # type: ignore[arg-type]
    # Row 7 is the oldest: the short episode has lost its first row.
    assert starts(by_hand(".....T.U...", Slices(3, end="stop"), capacity=4)) == [8]
    # An episode whose first row is gone has no beginning.
    assert starts(by_hand(view=Slices(3, start="episode"), **wrapped)) == [6, 8]  # type: ignore[arg-type]
    # Nobody looked for a lap: counted from what is left. Somebody did: from the true start.
    model = by_hand("........", Slices(2, stride=3), capacity=4)
    assert starts(model) == [4, 7]
    model = by_hand("....", Slices(2, stride=3), capacity=4)
    for number in range(4, 8):
        model.look()
        step = Step(number, {"obs": np.float32(0), "reward": np.float32(0)}, serial=number)
        model.add(None, [step])
    assert starts(model) == [6]


def test_windows_worked_out_by_hand() -> None:
    def told(model: OrderModel, anchor: int) -> tuple[list[int], str, str, str]:
        window = model.window(model.ring[anchor])
        bits = ("".join("01"[bit] for bit in row) for row in (window.valid, window.mask, window.first))
        return ([step.number for step in window.shown], *bits)  # type: ignore[return-value]

    model = by_hand(".....T.U...", Slices(3, burn_in=2, bootstrap=1))
    assert told(model, 2) == ([0, 1, 2, 3, 4, 5], "111111", "001110", "100000")
    assert told(model, 0) == ([0, 1, 2, 3, 3, 3], "111100", "111000", "100000")  # no burn-in: no place for it
    assert told(model, 1) == ([0, 1, 2, 3, 4, 4], "111110", "011100", "100000")
    assert told(model, 4) == ([2, 3, 4, 5, 5, 5], "111100", "001100", "000000")
    assert told(model, 7) == ([6, 7, 7, 7, 7, 7], "110000", "010000", "100000")
    assert told(model, 9) == ([8, 9, 10, 10, 10, 10], "111000", "011000", "100000")
    model = by_hand(".....T.U...", Slices(3, burn_in=2, bootstrap=1, end="cross"))
    assert told(model, 6) == ([4, 5, 6, 7, 8, 9], "111111", "001110", "001010")
    assert told(model, 8) == ([6, 7, 8, 9, 10, 10], "111110", "001110", "101000")
    # Masked rows are not there: 3 follows 1.
    model = by_hand("..M.M..", Slices(2, burn_in=1, bootstrap=1))
    assert told(model, 3) == ([1, 3, 5, 6], "1111", "0110", "0000")


def test_orders_worked_out_by_hand() -> None:
    model = by_hand(".....", Single(), draw=Draw("Fifo", max_reads=2))
    first, second, third, *_ = rows = model.rows()
    model.accept([first, second])
    model.accept([first, second, third])
    assert model.rows_consumed == 2
    assert starts(model) == [2, 3, 4]
    model = by_hand(".....", Single(), draw=Draw("Shuffle"))
    model.accept(list(model.rows()[:3]))
    assert (model.epoch, len(model.epoch_left)) == (1, 2)
    rows = model.rows()
    model.accept([rows[4], rows[3], rows[0], rows[4]])
    assert (model.epoch, len(model.epoch_left)) == (2, 3)
    with pytest.raises(AssertionError):
        model.accept([rows[0]])


# ---- seams -----------------------------------------------------------------------------------------------------------

# length, burn_in, stride, bootstrap, steps of an environment that fit
SHAPES = list(itertools.product((1, 2, 5), (0, 3), (1, 3), (0, 2), (4, 11)))
# What else a view may be asked for.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sums": {"n_step": 3},
    "more arrays": {"truncated": True, "place_indices": True},
    "starts": {"start": "episode"},
    "all": {"n_step": 2, "truncated": True, "place_indices": True, "start": "episode"},
}
OTHERS = (tuple(SAMPLERS), ("stored", "derived", None), (1, 2), (None, "lz4"), tuple(ASKED))


@functools.cache
def cells() -> list[tuple[Any, ...]]:
    return pairwise(OTHERS, SHAPES)


def look_at_everything(pair: OrderPair) -> None:
    """Every legal anchor appears, and every window is the model's."""
    legal = pair.legal_starts()
    if not legal:
        assert pair.refuse_or_sample(max(1, pair.model.draw.newest)) is None
        return
    draw = pair.model.draw
    wanted = {step.serial for step in (legal[-draw.n :] if draw.kind == "Recent" else legal)}
    if draw.kind in RANDOM:
        seen = set(pair.sample(draw.newest + enough(len(wanted)))["indices"][draw.newest :].tolist())
    else:
        pair.refuse_or_sample(len(legal) + 1)
        # Of two epochs' worth of a shuffle a whole epoch is a part.
        seen = {serial for _ in range(2) for serial in pair.sample(len(legal))["indices"].tolist()}
    assert seen == wanted


@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("end", ["pad", "stop", "cross"])
def test_every_window_is_of_one_piece_and_every_anchor_appears(end: str, num_envs: int | None) -> None:
    for cell, (length, burn_in, stride, bootstrap, steps, *others) in enumerate(cells()):
        sampler, next_obs, stack, compression, asked = others
        stride = 1 if "start" in ASKED[asked] else stride  # a beginning has no second step
        stream = np.random.default_rng([cell, num_envs or 0])
        # A masked row has no bytes of its own: where bytes are few, the next row's make room for others early, and with
        # stacks that takes a row with it (counted as retired).
        signs = "...........TTURB" + ("M" if compression is None else "")
        pair = OrderPair(
            steps * (num_envs or 1),
            schema(stack, compression),
            view=Slices(length, burn_in, stride, bootstrap, end, **ASKED[asked]),
            draw=SAMPLERS[sampler],
            next_obs=next_obs,
            num_envs=num_envs,
            writers=1,
        )
        try:
            look_at_everything(pair)
            for _ in range(7 if MORE > 1 else 3):
                feed(pair, stream, int(stream.integers(1, min(steps, 5) + 1)), signs)
                look_at_everything(pair)
            # Past the seam at every offset of the block.
            feed(pair, stream, steps)
            look_at_everything(pair)
        except Exception as error:
            raise AssertionError(f"{length=} {burn_in=} {stride=} {bootstrap=} {steps=} {others=}") from error
        finally:
            pair.close()


@pytest.mark.parametrize("end", ["pad", "stop", "cross"])
@pytest.mark.parametrize("added", range(1, 30, 2))
def test_newest_row_never_goes_on_in_the_oldest(added: int, end: str) -> None:
    pair = OrderPair(
        7, {"obs": sw.Field(())}, view=Slices(3, 2, bootstrap=2, end=end), draw=Draw("Fifo"), next_obs=None
    )
    for _ in range(added):
        pair.add(".", ())
    if added < 3 and end != "pad":
        assert pair.refuse_or_sample(1) is None
        return
    oldest = max(0, added - 7)
    last = added - 1 if end == "pad" else added - 3
    batch = pair.sample(last - oldest + 1)
    ids = batch["id"]
    rows = range(oldest, last + 1)
    assert ids[:, 0].tolist() == [max(oldest, anchor - 2) for anchor in rows]
    assert (np.diff(ids, axis=1)[batch["valid"][:, 1:]] == 1).all()
    assert ids.max() == added - 1


def test_several_writers_are_several_streams() -> None:
    stream = np.random.default_rng(5)
    for end, num_envs in itertools.product(("pad", "stop", "cross"), (1, 3)):
        view = Slices(4, 2, bootstrap=1, end=end)
        pair = OrderPair(3000, schema(), view=view, draw=Draw("Fifo"), next_obs="derived", num_envs=num_envs, writers=4)
        names = [pair.open_writer() for _ in range(3)]
        for _ in range(60):
            pair.add(letters(stream, num_envs * int(stream.integers(1, 4))), writer=names[int(stream.integers(3))])
        pair.check()
        pair.sample(len(pair.legal_starts()))
        pair.close_writer(names[0])  # ends its episodes: short ones may start now
        pair.sample(len(pair.legal_starts()))
        pair.refuse_or_sample(len(pair.legal_starts()) + 1)
        pair.close()


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized", "Shuffle"])
@pytest.mark.parametrize("end", ["pad", "stop", "cross"])
def test_windows_are_whole_while_writers_wrap(end: str, kind: str) -> None:
    """Each writer counts up, eleven steps an episode: the numbers tell whether a window was put together rightly."""
    buffer = sw.ReplayBuffer(
        400,
        schema={"obs": sw.Field((20,), "int64")},
        next_obs="derived",
        view=sw.Windows(5, burn_in=2, bootstrap=1, end=end),
        sampler=Draw(kind).public(),
        writers=4,
        seed=0,
    )
    stop = threading.Event()
    errors: list[BaseException] = []
    drawn = 0

    def write(number: int) -> None:
        with buffer.writer() as writer:
            while not stop.is_set():
                obs = np.full(20, number)
                writer.add(obs=obs, reward=0.0, next_obs=obs + 1, done=False, truncated=number % 11 == 10)
                number += 1

    def read() -> None:
        nonlocal drawn
        while not stop.is_set():
            try:
                batch = buffer.sample(16)
            except NotReady:
                continue
            obs, after = batch["obs"], batch["next_obs"]
            assert (obs == obs[:, :, :1]).all()
            assert (after == obs + 1).all()
            obs, valid = obs[:, :, 0], batch["valid"]
            assert ((np.diff(obs, axis=1) == 1) == valid[:, 1:]).all()
            if end != "cross":
                assert (obs // 11 == obs[:, :1] // 11).all()
            assert (batch["first"] == (valid & (obs % 11 == 0))).all()
            if kind == "Prioritized":
                buffer.update_priorities(batch["indices"], obs % 7, mask=batch["mask"])
            drawn += 1

    def guarded(job: Callable[..., None], *args: Any) -> None:
        try:
            job(*args)
        except BaseException as error:
            errors.append(error)
            stop.set()

    jobs = [(write, 0), (write, 11 * 10**9), (read,), (read,)]
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    stop.wait(0.6)
    stop.set()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert drawn > 0


# ---- how often -------------------------------------------------------------------------------------------------------

# Episodes of 2, 9, 5 and, still open, 4 rows.
EPISODES = ".T........T....T...."


def filled(view: Slices, draw: Draw, codes: str = EPISODES, capacity: int = 40, **options: Any) -> OrderPair:
    pair = OrderPair(capacity, schema(), view=view, draw=draw, next_obs="derived", **options)
    for code in codes:
        pair.add(code, ())
    pair.check()
    return pair


def counts_of(pair: OrderPair, draws: int) -> Counter[int]:
    """By the row's number."""
    by_serial = {step.serial: step.number for step in pair.model.rows()}
    return Counter(by_serial[serial] for serial in pair.buffer.sample(draws)["indices"].tolist())


@pytest.mark.parametrize("end", ["pad", "stop", "cross"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("draw", [Draw(), Draw("Recent", n=7), Draw("Prioritized")], ids=lambda draw: draw.kind)
def test_every_start_is_equally_likely(draw: Draw, stride: int, end: str) -> None:
    pair = filled(Slices(4, 1, stride, end=end), draw)
    legal = [step.number for step in pair.legal_starts()][-draw.n :]
    draws = 2000 * len(legal)
    counts = counts_of(pair, draws)
    assert set(counts) == set(legal)
    assert chi_square([counts[number] for number in legal], [2000] * len(legal)) < 5


@pytest.mark.parametrize("end", ["pad", "stop", "cross"])
@pytest.mark.parametrize("capacity", [40, 12])
def test_every_episode_is_equally_likely_and_every_start_in_it(capacity: int, end: str) -> None:
    pair = filled(Slices(4, 1, end=end, start="per_episode"), Draw(), capacity=capacity)
    legal = pair.legal_starts()
    episode = {step.number: int(step.values["where"][1]) for step in legal}
    sizes = Counter(episode.values())
    assert len(sizes) > 1
    draws = 60_000
    counts = counts_of(pair, draws)
    expected = {number: draws / len(sizes) / sizes[its] for number, its in episode.items()}
    assert set(counts) == set(expected)
    assert chi_square([counts[number] for number in expected], expected.values()) < 5
    by_episode: Counter[int] = Counter()
    for number, count in counts.items():
        by_episode[episode[number]] += count
    assert chi_square(by_episode.values(), [draws / len(sizes)] * len(sizes)) < 5


def test_episode_starts_are_followed_through_wraps() -> None:
    stream = np.random.default_rng(1)
    view = Slices(3, 1, 2, end="stop", start="per_episode")
    pair = OrderPair(36, schema(), view=view, draw=Draw(), next_obs="derived", num_envs=3)
    for _ in range(40 if MORE > 1 else 20):
        feed(pair, stream, 2)
        legal = {step.serial for step in pair.legal_starts()}
        if legal:
            # The rarest start has at least a share of one in episodes times rows.
            assert set(pair.sample(enough(len(legal) ** 2))["indices"].tolist()) == legal


# ---- priorities of windows -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0.9, 0.5, 0.0, 1.0])
def test_priority_is_mixed_over_the_learning_rows_only(eta: float) -> None:
    settings = {"alpha": 1.0, "beta": 0.5, "eps": 0.0}
    view = Slices(3, burn_in=2, bootstrap=1, priority_eta=eta)
    pair = filled(view, Draw("Prioritized", settings=settings))
    stream = np.random.default_rng(3)
    batch = pair.sample(64)
    errors = stream.normal(size=(64, 6)).astype(np.float32)
    errors[~batch["mask"]] = 1e9  # of no consequence
    report = pair.buffer.update_priorities(batch["indices"], errors, mask=batch["mask"])
    mixed = eta_mix(errors, batch["mask"], eta)
    assert report == pair.model.update(batch["indices"].tolist(), mixed.tolist())
    assert report["applied"] == 64
    pair.sample(200)  # compares the probabilities
    # One error a window goes on as before.
    pair.buffer.update_priorities(batch["indices"], errors[:, 0])
    pair.model.update(batch["indices"].tolist(), errors[:, 0].tolist())
    pair.sample(200)


def test_numeric_example_of_the_mix() -> None:
    pair = filled(Slices(3, burn_in=1), Draw("Prioritized", settings={"alpha": 1.0, "eps": 0.0}), codes="...T")
    serial = pair.legal_serials()
    batch = pair.sample(50)
    masks = {tuple(ids): mask for ids, mask in zip(batch["id"].tolist(), batch["mask"].tolist(), strict=True)}
    assert masks[(0, 1, 2, 3)] == [False, True, True, True]
    # 0.9 * 4 + 0.1 * 2 = 3.8, of 3.8 + 1 + 1 + 1
    pair.buffer.update_priorities([serial[1]], [[100.0, -4.0, 1.0, 1.0]], mask=[[False, True, True, True]])
    found = pair.buffer.sample(50)
    chance = dict(zip(found["indices"].tolist(), found["probabilities"].tolist(), strict=True))
    assert chance[serial[1]] == pytest.approx(3.8 / 6.8)
    assert chance[serial[0]] == pytest.approx(1 / 6.8)


def test_errors_of_places_that_do_not_count_may_be_anything() -> None:
    pair = filled(Slices(3, burn_in=1), Draw("Prioritized", settings={"alpha": 1.0, "eps": 0.0}))
    batch = pair.sample(16)
    errors = np.where(batch["mask"], 2.0, np.nan)
    assert pair.buffer.update_priorities(batch["indices"], errors, mask=batch["mask"])["applied"] == 16
    pair.model.update(batch["indices"].tolist(), [2.0] * 16)
    pair.sample(100)


def test_stored_state_is_that_of_the_first_place(tmp_path: Path) -> None:
    """After wraps and after save and open: a recurrent network starts from the state its window starts with."""
    stream = np.random.default_rng(2)
    view = Slices(4, burn_in=3, bootstrap=1)
    pair = OrderPair(20, schema(), view=view, draw=Draw("Prioritized"), next_obs="derived", num_envs=2)
    for turn in range(25):
        feed(pair, stream, 3)
        pair.check()
        pair.buffer.save(tmp_path / f"snapshot {turn}")
        for buffer in (pair.buffer, sw.open(tmp_path / f"snapshot {turn}")):
            batch = buffer.sample(40)
            by_id = {step.number: step for step in pair.model.rows()}
            wanted = [by_id[number].values["memory"].tolist() for number in batch["id"][:, 0].tolist()]
            assert batch["memory"][:, 0].tolist() == wanted
            anchors = buffer.get(batch["indices"])
            b = batch["mask"].argmax(axis=1)
            assert anchors["id"].tolist() == batch["id"][np.arange(40), b].tolist()
        pair.calls += 1


# ---- random calls ----------------------------------------------------------------------------------------------------


@st.composite
def slices(draw: Callable[..., Any]) -> Slices:
    start = draw(st.sampled_from(["uniform", "uniform", "episode"]))
    return Slices(
        draw(st.integers(1, 6)),
        draw(st.integers(0, 4)),
        1 if start == "episode" else draw(st.integers(1, 4)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from(["pad", "stop", "cross"])),
        start,
        n_step=draw(st.sampled_from([1, 1, 2, 5])),
        truncated=draw(st.booleans()),
        place_indices=draw(st.booleans()),
    )


class WindowCalls(RuleBasedStateMachine):
    """Random streams of one writer. Fifo without a limit shows all legal anchors, in order, in one call."""

    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        draw = data.draw
        self.num_envs = draw(st.sampled_from([None, 1, 3]))
        width = self.num_envs or 1
        kind = draw(st.sampled_from(["Fifo", "Fifo", "Lifo", "Shuffle", "Uniform", "Prioritized", "Recent"]))
        newest = draw(st.integers(0, 3)) if kind in RANDOM else 0
        self.pair = OrderPair(
            width * draw(st.integers(1, 14)),
            schema(draw(st.sampled_from([1, 1, 2]))),
            view=draw(slices()),
            draw=Draw(kind, n=draw(st.integers(1, 9)), newest=newest),
            next_obs=draw(st.sampled_from(["derived", "stored", None])),
            num_envs=self.num_envs,
            writers=1,
        )
        self.unseen = 0  # steps since somebody looked

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check_memory()
            self.pair.close()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        width, capacity = self.pair.model.width, self.pair.model.capacity
        steps = 1 if self.num_envs is None else data.draw(st.integers(1, min(6, capacity // width)))
        if self.unseen + steps > capacity // width:
            self.look()  # what becomes of step numbers without it has a test of its own
        codes = "".join(data.draw(st.sampled_from(".......TURBMM")) for _ in range(steps * width))
        self.pair.add(codes, () if self.num_envs is None else None)
        self.unseen += steps
        self.pair.check()

    @precondition(lambda self: self.pair.model.draw.kind not in RANDOM)
    @rule()
    def look(self) -> None:
        legal = len(self.pair.legal_starts())
        self.unseen = 0
        self.pair.refuse_or_sample(legal + 1)
        if legal:
            self.pair.refuse_or_sample(legal)  # fewer than newest= may be there

    @precondition(lambda self: self.pair.model.draw.kind in RANDOM)
    @rule(n=st.sampled_from([1, 2, 5, 60]))
    def draw_some(self, n: int) -> None:
        self.unseen = 0
        self.pair.refuse_or_sample(n)

    @rule(really=st.sampled_from([False, False, True]))
    def clear(self, really: bool) -> None:
        if really:
            self.pair.clear()
            self.unseen = 0


MORE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 1
TestWindowCalls = WindowCalls.TestCase
TestWindowCalls.settings = settings(max_examples=MORE * 35, stateful_step_count=25)


# ---- what has no meaning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Prioritized", "Recent", "Shuffle", "Fifo", "Lifo"])
def test_episodes_are_equally_likely_only_with_uniform_draws(kind: str) -> None:
    with pytest.raises(SchemaError, match="start"):
        OrderPair(10, schema(), view=Slices(3, start="per_episode"), draw=Draw(kind, n=3))
