"""Asynchronous GRPO on the CPU: processes generate, another trains, and nobody waits for the slowest.

    python examples/async_grpo.py                  # about three minutes on two cores
    python examples/async_grpo.py --seconds 20

A transformer learns to sort digits by trial and error alone: it starts from random weights and sees only how many
places of its answers were right. Generators put groups of answers into a SequenceBuffer that the trainer serves; "prox"
computes the log-probabilities of the policy at the start of a step (decoupled objective), "train" takes the step. New
weights reach generators between two tokens, so an answer may have several authors: each token carries its version.
"""

import argparse
import multiprocessing as mp
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sharpwave as sw


@dataclass(frozen=True)
class Config:
    """What a run may change."""

    seconds: float = 150.0
    steps: int = 10**9  # the trainer's, at most
    seed: int = 0
    digits: int = 4  # to sort
    kinds: int = 10  # of digits
    group: int = 16  # answers to each question
    batch: int = 32  # questions a step
    chunk: int = 16  # questions that a generator answers at once
    generators: int = 2
    max_staleness: int = 4
    minibatches: int = 2
    learning_rate: float = 1e-3  # falls to a tenth
    clip: float = 0.2
    entropy: float = 0.001
    cap: float = 5.0  # on the weight between the proximal policy and the one that acted


@dataclass
class Result:
    steps: int = 0
    seconds: float = 0.0
    rewards: list[float] = field(default_factory=list)  # mean of each step
    staleness: Counter[int] = field(default_factory=Counter)  # of each token trained on
    trainer_idle: float = 0.0
    generator_idle: float = 0.0
    stats: dict = field(default_factory=dict)

    def reward(self, last: int = 20) -> float:
        return float(np.mean(self.rewards[-last:]))


class Policy(nn.Module):
    """A causal transformer over question, separator and answer; gives the logits of each place of the answer."""

    def __init__(self, config: Config, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.digits = config.digits
        self.embed = nn.Embedding(config.kinds + 1, width)
        self.place = nn.Parameter(0.1 * torch.randn(2 * config.digits, width))
        block = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, config.kinds)

    def forward(self, question: Tensor, answer: Tensor) -> Tensor:
        """Logits behind the separator and each digit of `answer`, which may be shorter than a whole one."""
        separator = torch.full_like(question[:, :1], self.embed.num_embeddings - 1)
        tokens = torch.cat([question, separator, answer], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.blocks(self.embed(tokens) + self.place[: tokens.shape[1]], mask, is_causal=True)
        return self.head(hidden[:, self.digits :])

    def log_probs(self, question: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token of the answer, and the entropy there."""
        every = F.log_softmax(self(question, answer[:, :-1]), -1)
        return every.gather(-1, answer[..., None])[..., 0], -(every.exp() * every).sum(-1)


def score(question: Tensor, answer: Tensor) -> Tensor:
    """The share of places that are right."""
    return (question.sort(1).values == answer).float().mean(1)


# ---- generation: its own processes -----------------------------------------------------------------------------------


def generate(config: Config, number: int, address: str, folder: str, version, stop, idle) -> None:
    """Answers questions until told to stop, with the newest weights there are at each token."""
    torch.set_num_threads(1)
    torch.manual_seed(1000 * config.seed + number)
    policy, loaded, asked, waited, began = Policy(config), -1, 0, 0.0, time.monotonic()
    with sw.open(address) as seq, torch.no_grad():
        gate = seq.admission(config.batch)  # counts at the server, for all generators
        while not stop.is_set():
            start = time.monotonic()
            if not gate.start(config.chunk):
                stop.wait(0.02)
                waited += time.monotonic() - start
                continue
            question = torch.randint(config.kinds, (config.chunk, config.digits))
            prompts = question.repeat_interleave(config.group, 0)
            answer, log_probs, versions = prompts[:, :0], [], []
            for _ in range(config.digits):
                if version.value != loaded:
                    loaded = version.value
                    policy.load_state_dict(load_file(Path(folder) / f"{loaded}.safetensors"))
                every = F.log_softmax(policy(prompts, answer)[:, -1], -1)
                token = torch.multinomial(every.exp(), 1)
                answer = torch.cat([answer, token], 1)
                log_probs.append(every.gather(1, token))
                versions.append(loaded)
            shape = [[config.digits] * config.group] * config.chunk
            data = {
                "question": question.flatten(),
                "answer": answer.flatten(),
                "log_probs": torch.cat(log_probs, 1).flatten(),
                "versions": torch.tensor(versions).repeat(len(answer)),
                "rewards": score(prompts, answer),
            }
            lens = {"question": [[config.digits]] * config.chunk, "rewards": [[1] * config.group] * config.chunk}
            names = [f"{number}/{asked + at}" for at in range(config.chunk)]
            asked += config.chunk
            start = time.monotonic()
            seq.put(sw.SequenceSample(names, {key: lens.get(key, shape) for key in data}, data), timeout=30)
            gate.finish(config.chunk)
            waited += time.monotonic() - start
            idle[number] = waited / (time.monotonic() - began)


# ---- training: this process ------------------------------------------------------------------------------------------


def rows(batch: sw.SequenceSample, key: str, config: Config) -> Tensor:
    """A key as (answers, places)."""
    return batch[key].view(-1, config.digits)


def train_step(policy: Policy, optimizer: torch.optim.Optimizer, batch: sw.SequenceSample, config: Config) -> None:
    """Decoupled, group-relative: clipped around the proximal policy, weighted by its ratio to the one that acted."""
    question = rows(batch, "question", config).repeat_interleave(config.group, 0)
    answer, acted, proximal = (rows(batch, key, config) for key in ("answer", "log_probs", "prox_log_probs"))
    advantage = sw.returns.group_relative_advantages(batch["rewards"], group_size=config.group)[:, None]
    weight = (proximal - acted).exp()
    weight = weight * (weight <= config.cap)
    for part in torch.randperm(len(answer)).chunk(config.minibatches):
        log_probs, entropy = policy.log_probs(question[part], answer[part])
        ratio = (log_probs - proximal[part]).exp()
        gain = torch.minimum(ratio * advantage[part], ratio.clamp(1 - config.clip, 1 + config.clip) * advantage[part])
        optimizer.zero_grad()
        (-(weight[part] * gain) - config.entropy * entropy).mean().backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


def train(config: Config) -> Result:
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    policy = Policy(config)
    optimizer = torch.optim.Adam(policy.parameters(), config.learning_rate)
    made = {"question", "answer", "log_probs", "versions", "rewards"}
    prox = sw.Consumer("prox", {"question", "answer"}, {"prox_log_probs"}, batch_size=config.batch)
    flow = sw.Dataflow([prox, sw.Consumer("train", made | {"prox_log_probs"}, batch_size=config.batch)])
    seq = sw.SequenceBuffer(4096, flow=flow, max_staleness=config.max_staleness, watchdog_timeout=60)
    context = mp.get_context("spawn")
    version, stop = context.Value("q", 0), context.Event()
    idle = context.Array("d", config.generators)  # each generator's share
    result, began = Result(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, sw.serve({"samples": seq}, "tcp://127.0.0.1:0") as server:
        save_file(policy.state_dict(), Path(folder) / "0.safetensors")
        shared = (f"{server.address}/samples", folder, version, stop, idle)
        workers = [context.Process(target=generate, args=(config, n, *shared)) for n in range(config.generators)]
        for worker in workers:
            worker.start()
        try:
            while result.steps < config.steps and time.monotonic() - began < config.seconds:
                start = time.monotonic()
                optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - 0.9 * (start - began) / config.seconds)
                with seq.get("prox") as lease, torch.no_grad():
                    result.trainer_idle += time.monotonic() - start
                    question, answer = rows(lease.batch, "question", config), rows(lease.batch, "answer", config)
                    found = policy.log_probs(question.repeat_interleave(config.group, 0), answer)[0].flatten()
                    lens = {"prox_log_probs": lease.batch.seqlens["answer"]}
                    seq.amend(lease.handles, sw.SequenceSample(lease.batch.ids, lens, {"prox_log_probs": found}))
                with seq.get("train") as lease:
                    train_step(policy, optimizer, lease.batch, config)
                    result.staleness.update((version.value - lease.batch["versions"]).tolist())
                    result.rewards.append(lease.batch["rewards"].mean().item())
                result.steps += 1
                save_file(policy.state_dict(), Path(folder) / f"{result.steps}.safetensors")
                seq.set_version(result.steps)
                version.value = result.steps
                (Path(folder) / f"{result.steps - 50}.safetensors").unlink(missing_ok=True)
                if result.steps % 50 == 0:
                    print(f"step {result.steps:5}  reward {result.reward():.3f}", flush=True)
        finally:
            stop.set()
            for worker in workers:
                worker.join()
    result.stats, result.seconds = seq.stats(), time.monotonic() - began
    result.trainer_idle, result.generator_idle = result.trainer_idle / result.seconds, float(np.mean(idle[:]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=Config.seconds)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--seed", type=int, default=Config.seed)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    print(f"sorting {Config.digits} digits of {Config.kinds} kinds; reward by chance {1 / Config.kinds:.2f}")
    result = train(Config(**vars(options)))
    print(f"reward {result.rewards[0]:.3f} -> {result.reward():.3f} in {result.steps} steps, {result.seconds:.0f} s")
    total = sum(result.staleness.values())
    print(f"{total / result.seconds:,.0f} tokens/s trained on")
    print(f"idle: trainer {result.trainer_idle:.0%}, generators {result.generator_idle:.0%}")
    for age, count in sorted(result.staleness.items()):
        print(f"staleness {age}: {count / total:6.1%} of the tokens")
    print(f"evicted as too old: {result.stats['evicted']} of {result.stats['added']} questions")


if __name__ == "__main__":
    main()
