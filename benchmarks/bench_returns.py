"""Times generalized advantage estimation on the CPU: advantages and returns of rollouts of several sizes.

    python benchmarks/bench_returns.py                       # all, about two minutes
    python benchmarks/bench_returns.py --quick sharpwave c_loop

Everybody gets the same steps, and shows before it is timed that its advantages and returns are those of the formula.
Writes `results/returns.json`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar

from harness.contest import ContenderError, Player, print_case, run_case
from harness.estimator import DONE_SHARE, GAE_LAMBDA, GAMMA
from harness.program import Run, add_rounds, parse, parser

CONTENDERS = ("sharpwave", "c_loop", "rlox", "tianshou", "sb3", "torchrl", "apexrl")
# Steps and environments: of environments on the CPU, of simulated robots, and so many that few caches hold them.
SIZES = ((128, 1024), (24, 4096), (32, 65_536))
TITLE = f"float32, {DONE_SHARE:.0%} of the steps end an episode, gamma {GAMMA}, lambda {GAE_LAMBDA}"


class EstimatorPlayer(Player):
    module: ClassVar[str] = "harness.estimator"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("contenders", nargs="*", metavar="CONTENDER", help=f"all unless named: {', '.join(CONTENDERS)}")
    add_rounds(made)
    run = Run(parse(made))
    options = run.options
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        about, cases = {}, {}
        for label in options.contenders or CONTENDERS:
            try:
                player = EstimatorPlayer(label)
                stack.callback(player.close)
                about[label] = player.ask("describe")
            except ContenderError as reason:
                run.left_out.say(f"{label}, returns", reason)
                continue
            players[label] = player
        for steps, envs in SIZES:
            case = f"gae_{steps}x{envs}"
            cases[case] = run_case(case, players, options.rounds, options.burst_ms / 1e3, run.left_out)
            print_case(f"returns {case}", cases[case])
    run.save("returns", workloads={"returns": {"title": TITLE, "contenders": about, "cases": cases}})


if __name__ == "__main__":
    main()
