"""The configuration of `sharpwave serve`: what it makes, and how it names a mistake."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError, SharpwaveError, StorageError
from sharpwave.tools.server_config import ServerConfig

HEAD = 'at = "tcp://127.0.0.1:0"\n'
ROWS = HEAD + '[tables.replay.create]\nface = "ReplayBuffer"\ncapacity = 100\nobs_shape = [4]\n'


def read(folder: Path, text: str) -> ServerConfig:
    path = folder / "server.toml"
    path.write_text(text)
    return ServerConfig.read(path)


def test_a_replay_buffer_is_made_as_its_constructor_makes_it(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
at = "ipc://socket"
keys = "my-keys"
drain_s = 2
client_timeout = 3.5
[limits]
clients = 7
[tables.replay.create]
face = "ReplayBuffer"
capacity = 1_000
storage = "file://rows.sw"
next_obs = "derived"
num_envs = 2
seed = 5
sampler = { kind = "Prioritized", alpha = 0.7, beta = { kind = "Linear", start = 0.4, end = 1.0, steps = 100 } }
view = { kind = "Transitions", n_step = 3, gamma = 0.9 }
pace = { kind = "samples_per_insert", ratio = 2, min_size = 10, error = 20 }
[tables.replay.create.schema]
action = { kind = "Field", shape = [6] }
[tables.replay.create.schema.obs]
image = { kind = "Field", shape = [8, 8], dtype = "uint8", stack = 4 }
state = { kind = "Field", shape = [3] }
""",
    )
    assert (config.at, config.keys, config.drain_s) == ("ipc://socket", str(tmp_path / "my-keys"), 2.0)
    assert config.options == {"client_timeout": 3.5, "limits": {"clients": 7}}
    expected = sw.ReplayBuffer(
        1_000,
        schema={
            "action": sw.Field((6,)),
            "obs": {"image": sw.Field((8, 8), "uint8", stack=4), "state": sw.Field((3,))},
        },
        next_obs="derived",
        num_envs=2,
        sampler=sw.Prioritized(0.7, sw.Linear(0.4, 1.0, 100)),
        view=sw.Transitions(n_step=3, gamma=0.9),
        pace=sw.Pace.samples_per_insert(2, 10, 20),
    )
    with config.tables["replay"].make() as buffer:
        assert buffer.schema == expected.schema
        assert repr(buffer.sampler) == repr(expected.sampler)
        assert repr(buffer.view) == repr(expected.view)
        assert buffer.pace == expected.pace
        assert buffer.capacity == expected.capacity
    assert (tmp_path / "rows.sw").exists()
    with config.tables["replay"].make() as again:  # a second start goes on with the same file
        assert again.capacity == 1_000


def test_the_other_faces_are_made(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        HEAD
        + """
[tables.teacher.create]
face = "DistillationBuffer"
capacity = 50
obs_shape = [4]
[tables.episodes.create]
face = "TrajectoryReplayBuffer"
folder = "episodes"
capacity = 9
[tables.samples.create]
face = "SequenceBuffer"
capacity = 20
journal = "samples.journal"
[[tables.samples.create.flow]]
name = "ref"
inputs = ["input_ids"]
outputs = ["ref_logprobs"]
batch_size = 2
[[tables.samples.create.flow]]
name = "train"
inputs = ["input_ids", "ref_logprobs"]
""",
    )
    made = {name: table.make() for name, table in config.tables.items()}
    assert [type(buffer).__name__ for buffer in made.values()] == [
        "DistillationBuffer",
        "TrajectoryReplayBuffer",
        "SequenceBuffer",
    ]
    assert made["teacher"].capacity == 50
    assert made["samples"].flow["ref"].batch_size == 2
    assert made["samples"].flow.sinks == ["train"]
    for buffer in made.values():
        buffer.close()
    assert (tmp_path / "episodes").is_dir()
    assert (tmp_path / "samples.journal").exists()


def test_an_existing_buffer_is_opened_from_the_folder_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sw.ReplayBuffer(10, obs_shape=(2,), storage=f"file://{tmp_path}/rows.sw").close()
    (tmp_path / "elsewhere").mkdir()
    config = read(tmp_path, HEAD + '[tables.rows]\nopen = "file://rows.sw"\nverify = false\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    with config.tables["rows"].make() as buffer:
        assert buffer.capacity == 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("at = ", "not TOML"),
        ("[tables.a]\nopen = 'x'", "at: expected an address"),
        (HEAD, "expected at least one table"),
        (HEAD + "adress = 1\n[tables.a]\nopen='x'", "'adress' is not a setting of 'sharpwave serve'"),
        (HEAD + "key = 'x'\n[tables.a]\nopen='x'", "'key' is not a setting of 'sharpwave serve'; did you mean 'keys'?"),
        (HEAD + "drain_s = 'x'\n[tables.a]\nopen='x'", "drain_s: expected seconds, got 'x'"),
        (HEAD + "[tables.'a/b']\nopen='x'", "expected a name of letters"),
        (HEAD + "[tables.a]\nopne='x'", "tables.a: 'opne' is not a key of a table; did you mean 'open'?"),
        (HEAD + "[tables.a]\nopen='x'\n[tables.a.create]\nface='ReplayBuffer'", "expected either open = "),
        (HEAD + "[tables.a]\nopen='x'\nverfy=true", "did you mean 'verify'?"),
        (HEAD + "[tables.a]\nopen=3", "tables.a.open: expected an address or a path, got 3"),
        (
            HEAD + "[tables.a.create]\nface='Replaybuffer'",
            "tables.a.create.face: expected one of ReplayBuffer, DistillationBuffer, TrajectoryReplayBuffer, "
            "SequenceBuffer, got 'Replaybuffer'; did you mean 'ReplayBuffer'?",
        ),
        (
            ROWS + "capcity = 3",
            "tables.replay.create: 'capcity' is not an argument of ReplayBuffer; did you mean 'capacity'?",
        ),
        (ROWS + "sampler = 'Uniform'", "sampler: expected"),
        (ROWS + "sampler = { kind = 'uniform' }", "did you mean 'Uniform'?"),
        (
            ROWS + "sampler = { kind = 'Prioritized', alhpa = 1 }",
            "tables.replay.create.sampler: 'alhpa' is not an argument of Prioritized; did you mean 'alpha'?",
        ),
        (ROWS + "sampler = { kind = 'Prioritized', alpha = -1 }", "create.sampler: Prioritized(): alpha: expected"),
        (ROWS + "sampler = { kind = 'Recent' }", "create.sampler: "),
        (ROWS + "pace = { kind = 'ratio' }", "pace.kind: expected Pace or min_size or samples_per_insert or queue"),
        (ROWS + "view = { kind = 'Transitions', hindsight = { kind = 'Hindsight' } }", "Hindsight has functions"),
        (ROWS + "seed = { kind = 'x' }", "seed: expected a value, got a table"),
        (
            ROWS + "schema = { obs = [4] }",
            "schema.obs: expected { kind = \"Field\"",
        ),
        (
            ROWS + "schema = { obs = { kind = 'Field', shpe = [4] } }",
            "schema.obs: 'shpe' is not an argument of Field; did you mean 'shape'?",
        ),
        (HEAD + "[tables.a.create]\nface='ReplayBuffer'\nobs_shape=[4]", "capacity"),
        (HEAD + "[tables.a.create]\nface='SequenceBuffer'\ncapacity=4\nflow='x'", "flow: expected a list of consumer"),
        (
            HEAD + "[tables.a.create]\nface='SequenceBuffer'\ncapacity=4\nflow = [{ name = 'x', batchsize = 3 }]",
            "flow[0]: 'batchsize' is not an argument of Consumer; did you mean 'batch_size'?",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SharpwaveError) as refused:
        [table.make() for table in read(tmp_path, text).tables.values()]
    assert said in str(refused.value)
    assert "server.toml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_addresses_are_served_under_the_last_part_of_their_name() -> None:
    config = ServerConfig.from_addresses(["shm://atari", "file://run/live.sw", "best=runs/a=b/replay"], "tcp://x", None)
    assert {name: table.opens for name, table in config.tables.items()} == {
        "atari": {"address": "shm://atari"},
        "live": {"address": "file://run/live.sw"},
        "best": {"address": "runs/a=b/replay"},
    }
    with pytest.raises(SchemaError, match=r"two tables have the name 'a'; write NAME=file://b/a\.sw"):
        ServerConfig.from_addresses(["shm://a", "file://b/a.sw"], "tcp://x", None)
    with pytest.raises(SchemaError, match="expected a name for it; write NAME=file://"):
        ServerConfig.from_addresses(["file://"], "tcp://x", None)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nothing\.toml: cannot be read: No such file"):
        ServerConfig.read(tmp_path / "nothing.toml")


def test_python_3_10_is_told_which_package_reads_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.version_info", (3, 10, 0))
    monkeypatch.setitem(sys.modules, "tomli", None)
    with pytest.raises(StorageError, match=r"Python 3\.10 has no reader of TOML files; pip install tomli"):
        read(tmp_path, HEAD)
