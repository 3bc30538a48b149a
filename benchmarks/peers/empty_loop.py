"""What the timing loop of `add_1` costs by itself. It is part of every contender's figure."""

from __future__ import annotations

from itertools import cycle, islice

from harness.worker import Contender, Operation
from harness.workloads import Workload


class EmptyLoop(Contender):
    def fill(self, workload: Workload, capacity: int) -> None:
        self.rows = workload.rows()

    def add_one(self) -> dict[str, Operation]:
        rows = cycle(self.rows)

        def nothing(calls: int) -> None:
            for _obs, _action, _reward, _next_obs, _done in islice(rows, calls):
                pass

        return {"": Operation(nothing)}


FORMS = {"plain": EmptyLoop}
