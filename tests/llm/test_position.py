"""The data position against a model that remembers every item of every epoch."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sharpwave.errors import SchemaError
from sharpwave.llm.items import Items
from sharpwave.llm.position import Position


class Positions(RuleBasedStateMachine):
    """Items are out (at agents), held (in a buffer) or settled; the model has three sets and a list of trained keys."""

    @initialize(count=st.integers(1, 6), epochs=st.integers(1, 3), seed=st.integers(0, 5), is_shuffled=st.booleans())
    def begin(self, count, epochs, seed, is_shuffled):
        self.options = {"epochs": epochs, "seed": seed, "shuffle": is_shuffled}
        self.items = Items([{"id": f"x/{place}"} for place in range(count)])
        self.every = {f"{epoch}/x/{place}" for epoch in range(epochs) for place in range(count)}
        self.position = Position(self.items, **self.options)
        self.out, self.held, self.trained, self.left_out = set(), set(), [], set()
        self.save()

    def save(self):
        """A checkpoint, with what the buffer would undo at a resume."""
        self.saved = json.loads(json.dumps(self.position.to_json()))
        self.trained_then, self.left_out_then = list(self.trained), set(self.left_out)

    @property
    def settled(self):
        return {*self.trained, *self.left_out}

    @precondition(lambda self: self.position.has_next)
    @rule()
    def hand_out(self):
        key = self.position.next()
        assert key in self.every - self.settled - self.out - self.held
        self.out.add(key)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), then=st.sampled_from(["lose", "give_back", "hold", "hold", "no_signal", "rejected"]))
    def end_work(self, data, then):
        key = data.draw(st.sampled_from(sorted(self.out)))
        self.out.remove(key)
        if then == "lose":
            is_next = data.draw(st.booleans())
            assert self.position.lose(key, limit=10**9, is_next=is_next)
            if is_next:
                assert self.position.peek() == key
        elif then == "give_back":
            self.position.give_back(key)
        elif then == "hold":
            self.held.add(key)
        else:
            self.position.settle(key, then)
            self.left_out.add(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def train(self, data):
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove(key)
        self.position.settle(key, "trained")
        self.trained.append(key)

    @rule()
    def checkpoint(self):
        self.save()

    @rule(is_resumed=st.booleans())
    def restart(self, is_resumed):
        """Work on its way is lost; a learner that resumes undoes what it trained since the checkpoint."""
        if is_resumed:
            self.held |= set(self.trained[len(self.trained_then) :])
            self.trained = list(self.trained_then)
        self.left_out = set(self.left_out_then)
        self.out = set()
        self.position = Position(self.items, **self.options)
        self.position.restore(self.saved, sorted(self.held), list(self.trained))

    @rule(data=st.data())
    def claim(self, data):
        key = data.draw(st.sampled_from(sorted(self.every)))
        is_free = key not in self.settled | self.out | self.held
        assert self.position.claim(key) == is_free
        if is_free:
            self.out.add(key)

    @invariant()
    def counts_agree(self):
        outcomes = self.position.outcomes
        assert outcomes["trained"] == len(self.trained)
        assert outcomes["no_signal"] + outcomes["rejected"] == len(self.left_out)
        assert self.out | self.held <= self.position.open.keys()
        assert self.position.is_over == (self.settled == self.every)
        assert self.position.has_next == bool(self.every - self.settled - self.out - self.held)

    def teardown(self):
        """Every run can be brought to its end."""
        if not hasattr(self, "position"):
            return
        for key in sorted(self.out | self.held):
            self.position.settle(key, "trained")
            self.trained.append(key)
        while self.position.has_next:
            key = self.position.next()
            self.position.settle(key, "trained")
            self.trained.append(key)
        assert self.position.is_over
        assert sorted(self.trained) == sorted(self.every - self.left_out)


TestPositions = Positions.TestCase
TestPositions.settings = settings(max_examples=60, stateful_step_count=40)


def test_an_epoch_in_which_nothing_was_trained_is_noticed():
    position = Position(Items([{}, {}]), shuffle=False)
    for outcome in ("no_signal", "trained", "rejected", "no_signal"):
        assert position.empty_epoch is None
        position.settle(position.next(), outcome)
    assert (position.empty_epoch, position.has_rejected) == (1, True)


@pytest.mark.parametrize("first", ["no_signal", "rejected"])
def test_whether_items_of_an_empty_epoch_were_rejected_is_in_the_checkpoint(first):
    items = Items([{}, {}])
    position = Position(items, shuffle=False)
    position.settle(position.next(), first)
    again = Position(items, shuffle=False)
    again.restore(position.to_json(), [], [])
    again.settle(again.next(), "no_signal")
    assert (again.empty_epoch, again.has_rejected) == (0, first == "rejected")


def test_keys_that_are_open_are_the_last_after_close():
    position = Position(Items([{} for _ in range(3)]), shuffle=False)
    first, second = position.next(), position.next()
    position.close()
    assert not position.has_next
    position.lose(second, limit=1)
    assert position.next() == second
    position.settle(first, "trained")
    assert not position.is_over
    position.settle(second, "trained")
    assert position.is_over


def test_what_the_buffer_holds_is_open_whatever_the_position_says():
    items = Items([{} for _ in range(3)])
    position = Position(items, shuffle=False, epochs=2)
    for _ in range(4):
        position.settle(position.next(), "trained")
    said = position.to_json()
    again = Position(items, shuffle=False, epochs=2)
    again.restore(said, ["0/1", "1/0"], [])  # one of an epoch that was over
    assert (again.outcomes["trained"], sorted(again.open)) == (2, ["0/1", "1/0"])
    again.settle("0/1", "trained")
    again.settle("1/0", "trained")
    assert [again.next(), again.next(), again.has_next] == ["1/1", "1/2", False]
    again.settle("1/1", "no_signal")
    again.settle("1/2", "no_signal")
    assert again.is_over
    assert again.empty_epoch is None


def test_an_item_is_settled_once():
    position = Position(Items([{}]))
    key = position.next()
    position.settle(key, "trained")
    with pytest.raises(SchemaError, match="'0/0' is not open"):
        position.settle(key, "trained")


def test_births_follow_the_order_of_the_data():
    position = Position(Items([{} for _ in range(5)]), epochs=3, seed=1)
    keys = [position.next() for _ in range(15)]
    assert [position.birth(key) for key in keys] == list(range(1, 16))
    assert [position.birth(key) for key in reversed(keys)] == list(range(15, 0, -1))
