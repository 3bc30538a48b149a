"""Memory and disks that are full: an error from the call that needs the space, never a signal."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import os, sys, numpy as np, sharpwave as sw
from sharpwave.errors import StorageError
folder = sys.argv[1]
address = f"file://{folder}/live.sw"
def fill_up():
    with open(folder + "/other", "ab", buffering=0) as file:
        for size in (65536, 4096, 512):
            try:
                while True: file.write(b"x" * size)
            except OSError: pass
def free(bytes): os.truncate(folder + "/other", os.path.getsize(folder + "/other") - bytes)
def add(buf, i, done=False):
    buf.add(obs=np.full(64, i), action=0.0, reward=float(i), next_obs=np.full(64, i + 1), done=done)
def told(call):
    try: call()
    except StorageError as error: assert "No space left" in str(error), error
    else: raise AssertionError("no error")
def check(buf, numbers):
    seen = {}
    for batch in buf.rows():
        for reward, obs, after in zip(batch["reward"], batch["obs"], batch["next_obs"]):
            assert (obs == reward).all() and (after == reward + 1).all(), reward
            seen[int(reward)] = True
    assert sorted(seen) == sorted(numbers) and len(buf) == len(seen), (sorted(seen), len(buf))
    if numbers:
        batch = buf.sample(64)
        assert (batch["next_obs"] == batch["reward"][:, None] + 1).all()
def make(**more):
    return sw.ReplayBuffer(1000, obs_shape=(64,), next_obs="derived", storage=address, seed=0, writers=4, **more)
"""

CASES = {
    "the first add": "buf = make(); fill_up(); told(lambda: add(buf, 0)); check(buf, [])",
    "an add that finds part of its space": (
        "buf = make(); fill_up(); free(4096); told(lambda: add(buf, 0)); check(buf, [])"
    ),
    "the first add of a second writer": """
buf = make(); add(buf, 0); fill_up(); other = buf.writer()
told(lambda: add(other, 1)); check(buf, [0])
""",
    "the end of an episode": """
buf = make(); [add(buf, i) for i in range(100)]; fill_up()
try: add(buf, 100, done=True); n = 101
except StorageError: n = 100
check(buf, range(n)); buf.close() if n == 101 else told(buf.close)
free(1 << 20)
with sw.open(address) as again: check(again, range(n))
""",
    "closing, and a writer that comes after": """
buf = make(); [add(buf, i) for i in range(100)]; fill_up()
second = sw.open(address)
try: buf.close()
except StorageError: pass
check(second, range(100))
free(1 << 20); [add(second, i) for i in range(100, 200)]; check(second, range(200))
""",
    "closing with more open episodes than there is space for": """
def wide(): return sw.ReplayBuffer(64 * 40, obs_shape=(1024,), next_obs="derived", storage=address, seed=0, num_envs=64)
def push(buf, i):
    obs = np.full((64, 1024), i, np.float32)
    buf.add(obs=obs, action=np.zeros(64), reward=np.full(64, i), next_obs=obs + 1, done=np.zeros(64, bool))
def whole(buf, steps):
    seen = [0] * steps
    for batch in buf.rows(batch_size=64):
        assert (batch["next_obs"] == batch["reward"][:, None] + 1).all()
        for reward in batch["reward"]: seen[int(reward)] += 1
    assert seen == [64] * steps, seen
    assert (lambda b: (b["next_obs"] == b["reward"][:, None] + 1).all())(buf.sample(512))
buf = wide(); [push(buf, i) for i in range(5)]; second = sw.open(address); fill_up()
try: buf.close(); closed = True
except StorageError: closed = False
whole(second, 5)
free(3 << 20); second.stats(); whole(second, 5); [push(second, i) for i in range(5, 12)]; whole(second, 12)
second.close()
with sw.open(address) as third: whole(third, 12)
""",
    "opening after a kill": """
if os.fork() == 0:
    buf = make(); [add(buf, i) for i in range(100)]; os.kill(os.getpid(), 9)
os.wait(); fill_up()
with sw.open(address) as buf:
    check(buf, range(100))
    try: add(buf, 100); n = 101
    except StorageError: n = 100
    check(buf, range(n)); free(1 << 20); add(buf, n); check(buf, range(n + 1))
""",
    "recover=True": """
buf = make(); [add(buf, i) for i in range(100)]; buf.close(); fill_up()
with sw.open(address, recover=True) as again: check(again, range(100))
""",
    "reading, stats and saving elsewhere": """
import tempfile
buf = make(); add(buf, 0); fill_up(); check(buf, [0]); assert buf.stats()["size"] == 1
with tempfile.TemporaryDirectory() as elsewhere:
    buf.save(elsewhere + "/snapshot"); check(sw.open(elsewhere + "/snapshot"), [0])
told(lambda: buf.save(folder + "/snapshot")); check(buf, [0])
""",
    "a copy with holes": """
buf = make(); [add(buf, i) for i in range(10)]; buf.close()
os.system(f"cp --sparse=always {folder}/live.sw {folder}/copy.sw"); os.unlink(f"{folder}/live.sw")
fill_up(); told(lambda: sw.open(f"file://{folder}/copy.sw")); os.unlink(folder + "/other")
with sw.open(f"file://{folder}/copy.sw") as again:
    check(again, range(10)); fill_up()
    try:
        for i in range(10, 3000): add(again, i)
    except StorageError: pass
    again.sample(64)
""",
    "compressed values": """
schema = {"obs": sw.Field((64,), compression="lz4")}
buf = sw.ReplayBuffer(1000, schema=schema, next_obs="derived", storage=address, seed=0, num_envs=1, writers=4)
def push(i):
    obs = np.full(64, i, np.float32)
    buf.add(obs=obs, reward=float(i), next_obs=obs + 1, done=i % 7 == 6)
[push(i) for i in range(50)]; fill_up(); n = 50
try:
    while n < 3000: push(n); n += 1
except StorageError: pass
check(buf, range(n)) if n < 1000 else buf.sample(64)
free(1 << 20); push(n); assert buf.sample(64)["reward"].max() <= n
""",
}


def mounted(kind: str, folder: Path) -> str | None:
    """A command that mounts a small file system in a mount namespace of its own; None where the machine does not allow
    it."""
    if kind == "tmpfs":
        mount = f"mount -t tmpfs -o size=20m tmpfs {folder}"
    else:
        image = folder.parent / "image"
        mount = f"truncate -s 40M {image} && mkfs.ext4 -q -F {image} && mount -o loop {image} {folder}"
    if shutil.which("unshare") is None:
        return None
    tried = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False)
    return mount if tried.returncode == 0 else None


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
@pytest.mark.parametrize("case", list(CASES))
def test_lack_of_space_is_an_error_of_the_call(case: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = mounted(kind, folder)
    if mount is None:
        pytest.skip(f"this machine lets no test mount {kind}")
    script = tmp_path / "case.py"
    script.write_text(PRELUDE + CASES[case])
    command = f"{mount} && exec {sys.executable} {script} {folder}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
