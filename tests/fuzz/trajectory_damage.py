"""Damages folders of trajectories and opens them: ``python trajectory_damage.py FOLDER FIRST COUNT``.

Every row of every trajectory tells which row it is, so a wrong one is seen. Prints how often what was right and what
was told; anything else ends the process with an error. A crash is seen by its parent.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

import sharpwave as sw
from sharpwave.errors import StorageError

COUNT, STEPS, ENVS, WIDTH = 6, 5, 2, 40


def make(number: int) -> sw.Trajectory:
    row = np.arange(STEPS * ENVS, dtype=np.float32).reshape(STEPS, ENVS) + number * 1000
    obs = np.repeat(row[..., None], WIDTH, 2)
    return sw.Trajectory(rewards=row, curr_obs={"state": obs}, next_obs={"state": obs + 0.5}, model_weights_id="w")


def build(folder: Path, format: str, is_killed: bool) -> None:
    """A folder as it is closed, or as a killed process leaves it."""
    made = folder.with_name("building")
    buffer = sw.TrajectoryReplayBuffer(made, format=format, cache=0, capacity=COUNT)
    for number in range(COUNT + 2):
        buffer.add([make(number)])
        buffer.flush()
    if is_killed:
        shutil.copytree(made, folder)
    buffer.close()
    if not is_killed:
        shutil.copytree(made, folder)
    shutil.rmtree(made)


def damage(data: bytes, rng: random.Random) -> bytes:
    spoiled = bytearray(data)
    kind = rng.choice(("flip", "flip", "cut", "zero", "noise", "twice"))
    at = rng.randrange(len(spoiled))
    if kind == "flip":
        spoiled[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del spoiled[at:]
    elif kind == "zero":
        begin = at // 512 * 512
        end = min(begin + 512, len(spoiled))
        spoiled[begin:end] = bytes(end - begin)
    elif kind == "noise":
        end = min(at + 64, len(spoiled))
        spoiled[at:end] = rng.randbytes(end - at)
    else:
        spoiled[at:at] = spoiled[at : at + rng.randrange(1, 600)]
    return bytes(spoiled)


def look(folder: Path, rng: random.Random) -> str:
    """Opens it and reads everything: "right" or "told"."""
    recover = rng.random() < 0.3
    is_told = False
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            cache = rng.choice((0, 2, COUNT))
            with sw.TrajectoryReplayBuffer(folder, cache=cache, recover=recover) as buffer:
                held = len(buffer)
                for number in list(range(2, COUNT + 2)):
                    is_told |= not is_whole(buffer, number)
                for _ in range(6 if held else 0):
                    try:
                        check(buffer.sample(STEPS * ENVS * held))
                    except StorageError:
                        is_told = True
        except StorageError:
            return "told"
    if held < COUNT and not said:
        raise AssertionError(f"{COUNT - held} trajectories are gone, and nothing was said")
    return "told" if is_told or said else "right"


def is_whole(buffer: sw.TrajectoryReplayBuffer, number: int) -> bool:
    try:
        found = buffer.get(number)
    except (StorageError, sw.errors.StaleHandle):
        return False
    expected = make(number)
    assert np.array_equal(found.rewards, expected.rewards)
    assert np.array_equal(found.curr_obs["state"], expected.curr_obs["state"])
    assert np.array_equal(found.next_obs["state"], expected.next_obs["state"])
    return True


def check(batch: dict) -> None:  # type: ignore[type-arg]
    row = batch["trajectory_id"] * 1000 + batch["step"] * ENVS + batch["env"]
    assert np.array_equal(batch["rewards"], row.astype(np.float32))
    assert np.array_equal(batch["curr_obs"]["state"], np.repeat(row[:, None], WIDTH, 1).astype(np.float32))
    assert np.array_equal(batch["next_obs"]["state"], np.repeat(row[:, None] + 0.5, WIDTH, 1).astype(np.float32))


def main() -> None:
    root, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    whole = [root / f"{format}-{is_killed}" for format in ("pt", "safetensors") for is_killed in (False, True)]
    for folder, (format, is_killed) in zip(
        whole, [(format, is_killed) for format in ("pt", "safetensors") for is_killed in (False, True)], strict=True
    ):
        build(folder, format, is_killed)
        assert look(folder.rename(root / "spare"), random.Random(0)) == "right"
        (root / "spare").rename(folder)
        shutil.rmtree(folder)
        build(folder, format, is_killed)
    seen = Counter[str]()
    for seed in range(first, first + count):
        rng = random.Random(seed)
        folder = root / "damaged"
        shutil.copytree(rng.choice(whole), folder)
        victims = sorted(path for path in folder.iterdir() if path.stat().st_size)
        index = [path for path in victims if path.name == "trajectories.journal"]
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            victim = rng.choice(index if rng.random() < 0.4 else victims)
            if victim.stat().st_size:
                victim.write_bytes(damage(victim.read_bytes(), rng))
        try:
            outcome = look(folder, rng)
        except BaseException as error:
            raise SystemExit(f"seed {seed}: {type(error).__name__}: {error}") from error
        seen[outcome] += 1
        shutil.rmtree(folder)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
