"""The examples in docstrings of sharpwave.llm run."""

import doctest
import importlib
from pathlib import Path

import pytest

import sharpwave

ROOT = Path(sharpwave.__file__).parent
FILES = [path for path in sorted((ROOT / "llm").rglob("*.py")) if ">>> " in path.read_text()]
MODULES = [".".join(("sharpwave", *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed
