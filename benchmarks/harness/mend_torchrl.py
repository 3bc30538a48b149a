"""Builds torchrl's C++ extension anew where the wheel's does not load: `python -m harness.mend_torchrl`.

The wheel is built for one version of torch and says nothing about it when it is installed with another; its
prioritized sampler is then missing. The sources are in the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import torch
import torchrl
from torch.utils import cpp_extension


def loads() -> bool:
    try:
        import torchrl._torchrl  # noqa: F401
    except ImportError:
        return False
    return True


def build() -> None:
    package, libraries = Path(torchrl.__file__).parent, Path(torch.__file__).parent / "lib"
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    flags = ["-std=c++20", "-O3", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=_torchrl"]
    sources = [str(package / "csrc" / name) for name in ("pybind.cpp", "utils.cpp")]
    links = [f"-L{libraries}", *(f"-l{name}" for name in ("torch", "torch_cpu", "c10", "torch_python"))]
    target = package / f"_torchrl{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [os.environ.get("CXX", "c++"), *flags, *includes, *sources, *links, "-o", str(target)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if not loads():
        print("torchrl: building its extension for this torch, a minute or two", flush=True)
        build()
