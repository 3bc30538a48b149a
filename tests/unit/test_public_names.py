"""What importing the public names costs. The names themselves are in tests/house/api.txt."""

from __future__ import annotations

import subprocess
import sys

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
