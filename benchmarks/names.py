"""What the entries of a contest are called, and who counts as what."""

from __future__ import annotations

from harness.contest import contender_of

NAMES = {
    "sharpwave": "Sharpwave",
    "engine": "Sharpwave's engine from C++",
    "numpy_ring": "NumPy ring",
    "numpy_ring/take": "NumPy ring with take",
    "numpy_ring/assignments": "NumPy ring, five assignments",
    "torch_ring": "torch by hand",
    "c_limit": "bare C copies, one thread",
    "c_limit/threads": "bare C copies, all cores",
    "c_loop": "bare C loop, one thread",
    "empty_loop": "the timing loop itself",
    "sb3": "Stable-Baselines3",
    "reverb": "Reverb",
    "ray": "Ray actor",
    "apexrl": "ApexRL's loop",
    "loop": "a dozen launches a step",
    "echo": "bare ZeroMQ echo",
}
VARIANTS = {
    "keyword": "by keyword",
    "out": "out=",
    "torch": 'device="cpu"',
    "frame": "given single frames",
    "tensors": "torch tensors",
    "rollout": "RolloutBuffer",
    "native": "-march=native",
}
FORMS = {
    "uniform": "uniform",
    "one_step": "one step",
    "stored": "both stored",
    "derived": "derived",
    "rainbow": "prioritized and 3-step as well",
    "plain": "both stored",
    "lz4": "both stored, LZ4",
    "zstd": "both stored, Zstandard",
    "stacked": "each frame once",
    "stacked_lz4": "each frame once, LZ4",
    "stacked_zstd": "each frame once, Zstandard",
    "pad": "padded",
    "cached": "cached between adds",
    "own_goals": "own goals",
    "free": "no pace",
    "written_once": "states written once",
    "shm": "shared memory",
    "tcp": "tcp",
    "ipc": "ipc",
    "keys": "tcp with keys",
    "tcp_fresh": "tcp, copied first",
    "ipc_fresh": "ipc, copied first",
    "keys_fresh": "tcp with keys, copied first",
    "direct": "direct",
}
KINDS = {"w1": "small rows", "atari": "image rows"}
CONTESTS = KINDS | {
    "prioritized": "prioritized",
    "nstep": "3-step",
    "hindsight": "hindsight",
    "pace": "with a pace",
    "write": "recurrent states",
    "frames": "image rows, deduplicated",
    "shm": "in process and in shared memory",
    "shm_prioritized": "prioritized, in process and in shared memory",
    "snapshot": "a full buffer of small rows",
    "returns": "steps x environments",
}
# Operations on a whole buffer.
WHOLE_CASES = {
    "save": "save, before fsync",
    "fsync": "fsync",
    "load": "load, first sample(256)",
    "attach": "open in place",
}
# They say how long the machine took, not the contender.
BESIDE_CASES = ("fsync",)
# Of trajectories on disk.
TRAJECTORIES = {
    "sample_256": "256 of 100 cached [50, 8]",
    "sample_1024": "1,024 of 10,000 cached [2, 32]",
    "sample_256_disk": "256 of 100 [50, 8], no cache",
    "add": "add one [50, 8], the caller's time",
    "add_saved": "add one [50, 8], until it is saved",
    "open": "open a folder of 100,000 trajectories",
}
# Against whom: the label in the results, and what it is called.
TRAJECTORY_RIVALS = {"plain torch": "RLinf's algorithm in torch", "lean torch": "a lean form in torch"}
# Of several processes on one buffer.
CROWDS = ("uniform", "prioritized")
RATES = {"inserts_per_s": "inserts a second", "samples_per_s": "samples a second"}
# Of a server's buffers: calls with an answer, and what is asked for ahead.
SERVICE = {
    "sample_256": "sample(256), small rows",
    "add_1": "add 1 row",
    "batches_256": "256 small rows, asked for ahead",
    "adds": "a row of many on their way",
    "images": "sample(256), image rows",
    "image_batches": "256 image rows, asked for ahead",
}
WAYS = {"tcp": "tcp", "ipc": "ipc", "keys": "tcp with keys"}
# Past the server, in the buffer's own memory.
SERVICE_DIRECT = {"direct_sample_256": "sample(256)", "direct_add_1": "add 1 row"}
# Steps of training whose time in the buffer is asked.
TRAININGS = ("dqn_4", "dqn_17", "per_dqn_17", "sac")
# They store nothing that one could get back, or check nothing; a rival is someone whom a user could choose instead.
YARDSTICKS = ("engine", "c_limit", "c_loop", "empty_loop", "echo")
# What users write themselves: rivals, and no libraries.
BY_HAND = ("numpy_ring", "torch_ring")
# Forms that do another thing; they stand in a contest for comparison.
BESIDE = ("uniform", "one_step", "stored", "rainbow", "pad", "own_goals", "free", "shm", "written_once")


def name(label: str) -> str:
    """`Sharpwave, derived, out=` of `sharpwave@derived/out`."""
    if label in NAMES:
        return NAMES[label]
    entrant, _, variant = label.partition("/")
    contender, _, form = entrant.partition("@")
    return ", ".join(
        filter(None, (NAMES.get(contender, contender), FORMS.get(form, form), VARIANTS.get(variant, variant)))
    )


def entrant_of(label: str) -> str:
    """`sharpwave@derived` of `sharpwave@derived/out`."""
    return label.partition("/")[0]


def is_yardstick(label: str) -> bool:
    return contender_of(label) in YARDSTICKS


def is_beside(label: str) -> bool:
    return entrant_of(label).partition("@")[2] in BESIDE


def is_choice(label: str) -> bool:
    """Whether it is something that a user could choose for the task."""
    return not is_yardstick(label) and not is_beside(label)


def is_rival(label: str) -> bool:
    return is_choice(label) and contender_of(label) != "sharpwave"


def is_ours(label: str) -> bool:
    return is_choice(label) and contender_of(label) == "sharpwave"


def is_ring(label: str) -> bool:
    return contender_of(label) == "numpy_ring"


def is_library(label: str) -> bool:
    return is_rival(label) and contender_of(label) not in BY_HAND


def case_name(case: str) -> str:
    """`sample(256)` of `sample_256`, `GAE, 24 x 4096` of `gae_24x4096`."""
    if case in WHOLE_CASES:
        return WHOLE_CASES[case]
    verb, count = case.split("_")
    if verb == "add":
        return "add 1 row" if count == "1" else f"add {count} rows"
    if verb == "gae":
        return f"GAE, {count.replace('x', ' x ')}"
    return f"add 1, sample({count}), update({count})" if verb == "learn" else f"{verb}({count})"
