"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import sharpwave as sw
from sharpwave import errors


def test_package_gives_exactly_these_names() -> None:
    assert sw.__all__ == [
        "Consumer",
        "Dataflow",
        "DistillationBuffer",
        "Field",
        "Fifo",
        "Hindsight",
        "Lifo",
        "Linear",
        "Pace",
        "Prioritized",
        "Recent",
        "ReplayBuffer",
        "RolloutBuffer",
        "SequenceBuffer",
        "SequenceSample",
        "Shuffle",
        "Trajectory",
        "TrajectoryReplayBuffer",
        "Transitions",
        "Uniform",
        "Windows",
        "adapters",
        "collect",
        "compat",
        "errors",
        "open",
        "returns",
    ]
    assert all(hasattr(sw, name) for name in sw.__all__)


def test_buffer_gives_exactly_these_names() -> None:
    names = {name for name in dir(sw.ReplayBuffer) if not name.startswith("_")}
    verbs = {"add", "clear", "close", "flush", "get", "rows", "sample", "save", "stats", "stream", "writer", "for_env"}
    verbs |= {"tune", "update_priorities", "add_async", "sample_async", "batches"}
    assert names == verbs | {"capacity", "is_full", "num_envs", "pace", "sampler", "schema", "view"}


def test_rollouts_and_distillation_give_exactly_these_names() -> None:
    roll = {name for name in dir(sw.RolloutBuffer) if not name.startswith("_")}
    verbs = {"add", "clear", "compute_returns_and_advantages", "get_all_data", "minibatches", "recurrent_minibatches"}
    assert roll == verbs | {"autoreset", "device", "is_full", "num_envs", "num_steps", "step"}
    dist = {name for name in dir(sw.DistillationBuffer) if not name.startswith("_")}
    verbs = {"add", "batches", "clear", "close", "load", "sample", "save", "steps"}
    assert dist == verbs | {"capacity", "device", "is_full", "num_envs"}
    traj = {name for name in dir(sw.TrajectoryReplayBuffer) if not name.startswith("_")}
    verbs = {"add_trajectories", "clear", "clear_cache", "close", "flush", "get_stats", "get_trajectory", "is_ready"}
    verbs |= {"load_checkpoint", "sample", "save_checkpoint", "trajectories"}
    verbs |= {"add_trajectories_async", "sample_async", "save_checkpoint_async"}
    assert traj == verbs | {"sample_window_size", "size", "storage_dir", "total_samples"}
    functions = {"discounted_returns", "gae", "group_relative_advantages", "lambda_returns", "vtrace"}
    assert set(sw.returns.__all__) == functions


def test_sequences_give_exactly_these_names() -> None:
    seq = {name for name in dir(sw.SequenceBuffer) if not name.startswith("_")}
    verbs = {"put", "get", "amend", "put_async", "get_async", "amend_async", "release", "close", "ids"}
    verbs |= {"set_version", "admission", "checkpoint", "take_up", "wanted", "explain", "stats"}
    verbs |= {"set_version_async", "checkpoint_async"}
    assert seq == verbs | {"used_ids", "version"}
    sample = {name for name in dir(sw.SequenceSample) if not name.startswith("_")}
    parts = {"ids", "keys", "seqlens", "data", "trailing_shapes", "dtypes", "metadata", "tokens", "nbytes"}
    verbs = {
        "gather",
        "split",
        "split_by_tokens",
        "unpack",
        "reorder",
        "select",
        "update",
        "meta",
        "remap",
        "pad",
        "pack",
    }
    assert sample == parts | verbs | {"to_json", "from_json", "to_bytes", "from_bytes", "save", "load"}


def test_errors_are_ours_and_python_s() -> None:
    bases = {
        "SchemaError": ValueError,
        "NotReady": TimeoutError,
        "StorageError": OSError,
        "StaleHandle": LookupError,
        "ClosedError": RuntimeError,
        "BufferFull": RuntimeError,
    }
    assert set(errors.__all__) == {*bases, "SharpwaveError"}
    for name, base in bases.items():
        assert getattr(errors, name).__bases__ == (errors.SharpwaveError, base)
    assert errors.SharpwaveError.__bases__ == (Exception,)


def test_import_brings_numpy_only() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import sharpwave, sharpwave.adapters, sharpwave.compat, sharpwave.errors\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(roots - set(sys.stdlib_module_names)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["numpy", "sharpwave"]


def test_use_without_torch_and_gymnasium_imports_neither() -> None:
    code = (
        "import sys\n"
        "import sharpwave as sw\n"
        "b = sw.ReplayBuffer(4, obs_shape=(2,)); b.add([0, 0], 0, 0, [0, 0], False); b.sample(2)\n"
    )
    code += "print(*({'torch', 'gymnasium'} & set(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_version_is_the_distribution_s() -> None:
    from importlib.metadata import version

    assert sw.__version__ == version("sharpwave")
