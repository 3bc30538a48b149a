"""Published weights: whole versions only, in growing order, through kills of the publisher."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
from patience import HANG_S, until

from sharpwave.errors import NotReady, SchemaError, StaleHandle, StorageError
from sharpwave.llm.model import load_model, read_state, save_model, small_model, small_tokenizer
from sharpwave.llm.weights import Weights


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    if request.param == "disk":
        yield tmp_path / "weights"
        return
    place = Path("/dev/shm") / f"test-weights-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield place
    subprocess.run(["rm", "-rf", str(place)], check=True)


def state_of(value):
    return {"a": torch.full((3, 5), float(value)), "b": torch.full((7,), float(value), dtype=torch.bfloat16)}


def test_what_is_published_is_read_by_another_reader(folder):
    writer, reader = Weights(folder), Weights(folder)
    assert reader.latest() is None
    assert writer.publish(state_of(3), 3) == reader.latest()
    state = reader.latest().read()
    assert all(torch.equal(state[name], tensor) for name, tensor in state_of(3).items())
    assert state["b"].dtype == torch.bfloat16


def test_a_model_is_published_in_another_dtype(folder):
    model = small_model()
    published = Weights(folder).publish(model, 1, dtype=torch.bfloat16)
    assert all(torch.equal(published.read()[name], one.to(torch.bfloat16)) for name, one in model.weights())
    assert load_model(published.path).dtype is torch.bfloat16  # its config.json says so


def test_a_number_too_large_for_the_dtype_is_refused(folder):
    weights = Weights(folder)
    state = {"a": torch.ones(4), "b": torch.tensor([[1.0, 1e6], [float("nan"), 2.0]]), "steps": torch.tensor([3])}
    with pytest.raises(SchemaError, match="publish\\(\\): b has 2 of 4 values that are NaN or infinite"):
        weights.publish(state, 1, dtype=torch.float16)
    assert weights.latest() is None
    state["b"] = torch.ones(2, 2)
    assert weights.publish(state, 1, dtype=torch.float16).read()["steps"].dtype is torch.int64


def test_a_version_is_found_however_soon_after_another_it_is_published(folder):
    """Times of a folder have ticks: two changes within one look like one."""
    reader, writer = Weights(folder), Weights(folder, keep=1)
    for version in range(1, 60):
        writer.publish(state_of(version), version)
        assert reader.latest().version == version
    time.sleep(0.1)
    assert reader.latest().version == reader.latest().version == 59  # now the list is remembered
    writer.publish(state_of(60), 60)
    assert reader.latest().version == 60


def test_versions_only_grow_with_any_publisher(folder):
    Weights(folder).publish(state_of(0), 4)
    for version in (4, 3, 0):
        with pytest.raises(SchemaError, match=f"version={version}, but 4 is published; versions only grow"):
            Weights(folder).publish(state_of(1), version)
    for version in (-1, 1.0, True, 10**12):
        with pytest.raises(SchemaError, match=r"publish\(\): version: expected a whole number, 0 to 999999999999, got"):
            Weights(folder).publish(state_of(1), version)
    assert Weights(folder).latest().version == 4
    assert Weights(folder).latest().read()["a"][0, 0] == 0


def test_the_last_k_versions_are_kept(folder):
    weights = Weights(folder, keep=3)
    published = [weights.publish(state_of(version), version) for version in range(0, 12, 2)]
    assert sorted(path.name for path in folder.glob("v*")) == [f"v{version:012}" for version in (6, 8, 10)]
    for one in published[3:]:
        assert one.read()["a"][0, 0] == one.version
    with pytest.raises(StaleHandle, match=r"version 4 was removed; read latest\(\), or raise Weights\(keep=\)"):
        published[2].read()
    assert not list(folder.glob(".new*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder, value):
    weights = Weights(folder)
    weights.publish(state_of(1), 1)
    bad = state_of(2)
    bad["b"][4] = value
    with pytest.raises(SchemaError, match="b has 1 of 7 values that are NaN or infinite"):
        weights.publish(bad, 2)
    assert weights.latest().version == 1
    assert sorted(path.name for path in folder.iterdir() if path.name != ".lock") == ["v000000000001"]


def test_wait_wakes_for_a_newer_version_and_ends_with_its_timeout(folder):
    weights, found = Weights(folder), []
    with pytest.raises(NotReady, match=r"wait\(\): nothing is published, newer_than=-1; timeout=0 s passed"):
        weights.wait(timeout=0)
    weights.publish(state_of(1), 1)
    assert weights.wait().version == 1
    with pytest.raises(NotReady, match="version 1 is published, newer_than=1"):
        weights.wait(newer_than=1, timeout=0.02)
    waiting = threading.Thread(target=lambda: found.append(Weights(folder).wait(newer_than=1, timeout=HANG_S)))
    waiting.start()
    until(lambda: waiting.native_id is not None)
    assert not found
    weights.publish(state_of(2), 2)
    waiting.join(HANG_S)
    assert [one.version for one in found] == [2]


def test_a_changed_byte_and_a_short_file_are_found_on_reading(folder):
    one = Weights(folder).publish(state_of(1), 1)
    path = one.path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StorageError, match=r"model\.safetensors is damaged: its checksum is not the published one"):
        one.read()
    path.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match=f"has {len(whole) - 1} bytes, {len(whole)} were published"):
        one.read(check=False)
    path.unlink()
    with pytest.raises(StorageError, match=r"has neither model\.safetensors nor"):
        one.read()


def test_a_published_folder_is_compared_with_its_manifest_whichever_way_it_is_read(folder):
    one = Weights(folder).publish(small_model(), 1)
    manifest, path = one.path / "manifest.json", one.path / "model.safetensors"
    text, whole = manifest.read_text(), path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for read in (one.read, lambda: read_state(one.path), lambda: load_model(one.path)):
        with pytest.raises(StorageError, match=r"model\.safetensors is damaged: its checksum is not the published one"):
            read()
    path.write_bytes(whole)
    for damaged in ("{", "{}", '"x"', '{"files": 3}', '{"files": {"a": 1}}', "[" * 100_000):
        manifest.write_text(damaged)
        with pytest.raises(StorageError, match=r"manifest\.json is damaged: .*; publish the weights again"):
            read_state(one.path)
    manifest.write_text('{"files": {}}')
    with pytest.raises(StorageError, match=r"manifest\.json does not list model\.safetensors, so it was not published"):
        read_state(one.path)
    manifest.write_text('{"files": {"model.safetensors": {"bytes": 0, "crc32c": 0}}}')
    path.rename(folder / "kept")
    path.symlink_to("/proc/self/mem")  # nobody can read its first byte, not even root
    with pytest.raises(StorageError, match=r"model\.safetensors cannot be read: Input/output error"):
        read_state(one.path)
    (folder / "kept").rename(path)
    manifest.write_text(text)
    assert len(read_state(one.path)) == 25
    manifest.unlink()
    with pytest.raises(StorageError, match=r"has no manifest\.json; read the path of a version that was published"):
        one.read()
    manifest.write_text(text)
    save_model(small_model(seed=1), one.path)  # another model in its place
    assert len(load_model(one.path).state_dict()) == 25


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ({5: torch.zeros(2)}, {}, "a tensor has the name 5, expected a string"),
        ({"a": [1.0]}, {}, "a is list, expected a tensor"),
        (
            {"a": torch.zeros(2).to(torch.float8_e4m3fn)},
            {},
            r"a has dtype torch\.float8_e4m3fn, expected float32, another",
        ),
        ({"a": torch.zeros(2)}, {"dtype": "bfloat16"}, r"dtype='bfloat16', expected None or torch\.float32, "),
        ({"a": torch.zeros(2)}, {"dtype": torch.int8}, r"dtype=torch\.int8, expected None or"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused_by_name(folder, state, options, message):
    weights = Weights(folder)
    with pytest.raises(SchemaError, match=message):
        weights.publish(state, 1, **options)
    assert weights.latest() is None


def test_tensors_that_share_memory_are_written_each_on_its_own(folder):
    whole = torch.arange(12.0)
    state = {"embed": whole, "head": whole, "part": whole[3:5], "end": whole[10:], "none": whole[:0]}
    read = Weights(folder).publish(state, 1).read()
    assert {name: one.tolist() for name, one in read.items()} == {name: one.tolist() for name, one in state.items()}


def test_settings_of_weights_are_checked(folder, tmp_path):
    for keep in (0, "2", 1.5):
        with pytest.raises(SchemaError, match=r"Weights\(\): keep: expected a whole number, at least 1, got"):
            Weights(folder, keep=keep)
    with pytest.raises(StorageError, match=r"companions='.*nothing' is no folder; give one with the tokenizer's files"):
        Weights(folder, companions=tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"companions='.*nothing' is no folder"):
        save_model(small_model(), tmp_path / "model", companions=str(tmp_path / "nothing"))


def test_a_published_model_is_a_hugging_face_folder(folder, tmp_path):
    small_tokenizer(tmp_path / "tokenizer")
    model = small_model(tie_word_embeddings=True)
    one = Weights(folder, companions=tmp_path / "tokenizer").publish(model, 1)
    again = load_model(one.path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert (one.path / "tokenizer.json").exists()


PUBLISHER = """
import sys, torch
from sharpwave.llm.weights import Weights
weights = Weights(sys.argv[1])
version = weights.latest().version if weights.latest() else 0
while True:
    version += 1
    weights.publish({name: torch.full((300, 1000), float(version)) for name in "abcdef"}, version)
    print(version, flush=True)
"""


def stopped_while_writing(process, folder):
    """Stops the process at an instant when a version is half written."""
    while True:
        until(lambda: any(folder.glob(".new-*")))
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        if any(folder.glob(".new-*")):
            return
        process.send_signal(signal.SIGCONT)


def test_a_killed_publisher_leaves_whole_versions_and_the_next_one_goes_on(folder):
    reader, seen = Weights(folder), 0
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(folder)], stdout=subprocess.PIPE)
        try:
            for _ in range(2):
                last = int(process.stdout.readline())
            stopped_while_writing(process, folder)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert list(folder.glob(".new-*"))
        one = reader.latest()
        assert one.version >= last > seen
        state = one.read()
        assert all(bool((state[name] == one.version).all()) for name in "abcdef")
        seen = one.version
    reader.publish(state_of(0), seen + 1)
    assert not list(folder.glob(".new-*"))


FULL = """
import resource, signal, sys, torch
from sharpwave.errors import StorageError
from sharpwave.llm.model import save_model, small_model
from sharpwave.llm.weights import Weights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
weights, model = Weights(sys.argv[1]), small_model()
for write in (lambda: weights.publish({"a": torch.zeros(10_000)}, 2), lambda: save_model(model, sys.argv[2])):
    try:
        write()
    except StorageError as error:
        print(error)
"""


def test_a_disk_without_room_leaves_what_was_there(folder, tmp_path):
    Weights(folder).publish(state_of(1), 1)
    save_model(small_model(seed=3), tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    asked = [sys.executable, "-c", FULL, str(folder), str(tmp_path / "model")]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 2
    assert all("cannot be written" in line and "File too large" in line for line in said)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "v000000000001"]
    assert Weights(folder).latest().read()["a"][0, 0] == 1
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}


def test_other_users_of_the_machine_cannot_read_weights(folder):
    one = Weights(folder).publish(state_of(1), 1)
    assert {path.stat().st_mode & 0o777 for path in (folder, one.path)} == {0o700}


def test_publishers_take_turns(folder):
    errors, done = [], []

    def publish(version):
        try:
            done.append(Weights(folder, keep=50).publish(state_of(version), version).version)
        except SchemaError as error:
            errors.append(error)

    threads = [threading.Thread(target=publish, args=(version,)) for version in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(done) + len(errors) == 20
    assert max(done) == 19 == Weights(folder).latest().version
    assert len(list(folder.glob("v*"))) == len(done)
