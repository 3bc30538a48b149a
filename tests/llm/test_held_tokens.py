"""`HeldTokens` against two plain arrays: the token of each place, and the version that made it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sharpwave.llm.generators.held_tokens import HeldTokens

SLOTS, CONTEXT, LEAST = 5, 90, 8


class Plain:
    def __init__(self):
        self.tokens = np.full((SLOTS, CONTEXT), -1)
        self.versions = np.full((SLOTS, CONTEXT), -1)

    def count(self, slot, ids, version):
        held = (self.tokens[slot, : len(ids)] == ids) & (self.versions[slot, : len(ids)] == version)
        return len(ids) if held.all() else int(held.argmin())

    def longest(self, ids, version, among):
        counts = [self.count(slot, ids, version) if slot in among else 0 for slot in range(SLOTS)]
        most = max(counts)
        if most == 0 or (len(ids) >= LEAST and most < LEAST):
            return -1, 0
        return counts.index(most), most


# Prompts that begin alike, end alike, or are the same but for one token.
PROMPTS = [np.concatenate([np.arange(40), np.full(n, token)]) for token in (1, 2) for n in (1, 20, 50)]
PROMPTS += [np.arange(n) for n in (0, 1, 5, 8, 40, 90)] + [np.where(np.arange(60) == at, 7, 3) for at in (0, 9, 59)]

steps = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.integers(0, len(PROMPTS) - 1), st.integers(0, 90), st.integers(0, 2)),
    max_size=30,
)


@given(steps, st.sets(st.integers(0, SLOTS - 1)), st.randoms())
def test_it_finds_what_plain_arrays_find(steps, among, random):
    """As the engine does it: a sequence goes on behind what the slot holds of it, in one piece or token by token."""
    held, plain = HeldTokens(SLOTS, CONTEXT), Plain()
    for slot, number, size, version in steps:
        ids = PROMPTS[number][:size]
        start = random.choice([0, plain.count(slot, ids, version)])
        held.drop(slot, start)
        plain.versions[slot, start:] = -1
        middle = random.randint(start, max(start, len(ids)))
        held.put(slot, start, ids[start:middle], version)
        plain.tokens[slot, start : len(ids)] = ids[start:]
        plain.versions[slot, start:middle] = version
        for place in range(middle, len(ids)):
            version += random.random() < 0.02  # weights change while an answer grows
            held.put_each(np.array([slot]), np.array([place]), ids[[place]], version)
            plain.versions[slot, place] = version
        for asked in PROMPTS:
            for at in range(4):
                assert held.longest(asked, at, among) == plain.longest(asked, at, among)
                assert held.count(slot, asked, at) == plain.count(slot, asked, at)
