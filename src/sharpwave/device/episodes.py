"""Streams and episodes of the rows of a table on a GPU. Every call waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .table import DeviceTable

__all__ = ["EpisodeIds", "Episodes", "list_episodes"]

_ENDS, _STOPS, _GOES_ON = 2, 8, 16  # flags of state.py
_TOGETHER = 1 << 20  # rows at a time: all tensors of one step take about 100 bytes a row


class EpisodeIds:
    """Numbers the episodes of rows that are read oldest first, in parts. A stream is an environment."""

    def __init__(self, table: DeviceTable) -> None:
        self.table = table
        self.episode = torch.zeros(table.num_envs, dtype=torch.int64, device=table.device)
        self.seen = torch.zeros(table.num_envs, dtype=torch.bool, device=table.device)
        self.ended = torch.ones(table.num_envs, dtype=torch.bool, device=table.device)

    def forget(self) -> None:
        """Before a part whose rows do not follow the last ones: some were overwritten in between."""
        self.seen.zero_()
        self.ended.fill_(True)

    def of(self, serials: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each row its stream, its episode, and whether the row before in its stream was read."""
        env = slots % self.table.num_envs
        order = torch.argsort(env, stable=True)  # by environment, then by time
        env, names, flags = env[order], serials[order], self.table.flags[slots[order]]
        ends = (flags & (_ENDS | _STOPS)) != 0
        is_first = torch.ones_like(ends)
        is_first[1:] = env[1:] != env[:-1]
        before = torch.roll(ends, 1)
        begins = torch.where(is_first, self.ended[env], before)
        follows = ~is_first | self.seen[env]
        # The episode of a row is that of the last row that begins one, or that of the part before.
        known = torch.where(begins, names, self.episode[env])
        place = torch.arange(len(names), device=names.device)
        episodes = known[torch.cummax(torch.where(begins | is_first, place, 0), 0).values]
        last = torch.ones_like(ends)
        last[:-1] = is_first[1:]
        self.episode[env[last]], self.ended[env[last]], self.seen[env[last]] = episodes[last], ends[last], True
        back = torch.empty_like(order)
        back[order] = place
        return env[back], episodes[back], follows[back]


class Episodes(NamedTuple):
    """Positions in the ring are numbers of rows since the first one ever added."""

    serials: list[int]  # of the first rows
    firsts: list[int]  # positions of the first rows
    lasts: list[int]  # positions of the last rows
    are_whole: list[bool]
    are_finished: list[bool]


def list_episodes(table: DeviceTable) -> Episodes:
    """All episodes of the live rows, in the order of their first rows."""
    numbers = table.read_numbers()
    # Before the first lap is over, the oldest rows start episodes. Later it is not known what came before them.
    is_first_lap = numbers["head"] - numbers["origin"] <= table.capacity
    ids, serials = EpisodeIds(table), table.serials()
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ("first", "whole", "episode", "at", "finished")}
    for begin in range(0, len(serials), _TOGETHER):
        part = serials[begin : begin + _TOGETHER]
        slots = part % table.span
        _, episodes, follows = ids.of(part, slots)
        flags = table.flags[slots]
        starts = episodes == part
        found["first"].append(part[starts])
        found["whole"].append((follows[starts] | is_first_lap) & ((flags[starts] & _GOES_ON) == 0))
        # The last row that this part has of each episode in it.
        names, which = torch.unique(episodes, return_inverse=True)
        newest = torch.zeros(len(names), dtype=torch.int64, device=part.device)
        newest = newest.scatter_reduce(0, which, torch.arange(len(part), device=part.device), "amax")
        found["episode"].append(names)
        found["at"].append(part[newest])
        found["finished"].append((flags[newest] & _ENDS) != 0)
    last: dict[int, tuple[int, bool]] = {}
    for names, at, finished in zip(found["episode"], found["at"], found["finished"], strict=True):
        last.update(zip(names.tolist(), zip(at.tolist(), finished.tolist(), strict=True), strict=True))
    firsts = [serial for part in found["first"] for serial in part.tolist()]

    def position(serial: int) -> int:
        return serial // table.span * table.capacity + serial % table.span

    return Episodes(
        firsts,
        [position(serial) for serial in firsts],
        [position(last[serial][0]) for serial in firsts],
        [whole for part in found["whole"] for whole in part.tolist()],
        [last[serial][1] for serial in firsts],
    )
