"""Wrong messages for the fuzzer: right ones with other bits, numbers and lengths, and documents that make no sense."""

from __future__ import annotations

import random
from typing import Any

import wire

EDGES = [0, 1, 2, 3, 7, 8, 63, 64, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


class Mutator:
    """Makes wrong messages of right ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def edge(self, width: int) -> int:
        value = self.random.choice(EDGES) if self.random.random() < 0.7 else self.random.getrandbits(8 * width)
        return value % 2 ** (8 * width)

    def bits(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8, 64))):
            if changed:
                changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def head(self, data: bytes) -> bytes:
        """Some fields of the head are other numbers."""
        if len(data) < wire.HEAD.size:
            return data
        values = list(wire.HEAD.unpack_from(data))
        widths = [4, 2, 2, 2, 2, 4, 8, 4, 4, 8, 8, 8, 8]
        for place in self.random.sample(range(1, 13), self.random.choice((1, 1, 2, 4))):
            values[place] = self.edge(widths[place])
        return wire.HEAD.pack(*values) + data[wire.HEAD.size :]

    def cut(self, data: bytes) -> bytes:
        return data[: self.random.randrange(len(data) + 1)]

    def grow(self, data: bytes) -> bytes:
        return data + self.random.randbytes(self.random.choice((1, 7, 8, 64, 5_000)))

    def numbers(self, data: bytes) -> bytes:
        """Some words of the body are other numbers: lengths, offsets, counts."""
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 2, 4))):
            width = self.random.choice((4, 8))
            if len(changed) > wire.HEAD.size + width:
                place = self.random.randrange(wire.HEAD.size, len(changed) - width + 1) // 4 * 4
                if place + width <= len(changed):
                    changed[place : place + width] = self.edge(width).to_bytes(width, "little")
        return bytes(changed)

    def call(self, table: str) -> dict[str, Any]:
        """A verb of a table with arguments that it may have, and values that it may not."""
        names = self.random.sample(ARGUMENTS, self.random.choice((0, 2, 8, len(ARGUMENTS))))
        args = {name: self.random.choice(_VALUES) for name in names}
        return {"verb": self.random.choice(VERBS[table]), "args": args}

    def any(self, data: bytes) -> bytes:
        for _ in range(self.random.choice((1, 1, 1, 2))):
            data = self.random.choice((self.bits, self.head, self.cut, self.grow, self.numbers))(data)
        return data


VERBS = {
    "replay": ["get", "handles", "positions", "iterate", "next", "update", "write", "tune", "stats", "flush"],
    "samples": ["put", "amend", "get", "ack", "give_back", "renew", "cancel_put", "cancel_get", "release", "version",
                "set_version", "admit", "checkpoint", "used_ids", "mark_used", "wanted", "explain", "stats", "len",
                "contains", "ids", "clear", "flush", "save", "push"],
    "episodes": ["add", "sample", "get", "trajectories", "len", "stats", "save", "load", "clear", "flush"],
}  # fmt: skip
ARGUMENTS = [
    "path", "handles", "batch_size", "iterator", "ids", "version", "values", "samples", "partial", "part", "owner",
    "origin", "leaves", "consumer", "what", "unfinished", "trajectories", "token", "stream", "skips_stale", "set_aside",
    "running", "recent", "name", "max_concurrent", "key", "incremental", "id", "handle", "count", "births", "beta",
    "alpha", "after", "where", "ends", "priorities", "mask", "timeout",
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, 0, 1, -1, 7, 2**31, 2**63, -(2**70), 1.5, {"$float": "nan"}, {"$float": "inf"}, "", "train", "x" * 999,
    "/nowhere/at/all", "../up", "\0", [], [1, 2], [[]], ["a"], [None, {}], {}, {"a": {"b": [1]}}, {"$tuple": [1, 2]},
    {"$": ["<i8", [2], 64]}, {"$": ["<f4", [0, 3], 64]}, {"$": ["<i8", [2**40], 64]}, {"$bytes": [64, 8]},
    {"$dict": [[1, 2]]}, {"$dict": 1}, {"$": ["|V8", [1], 64]}, {"$": ["<U4", [1], 64]}, {"$": ["<M8[s]", [1], 64]},
]  # fmt: skip
BAD_DOCUMENTS: list[Any] = [
    {"verb": "stats", "args": []}, {"verb": "stats"}, {"verb": 3, "args": {}}, {"verb": "nothing", "args": {}},
    {"verb": "__class__", "args": {}}, {"verb": "get", "args": {}}, {"verb": "get", "args": {"handles": "x"}},
    {"verb": "get", "args": {"handles": {"$": ["<i8", [4], 0]}}},
    {"verb": "get", "args": {"handles": {"$": ["<i8", [2**62], 64]}}},
    {"verb": "get", "args": {"handles": {"$": ["<i8", [-1], 64]}}},
    {"verb": "get", "args": {"handles": {"$": ["<i8", [2**32, 2**32], 64]}}},
    {"verb": "get", "args": {"handles": {"$": ["|O", [1], 64]}}},
    {"verb": "get", "args": {"handles": {"$": ["<i8", [0] * 100, 64]}}},
    {"verb": "get", "args": {"handles": {"$": ["f4,O", [1], 64]}}},
    {"verb": "get", "args": {"handles": {"$": [[], {}, "x"]}}}, {"verb": "get", "args": {"handles": {"$": 1}}},
    {"verb": "get", "args": {"handles": {"$bytes": [2**60, 2**60]}}},
    {"verb": "get", "args": {"handles": {"$dict": [[[], 1]]}}}, {"verb": "get", "args": {"handles": {"$float": "x"}}},
    {"verb": "get", "args": {"handles": {"$tuple": 5}}}, {"verb": "open_stream", "args": {"token": "zz"}},
    {"verb": "open_stream", "args": {"token": "00"}}, {"verb": "open_stream", "args": {"token": None}},
    {"verb": "iterate", "args": {"what": "rows", "batch_size": 2**62, "ids": True}},
    {"verb": "iterate", "args": {"what": 5}}, {"verb": "next", "args": {"iterator": []}},
    {"verb": "tune", "args": {"alpha": "x", "beta": [1]}},
    {"verb": "save", "args": {"path": "/", "incremental": False}},
    {"verb": "save", "args": {"path": "\0", "incremental": 3}}, [], 5, None, "x", {}, {"$": 1}, {"$tuple": [1]},
]  # fmt: skip
