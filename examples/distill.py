"""Distils a PPO teacher into a network of 58 numbers: what it said is kept in a DistillationBuffer.

    python examples/distill.py                                # trains the teacher first, in seconds
    python examples/distill.py --teacher teacher.pt           # keeps it there, and takes it from there the next time

First the teacher acts, and the buffer that holds its answers is saved and opened again, as if the student were taught
on another day. Then the student acts, the teacher says what it would have done there, and the buffer grows by that
(DAgger): a student that only ever saw its teacher's own paths does not know the way back to them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import ppo  # the example beside this one
import torch
from torch import Tensor, nn

import sharpwave as sw


@dataclass(frozen=True)
class Config:
    """What a run may change."""

    seed: int = 0
    rounds: int = 6  # of acting and learning; the first one is the teacher's
    envs: int = 16
    steps: int = 32  # of each environment in a round
    updates: int = 50  # gradient steps of a round
    batch_size: int = 128
    learning_rate: float = 5e-3
    hidden: int = 8


class Student(nn.Module):
    """One hidden layer, no critic."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(ppo.OBS_SCALE))
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def logits(self, obs: Tensor) -> Tensor:
        """Returns (..., 2); the greedy action is the larger one's."""
        return self.layers(obs * self.scale)


@dataclass
class Result:
    """What a run leaves behind. Returns are means of 100 greedy episodes from the same starts."""

    student: Student
    buffer: sw.DistillationBuffer
    teacher_return: float
    student_return: float = 0.0
    rounds: list[tuple[int, float, float]] = field(
        default_factory=list
    )  # (rows held, agreement, return of 20 episodes)

    def share(self) -> float:
        """Returns how much of the teacher's return the student has."""
        return self.student_return / self.teacher_return


@torch.no_grad()
def gather(
    env: ppo.GymCartPole, actor: ppo.Policy | Student, teacher: ppo.Policy, buffer: sw.DistillationBuffer
) -> None:
    """Lets the actor take a step in every environment, and stores what the teacher says there."""
    obs, said = env.obs, teacher.logits(env.obs)
    step = env.step(actor.logits(obs).argmax(dim=-1))
    # The teacher labels the rows, also when the student acts. Only recurrent students use `done`.
    buffer.add(obs, said.argmax(dim=-1), done=step.terminated | step.truncated, logits=said)


def learn(student: Student, optimizer: torch.optim.Optimizer, buffer: sw.DistillationBuffer, config: Config) -> float:
    """Brings the student's probabilities towards the teacher's; returns in how many of the last rows both act alike."""
    for _ in range(config.updates):
        batch = buffer.sample(config.batch_size)
        logits = student.logits(batch["obs"])
        wanted = batch["logits"].log_softmax(dim=-1)
        loss = nn.functional.kl_div(logits.log_softmax(dim=-1), wanted, reduction="batchmean", log_target=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float((logits.argmax(dim=-1) == batch["action"]).float().mean())


def train(
    teacher: ppo.Policy, config: Config, path: Path, progress: Callable[[Result], None] = lambda result: None
) -> Result:
    """Teaches one student; the same teacher and config give the same one.

    Args:
        teacher: Whose `logits` are to be learnt.
        config: The run's settings.
        path: Where the teacher's own rows are saved.
        progress: Called after each round.
    """
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    torch.manual_seed(config.seed)
    env = ppo.GymCartPole(config.envs, config.seed, "cpu")
    rows = sw.DistillationBuffer(
        capacity=config.rounds * config.steps * config.envs,
        obs_shape=(4,),
        teacher={"logits": (2,)},
        num_envs=config.envs,
        seed=config.seed,
    )
    for _ in range(config.steps):
        gather(env, teacher, teacher, rows)
    rows.save(path)
    rows.close()
    buffer = sw.open(path, device="cpu")  # the same rows and random stream; batches are tensors

    student = Student(config.hidden)
    optimizer = torch.optim.Adam(student.parameters(), lr=config.learning_rate, fused=True)
    result = Result(student, buffer, teacher_return=ppo.evaluate(teacher.logits, seed=2_000_000, episodes=100))
    for number in range(config.rounds):
        if number:
            for _ in range(config.steps):
                gather(env, student, teacher, buffer)
        agreement = learn(student, optimizer, buffer, config)
        result.rounds.append((len(buffer), agreement, ppo.evaluate(student.logits, seed=1_000_000)))
        progress(result)
    result.student_return = ppo.evaluate(student.logits, seed=2_000_000, episodes=100)
    return result


def take_teacher(path: Path | None, seed: int) -> ppo.Policy:
    """Returns the teacher that is kept there, or trains one (and keeps it there)."""
    teacher = ppo.Policy()
    if path is not None and path.exists():
        teacher.load_state_dict(torch.load(path, weights_only=True))
        return teacher
    print("training a teacher", flush=True)
    teacher = ppo.train(ppo.Config(seed=seed)).policy
    if path is not None:
        torch.save(teacher.state_dict(), path)
    return teacher


def main() -> None:
    """Distils from the command line and prints a line a round."""
    parser = argparse.ArgumentParser(description="Distils a PPO teacher on CartPole-v1 into a smaller student.")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    parser.add_argument("--rounds", type=int, default=Config.rounds, help="rounds of acting and learning")
    parser.add_argument("--teacher", type=Path, help="file of the teacher's weights; made where it is not there")
    parser.add_argument("--out", type=Path, default=Path("runs/distill"), help="folder for rows and student")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    options.out.mkdir(parents=True, exist_ok=True)

    def report(now: Result) -> None:
        rows, agreement, value = now.rounds[-1]
        print(f"{rows:7,} rows  agreement {agreement:4.0%}  student's return {value:5.1f}", flush=True)

    config = Config(seed=options.seed, rounds=options.rounds)
    result = train(take_teacher(options.teacher, options.seed), config, options.out / "teacher_rows", report)
    torch.save(result.student.state_dict(), options.out / "student.pt")
    print(
        f"greedy return over 100 episodes: student {result.student_return:.1f}, "
        f"teacher {result.teacher_return:.1f}: {result.share():.0%}"
    )


if __name__ == "__main__":
    main()
