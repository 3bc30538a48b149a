"""What every room of the tests shares: hypothesis without deadlines, and shared memory that leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported here or in a process that a test starts: its threads wait for each other busily, which costs
# more than they bring where tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from sharpwave import _core

settings.register_profile(
    "sharpwave", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# `make soak`: other cases each time, and many more of them.
settings.register_profile("soak", parent=settings.get_profile("sharpwave"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "sharpwave"))

_PREFIX = f"test-{os.getpid()}-"

# A shell starts what runs in the background with Ctrl-C ignored, and every process that a test starts would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes that share the tests must call them alike: an address is another one in each."""
    if wrong := [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]:
        raise pytest.UsageError(f"{wrong[0]}: its id holds an address; give the value an id by pytest.param(..., id=)")


def _shared_files(part: str) -> list[Path]:
    return [path for path in Path(_core.shared_memory_folder).glob("sharpwave-*") if part in path.name]


@pytest.fixture
def shm_address() -> Iterator[str]:
    """An address in shared memory that nobody else uses; what is left there after the test is removed."""
    name = f"{_PREFIX}{uuid.uuid4().hex}"
    yield f"shm://{name}"
    for path in _shared_files(name):
        path.unlink()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users' processes reach: pytest closes its own to them, how deep it lies differs from run to
    run, and other runs share its upper part."""
    folder = Path(tempfile.mkdtemp(prefix="sharpwave-test-"))
    folder.chmod(0o755)
    closed = [str(parent) for parent in folder.parents if not parent.stat().st_mode & 0o001]
    try:
        if closed:
            pytest.skip(f"other users cannot pass {closed[0]}")
        yield folder
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def _shared_memory_is_left_clean() -> Iterator[None]:
    yield
    assert _shared_files(_PREFIX) == []
