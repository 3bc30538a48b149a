"""The command line: what it prints, and how it fails."""

import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.address import to_path
from sharpwave.errors import StorageError

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from sharpwave.tools import cli, segments


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved buffer of three rows."""
    buffer = sw.ReplayBuffer(8, obs_shape=(2,), action_shape=())
    for row in range(3):
        obs = np.full(2, row, np.float32)
        buffer.add(obs=obs, action=0.0, reward=1.0, next_obs=obs, terminated=False, truncated=False)
    path = tmp_path / "replay"
    buffer.save(path)
    buffer.close()
    return path


def run_module(*arguments: str, without: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `python -m sharpwave`, optionally as if one module were not installed."""
    if without is None:
        command = [sys.executable, "-m", "sharpwave", *arguments]
    else:
        # A None in sys.modules makes the import raise ModuleNotFoundError, as a missing package does.
        source = (
            f"import sys; sys.modules[{without!r}] = None; sys.argv = ['sharpwave', *{list(arguments)!r}]; "
            "from sharpwave.tools.cli import main; main()"
        )
        command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_version_is_printed_by_the_module() -> None:
    finished = run_module("--version")
    assert finished.returncode == 0
    assert finished.stdout.strip() == f"sharpwave {sw.__version__}"


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(cli.build_app(), ["--help"])
    assert shown.exit_code == 0
    for command in ("demo", "info", "ls", "rm"):
        assert f" {command} " in shown.stdout


def test_info_shows_the_stats_of_a_saved_buffer_as_a_table(saved: Path) -> None:
    shown = CliRunner().invoke(cli.build_app(), ["info", str(saved)])
    assert shown.exit_code == 0
    cells = {tuple(line.strip("│").replace(" ", "").split("│")) for line in shown.stdout.splitlines()}
    assert ("size", "3") in cells
    assert ("capacity", "8") in cells


def test_info_prints_json_that_equals_the_stats(saved: Path) -> None:
    shown = CliRunner().invoke(cli.build_app(), ["info", str(saved), "--json"])
    assert shown.exit_code == 0
    stats = json.loads(shown.stdout)
    assert stats.keys() == sw.open(saved).stats(huge_pages=True).keys()
    assert (stats["size"], stats["capacity"]) == (3, 8)


def test_info_on_a_missing_path_fails_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "nothing-here"
    finished = run_module("info", str(missing))
    assert finished.returncode == 1
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("sharpwave: ")
    assert "nothing-here" in line


@pytest.mark.parametrize(
    ("arguments", "without", "extra"),
    [
        (("demo",), "typer", "demo"),
        (("demo",), "rich", "demo"),
        (("demo",), "torch", "demo"),
        (("demo",), "gymnasium", "demo"),
        (("demo",), "matplotlib", "demo"),
        (("info", "anywhere"), "typer", "cli"),
        (("generate", "serve", "anywhere"), "torch", "cli,llm"),
        (("generate", "serve", "anywhere"), "uvicorn", "cli,llm"),
    ],
)
def test_missing_extra_is_named_in_one_line(
    arguments: tuple[str, ...], without: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments == ("demo",):
        for module in ("torch", "gymnasium", "matplotlib"):  # else another missing one may be named first
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    finished = run_module(*arguments, without=without)
    assert finished.returncode == 1
    (line,) = finished.stderr.splitlines()
    assert without in line
    assert f'pip install "sharpwave[{extra}]"' in line
    assert list(tmp_path.iterdir()) == []


def test_missing_module_that_is_no_extra_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")

    monkeypatch.setattr(cli, "build_app", lambda: fail)
    with pytest.raises(ModuleNotFoundError, match="elsewhere"):
        cli.main()


def test_unwritable_out_fails_in_one_line_before_training(tmp_path: Path) -> None:
    for module in ("torch", "gymnasium", "matplotlib"):
        pytest.importorskip(module)
    (tmp_path / "file").write_text("")
    finished = run_module("demo", "--out", str(tmp_path / "file" / "demo"))
    assert finished.returncode == 1
    (line,) = finished.stderr.splitlines()
    assert "NotADirectoryError" in line


# ---- live buffers ----------------------------------------------------------------------------------------------------

ATTACH = """
import sys, time, sharpwave as sw
buffer = sw.open(sys.argv[1])
works = sys.argv[2] == "work"
if works:
    buffer.add([0, 0], 0.0, 0.0, [0, 0], False)
print("ready", flush=True)
while works:
    buffer.add([0, 0], 0.0, 0.0, [0, 0], False)
    buffer.sample(4)
    time.sleep(0.001)
sys.stdin.read()
"""


@contextmanager
def process(address: str, task: str = "wait") -> Iterator[subprocess.Popen[str]]:
    """Another process that has the buffer open, and waits or works until it is killed."""
    command = [sys.executable, "-c", ATTACH, address, task]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


@pytest.fixture
def live(shm_address: str) -> Iterator[sw.ReplayBuffer]:
    """Three rows in shared memory."""
    with sw.ReplayBuffer(8, obs_shape=(2,), storage=shm_address, writers=5, seed=0) as buffer:
        for _ in range(3):
            buffer.add([0, 0], 0.0, 0.0, [0, 0], False)
        yield buffer


def file_of(address: str) -> Path:
    path = to_path(address, "test")
    assert path is not None
    return path


def files_of(address: str) -> list[str]:
    """Names of everything in the folder that belongs to an address."""
    table = file_of(address)
    return sorted(path.name.removeprefix(table.name) for path in table.parent.glob(f"{table.name}*"))


def listed(address: str) -> dict[str, Any] | None:
    """What `ls --json` says of one address; None if nothing."""
    shown = CliRunner().invoke(cli.build_app(), ["ls", "--json"])
    assert shown.exit_code == 0, shown.output
    entries = [entry for entry in json.loads(shown.stdout) if entry["address"] == address]
    assert len(entries) <= 1
    return entries[0] if entries else None


def test_ls_tells_what_stats_tells(live: sw.ReplayBuffer, shm_address: str) -> None:
    live.sample(7)
    live.writer()
    stats, entry = live.stats(), listed(shm_address)
    assert entry is not None
    names = ("size", "capacity", "rows_added", "rows_sampled", "writers", "max_writers", "recoveries", "rows_lost")
    assert {name: entry[name] for name in names} == {name: stats[name] for name in names}
    assert entry["bytes"] == stats["storage_bytes"] == file_of(shm_address).stat().st_size
    assert entry["allocated_bytes"] == entry["bytes"]
    assert entry["face"] == "ReplayBuffer"
    assert 0 <= entry["age_s"] < 300
    live.clear()
    assert (listed(shm_address) or {})["size"] == 0


def test_ls_names_the_processes_that_have_a_buffer_open(live: sw.ReplayBuffer, shm_address: str) -> None:
    own = os.getpid()
    with process(shm_address) as first, process(shm_address) as second, process(shm_address) as third:
        assert (listed(shm_address) or {})["pids"] == sorted([own, first.pid, second.pid, third.pid])
        second.kill()
        second.wait()
        assert (listed(shm_address) or {})["pids"] == sorted([own, first.pid, third.pid])
        # And so does another process's `ls`, after ours looked at the lock file that this process holds a lock on.
        shown = run_module("ls")
        (line,) = [line for line in shown.stdout.splitlines() if line.startswith(f"{shm_address} ")]
        assert line.split()[:4] == [shm_address, "ReplayBuffer", "3", "8"]
        assert line.rstrip().endswith(", ".join(map(str, sorted([own, first.pid, third.pid]))))


def test_ls_changes_nothing_and_repairs_nothing(live: sw.ReplayBuffer, shm_address: str) -> None:
    with process(shm_address, "work") as child:
        live.close()
        child.kill()
        child.wait()
        before = file_of(shm_address).read_bytes()
        entry = listed(shm_address)
        assert entry is not None
        assert (entry["pids"], entry["writers"]) == ([], 1)  # the dead one's writer: whoever attaches takes it back
        assert file_of(shm_address).read_bytes() == before
    with sw.open(shm_address) as opened:
        assert (opened.stats()["recoveries"], opened.stats()["writers"]) == (1, 0)
        assert (listed(shm_address) or {})["recoveries"] == 1


@pytest.mark.parametrize("length", [0, 7, 8, 816, 4095, 4096, 50_000])
def test_ls_shows_a_truncated_file_with_its_reason(live: sw.ReplayBuffer, shm_address: str, length: int) -> None:
    live.close()
    os.truncate(file_of(shm_address), length)
    entry = listed(shm_address)
    assert entry is not None
    assert entry.keys() == {"address", "problem"}
    assert ("is truncated" if length >= 4096 else "is not a Sharpwave table") in entry["problem"]
    assert entry["problem"] in run_module("ls").stdout


def test_ls_survives_any_byte(live: sw.ReplayBuffer, shm_address: str) -> None:
    live.close()
    path = file_of(shm_address)
    whole = path.read_bytes()
    stream = np.random.default_rng(0)
    for place in [*range(0, 200, 5), *range(432, 560, 7)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(StorageError, match=r"damaged|not a Sharpwave|format version"):
            segments.read(shm_address)
    regions = [struct.unpack_from("<QQ", whole, 432 + 16 * region) for region in (0, 1, 2, 5)]
    for turn in range(200):
        offset, length = regions[turn % 4]
        broken = np.frombuffer(whole, np.uint8).copy()
        places = offset + stream.integers(length, size=40)
        broken[places] = stream.integers(256, size=40)
        path.write_bytes(broken.tobytes())
        entry = listed(shm_address)
        assert entry is not None
        assert "is damaged" in entry.get("problem", "") or 0 <= entry["size"] <= entry["capacity"] == 8


def test_ls_passes_over_what_has_none_of_our_names(live: sw.ReplayBuffer, shm_address: str) -> None:
    table = file_of(shm_address)
    for name in (f"{table.name}.txt", f"{table.name}.backup", f"x{table.name}", table.name.replace("sw", "SW")):
        strange = table.with_name(name)
        strange.write_text("mine")
        try:
            shown = json.loads(CliRunner().invoke(cli.build_app(), ["ls", "--json"]).stdout)
            assert [entry["address"] for entry in shown if table.name[10:-3] in entry["address"]] == [shm_address]
        finally:
            strange.unlink()


@pytest.mark.timing  # in half a second the other process gets a processor
def test_watch_tells_rates_line_by_line_and_takes_no_seat(live: sw.ReplayBuffer, shm_address: str) -> None:
    with process(shm_address, "work") as child:
        options = ["info", shm_address, "--watch", "--interval", "0.5", "--count", "2"]
        shown = run_module(*options)
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        assert len(lines) == 2
        for line in lines:
            added, sampled = (int(rate.replace(",", "")) for rate in re.findall(r"(?:added|sampled) ([\d,]+)/s", line))
            assert 0 < added < sampled
            assert "8 of 8 rows" in line
            assert "2 of 5 writers" in line
            assert line.endswith(", ".join(map(str, sorted([os.getpid(), child.pid]))))
        first, second = map(json.loads, run_module(*options, "--json").stdout.splitlines())
        passed_s = (second["rows_added"] - first["rows_added"]) / second["added_per_s"]
        assert passed_s >= 0.5
        assert second["rows_sampled"] - first["rows_sampled"] == pytest.approx(second["sampled_per_s"] * passed_s)


def test_watch_redraws_its_table_on_a_terminal_until_ctrl_c(live: sw.ReplayBuffer, shm_address: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "sharpwave", "info", shm_address, "--watch", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as child:
        try:
            os.close(theirs)
            seen = b""
            while seen.count(b"per second") < 3:
                seen += os.read(ours, 65_536)
            child.send_signal(signal.SIGINT)
            with suppress(OSError):  # what nobody reads would fill the terminal, and the child would wait for ever
                while more := os.read(ours, 65_536):
                    seen += more
            assert child.wait(60) == 0
        finally:
            child.kill()
    os.close(ours)
    assert b"3 of 8" in seen
    assert b"Aborted" not in seen


def test_watch_ends_with_an_error_when_the_buffer_goes(live: sw.ReplayBuffer, shm_address: str) -> None:
    command = [sys.executable, "-m", "sharpwave", "info", shm_address, "--watch", "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "3 of 8 rows" in child.stdout.readline()
        live.close(unlink=True)
        _, complaint = child.communicate(timeout=60)
    assert child.returncode == 1
    assert complaint == f"sharpwave: StorageError: info: there is no '{shm_address}'\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["info", "{saved}", "--watch"], "expected 'shm://name' or 'file://path'"),
        (["info", "file://{saved}", "--watch"], "is a snapshot, not a live buffer"),
        (["info", "{saved}", "--count", "3"], "it counts the looks of --watch"),
    ],
)
def test_watch_refuses_what_it_cannot_do(saved: Path, arguments: list[str], words: str) -> None:
    finished = run_module(*[word.format(saved=saved) for word in arguments])
    assert finished.returncode != 0
    assert words in finished.stderr


# ---- rm --------------------------------------------------------------------------------------------------------------


def test_rm_frees_the_name_at_once_and_harms_nobody_inside(live: sw.ReplayBuffer, shm_address: str) -> None:
    with process(shm_address) as child:
        shown = CliRunner().invoke(cli.build_app(), ["rm", shm_address])
        assert shown.exit_code == 0
        pids = ", ".join(map(str, sorted([os.getpid(), child.pid])))
        assert shown.stdout == f"removed {shm_address}; still mapped in {pids}\n"
        assert files_of(shm_address) == []
        live.add([1, 1], 0.0, 0.0, [0, 0], False)
        assert len(live) == 4
        with sw.ReplayBuffer(5, obs_shape=(2,), storage=shm_address) as another:
            assert (another.capacity, len(another)) == (5, 0)
            another.close(unlink=True)


def test_rm_of_a_file_leaves_nothing(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/live.sw"
    sw.ReplayBuffer(8, obs_shape=(2,), storage=address).close()
    assert len(list(tmp_path.iterdir())) == 1
    assert CliRunner().invoke(cli.build_app(), ["rm", address]).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_rm_names_what_is_absent_and_removes_the_others(live: sw.ReplayBuffer, shm_address: str) -> None:
    finished = run_module("rm", "shm://never-made", shm_address, "elsewhere")
    assert finished.returncode == 1
    assert finished.stdout.startswith(f"removed {shm_address}")
    assert finished.stderr.splitlines() == [
        "sharpwave: StorageError: rm: there is no 'shm://never-made'",
        "sharpwave: StorageError: rm: expected 'shm://name' or 'file://path', got 'elsewhere'",
    ]
    assert files_of(shm_address) == []


def test_rm_leaves_alone_what_is_not_ours(saved: Path, tmp_path: Path) -> None:
    text, folder, link = tmp_path / "notes.txt", tmp_path / "folder", tmp_path / "link"
    text.write_text("mine")
    folder.mkdir()
    link.symlink_to(saved)
    for name in (f"{text.name}.lock", f"{text.name}.a1B2c3"):
        (tmp_path / name).write_text("mine too")
    before = sorted(tmp_path.iterdir())
    paths = [text, folder, link, saved]
    finished = run_module("rm", *(f"file://{path}" for path in paths))
    assert finished.returncode == 1
    assert finished.stdout == ""
    for line, path, words in zip(
        finished.stderr.splitlines(),
        paths,
        ("is not a Sharpwave table", "is not a file", "is not a file", "is a snapshot, not a live buffer"),
        strict=True,
    ):
        assert f"rm: '{path}' {words}" in line
    assert sorted(tmp_path.iterdir()) == before


CREATE_AND_DIE = """
import resource, signal, sys, sharpwave as sw
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sw.ReplayBuffer(10_000, obs_shape=(2,), storage=sys.argv[1])
"""


def test_rm_removes_what_a_killed_creator_left(shm_address: str) -> None:
    """The system kills the creator when it asks for more than it may have."""
    killed = subprocess.run([sys.executable, "-c", CREATE_AND_DIE, shm_address], check=False)
    assert killed.returncode == -signal.SIGXFSZ
    left = files_of(shm_address)  # nothing, where a file can be made without a name
    assert (listed(shm_address) is None) == (left == [])
    assert run_module("rm", shm_address).returncode == (1 if left == [] else 0)
    assert files_of(shm_address) == []


def test_rm_knows_each_state_in_which_a_creator_can_die(live: sw.ReplayBuffer, shm_address: str) -> None:
    table = file_of(shm_address)
    begun = table.with_name(f"{table.name}.BEGUN1")  # allocated, and all but the header written
    with begun.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 200_000)
        os.pwrite(file.fileno(), b"\1", 45_056)
    made = f"{shm_address}-made"  # complete, and not published yet
    sw.ReplayBuffer(8, obs_shape=(2,), storage=made).close()
    shutil.copy(file_of(made), table.with_name(f"{table.name}.next"))  # on its way to another's place
    file_of(made).rename(table.with_name(f"{table.name}.abcDEF"))
    os.link(table, table.with_name(f"{table.name}.QQQQQQ"))  # published, under both names
    backup = table.with_name(f"{table.name}.backup")  # a user's, with rows
    shutil.copy(table, backup)
    other = table.with_name(f"{table.name}.NOTE12")
    other.write_text("mine")
    problems = [entry.problem for entry in segments.find() if isinstance(entry, segments.Damaged)]
    assert problems.count(f"its creator was killed; 'sharpwave rm {shm_address}' removes what it left") == 4
    finished = run_module("rm", shm_address)
    assert finished.returncode == 0, finished.stderr
    assert files_of(shm_address) == [".NOTE12", ".backup"]
    assert run_module("rm", made).returncode == 1  # it has no name of its own any more


def test_rm_leaves_a_creator_at_work_alone(shm_address: str) -> None:
    table = file_of(shm_address)
    temporary = table.with_name(f"{table.name}.W0RK1N")
    with temporary.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 200_000)
        command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file) as creator:
            finished = run_module("rm", shm_address)
            assert (finished.returncode, files_of(shm_address)) == (1, [".W0RK1N"])
            assert listed(shm_address) is None
            creator.kill()
    assert run_module("rm", shm_address).returncode == 0
    assert files_of(shm_address) == []


def test_rm_removes_what_a_creator_left_while_others_look_at_it(shm_address: str) -> None:
    table = file_of(shm_address)
    temporary = table.with_name(f"{table.name}.LEFT01")
    with temporary.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 200_000)
    command = [sys.executable, "-c", "import sys; sys.stdin.read(1)"]
    with temporary.open("rb") as file, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file) as lister:
        finished = run_module("rm", shm_address)  # as beside "sharpwave ls", which opens every file
        assert (finished.returncode, files_of(shm_address)) == (0, []), finished.stderr
        lister.kill()


def test_rm_removes_a_buffer_that_is_open_and_names_who_has_it(live: sw.ReplayBuffer, shm_address: str) -> None:
    assert segments.remove(shm_address).pids == [os.getpid()]
    assert files_of(shm_address) == []
    assert len(live) >= 0, "who has it open keeps it"


# ---- trajectories ----------------------------------------------------------------------------------------------------


def fill_ranks(folder: Path) -> None:
    for rank in range(2):
        with sw.TrajectoryReplayBuffer(folder / f"rank_{rank}", seed=1234) as buffer:
            for number in range(3):
                rewards = np.full((4 + number, 2), 10 * rank + number, np.float32)
                obs = {"state": np.repeat(rewards[..., None], 3, 2)}
                buffer.add([sw.Trajectory(rewards=rewards, curr_obs=obs, model_weights_id=f"w{number}")])


def test_info_of_trajectories_prints_keys_shapes_and_counts(tmp_path: Path) -> None:
    fill_ranks(tmp_path / "all")
    done = run_module("info", str(tmp_path / "all" / "rank_0"), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "all" / "rank_0").glob("trajectory_*"))
    assert {name: value for name, value in facts.items() if name != "bytes"} == {
        "trajectories": 3,
        "set aside": 0,
        "transitions": 30,
        "format": "safetensors",
        "steps": "4 to 6",
        "envs": "2",
        "ids": "0 to 2",
        "weights": 3,
        "seed": 1234,
        "keys": {"rewards": "float32 []", "curr_obs/state": "float32 [3]"},
    }
    done = run_module("info", str(tmp_path / "all"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"transitions\W+60\b", done.stdout)
    assert re.search(r"curr_obs/state\W+float32 \[3\]", done.stdout)
    done = run_module("info", str(tmp_path))
    assert done.returncode == 1
    assert "metadata.json: there is no such file" in done.stderr


def test_merge_and_split_of_trajectories(tmp_path: Path) -> None:
    fill_ranks(tmp_path / "all")
    both = ("--source-path", str(tmp_path / "all"), "--save-path", str(tmp_path / "merged"))
    done = run_module("merge", *both, "--dry-run")
    assert done.returncode == 0, done.stderr
    first, second, *_, last = done.stdout.splitlines()
    assert (
        first == f"{tmp_path}/all/rank_0/trajectory_0_w0.safetensors -> {tmp_path}/merged/trajectory_0_w0.safetensors"
    )
    assert second.startswith(f"{tmp_path}/all/rank_1/trajectory_0_w0.safetensors -> ")
    assert last == "6 trajectories would be moved; nothing was changed"
    assert not (tmp_path / "merged").exists()
    done = run_module("merge", *both)
    assert (done.returncode, done.stdout) == (0, f"moved 6 trajectories into {tmp_path}/merged\n"), done.stderr
    assert list((tmp_path / "all").glob("*/trajectory_*")) == []

    both = ("--source-path", str(tmp_path / "merged"), "--save-path", str(tmp_path / "part"))
    assert (
        "2 trajectories would be copied"
        in run_module("split", *both, "--split-count", "2", "--copy", "--dry-run").stdout
    )
    assert not (tmp_path / "part").exists()
    done = run_module("split", *both, "--split-count", "2", "--copy")
    assert (done.returncode, done.stdout) == (0, f"copied 2 trajectories into {tmp_path}/part\n"), done.stderr
    done = run_module("split", *both, "--split-count", "7")
    assert done.returncode == 1
    assert "SchemaError: split: split_count: expected at most the 6" in done.stderr

    done = run_module("convert", str(tmp_path / "part"), str(tmp_path / "torch"), "--format", "pt")
    assert (done.returncode, done.stdout) == (0, f"2 trajectories in {tmp_path}/torch\n"), done.stderr
    with sw.TrajectoryReplayBuffer(tmp_path / "torch") as buffer:
        assert [trajectory.rewards[0, 0] for _, trajectory in buffer.trajectories()] == [0, 10]
        assert (tmp_path / "torch" / "trajectory_1_w0.pt").exists()
    assert (tmp_path / "torch" / "trajectory_index.json").exists(), "RLinf reads it"


def test_minari_data_set_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    env = gymnasium.make("CartPole-v1", max_episode_steps=25)
    rng = np.random.default_rng(0)
    episodes = []
    for seed in range(6):
        observations, rows, is_over = [env.reset(seed=seed)[0]], [], False
        while not is_over:
            action = int(rng.integers(2)) if seed % 2 else seed // 2 % 2
            obs, reward, terminated, truncated, _ = env.step(action)
            observations.append(obs)
            rows.append((action, reward, terminated, truncated))
            is_over = terminated or truncated
        actions, rewards, terminations, truncations = (np.array(column) for column in zip(*rows, strict=True))
        flags = {"terminations": terminations, "truncations": truncations}
        all_obs = np.stack(observations)
        episodes.append(
            minari.data_collector.EpisodeBuffer(
                id=seed, observations=all_obs, actions=actions, rewards=rewards, **flags
            )
        )
    env.close()
    made = minari.create_dataset_from_buffers("test/cartpole-v0", episodes, env=env.spec)

    folder = str(tmp_path / "folder")
    done = run_module("convert", "minari:test/cartpole-v0", folder)
    assert (done.returncode, done.stdout) == (0, f"6 episodes in {folder}\n"), done.stderr
    episodes = list(made.iterate_episodes())
    assert {bool(episode.truncations.any()) for episode in episodes} == {True, False}
    with sw.TrajectoryReplayBuffer(folder) as buffer:
        assert buffer.stats()["transitions"] == made.total_steps
        for (_, trajectory), episode in zip(buffer.trajectories(), episodes, strict=True):
            assert np.array_equal(trajectory.curr_obs["observation"][:, 0], episode.observations[:-1])
            assert np.array_equal(trajectory.next_obs["observation"][:, 0], episode.observations[1:])
            assert np.array_equal(trajectory.terminations[:, 0], episode.terminations)
        batch = buffer.sample(made.total_steps)
        assert batch["actions"].dtype == np.int64

    done = run_module("convert", folder, "minari:test/back-v0")
    assert (done.returncode, done.stdout) == (0, "6 episodes in minari:test/back-v0\n"), done.stderr
    back = minari.load_dataset("test/back-v0")
    assert back.action_space == made.action_space
    assert back.observation_space == made.observation_space
    assert back.env_spec.id == "CartPole-v1"
    for one, other in zip(back.iterate_episodes(), episodes, strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name

    with sw.TrajectoryReplayBuffer(tmp_path / "rollout") as buffer:
        rewards = np.arange(10, dtype=np.float32).reshape(5, 2)
        obs = {"observation": np.repeat(rewards[..., None], 2, 2)}
        after = {"observation": obs["observation"] + 2}
        dones = np.zeros((6, 2), bool)
        dones[2 + 1, 0] = True  # the first row is the reset's
        actions = np.zeros((5, 2), np.int64)
        given = sw.Trajectory(rewards=rewards, curr_obs=obs, next_obs=after, dones=dones, actions=actions)
        buffer.add([given])
    done = run_module("convert", str(tmp_path / "rollout"), "minari:test/rollout-v0")
    assert done.returncode == 0, done.stderr
    rows = [episode.rewards.tolist() for episode in minari.load_dataset("test/rollout-v0").iterate_episodes()]
    assert rows == [[0, 2, 4], [6, 8], [1, 3, 5, 7, 9]], "every environment's own, cut at its ends"
    done = run_module("convert", "minari:test/rollout-v0", "minari:test/b-v0")
    assert done.returncode == 1
    assert "expected a folder or a file on one side" in done.stderr


def test_minari_data_set_of_an_environment_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    folder = tmp_path / "folder"
    rewards = np.arange(10, dtype=np.float32).reshape(10, 1)
    obs = np.zeros((10, 1, 3), np.float32)
    with sw.TrajectoryReplayBuffer(folder) as buffer:
        buffer.add(
            [
                sw.Trajectory(
                    rewards=rewards,
                    actions=np.zeros((10, 1, 2), np.float32),
                    curr_obs={"observation": obs},
                    next_obs={"observation": obs},
                )
            ]
        )
    box = {"type": "Box", "dtype": "float32", "shape": [3], "low": [-1.0] * 3, "high": [1.0] * 3}
    spec = {
        "id": "Nowhere-v0",
        "entry_point": "package_that_is_not_there.envs:Nowhere",
        "reward_threshold": None,
        "nondeterministic": False,
        "max_episode_steps": 10,
        "order_enforce": True,
        "disable_env_checker": False,
        "kwargs": {},
        "additional_wrappers": [],
        "vector_entry_point": None,
    }
    spaces = {
        "observation_space": json.dumps(box),
        "action_space": json.dumps(box | {"shape": [2], "low": [-1.0] * 2, "high": [1.0] * 2}),
        "env_spec": json.dumps(spec),
    }
    (folder / "minari.json").write_text(json.dumps(spaces | {"action_space": "no space"}))
    done = run_module("convert", str(folder), "minari:test/nowhere-v0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "minari" / "test" / "nowhere-v0").exists()
    (folder / "minari.json").write_text(json.dumps(spaces))
    done = run_module("convert", str(folder), "minari:test/nowhere-v0")
    assert (done.returncode, done.stdout) == (0, "1 episodes in minari:test/nowhere-v0\n"), done.stderr
    back = minari.load_dataset("test/nowhere-v0")
    assert back.env_spec.id == "Nowhere-v0"
    assert [episode.rewards.tolist() for episode in back.iterate_episodes()] == [list(range(10))]
    done = run_module("convert", str(folder), "minari:test/nowhere-v0")
    assert done.returncode == 1
    assert "there is a data set of that name" in done.stderr
    assert minari.load_dataset("test/nowhere-v0").total_episodes == 1


def test_minari_data_set_to_a_snapshot_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    file, other = str(tmp_path / "saved.sw"), str(tmp_path / "other.sw")
    with sw.ReplayBuffer(20, obs_shape=(3,), action_dtype="int64", num_envs=1, seed=0) as buffer:
        for number in range(10):
            buffer.add([number] * 3, number % 2, number, [number + 1] * 3, number % 4 == 3)
        buffer.save(file)
        expected = [episode["reward"].tolist() for episode in buffer.episodes()]
    done = run_module("convert", file, "minari:test/rows-v0")
    assert (done.returncode, done.stdout) == (0, "2 episodes in minari:test/rows-v0\n"), done.stderr
    data = minari.load_dataset("test/rows-v0")
    assert [episode.rewards.tolist() for episode in data.iterate_episodes()] == expected
    done = run_module("convert", "minari:test/rows-v0", other)
    assert (done.returncode, done.stdout) == (0, f"2 episodes in {other}\n"), done.stderr
    with sw.open(other) as back:
        assert [episode["reward"].tolist() for episode in back.episodes()] == expected
    for arguments, message in (
        (("minari:test/rows-v0", other), "there is such a file"),
        (("minari:test/rows-v0", str(tmp_path / "c.sw"), "--format", "pt"), "--format applies to folders"),
        ((file, str(tmp_path / "folder")), "expected a folder of trajectories, got a file"),
        ((str(tmp_path / "none.sw"), "minari:test/none-v0"), "none.sw"),
        (("minari:test/none-v0", str(tmp_path / "folder")), "there is no such data set on this machine"),
    ):
        done = run_module("convert", *arguments)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert "no such folder" not in done.stderr
    assert not (tmp_path / "folder").exists()
    with sw.DistillationBuffer(5, obs_shape=(1,), action_shape=(), seed=0) as teacher:
        teacher.save(tmp_path / "teacher.sw")
    done = run_module("convert", str(tmp_path / "teacher.sw"), "minari:test/none-v0")
    assert "expected a folder of trajectories or a ReplayBuffer, got DistillationBuffer" in done.stderr


def test_minari_data_set_that_a_folder_cannot_hold_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    file, folder = str(tmp_path / "saved.sw"), tmp_path / "folder"
    fields = {"obs": (sw.Field((2,)), sw.Field(())), "action": sw.Field(())}
    with sw.ReplayBuffer(20, schema=fields, seed=0) as buffer:
        buffer.add(obs=([0, 0], 0), action=0, reward=0, next_obs=([1, 1], 1), done=True)
        buffer.save(file)
    assert run_module("convert", file, "minari:test/pairs-v0").returncode == 0
    folder.mkdir()
    for _ in range(2):  # the second time the folder is as empty as the first
        done = run_module("convert", "minari:test/pairs-v0", str(folder))
        assert done.returncode == 1
        assert "give a file FILE.sw instead" in done.stderr
        assert list(folder.iterdir()) == []
    done = run_module("convert", "minari:test/pairs-v0", str(tmp_path / "pairs.sw"))
    assert done.returncode == 0, done.stderr
