"""Files with one owner, and files that appear whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from patience import HANG_S, until_asleep

import sharpwave as sw
from sharpwave import _core
from sharpwave.errors import ClosedError, StorageError


def test_a_file_has_one_owner_even_in_one_process(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    first = _core.own_file(path)
    assert first is not None
    assert _core.own_file(path) is None
    first.close()
    assert _core.own_file(path) is not None


def test_reading_and_copying_an_owned_file_leaves_it_owned(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal"
    path.parent.mkdir()
    first = _core.own_file(str(path))
    with open(path, "rb+"):
        pass
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    assert _core.own_file(str(path)) is None
    assert first is not None
    assert first.is_open


def test_a_killed_owner_whose_child_lives_owns_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    read, write = os.pipe()
    owner = os.fork()
    if owner == 0:
        lock = _core.own_file(path)
        assert lock is not None
        child = os.fork()
        if child == 0:
            os.close(read)
            assert not lock.is_open
            with pytest.raises(ClosedError, match="parent"):
                lock.fileno()
            os.write(write, f"{os.getpid()}\n".encode())
            time.sleep(30)
            os._exit(0)
        time.sleep(30)
        os._exit(1)
    os.close(write)
    grandchild = int(os.read(read, 20))
    os.close(read)
    try:
        assert _core.own_file(path) is None
        os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)
        assert _core.own_file(path) is not None
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_program_that_the_owner_starts_owns_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    lock = _core.own_file(path)
    assert lock is not None
    with subprocess.Popen(["sleep", "30"], close_fds=False) as child:
        lock.close()
        try:
            assert _core.own_file(path) is not None
        finally:
            child.kill()


def test_waiting_for_an_owner_ends_at_the_deadline_and_on_a_signal(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    lock = _core.own_file(path)
    assert lock is not None
    start = time.monotonic()
    assert _core.own_file(path, timeout=0.2) is None
    assert 0.15 < time.monotonic() - start < HANG_S
    code = f"from sharpwave import _core\nprint('waits', flush=True)\n_core.own_file({path!r}, timeout=600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiter:
        assert waiter.stdout is not None
        waiter.stdout.readline()
        until_asleep(waiter.pid)
        waiter.send_signal(signal.SIGINT)
        assert waiter.wait(HANG_S) != 0
        assert waiter.stderr is not None
        assert b"KeyboardInterrupt" in waiter.stderr.read()


def test_symlinks_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(StorageError, match="symbolic link"):
        _core.own_file(str(tmp_path / "link"))
    with pytest.raises(StorageError):
        _core.own_file(str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o666)
    os.chown(path, 12345, 12345)
    with pytest.raises(StorageError, match="belongs to user 12345"):
        _core.own_file(str(path))


def test_a_replaced_file_has_its_owner_before_its_name(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    old = _core.own_file(path)
    made = _core.NewFile(path)
    made.write(b"new")
    made.write(bytearray(b"er"))
    lock = made.own()
    made.sync()
    made.publish(replace=True)
    assert old is not None
    assert not old.is_named(path)
    assert lock.is_named(path)
    old.close()
    assert _core.own_file(path) is None
    assert Path(path).read_bytes() == b"newer"
    assert os.listdir(tmp_path) == ["journal"]


def test_a_new_file_without_a_name_leaves_nothing(tmp_path: Path) -> None:
    made = _core.NewFile(str(tmp_path / "file"))
    made.write(b"x")
    del made
    assert os.listdir(tmp_path) == []
    _core.NewFile(str(tmp_path / "file")).publish(replace=False)
    with pytest.raises(StorageError, match="exists"):
        _core.NewFile(str(tmp_path / "file")).publish(replace=False)


# ---- saves to one path -----------------------------------------------------------------------------------------------


def one_row() -> sw.ReplayBuffer:
    buffer = sw.ReplayBuffer(8, obs_shape=(2,), seed=0)
    buffer.add([1, 2], 0, 0, [3, 4], False)
    return buffer


def test_threads_that_save_to_one_path_at_once_all_succeed(tmp_path: Path) -> None:
    failures: list[Exception] = []

    def save() -> None:
        buffer, until = one_row(), time.monotonic() + 1.5
        while time.monotonic() < until:
            try:
                buffer.save(tmp_path / "snapshot")
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(sw.open(tmp_path / "snapshot")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]


def test_what_a_killed_save_has_left_is_taken_away(tmp_path: Path) -> None:
    one_row().save(tmp_path / "snapshot")
    (tmp_path / "snapshot.next").write_bytes(b"of a process that was killed before it had replaced the first one")
    bigger = one_row()
    bigger.add([5, 6], 0, 0, [7, 8], False)
    bigger.save(tmp_path / "snapshot")
    assert len(sw.open(tmp_path / "snapshot")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["snapshot"]
