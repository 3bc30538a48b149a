"""Files that are absent, foreign, cut short, damaged or in the way: named reasons, and nothing lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz import layout
from numbered import filled, make, numbers_in, row, state_of
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import StorageError


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Seventeen rows in a ring of ten, one of them masked, with an episode end."""
    buffer = filled(15)
    buffer.add(**row(15, mask=False))
    buffer.add(**row(16, done=True))
    path = tmp_path / "snapshot"
    buffer.save(path)
    return path


@pytest.fixture
def live(tmp_path: Path) -> Path:
    path = tmp_path / "live.sw"
    filled(15, storage=f"file://{path}").close()
    return path


# ---- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["{0}/absent", "file://{0}/absent", "shm://absent-for-sure"])
def test_absent_file_is_named(address: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot open .*absent.*No such file"):
        sw.open(address.format(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["tcp://host", "shm://", "shm://a/b", "file://", "weird://x"])
def test_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(StorageError, match=r"open\(\): (address: )?expected"):
        sw.open(address)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_directory_is_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"is not a file|Is a directory"):
        sw.open(f"{prefix}{tmp_path}")


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize("content", [b"", b"x", b"SHRPWAVE", b"not a table\n" * 1000, bytes(4096), bytes(100_000)])
def test_foreign_file_is_refused_and_left(prefix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StorageError, match="is not a Sharpwave table"):
        sw.open(f"{prefix}{path}")
    assert path.read_bytes() == content


def test_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = f"import sharpwave as sw\ntry: sw.open('{tmp_path}/pipe')\nexcept sw.errors.StorageError: print('refused')"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("open() hangs")
    assert done.stdout == "refused\n"


PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452")  # how every picture of the kind begins


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_picture_device_and_socket_are_refused_at_once(prefix: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(PNG + bytes(5000))
    with pytest.raises(StorageError, match="is not a Sharpwave table"):
        sw.open(f"{prefix}{picture}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        with pytest.raises(StorageError, match=r"cannot open .*socket"):
            sw.open(f"{prefix}{tmp_path}/socket")
    for device in ("/dev/null", "/dev/zero"):
        with pytest.raises(StorageError, match=f"'{device}' is not a (file|Sharpwave table)"):
            sw.open(f"{prefix}{device}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["picture.png", "socket"]


# ---- somebody else's, and no room left -------------------------------------------------------------------------------

# Children do this where the machine is in a state that the tests do not want to be in.
CHILD = """
import os, sys
import numpy as np
import sharpwave as sw

def told(call):
    try:
        print("made", call() is None)
    except sw.errors.StorageError as error:
        print("refused:", error)

def heap(number, rows=1):
    stream = np.random.default_rng(number)
    noise = stream.integers(0, 256, (rows, 4096), dtype=np.uint8)  # nothing to compress
    return dict(obs=noise, reward=np.full(rows, number, np.float32), done=np.zeros(rows, bool))

def make(**options):
    schema = {"obs": sw.Field((4096,), "uint8", compression="lz4")}
    return sw.ReplayBuffer(300, **{"schema": schema, "next_obs": None, "num_envs": 1, "seed": 0, **options})

def numbers(buffer):
    found = []
    for batch in buffer.rows():
        for number, obs in zip(batch["reward"].astype(int).tolist(), batch["obs"]):
            assert (obs == heap(number)["obs"][0]).all(), "a torn row"
            found.append(number)
    return found

def fill(buffer):
    for number in range(10_000):
        try:
            buffer.add(**heap(number))
        except sw.errors.StorageError as error:
            print("refused:", error)
            return number
"""


def child(code: str, *around: str, folder: Path) -> list[str]:
    """What a process says that runs CHILD and this, in `folder`, started by the command `around`."""
    command = [*around, sys.executable, "-c", CHILD + code]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=folder, env=env)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def as_nobody(code: str, folder: Path) -> list[str]:
    """As a user who owns nothing: root may write everywhere. What is needed is imported before."""
    become = "\nsw.open\nif os.geteuid() == 0:\n    os.setgroups([])\n    os.setgid(65534)\n    os.setuid(65534)\n"
    return child(become + code, folder=folder)


def test_folder_that_may_not_be_written_to_is_named(open_folder: Path) -> None:
    snapshot, live = open_folder / "snapshot", open_folder / "live.sw"
    filled(3).save(snapshot)
    filled(3, storage=f"file://{live}").close()
    for path in (snapshot, live):
        path.chmod(0o444)
    open_folder.chmod(0o555)
    said = as_nobody(
        """
told(lambda: make(storage="file://new.sw"))
told(lambda: make().save("new"))
told(lambda: make().save("deeper/new"))
told(lambda: sw.open("file://live.sw"))
print(len(sw.open("snapshot")))
""",
        open_folder,
    )
    assert [line.split(":")[0] for line in said[:-1]] == ["refused"] * 4
    assert f"cannot create '{open_folder}/new.sw'" in said[0]
    assert "cannot create 'new'" in said[1]
    assert "cannot make the folder 'deeper'" in said[2]
    assert f"cannot open '{open_folder}/live.sw'" in said[3]
    assert all("denied" in line for line in said[:-1])
    assert said[-1] == "3", "reading a snapshot needs no right to write"
    assert {path.name for path in open_folder.iterdir()} == {"snapshot", "live.sw"}


def test_file_that_may_not_be_read_is_named(open_folder: Path) -> None:
    snapshot, live = open_folder / "snapshot", open_folder / "live.sw"
    filled(3).save(snapshot)  # files are made for their owner alone
    filled(3, storage=f"file://{live}").close()
    if os.geteuid() != 0:
        snapshot.chmod(0)
        live.chmod(0)
    said = as_nobody('told(lambda: sw.open("snapshot"))\ntold(lambda: sw.open("file://live.sw"))', open_folder)
    for line, name in zip(said, ("snapshot", f"{open_folder}/live.sw"), strict=True):
        assert f"cannot open '{name}': Permission denied" in line


def small_disk(kib: int, over: Path, options: str = "") -> list[str]:
    """Starts a command that sees a file system of so many KiB at a folder, and nobody else does."""
    mount = f'mount -t tmpfs -o size={kib}k{options} tmpfs {over} && exec "$@"'
    around = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "sh", "-c", mount, "sh"]
    try:
        done = subprocess.run([*around, "true"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode:
        pytest.skip(f"a file system of our own may not be mounted here: {done.stderr.strip()}")
    return around


def test_read_only_disk_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    said = child(
        'told(lambda: make(storage="file://disk/new.sw"))\ntold(lambda: make().save("disk/new"))',
        *small_disk(100, disk, ",ro"),
        folder=tmp_path,
    )
    assert len(said) == 2
    assert all("Read-only file system" in line for line in said)


def test_full_disk_is_told_by_the_call_that_wants_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    said = child(
        """
told(lambda: make(storage="file://disk/rows.sw", schema={"obs": sw.Field((4096,), "uint8")}))
print(os.listdir("disk"))
buffer = make(storage="file://disk/live.sw")
held = fill(buffer)
print(held > 50, numbers(buffer) == list(range(held)), len(buffer) == held)
print(set(buffer.sample(64)["reward"].astype(int)) <= set(range(held)))
told(lambda: buffer.save("disk/snapshot"))
print(sorted(os.listdir("disk")))
buffer.close()
buffer = sw.open("file://disk/live.sw")
print(numbers(buffer) == list(range(held)), buffer.stats()["recoveries"])
buffer.clear()
buffer.add(**heap(7))
print(numbers(buffer))
""",
        *small_disk(700, disk),
        folder=tmp_path,
    )
    assert said[0].startswith("refused: cannot allocate")
    assert "give a smaller capacity or another storage=: No space left on device" in said[0]
    assert said[1] == "[]"
    assert f"'{tmp_path}/disk/live.sw' cannot grow: No space left on device" in said[2]
    assert said[3:5] == ["True True True", "True"]
    assert said[5].startswith("refused:")
    assert said[6:] == ["['live.sw']", "True 0", "[7]"]


def test_failed_save_on_a_full_disk_leaves_the_older_snapshot(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    said = child(
        """
buffer = make()
for number in range(20):
    buffer.add(**heap(number))
buffer.save("disk/snapshot")
for number in range(20, 200):
    buffer.add(**heap(number))
told(lambda: buffer.save("disk/snapshot"))
print(os.listdir("disk"), numbers(sw.open("disk/snapshot")) == list(range(20)))
""",
        *small_disk(400, disk),
        folder=tmp_path,
    )
    assert said[0].startswith("refused:")
    assert "No space left on device" in said[0]
    assert said[1] == "['snapshot'] True"


def test_full_shared_memory_is_told_by_the_call_that_wants_room(tmp_path: Path) -> None:
    said = child(
        """
told(lambda: make(storage="shm://rows", schema={"obs": sw.Field((4096,), "uint8")}))
print(os.listdir("/dev/shm"))
buffer = make(storage="shm://full")
held = fill(buffer)
print(held > 50, numbers(buffer) == list(range(held)))
told(lambda: make(storage="shm://another"))
buffer.close(unlink=True)
print(os.listdir("/dev/shm"))
told(lambda: make(storage="shm://another").close())
""",
        *small_disk(700, Path("/dev/shm")),
        folder=tmp_path,
    )
    assert "No space left on device" in said[0]
    assert said[1] == "[]"
    assert "cannot grow: No space left on device" in said[2]
    assert said[3] == "True True"
    assert said[4].startswith("refused: cannot allocate")
    assert said[5:] == ["[]", "made True"]


def test_failed_add_of_many_rows_says_how_many_were_added(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    said = child(
        """
buffer = make(storage="file://disk/live.sw", writers=1)
while True:
    before = buffer.stats()["rows_added"]
    try:
        buffer.add(**heap(1, rows=40))
    except sw.errors.StorageError as error:
        said = str(error)
        break
print(buffer.stats()["rows_added"] - before)
print(said.rpartition("; ")[2])
""",
        *small_disk(700, disk),
        folder=tmp_path,
    )
    assert 0 < int(said[0]) < 40
    assert said[1] == f"the first {said[0]} of the 40 rows were added, the others were not"


def test_full_disk_is_told_in_words_that_fit_the_call(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    said = child(
        """
buffer = make()
for number in range(200):
    buffer.add(**heap(number))
told(lambda: buffer.save("disk/snapshot"))
told(lambda: make(storage="file://disk/rows.sw", schema={"obs": sw.Field((4096,), "uint8")}))
""",
        *small_disk(400, disk),
        folder=tmp_path,
    )
    assert "add()" not in said[0]
    assert "e-" not in said[1].split("for")[0]


def test_increment_of_a_snapshot_that_lost_its_end_is_a_whole_one(tmp_path: Path) -> None:
    buffer = filled(900, capacity=1000)
    buffer.save(tmp_path / "snapshot")
    os.truncate(tmp_path / "snapshot", (tmp_path / "snapshot").stat().st_size - 4096)
    buffer.add(**row(900))
    buffer.save(tmp_path / "snapshot", incremental=True)
    assert numbers_in(sw.open(tmp_path / "snapshot")) == list(range(901))


def test_limit_on_the_size_of_files_is_an_error_of_ours(tmp_path: Path) -> None:
    said = child(
        """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
told(lambda: make(storage="file://live.sw"))
buffer = make()
for number in range(20):
    buffer.add(**heap(number))
told(lambda: buffer.save("snapshot"))
print(os.listdir("."))
""",
        folder=tmp_path,
    )
    assert all("File too large" in line for line in said[:2])
    assert said[2] == "[]"


def test_unwritable_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    buffer = filled(3)
    with pytest.raises(StorageError, match=r"save\(\): cannot make the folder"):
        buffer.save(tmp_path / "file" / "snapshot")
    with pytest.raises(StorageError, match=r"save\(\): cannot make the folder"):
        buffer.save(tmp_path / "file" / "deeper" / "snapshot")
    with pytest.raises(StorageError, match="cannot create"):
        make(storage=f"file://{tmp_path}/file/live.sw")
    with pytest.raises(StorageError, match="cannot create"):
        make(storage=f"file://{tmp_path}/absent/live.sw")
    with pytest.raises(StorageError, match="leave out the 'file://'"):
        buffer.save(f"file://{tmp_path}/x")
    with pytest.raises(StorageError, match="expected 'shm://name' or 'file://path'"):
        buffer.save("weird://x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "in the way"


def test_name_too_long_for_the_system_is_a_storage_error_to_open(tmp_path: Path) -> None:
    for address in (f"{tmp_path}/{'a' * 300}", f"file://{tmp_path}/{'a' * 300}"):
        with pytest.raises(StorageError, match="File name too long"):
            sw.open(address)


def test_name_too_long_for_the_system_is_a_storage_error_to_save(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File name too long"):
        filled(3).save(tmp_path / ("a" * 300))


def test_save_makes_folders_and_replaces_an_older_snapshot_only(tmp_path: Path, live: Path) -> None:
    path = tmp_path / "run" / "deep" / "snapshot"
    filled(3).save(path)
    filled(5).save(path)
    assert numbers_in(sw.open(path)) == list(range(5))
    assert os.listdir(path.parent) == ["snapshot"]
    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"years of work")
    with pytest.raises(StorageError, match="exists and is not a Sharpwave snapshot; give another path"):
        filled(3).save(notes)
    assert notes.read_bytes() == b"years of work"
    with pytest.raises(StorageError, match="exists and is not a file; give another path"):
        filled(3).save(tmp_path)
    before = live.read_bytes()
    with pytest.raises(StorageError, match="is a live table; give another path"):
        filled(3).save(live)
    assert live.read_bytes() == before
    leftovers = {entry.name for entry in tmp_path.iterdir()}
    assert leftovers == {"run", "notes.txt", "live.sw"}


def test_refused_creation_leaves_nothing_beside_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"years of work")
    with pytest.raises(StorageError, match="exists"):
        make(storage=f"file://{tmp_path}/notes.txt")
    assert (tmp_path / "notes.txt").read_bytes() == b"years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_live_file_is_not_a_snapshot_and_the_reverse(snapshot: Path, live: Path) -> None:
    with pytest.raises(StorageError, match="is a live table; open it in place with"):
        sw.open(live)
    with pytest.raises(StorageError, match="is a snapshot; open it without file://"):
        sw.open(f"file://{snapshot}")
    with pytest.raises(StorageError, match="is a snapshot"):
        make(storage=f"file://{snapshot}", exist="attach")
    assert numbers_in(sw.open(snapshot)) == [7, 8, 9, 10, 11, 12, 13, 14, 16]


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_other_version_and_other_byte_order_are_named(snapshot: Path) -> None:
    whole = snapshot.read_bytes()
    snapshot.write_bytes(whole[:8] + (99).to_bytes(4, "little") + whole[12:])
    with pytest.raises(StorageError, match="has format version 99, this Sharpwave reads version 2"):
        sw.open(snapshot)
    snapshot.write_bytes(whole[:12] + whole[12:16][::-1] + whole[16:])
    with pytest.raises(StorageError, match="other byte order"):
        sw.open(snapshot)


def flip(whole: bytes, at: int, bit: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]


def wide_rows() -> sw.ReplayBuffer:
    """Rows over 1 KB: their words stand in a column of their own."""
    buffer = sw.ReplayBuffer(6, schema={"obs": sw.Field((400,))}, next_obs=None, seed=0)
    for number in range(9):
        buffer.add(obs=np.full(400, number), reward=float(number), done=number == 4)
    return buffer


@pytest.mark.parametrize("build", [lambda: filled(15), wide_rows, lambda: make()], ids=["small", "wide", "empty"])
def test_flipped_bit_of_a_snapshot_is_noticed_wherever_it_matters(
    build: Callable[[], sw.ReplayBuffer], tmp_path: Path
) -> None:
    buffer = build()
    path = tmp_path / "snapshot"
    buffer.save(path)
    whole = path.read_bytes()
    regions = {"header": layout.Span("header", 0, layout.HEADER_BYTES), **layout.regions_of(whole)}
    if len(buffer):
        assert {"header", "counters", "writers", "blocks", "fields", "description", "rows", "checksums"} <= set(regions)
    loaded = state_of(sw.open(path))
    stream = np.random.default_rng(1)
    # Anywhere in the file, and in every region by name: padding is most of a small file.
    places = [int(at) for at in stream.integers(0, len(whole), 150)]
    for _, offset, size in regions.values():
        places += [offset, offset + size - 1, *(int(at) for at in stream.integers(offset, offset + size, 15))]
    assert len(places) > 250
    noticed = 0
    for at in places:
        path.write_bytes(flip(whole, at, int(stream.integers(8))))
        try:
            same = state_of(sw.open(path)) == loaded
        except StorageError:
            noticed += 1
            continue
        assert same, f"byte {at} changed the contents unnoticed"
        inside = [name for name, (_, offset, size) in regions.items() if offset <= at < offset + size]
        assert inside in ([], ["rows"]), f"byte {at} of {inside} is not covered by a checksum"
    assert noticed > 100


DAMAGED_LIVE = """
import sys
import numpy as np
import sharpwave as sw
for path in sys.argv[1:]:
    print(path, flush=True)
    try:
        buffer = sw.open("file://" + path)
    except sw.errors.StorageError:
        continue
    except Exception as error:
        print("not a StorageError:", type(error).__name__, error, flush=True)
        continue
    try:
        len(buffer), buffer.stats(), list(buffer.rows())
        buffer.add(np.zeros(2), 0.0, 0.0, np.zeros(2), False)
        buffer.sample(8)
        buffer.clear()
        buffer.add(np.zeros(2), 0.0, 0.0, np.zeros(2), False)
        list(buffer.rows())
    except sw.errors.SharpwaveError:
        pass
    except Exception as error:
        print("not an error of ours:", type(error).__name__, error, flush=True)
    buffer.close()
print("survived")
"""


def open_damaged(folder: Path, whole: bytes, places: list[tuple[int, int]]) -> str:
    """What a fresh process says when it opens and uses one damaged copy after another."""
    paths = []
    for i, (at, bit) in enumerate(places):
        path = folder / f"damaged-{i}-byte-{at}-bit-{bit}.sw"
        path.write_bytes(flip(whole, at, bit))
        paths.append(str(path))
    command = [sys.executable, "-c", DAMAGED_LIVE, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("not ")]
    last = done.stdout.splitlines()[-1] if done.stdout else "nothing"
    if done.returncode:
        return f"exit {done.returncode} at {last}"
    return "; ".join(wrong) or last


def test_damaged_description_of_a_live_file_is_a_storage_error(live: Path, tmp_path: Path) -> None:
    whole = live.read_bytes()
    _, offset, size = layout.regions_of(whole)["description"]
    text = whole[offset : offset + size]
    shape = offset + text.index(b"[[2]") + 2
    assert open_damaged(tmp_path, whole, [(offset, 0), (shape, 0), (offset + size - 1, 3)]) == "survived"
