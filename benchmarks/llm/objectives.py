"""The objective study: sync, decoupled, naive and recompute at a fixed lag, many members trained side by side.

    python benchmarks/llm/objectives.py                        # 19 cells, 8 seeds: minutes on a GPU
    python benchmarks/llm/objectives.py --seeds 2              # half an hour on one core of a CPU
    python benchmarks/llm/objectives.py --add a.json b.json    # takes over members of earlier runs, trains the others
    python benchmarks/llm/objectives.py --cells bold --seeds 2 # the three cells that the goals name
    python benchmarks/llm/objectives.py --quick                # a few steps: does it run?

A small transformer learns to sort digits by GRPO. Every batch is made by the weights of `lag` versions ago, the worst
case that a bound on staleness allows. The score is the share of exact answers of the *current* policy, so the lag
itself is not measured. All members (cell x objective x seed) are one more leading axis in every tensor. The transformer
and `clipped_loss` are those of the package. Writes `results/objectives.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from sharpwave.llm.model import ModelConfig, Transformer
from sharpwave.llm.objectives import clipped_loss

RESULTS = Path(__file__).parents[1] / "results"
# Adam's eps, clip, learning rate. In the first three the goals hold: small clips against the movement over the lag.
BOLD = ((1e-2, 0.005, 5e-4), (1e-2, 0.02, 5e-4), (1e-8, 0.005, 2e-4))
OTHERS = (
    *((1e-2, 0.005, rate) for rate in (1e-3, 2e-3)),
    (1e-2, 0.02, 1e-3),
    *((1e-2, 0.05, rate) for rate in (5e-4, 1e-3)),
    *((1e-2, 0.2, rate) for rate in (5e-4, 1e-3, 2e-3)),
    (1e-8, 0.005, 4e-4),
    *((1e-8, clip, rate) for clip in (0.02, 0.05) for rate in (2e-4, 4e-4)),
    *((1e-8, 0.2, rate) for rate in (2e-4, 4e-4, 8e-4)),
)
OBJECTIVES = ("sync", "decoupled", "naive", "recompute")
# Standard deviations of the first weights, by the name of the matrix. They decide how far a learning rate moves the
# policy, and so what the cells mean: these are those of the prototype whose cells the goals name.
SCALES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0.125),
    "embed_tokens": 1.0, "o_proj": 0.0625, "down_proj": 0.03125, "lm_head": 0.05,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What all members share."""

    digits: int = 4
    lag: int = 8
    steps: int = 160
    prompts: int = 64
    group: int = 8
    minibatches: int = 4
    supervised: int = 60  # steps before the study, so that the first policy is right now and then
    supervised_rate: float = 1.5e-3
    warmup: int = 10
    advantage_scale: float = 3.0  # centred and not divided by their deviation
    cap: float = 5.0
    evaluations: int = 20  # steps between two
    prompts_evaluated: int = 256
    scales: dict[str, float] = field(default_factory=lambda: dict(SCALES))


@dataclass(frozen=True)
class Member:
    objective: str
    eps: float
    clip: float
    learning_rate: float
    seed: int


class Sorter(nn.Module):
    """The package's transformer over question, separator and answer; gives digits behind the last `count` tokens."""

    def __init__(self, digits: int) -> None:
        super().__init__()
        config = ModelConfig(
            model_type="llama", vocab_size=11, hidden_size=32, intermediate_size=88, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=2 * digits + 1,
        )  # fmt: skip
        self.model = Transformer(config)

    @torch.no_grad()
    def fill_randomly(self, seed: int, scales: dict[str, float]) -> Sorter:
        source = torch.Generator("cpu").manual_seed(seed)
        for name, weight in self.model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.copy_(scales[name.split(".")[-2]] * torch.randn(weight.shape, generator=source))
        return self

    def forward(self, ids: Tensor, count: int) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # vmap knows no other one on a CPU, and sequences are short
            return self.logprobs(ids, count)

    def logprobs(self, ids: Tensor, count: int) -> Tensor:
        return F.log_softmax(self.model.logits(self.model.hidden(ids)[:, -count:])[..., :10].float(), -1)


class Crowd:
    """The weights of all members, and Adam over them with a rate and an eps of each."""

    def __init__(self, state: dict[str, Tensor], rates: Tensor, eps: Tensor) -> None:
        self.state, self.rates, self.eps, self.updates = state, rates, eps, 0
        self.first = {name: torch.zeros_like(weight) for name, weight in state.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in state.items()}

    def update(self, gradients: dict[str, Tensor], scale: float, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.updates += 1
        norm = torch.stack([each.flatten(1).pow(2).sum(1) for each in gradients.values()]).sum(0).sqrt()
        shrink = 1 / norm.clamp(min=1)
        for name, gradient in gradients.items():
            shape = (-1, *[1] * (gradient.dim() - 1))
            gradient = gradient * shrink.view(shape)
            first = self.first[name].lerp_(gradient, 1 - betas[0]) / (1 - betas[0] ** self.updates)
            second = self.second[name].lerp_(gradient**2, 1 - betas[1]) / (1 - betas[1] ** self.updates)
            self.state[name] = self.state[name] - scale * self.rates.view(shape) * first / (
                second.sqrt() + self.eps.view(shape)
            )


class Study:
    def __init__(self, members: list[Member], setting: Setting, device: str) -> None:
        # Members of one method side by side: `clipped_loss` is called once for each method.
        self.members = sorted(members, key=lambda member: OBJECTIVES.index(member.objective))
        self.setting, self.device = setting, device
        self.sorter = Sorter(setting.digits).to(device)
        self.stream = torch.Generator(device).manual_seed(1 + min(member.seed for member in members))
        self.forward = vmap(lambda state, ids, count: functional_call(self.sorter, state, (ids, count)), (0, 0, None))

    def slices(self) -> list[tuple[str, slice]]:
        found = []
        for objective in OBJECTIVES:
            at = [number for number, member in enumerate(self.members) if member.objective == objective]
            if at:
                found.append(("decoupled" if objective == "sync" else objective, slice(at[0], at[-1] + 1)))
        return found

    def questions(self, members: int, count: int) -> tuple[Tensor, Tensor]:
        """Questions with their separator, and the right answers, [members, count, digits]."""
        digits = torch.randint(10, (members, count, self.setting.digits), device=self.device, generator=self.stream)
        separator = torch.full_like(digits[..., :1], 10)
        return torch.cat([digits, separator], -1), digits.sort(-1).values

    @torch.no_grad()
    def answers(self, state: dict[str, Tensor], questions: Tensor) -> tuple[Tensor, Tensor]:
        ids, logprobs = questions, []
        for _ in range(self.setting.digits):
            every = self.forward(state, ids, 1)[..., 0, :]
            noise = torch.empty_like(every).exponential_(generator=self.stream)
            token = (every.exp() / noise).argmax(-1, keepdim=True)
            logprobs.append(every.gather(-1, token))
            ids = torch.cat([ids, token], -1)
        return ids, torch.cat(logprobs, -1)

    def logprobs(self, state: dict[str, Tensor], ids: Tensor) -> Tensor:
        """Of the answers in [members, count, question and answer]."""
        digits = self.setting.digits
        return self.forward(state, ids[..., :-1], digits).gather(-1, ids[..., -digits:, None])[..., 0]

    def gradients(self, state: dict[str, Tensor], loss: Any) -> dict[str, Tensor]:
        learning = {name: weight.detach().requires_grad_() for name, weight in state.items()}
        found = torch.autograd.grad(loss(learning), list(learning.values()))
        return dict(zip(learning, found, strict=True))

    def start(self) -> dict[str, Tensor]:
        """Supervised for a little while, one model a seed; members of a seed start from the same weights."""
        seeds = sorted({member.seed for member in self.members})
        new = (Sorter(self.setting.digits).fill_randomly(seed, self.setting.scales) for seed in seeds)
        models = [sorter.to(self.device) for sorter in new]
        state = {name: weight.detach() for name, weight in stack_module_state(models)[0].items()}
        ones = torch.ones(len(seeds), device=self.device)
        crowd = Crowd(state, self.setting.supervised_rate * ones, 1e-8 * ones)
        for _ in range(self.setting.supervised):
            questions, right = self.questions(len(seeds), 256)
            ids = torch.cat([questions, right], -1)
            crowd.update(
                self.gradients(crowd.state, lambda now, ids=ids: -self.logprobs(now, ids).mean((1, 2)).sum()), 1.0
            )
        at = torch.tensor([seeds.index(member.seed) for member in self.members], device=self.device)
        return {name: weight[at] for name, weight in crowd.state.items()}

    def evaluate(self, state: dict[str, Tensor]) -> list[float]:
        questions, right = self.questions(len(self.members), self.setting.prompts_evaluated)
        ids, _ = self.answers(state, questions)
        return (ids[..., -self.setting.digits :] == right).all(-1).float().mean(-1).tolist()

    def run(self, say: Any = print) -> dict[str, Any]:
        setting, count = self.setting, len(self.members)
        each = {name: torch.tensor([getattr(member, name) for member in self.members], device=self.device)
                for name in ("eps", "clip", "learning_rate")}  # fmt: skip
        lag = torch.tensor([0 if member.objective == "sync" else setting.lag for member in self.members])
        lag = lag.to(self.device)
        crowd = Crowd(self.start(), each["learning_rate"], each["eps"])
        kept = [dict(crowd.state)] * (setting.lag + 1)  # the newest last
        curves, drift, clipped, began = [self.evaluate(crowd.state)], 0.0, 0.0, time.time()
        for step in range(setting.steps):
            kept = [*kept[1:], dict(crowd.state)]
            acting = {
                name: torch.where(_like(lag, kept[-1][name]) == 0, kept[-1][name], kept[0][name]) for name in kept[0]
            }
            ids, behaviour, advantages = self.batch(acting, count)
            with torch.no_grad():
                proximal = self.logprobs(crowd.state, ids)
            drift = drift + (proximal - behaviour).abs().mean((1, 2)) / setting.steps
            order = torch.randperm(ids.shape[1], generator=self.stream, device=self.device)
            for part in order.chunk(setting.minibatches):
                given = [column[:, part] for column in (ids, behaviour, proximal, advantages)]
                share = self.update(crowd, given, each["clip"], min(1.0, (step + 1) / setting.warmup))
                clipped = clipped + share / setting.steps / setting.minibatches
            if (step + 1) % setting.evaluations == 0:
                curves.append(self.evaluate(crowd.state))
                say(f"step {step + 1}: {time.time() - began:.0f} s, mean {sum(curves[-1]) / count:.3f}", flush=True)
        return self.results(curves, drift, clipped, time.time() - began)

    def batch(self, acting: dict[str, Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        setting = self.setting
        questions, right = self.questions(count, setting.prompts)
        questions, right = (each.repeat_interleave(setting.group, 1) for each in (questions, right))
        ids, behaviour = self.answers(acting, questions)
        rewards = (ids[..., -setting.digits :] == right).float().mean(-1).view(count, setting.prompts, setting.group)
        advantages = (rewards - rewards.mean(-1, keepdim=True)).view(count, -1, 1) * setting.advantage_scale
        return ids, behaviour, advantages.expand_as(behaviour)

    def update(self, crowd: Crowd, given: list[Tensor], clip: Tensor, scale: float) -> Tensor:
        """One update of every member. Returns the share of its tokens that the clip held."""
        ids, *columns = given
        shares: list[Tensor] = []

        def loss(state: dict[str, Tensor]) -> Tensor:
            """The sum over members of their mean loss."""
            logprobs, total = self.logprobs(state, ids), torch.zeros((), device=self.device)
            for method, at in self.slices():
                own = [column[at] for column in (logprobs, *columns)]
                made = clipped_loss(*own, method=method, clip=clip[at].view(-1, 1, 1), cap=self.setting.cap)
                total = total + made.loss.mean((1, 2)).sum()
                shares.append(made.is_clipped.float().mean((1, 2)))
            return total

        crowd.update(self.gradients(crowd.state, loss), scale)
        return torch.cat(shares)

    def results(self, curves: list[list[float]], drift: Tensor, clipped: Tensor, took_s: float) -> dict[str, Any]:
        scores = torch.tensor(curves)
        members = [
            {**asdict(member), "curve": [round(value, 4) for value in scores[:, at].tolist()],
             "score": scores[-3:, at].mean().item(), "start": scores[0, at].item(),
             "drift": drift[at].item(), "clip_share": clipped[at].item()}
            for at, member in enumerate(self.members)
        ]  # fmt: skip
        return {"took_s": took_s, "members": members}


def _like(numbers: Tensor, weight: Tensor) -> Tensor:
    return numbers.view(-1, *[1] * (weight.dim() - 1))


def summary(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line a cell: the mean score of each objective over seeds, and the share of sync's gain that it makes."""
    lines = []
    for cell in sorted({(one["eps"], one["clip"], one["learning_rate"]) for one in members}, reverse=True):
        own = [one for one in members if (one["eps"], one["clip"], one["learning_rate"]) == cell]
        line: dict[str, Any] = {"eps": cell[0], "clip": cell[1], "learning_rate": cell[2], "is_bold": cell in BOLD}
        for objective in OBJECTIVES:
            scores = [one["score"] for one in own if one["objective"] == objective]
            if scores:
                line[objective] = {"mean": sum(scores) / len(scores), "least": min(scores), "most": max(scores)}
        start = sum(one["start"] for one in own) / len(own)
        line["start"] = start
        gain = line["sync"]["mean"] - start if "sync" in line else 0.0
        for objective in (name for name in OBJECTIVES[1:] if name in line and gain > 0):
            line[objective]["share_of_gain"] = (line[objective]["mean"] - start) / gain
        lines.append(line)
    return lines


def told(line: dict[str, Any]) -> str:
    scores = []
    for objective in (name for name in OBJECTIVES if name in line):
        share = line[objective].get("share_of_gain")
        scores.append(f"{objective} {line[objective]['mean']:.3f}" + ("" if share is None else f" ({share:.0%})"))
    cell = f"eps {line['eps']:g}, clip {line['clip']:g}, rate {line['learning_rate']:g}"
    return f"{cell}: start {line['start']:.3f}, {', '.join(scores)}"


def earlier(paths: list[Path], setting: dict[str, Any]) -> dict[Member, dict[str, Any]]:
    """The members of results that were made with the same setting."""
    found = {}
    for path in paths:
        document = json.loads(path.read_text())
        if {**document["settings"], "seeds": 0} != {**setting, "seeds": 0}:
            raise SystemExit(f"--add: {path} was made with another setting")
        found |= {member_of(one): one for one in document["members"]}
    return found


def member_of(said: dict[str, Any]) -> Member:
    return Member(**{name: said[name] for name in Member.__dataclass_fields__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", choices=("bold", "all"), default="all")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="results whose members are not trained again")
    parser.add_argument("--steps", type=int, default=Setting.steps)
    parser.add_argument("--lag", type=int, default=Setting.lag)
    parser.add_argument("--objectives", nargs="*", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="three cells, one seed, four steps; writes nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        torch.set_num_threads(1)
    setting = Setting(steps=4, lag=2, evaluations=2) if chosen.quick else Setting(steps=chosen.steps, lag=chosen.lag)
    cells = BOLD if chosen.cells == "bold" or chosen.quick else (*BOLD, *OTHERS)
    seeds = 1 if chosen.quick else chosen.seeds
    known = earlier(chosen.add, asdict(setting))
    numbers = range(chosen.first_seed, chosen.first_seed + seeds)
    runs = [[Member(o, *cell, seed) for o in chosen.objectives] for seed in numbers for cell in cells]
    runs = [members for members in runs if any(member not in known for member in members)]
    if chosen.device != "cpu":  # all at once; on a CPU few members at a time take a quarter of the time
        together = [member for members in runs for member in members]
        runs = [sorted(together, key=lambda one: OBJECTIVES.index(one.objective))]
    machine = {"device": torch.cuda.get_device_name() if chosen.device == "cuda" else f"CPU ({platform.machine()})",
               "torch": torch.__version__}  # fmt: skip
    for members in [*runs, []]:
        if members:
            made = Study(members, setting, chosen.device).run()
            share_s = made["took_s"] / len(members)
            known |= {member_of(one): {**one, "took_s": share_s} for one in made["members"]}
        document = {
            "machine": machine, "settings": {**asdict(setting), "seeds": len({member.seed for member in known})},
            "took_s": sum(one.get("took_s", 0.0) for one in known.values()), "members": list(known.values()),
        }  # fmt: skip
        document["cells"] = summary(document["members"])
        if not chosen.quick:  # after each run: one that is ended can be added to the next one
            chosen.results.mkdir(parents=True, exist_ok=True)
            (chosen.results / "objectives.json").write_text(json.dumps(document, indent=1) + "\n")
    for line in document["cells"]:
        print(told(line))


if __name__ == "__main__":
    main()
