"""RLinf's side of rlinf.py, in a process of its own: ``python rlinf_upstream.py EXPORT COMMAND ...``.

EXPORT is an export of one commit of RLinf. Its buffer code runs as it is. Stand-ins replace what its packages import
and its buffer does not use:

- ``rlinf.scheduler``: the cluster on ray. The buffer takes a logger from its ``Worker``, nothing else.
- ``huggingface_hub``: the lerobot writer, imported by the same package, reads one path of it.
"""

from __future__ import annotations

import json
import logging
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXPORT = Path(sys.argv[1])
sys.path[0] = str(EXPORT)  # not the folder of this file: it has a module named rlinf


def stand_in() -> None:
    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        made.__path__ = []
        sys.modules[name] = made

    logger = logging.getLogger("rlinf")
    logger.setLevel(logging.ERROR)
    worker = type("Worker", (), {"logger": logger, "torch_device_type": "cpu"})
    for name in ("rlinf.scheduler", "rlinf.scheduler.worker", "rlinf.scheduler.worker.worker"):
        module(name, Worker=worker)
    module("huggingface_hub")
    module("huggingface_hub.constants", HF_HOME="")
    warnings.filterwarnings("ignore", message=".*register_new_resolver.*")


stand_in()

import torch  # noqa: E402

try:  # the module moved after 64bf29a30
    from rlinf.data import replay_buffer as upstream
    from rlinf.data.embodied_io_struct import ChunkStepResult, Trajectory
    from rlinf.data.embodied_io_struct import EmbodiedRolloutResult as Builder
except ImportError:
    from rlinf.data.schema.embodied_trajectory_builder import EmbodiedTrajectoryBuilder as Builder
    from rlinf.data.schema.embodied_types import ChunkStepResult, Trajectory
    from rlinf.data.storage.replay import buffer as upstream

Buffer = upstream.TrajectoryReplayBuffer
NAMES = Buffer.__init__.__code__.co_varnames
RANKS = {"rank_0": 3, "rank_1": 2, "rank_10": 4}
IS_FIRST = "storage_dir" in NAMES  # until #693


def build(folder: Path | str, format: str, saves: bool = True, **options: Any) -> Any:
    """A buffer, by the names that this commit has."""
    if IS_FIRST:
        return Buffer(storage_dir=str(folder), storage_format=format, save_trajectories=saves, **options)
    return Buffer(auto_save_path=str(folder), trajectory_format=format, auto_save=saves, **options)


# ---- rollouts, made by RLinf's own builder ---------------------------------------------------------------------------


def rollout(
    seed: int,
    steps: int = 6,
    envs: int = 4,
    epochs: int = 1,
    chunk: int = 1,
    values: bool = False,
    images: bool = False,
    inputs: bool = False,
    intervenes: int = 0,
    dtype: Any = torch.float32,
    trail: bool = True,
) -> Any:
    """A builder that holds a rollout. Rewards are all different: a drawn row is known by its reward.

    Args:
        intervenes: A human may act in every so many steps; 0: never.
        trail: Rewards and flags have an axis for the chunk, as embodied environments give them.
    """
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int, kind: Any = torch.float32) -> Any:
        return torch.randn(*shape, generator=random).to(kind)

    def flags() -> dict[str, Any]:
        ends = {name: torch.rand(*row, generator=random) < 0.3 for name in ("terminations", "truncations")}
        return {**ends, "dones": ends["terminations"] | ends["truncations"]}

    def obs() -> dict[str, Any]:
        made = {"states": noise(envs, 5, kind=dtype)}
        if images:
            made["main_images"] = torch.randint(0, 256, (envs, 8, 8, 3), dtype=torch.uint8, generator=random)
        return made

    row = (envs, chunk) if trail else (envs,)
    made = Builder(max_episode_length=steps)
    if hasattr(made, "model_weights_id"):
        made.model_weights_id = f"weights{seed}_{seed % 3}"
    for epoch in range(epochs):
        made.append_step_result(ChunkStepResult(**flags(), forward_inputs=None))
        before = obs()
        for step in range(steps // epochs):
            number = seed * 100_000 + (epoch * (steps // epochs) + step) * envs * chunk
            rewards = number + torch.arange(envs * chunk, dtype=torch.float32).reshape(row)
            given = {"actions": noise(envs, 3 * chunk), "prev_logprobs": noise(envs, 3 * chunk), "rewards": rewards}
            if values:
                given["prev_values"] = noise(envs, 1)
            if "versions" in ChunkStepResult.__dataclass_fields__:
                given["versions"] = torch.full((envs, 1), float(seed % 5))
            extra = {"action": noise(envs, 3 * chunk), "mask": torch.ones(envs, 2, dtype=torch.int64)}
            made.append_step_result(ChunkStepResult(**given, **flags(), forward_inputs=extra if inputs else None))
            if intervenes and step % intervenes == 0:
                made.update_last_actions(noise(envs, 3 * chunk), torch.rand(envs, generator=random) < 0.6)
            after = obs()
            made.append_transitions({**before}, {**after})
            before = after
        if values:
            made.append_step_result(ChunkStepResult(prev_values=noise(envs, 1), forward_inputs=None))
    return made


def shapes() -> Iterator[tuple[str, list[Any]]]:
    """Names and trajectories; none where the builder of this commit cannot make them."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "two_axes": {"trail": False},
        "epochs": {"epochs": 2},
        "values": {"values": True},
        "values_epochs": {"values": True, "epochs": 3, "envs": 3},
        "intervened": {"intervenes": 2},
        "intervened_always": {"intervenes": 1},
        "images": {"images": True},
        "inputs": {"inputs": True},
        "chunks": {"chunk": 2},
        "one_env": {"envs": 1},
        "bfloat16": {"dtype": torch.bfloat16},
        "float16": {"dtype": torch.float16},
        "all": {"values": True, "images": True, "inputs": True, "epochs": 2, "intervenes": 1},
    }
    for name, options in cases.items():
        try:
            made = [rollout(number + 1, **options).to_trajectory() for number in range(3)]
        except (RuntimeError, IndexError, TypeError, AssertionError):
            yield name, []
            continue
        if "epochs" not in options:  # two kinds of length in one folder
            made.append(rollout(4, **{**options, "steps": 2}).to_trajectory())
        yield name, made
    for name, options in (("split", {}), ("split_images", {"images": True, "values": True})):
        parts = []
        for number in range(2):
            built = rollout(number + 1, **options)
            try:
                parts += built.to_splited_trajectories(2)
            except IndexError:  # the first versions have one flag for all environments, which they cannot split
                built.intervene_flags.clear()
                parts += built.to_splited_trajectories(2)
        yield name, parts
        if hasattr(Builder, "to_splited_trajectories_by_sizes"):
            sizes = rollout(3, **options).to_splited_trajectories_by_sizes([1, 3])
            yield f"{name}_by_sizes", sizes
    if hasattr(Trajectory, "extract_intervene_traj"):
        found = rollout(5, intervenes=2).to_trajectory().extract_intervene_traj()
        yield "extracted", found
    for name, leaf in dtypes().items():
        made = rollout(6).to_trajectory()
        made.forward_inputs = {"leaf": leaf, "numpy": torch.ones(6, 4, 2)}
        yield name, [made]


def dtypes() -> dict[str, Any]:
    """Leaves of dtypes that rollouts do not have and files can."""
    bits = torch.arange(6 * 4 * 2, dtype=torch.int64).reshape(6, 4, 2)
    made = {
        str(kind).removeprefix("torch."): bits.to(kind)
        for kind in (torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int32, torch.float64)
    }
    made["float8_e4m3fn"] = bits.to(torch.float32).to(torch.float8_e4m3fn)
    made["float8_e5m2"] = bits.to(torch.float32).to(torch.float8_e5m2)
    made["complex64"] = torch.complex(bits.float(), -bits.float())
    made["complex128"] = torch.complex(bits.double(), -bits.double())
    return made


# ---- commands --------------------------------------------------------------------------------------------------------


def fields(trajectory: Any) -> dict[str, Any]:
    """Everything of a trajectory that can be drawn from."""

    def keep(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() >= 2

    made: dict[str, Any] = {}
    for name in trajectory.__dataclass_fields__:
        value = getattr(trajectory, name)
        if isinstance(value, dict):
            part = {key: one for key, one in value.items() if keep(one)}
            if part:
                made[name] = part
        elif keep(value):
            made[name] = value
    return made


def dump(buffer: Any, out: Path) -> None:
    """What a buffer that was loaded reads from its files, and how it flattens it."""
    found, flat = {}, {}
    for number in buffer._trajectory_id_list:
        one = buffer._load_trajectory(number, buffer._trajectory_index[number]["model_weights_id"])
        found[number] = fields(one)
        flat[number] = buffer._flatten_trajectory(one)
    torch.save({"found": found, "flat": flat}, out)


def load(folder: Path, format: str) -> Any:
    buffer = build(folder.parent / "other", format, enable_cache=False) if IS_FIRST else build("", format, saves=False)
    buffer.load_checkpoint(str(folder))
    return buffer


def write(root: Path) -> None:
    """Folders and checkpoints of every shape; a list of them on standard output, and what RLinf itself cannot do."""
    cases, cannot = [], []

    def case(kind: str, name: str, format: str, make: Callable[[Path], Any]) -> bool:
        folder, out = root / kind / f"{name}-{format}", root / f"{kind}-{name}-{format}.expected"
        try:
            make(folder)
            dump(load(folder, format), out)
        except Exception as error:  # RLinf failed on its own data: no case
            cannot.append(f"{kind} {name} {format}: {type(error).__name__}")
            return False
        cases.append({"kind": kind, "name": name, "format": format, "folder": str(folder), "expected": str(out)})
        return True

    def live(folder: Path) -> None:
        buffer = build(folder, format, enable_cache=False)
        buffer.add_trajectories(trajectories)
        buffer.close()

    def checkpoint(folder: Path) -> None:
        if IS_FIRST:
            buffer = load(root / "live" / f"{name}-{format}", format)
        else:
            buffer = build("", format, saves=False)
            buffer.add_trajectories(trajectories)
        buffer.save_checkpoint(str(folder))

    def window(folder: Path) -> None:
        """Of a buffer with files: what the window of its last draw had."""
        buffer = build(root / "again" / f"{name}-{format}", format, cache_size=len(trajectories))
        buffer.add_trajectories(trajectories)
        buffer._save_executor.shutdown(wait=True)  # its checkpoint leaves out files that are not written yet
        buffer.sample(1)
        buffer.save_checkpoint(str(folder))

    for name, trajectories in shapes():
        if not trajectories:
            cannot.append(f"{name}: its builder")
        for format in ("pt", "pkl") if trajectories else ():
            if case("live", name, format, live):
                case("checkpoint", name, format, checkpoint)
                if not IS_FIRST:
                    case("window", name, format, window)
    for rank, count in RANKS.items():
        buffer = build(root / "ranks" / rank, "pt")
        buffer.add_trajectories([rollout(100 * int(rank[5:]) + number).to_trajectory() for number in range(count)])
        buffer.close()
    print(json.dumps({"cases": cases, "cannot": cannot}))


def read(spec: Path) -> None:
    """Loads folders, those that cannot be loaded with the error. One line of JSON a folder."""
    for part in json.loads(spec.read_text()):
        folder, out = Path(part["folder"]), Path(part["out"])
        try:
            if part.get("adopts") and IS_FIRST:
                buffer = build(folder, part["format"], enable_cache=False)  # the constructor takes it up
            else:
                buffer = load(folder, part["format"])
            dump(buffer, out)
            expected = torch.load(out, weights_only=True)["flat"]
            # Not where there is one flag for all environments: these versions cannot draw from what they recorded.
            if part["draws"] and all(
                len(one.get("intervene_flags", one["rewards"])) == len(one["rewards"]) for one in expected.values()
            ):
                batch = buffer.sample(16)
                rewards = torch.cat([one["rewards"] for one in expected.values()]).reshape(-1)
                if not torch.isin(batch["rewards"].reshape(-1), rewards).all():
                    raise ValueError("drew rows that are none")
            error = None
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        print(json.dumps({"out": part["out"], "error": error}))


def script(path: Path, swapped: bool, arguments: list[str]) -> None:
    """Runs a script of RLinf's; ``swapped`` gives it our buffer in place of RLinf's."""
    if swapped:
        swap()
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def swap() -> None:
    """Our names where RLinf's stand: what a changed import does."""
    from sharpwave.compat import rlinf as ours

    upstream.TrajectoryReplayBuffer = ours.TrajectoryReplayBuffer
    package = sys.modules.get("rlinf.data.storage.replay")
    if package is not None:
        package.TrajectoryReplayBuffer = ours.TrajectoryReplayBuffer


def datasets(root: Path) -> None:
    """RLinf's datasets over our buffers, as its workers build them."""
    from sharpwave.compat.rlinf import TrajectoryReplayBuffer as Ours

    try:
        from rlinf.data.embodied_buffer_dataset import PreloadReplayBufferDataset, ReplayBufferDataset
    except ImportError:
        from rlinf.data.storage.replay import PreloadReplayBufferDataset, ReplayBufferDataset
    for kind in (ReplayBufferDataset, PreloadReplayBufferDataset):
        buffers = []
        for name in ("replay_buffer", "demo_buffer"):
            made = Ours(seed=1, enable_cache=True, cache_size=5, sample_window_size=100, auto_save=False,
                        auto_save_path=str(root / name), trajectory_format="pt")  # fmt: skip
            made.add_trajectories([rollout(number + 1, inputs=True).to_trajectory() for number in range(2)])
            buffers.append(made)
        data = kind(*buffers, batch_size=8, min_replay_buffer_size=1, min_demo_buffer_size=1, prefetch_size=2)
        batch = next(iter(data))
        assert batch["rewards"].shape == (8, 1), batch["rewards"].shape
        assert batch["curr_obs"]["states"].shape == (8, 5)
        if kind is PreloadReplayBufferDataset:
            data.close()
    print(json.dumps({"passed": 2}))


def compare(_: Path) -> None:
    """PriorityStore, extract_intervene_traj and _flatten_trajectory, ours beside RLinf's, on the same input."""
    from sharpwave.compat import rlinf as ours

    report: dict[str, list[str]] = {}

    def check(name: str, is_equal: bool, what: str = "") -> None:
        report.setdefault(name, []).append("" if is_equal else what or "differs")

    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
        return bool(one == other)

    mine = ours.TrajectoryReplayBuffer(save_trajectories=False)
    theirs = build("", "pt", saves=False) if not IS_FIRST else None
    for seed in range(20):
        options = {"epochs": 1 + seed % 3, "inputs": seed % 2 == 0, "images": seed % 4 == 1, "chunk": 1 + seed % 2}
        one = rollout(seed, **options).to_trajectory()
        if theirs is not None:
            check("_flatten_trajectory", equal(theirs._flatten_trajectory(one), mine._flatten_trajectory(one)))
        if hasattr(Trajectory, "extract_intervene_traj"):
            random = torch.Generator().manual_seed(seed)
            one.intervene_flags = torch.rand(6, 4, 3, generator=random) < (0.0, 0.2, 0.7)[seed % 3]
            held = {name: getattr(one, name) for name in one.__dataclass_fields__}
            for mode in ("any", "all"):
                expected = one.extract_intervene_traj(mode)
                got = ours.Trajectory(**held).extract_intervene_traj(mode)
                if expected is None or got is None:
                    check("extract_intervene_traj", expected is None and got is None)
                    continue
                check("extract_intervene_traj", len(expected) == len(got), "another number of them")
                for left, right in zip(expected, got, strict=True):
                    skipped = () if options["epochs"] == 1 else ("terminations", "truncations", "dones")
                    parts = [fields(each) for each in (left, right)]
                    for part in parts:
                        for name in skipped:
                            part.pop(name)
                    check("extract_intervene_traj", equal(*parts))
    if hasattr(upstream, "PriorityStore"):
        import random as numbers

        for seed in range(50):
            chance = numbers.Random(seed)
            wrong = ""
            stores = [upstream.PriorityStore(maxsize=4), ours.PriorityStore(maxsize=4)]
            for _ in range(60):
                what = chance.randrange(10)
                if what < 6:
                    low = chance.randrange(6)
                    given = ((float(low), low + chance.random()), Trajectory(versions=torch.full((2, 1), float(low))))
                    results = [store.add(*given) for store in stores]
                elif what < 8:
                    count = chance.randrange(1, 6)
                    results = [[id(one) for one in store.topn(count)] for store in stores]
                elif what < 9:
                    bound = chance.randrange(5)
                    results = [store.remove_below(bound) for store in stores]
                else:
                    results = [store.get_metric() for store in stores]
                if results[0] != results[1] or len(stores[0]) != len(stores[1]):
                    wrong = wrong or f"{what}: {results}"
            check("PriorityStore", not wrong, wrong)
    print(json.dumps(report))


def main() -> None:
    command, arguments = sys.argv[2], sys.argv[3:]
    if command == "script":
        script(Path(arguments[0]), arguments[1] == "swapped", arguments[2:])
    else:
        {"write": write, "read": read, "datasets": datasets, "compare": compare}[command](Path(arguments[0]))


if __name__ == "__main__":
    main()
