"""What importing the public names costs. The names themselves are in tests/house/api.txt."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sharpwave as sw


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


def _printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def test_import_leaves_what_takes_long_until_it_is_used() -> None:
    code = (
        "import sys, numpy\n"
        "before = set(sys.modules)\n"
        "import sharpwave as sw\n"
        "slow = {'asyncio', 'importlib.metadata', 'torch', 'gymnasium'}\n"
        "slow |= {'sharpwave.buffers.' + face for face in ('open', 'rollout', 'sequence', 'trajectory')}\n"
        "print(*(slow & (set(sys.modules) - before)))\n"
    )
    assert _printed(code) == []
    code += "sw.SequenceBuffer, sw.open, sw.__version__\nprint(*sorted(slow & (set(sys.modules) - before)))\n"
    faces = [f"sharpwave.buffers.{face}" for face in ("open", "rollout", "sequence", "trajectory")]
    assert _printed(code) == ["importlib.metadata", *faces]


def test_each_name_is_listed_and_the_same_object_every_time() -> None:
    code = (
        "import pickle, sharpwave as sw\n"
        "for name in [*sw.__all__, '__version__']:\n"
        "    assert name in dir(sw), name\n"
        "    one = getattr(sw, name)\n"
        "    assert one is getattr(sw, name) is vars(sw)[name], name\n"
        "    if isinstance(one, type):\n"
        "        assert pickle.loads(pickle.dumps(one)) is one, name\n"
        "print('fine')\n"
    )
    assert _printed(code) == ["fine"]


def test_star_imports_every_name() -> None:
    code = f"from sharpwave import *\nprint(*sorted(set(dir()) & set({sw.__all__!r})))\n"
    assert _printed(code) == sorted(sw.__all__)


def test_collect_is_the_function_whatever_was_imported_first() -> None:
    code = "import sharpwave.collect\nimport sharpwave as sw\nprint(callable(sw.collect))\n"
    assert _printed(code) == ["True"]


def test_absent_name_is_an_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'sharpwave' has no attribute 'ReplyBuffer'"):
        sw.ReplyBuffer  # noqa: B018


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
