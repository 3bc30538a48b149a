"""RLinf's buffer at seven commits, against ours: files in both directions, its tools on our folders, its callers.

Needs torch, and RLinf's own requirements as far as its buffer and its viewer use them: omegaconf, sortedcontainers,
matplotlib. What RLinf imports besides is replaced by stand-ins (see rlinf_upstream.py).
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .outcome import Outcome

__all__ = ["run"]

COMMITS = {
    "#621": "8e75b0895",
    "#644": "8ed824f2d",
    "#626": "487c80f24",
    "#675": "4ed95040b",
    "#693": "f5afdf455",
    "64bf29a": "64bf29a30",
    "a3816b5": "a3816b596",
}
DRIVER = Path(__file__).with_name("rlinf_upstream.py")
TIMEOUT_S = 600
NO_PICKLE = {"uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"}  # torch cannot read pickles of these
NO_DRAW = NO_PICKLE  # nor gather rows of them in RLinf's way
TOOL = "toolkits/replay_buffer/merge_or_split_replay_buffer.py"


def run(checkout: Path) -> list[Outcome]:
    """Every commit in turn, in a temporary folder; the checkout needs its history and is not changed."""
    outcomes = []
    for name, commit in COMMITS.items():
        with tempfile.TemporaryDirectory(prefix="rlinf-") as folder:
            root = Path(folder)
            archive = subprocess.run(
                ["git", "-C", str(checkout), "archive", commit, "rlinf", "toolkits", "examples", "tests"],
                capture_output=True,
                check=True,
            )
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
                packed.extractall(root / "export", filter="data")
            outcomes += _Commit(name, root).run()
    return outcomes


class _Commit:
    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root, self.export = name, root, root / "export"
        self.outcomes: dict[str, Outcome] = {}
        self.is_young = (self.export / "toolkits/replay_buffer/visualize.py").exists()

    def run(self) -> list[Outcome]:
        written = json.loads(self.driver("write", str(self.root / "theirs")).splitlines()[-1])
        self.cases = written["cases"]
        self.note("folders to us", f"{len(written['cannot'])} not made: {', '.join(written['cannot'])}")
        self.folders_to_us()
        self.folders_from_us()
        self.merge_and_split()
        self.command_lines()
        if self.is_young:
            self.viewer()
            self.compared()
        self.callers()
        self.own_tests()
        return list(self.outcomes.values())

    # ---- counting ---------------------------------------------------------------------------------------------

    def outcome(self, kind: str) -> Outcome:
        return self.outcomes.setdefault(kind, Outcome(f"{self.name} {kind}", 0, 0))

    def note(self, kind: str, text: str) -> None:
        self.outcome(kind).notes.append(text)

    def check(self, kind: str, what: str, test: Callable[..., Any], *given: Any) -> None:
        """Passes unless the test raises."""
        try:
            test(*given)
        except Exception as error:
            self.outcome(kind).failed += 1
            self.note(kind, f"{what}: {type(error).__name__}: {str(error)[:300]}")
        else:
            self.outcome(kind).passed += 1

    # ---- processes --------------------------------------------------------------------------------------------

    def process(self, command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
        places = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *command],
            input=given,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=self.root,
            env=env,
        )

    def driver(self, *arguments: str, given: str = "") -> str:
        done = self.process([str(DRIVER), str(self.export), *arguments], given)
        if done.returncode:
            raise RuntimeError(f"{arguments[0]}: {done.stderr[-500:]}")
        return done.stdout

    def tool(self, *arguments: Any) -> None:
        done = self.process([str(self.export / TOOL), *map(str, arguments)])
        if done.returncode:
            raise RuntimeError(done.stderr[-300:])

    def our_tool(self, *arguments: Any) -> None:
        done = self.process(["-m", "sharpwave.compat.rlinf.merge_or_split", *map(str, arguments)])
        if done.returncode:
            raise RuntimeError(done.stderr[-300:])

    def read(self, folders: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any] | str]:
        """What RLinf reads from folders: the trajectories, or the error."""
        spec = self.root / "read.json"
        parts = [
            {"draws": True, **part, "out": str(self.root / f"read-{at}")} for at, part in enumerate(folders.values())
        ]
        spec.write_text(json.dumps(parts))
        lines = [json.loads(line) for line in self.driver("read", str(spec)).splitlines() if line.startswith("{")]
        return {name: line["error"] or _load(line["out"])["found"] for name, line in zip(folders, lines, strict=True)}

    # ---- theirs to us -----------------------------------------------------------------------------------------

    def folders_to_us(self) -> None:
        adopted: dict[str, dict[str, Any]] = {}
        more: dict[str, dict[int, Any]] = {}
        for case in self.cases:
            what, expected = f"{case['kind']} {case['name']} {case['format']}", _load(case["expected"])
            self.check("folders to us", what, self.loaded, case, expected)
            self.check("draws from theirs", what, self.drawn, case, expected)
            if case["kind"] == "live":
                folder = self.root / "adopted" / f"{case['name']}-{case['format']}"
                self.check("taken up by us", what, self.adopted, case, expected, folder)
                found = expected["found"]
                more[what] = {**found, max(found) + 1: found[min(found)]}
                adopted[what] = _part(folder, case)
        for what, found in self.read(adopted).items():
            self.check("and by RLinf again", what, _compare, found, more[what])

    def loaded(self, case: dict[str, Any], expected: dict[str, Any]) -> None:
        with _buffer(save_trajectories=False, sample_window_size=0, allow_pickle=True) as buffer:
            buffer.load_checkpoint(case["folder"])
            _compare(_held(buffer), expected["found"])

    def drawn(self, case: dict[str, Any], expected: dict[str, Any]) -> None:
        """Rows, against RLinf's own flattening where that has a row for every step."""
        import torch

        import sharpwave as sw

        with sw.TrajectoryReplayBuffer(None, allow_pickle=True, device="cpu") as buffer:
            buffer.load(case["folder"])
            batch = buffer.sample(min(buffer.stats()["transitions"], 48))
            compared = 0
            for at, number in enumerate(batch["trajectory_id"].tolist()):
                steps, envs = expected["found"][number]["rewards"].shape[:2]
                row = int(batch["step"][at]) * envs + int(batch["env"][at])
                for path, flat in _walk(expected["flat"][number]):
                    if flat.shape[0] == steps * envs:
                        assert torch.equal(_bits(_at(batch, path)[at]), _bits(flat[row])), f"{path} of {number}"
                        compared += 1
            assert compared >= 5 * len(batch["step"]), compared

    def adopted(self, case: dict[str, Any], expected: dict[str, Any], folder: Path) -> None:
        """Lived in: what we add to a folder of RLinf's is there again, and nothing else is lost."""
        shutil.copytree(case["folder"], folder)
        found = expected["found"]
        options = {"storage_dir": folder, "storage_format": case["format"], "allow_pickle": True}
        with _buffer(**options) as buffer:
            _compare(_held(buffer), found)
            buffer.add_trajectories([_trajectory(_shaped(found[min(found)]))])
        with _buffer(**options) as buffer:
            _compare(_held(buffer), {**found, max(found) + 1: found[min(found)]})

    # ---- ours to them -----------------------------------------------------------------------------------------

    def folders_from_us(self) -> None:
        folders: dict[str, dict[str, Any]] = {}
        expected: dict[str, dict[int, Any]] = {}
        with ExitStack() as still_open:
            for case in self.cases:
                if case["kind"] != "live":
                    continue
                given = _load(case["expected"])["found"]
                for kind, folder in self.ours(case, given, still_open):
                    what = f"{kind} {case['name']} {case['format']}"
                    folders[what], expected[what] = _part(folder, case), given
                    if kind == "closed":
                        folders[f"taken up {what}"] = {**folders[what], "adopts": True}
                        expected[f"taken up {what}"] = given
            for what, found in self.read(folders).items():
                self.check("folders from us", what, _compare, found, expected[what])

    def ours(self, case: dict[str, Any], given: dict[int, Any], still_open: ExitStack) -> Iterator[tuple[str, Path]]:
        """Folders of ours with the same trajectories: of every way that makes one."""
        root = self.root / "ours" / f"{case['name']}-{case['format']}"
        format = {"storage_format": case["format"], "allow_pickle": True}
        every = [_trajectory(_shaped(given[number])) for number in sorted(given)]
        with _buffer(storage_dir=root / "closed", **format) as buffer:
            buffer.add_trajectories(every)
            buffer.save_checkpoint(save_path=root / "checkpoint")
        yield "closed", root / "closed"
        yield "checkpoint", root / "checkpoint"
        with _buffer(storage_dir=root / "gone", **format) as buffer:
            buffer.add_trajectories(every)
            buffer.save_checkpoint(root / "left")
        shutil.rmtree(root / "gone")
        yield "checkpoint whose live folder is gone", root / "left"
        with _buffer(auto_save=False, trajectory_format=case["format"], allow_pickle=True) as buffer:
            buffer.add_trajectories(every)
            buffer.save_checkpoint(root / "memory")
        yield "checkpoint of a buffer without files", root / "memory"
        buffer = still_open.enter_context(_buffer(storage_dir=root / "open", **format))
        buffer.add_trajectories(every)
        _wait_for_index(root / "open", len(every))
        yield "open", root / "open"

    # ---- tools ------------------------------------------------------------------------------------------------

    def merge_and_split(self) -> None:
        theirs, made = self.root / "theirs/ranks", self.root / "merged"
        made.mkdir()
        read: dict[str, dict[str, Any]] = {}
        with ExitStack() as still_open:
            self.our_ranks(theirs, still_open)
            for source in (theirs, *(self.root / f"ranks-{kind}" for kind in ("closed", "checkpoint", "open"))):
                for tool, run in (("its", self.tool), ("our", self.our_tool)):
                    begin = f"{tool} tool, {source.name}"
                    merged, split = made / f"{begin} merged", made / f"{begin} split"
                    kind = f"{tool} merge and split on {'theirs' if source is theirs else 'ours'}"
                    merge = ("--source-path", source, "--save-path", merged, "--copy")
                    self.check(kind, f"merge of {source.name}", run, *merge)
                    cut = ("--source-path", merged, "--save-path", split, "--split-count", 5, "--copy")
                    self.check(kind, f"split of {source.name}", run, *cut)
                    read[f"{kind}|{merged.name}"] = {"folder": str(merged), "format": "pt"}
                    read[f"{kind}|{split.name}"] = {"folder": str(split), "format": "pt"}
            moved = self.root / "moved"
            shutil.copytree(self.root / "ranks-closed", moved)
            kind, target = "its merge and split on ours", made / "moved merged"
            self.check(kind, "moving merge", self.tool, "--source-path", moved, "--save-path", target)
            read[f"{kind}|{target.name}"] = {"folder": str(target), "format": "pt"}
        found = self.read(read)
        # Its tool on its own folders is what all others have to give.
        whole, part = (found[f"its merge and split on theirs|its tool, ranks {what}"] for what in ("merged", "split"))
        if isinstance(whole, str) or isinstance(part, str) or (len(whole), len(part)) != (9, 5):
            raise RuntimeError(f"RLinf cannot read what its own tool made: {whole if isinstance(whole, str) else part}")
        for name, one in found.items():
            kind, what = name.split("|")
            expected = part if what.endswith("split") else whole
            self.check(kind, f"{what}: tensors", _compare, one, expected)
            self.check(kind, f"{what}: we load it", self.loaded, {"folder": made / what}, {"found": expected})
            self.check(kind, f"{what}: index", _same_index, made / what, made / "its tool, ranks merged")

    def our_ranks(self, theirs: Path, still_open: ExitStack) -> None:
        """Folders of ours, of every kind, with the trajectories of RLinf's ranks."""
        for rank in sorted(path.name for path in theirs.iterdir()):
            with _buffer(save_trajectories=False, sample_window_size=0) as buffer:
                buffer.load_checkpoint(theirs / rank)
                every = [trajectory for _, trajectory in buffer.trajectories()]
            with _buffer(storage_dir=self.root / "ranks-closed" / rank) as buffer:
                buffer.add_trajectories(every)
                (self.root / "ranks-checkpoint").mkdir(exist_ok=True)
                buffer.save_checkpoint(self.root / "ranks-checkpoint" / rank)
            buffer = still_open.enter_context(_buffer(storage_dir=self.root / "ranks-open" / rank))
            buffer.add_trajectories(every)
            _wait_for_index(self.root / "ranks-open" / rank, len(every))

    def command_lines(self) -> None:
        """The test that its module is when it is run, on our folders; ours on its folders."""
        paths = ("rlinf/data/replay_buffer.py", "rlinf/data/storage/replay/buffer.py")
        script = next(self.export / path for path in paths if (self.export / path).exists())
        ways = {
            "closed folder": "ours/plain-pt/closed",
            "checkpoint": "ours/plain-pt/checkpoint",
            "left checkpoint": "ours/plain-pt/left",
        }
        arguments = ("--num-chunks", "8", "--cache-size", "10", "--enable-cache")

        def theirs(folder: str) -> None:
            out = self.driver("script", str(script), "its", "--load-path", str(self.root / folder), *arguments)
            assert "rewards" in out, out

        def our(folder: str) -> None:
            command = ["-m", "sharpwave.compat.rlinf", "--load-path", str(self.root / folder), *arguments]
            done = self.process(command)
            assert done.returncode == 0, done.stderr
            assert "rewards: (8, 1) torch.float32" in done.stdout, done.stdout

        for what, folder in ways.items():
            self.check("its command line on ours", what, theirs, folder)
        for folder in ("theirs/live/plain-pt", "theirs/checkpoint/plain-pt"):
            self.check("our command line on theirs", folder, our, folder)

    def viewer(self) -> None:
        """Its viewer and its viewer without a screen: on our folders as it is, on any with its import changed."""
        folder = self.export / "toolkits/replay_buffer"

        def look(which: str, source: Path, swapped: str) -> None:
            image = self.root / "image.png"
            image.unlink(missing_ok=True)
            options = ["--replay_dir", str(source), "--output", str(image)]
            options += [] if which == "visualize_headless.py" else ["--save_image", "--no_display"]
            commands = "n\nnt\nnb\nb\nend\nn\nj 1\nhome\np\ninfo\nq\n"
            out = self.driver("script", str(folder / which), swapped, *options, given=commands)
            assert image.stat().st_size > 1_000
            assert "Error" not in out, out[-500:]
            assert "Total trajectories: 4" in out, out[-500:]
            if which == "visualize_headless.py":
                assert "Jumped to trajectory ID 1" in out, out[-500:]

        with _buffer(storage_dir=self.root / "seen") as still_open:
            shapes = _load(self.root / "theirs/live-images-pt.expected")["found"].values()
            still_open.add_trajectories([_trajectory(one) for one in shapes])
            _wait_for_index(self.root / "seen", 4)
            for which in ("visualize.py", "visualize_headless.py"):
                for place in ("closed", "checkpoint", "left", "memory"):
                    source = self.root / "ours/images-pt" / place
                    self.check("its viewer on ours", f"{which} {place}", look, which, source, "its")
                    self.check("its viewer over our buffer", f"{which} {place}", look, which, source, "swapped")
                self.check("its viewer on ours", f"{which} open", look, which, self.root / "seen", "its")
                for place in ("live", "checkpoint"):
                    source = self.root / "theirs" / place / "images-pt"
                    what = f"{which} RLinf's {place}"
                    self.check("its viewer over our buffer", what, look, which, source, "swapped")

    def compared(self) -> None:
        """Names that only have a meaning beside RLinf's own; and its datasets over our buffers."""
        for name, results in json.loads(self.driver("compare", ".").splitlines()[-1]).items():
            outcome = self.outcome(f"{name} beside its own")
            wrong = [result for result in results if result]
            outcome.passed, outcome.failed = len(results) - len(wrong), len(wrong)
            outcome.notes += wrong[:3]
        self.check("its datasets over our buffers", "both", self.driver, "datasets", str(self.root / "data"))

    # ---- callers ----------------------------------------------------------------------------------------------

    def callers(self) -> None:
        """Every call of the buffer in RLinf is accepted by ours, and every attribute that it reads is there."""
        from sharpwave.compat import rlinf as ours

        seen = set()
        with _buffer(save_trajectories=False) as instance:
            for part in ("rlinf", "examples", "toolkits"):
                for path in sorted((self.export / part).rglob("*.py")):
                    if path.parts[-2:] in (("data", "replay_buffer.py"), ("replay", "buffer.py")):
                        continue
                    for use in _uses(path):
                        if use in seen:
                            continue
                        seen.add(use)
                        self.check("callers", f"{path.name}: {use}", self.accepted, use, ours, instance)
        if len(seen) < 10:
            self.outcome("callers").failed += 1
            self.note("callers", f"found only {len(seen)}: they have other names now")

    def accepted(self, use: tuple[str, str, int, tuple[str, ...]], ours: Any, instance: Any) -> None:
        receiver, name, count, keywords = use
        if name == "TrajectoryReplayBuffer":
            given = {
                "seed": 1,
                "enable_cache": True,
                "cache_size": 5,
                "sample_window_size": 100,
                **dict.fromkeys(("storage_dir", "auto_save_path"), str(self.root / "called")),
                **dict.fromkeys(("storage_format", "trajectory_format"), "pt"),
            }
            for saves in (True, False):
                flags = dict.fromkeys(("save_trajectories", "auto_save"), saves)
                assert not count
                ours.TrajectoryReplayBuffer(**{key: {**given, **flags}[key] for key in keywords}).close()
            return
        if name == "PriorityStore":
            ours.PriorityStore(**dict.fromkeys(keywords, 3))
            return
        target = ours.PriorityStore(2) if receiver == "rollout_store" else instance
        found = getattr(target, name)
        if count >= 0:
            inspect.signature(found).bind(*range(count), **dict.fromkeys(keywords))

    def own_tests(self) -> None:
        """RLinf's unit tests of its buffer. None of the seven commits has any; one that came would be run here."""
        words = re.compile(r"replay_buffer|storage\.replay|TrajectoryReplayBuffer|PriorityStore|import.*\bTrajectory\b")
        found = [path for path in (self.export / "tests").rglob("*.py") if words.search(path.read_text())]
        outcome = self.outcome("its own unit tests")
        if not found:
            outcome.notes.append("RLinf has none that names its buffer, in tests/")
        for path in found:
            outcome.failed += 1
            outcome.notes.append(f"{path.relative_to(self.export)} names the buffer and is not run yet")


# ---- buffers and tensors ---------------------------------------------------------------------------------------------


def _buffer(**options: Any) -> Any:
    from sharpwave.compat.rlinf import TrajectoryReplayBuffer

    return TrajectoryReplayBuffer(**options)


def _trajectory(found: dict[str, Any]) -> Any:
    from sharpwave.compat.rlinf import Trajectory

    return Trajectory(max_episode_length=6, model_weights_id="w_0", **found)


def _held(buffer: Any) -> dict[int, Any]:
    def there(value: Any) -> bool:
        return value is not None and value != {} if isinstance(value, dict) else value is not None

    facts = ("max_episode_length", "model_weights_id")
    return {
        number: {name: value for name, value in vars(one).items() if name not in facts and there(value)}
        for number, one in buffer.trajectories()
    }


def _load(path: str | Path) -> Any:
    import torch

    return torch.load(path, weights_only=True)


def _part(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    return {"folder": str(folder), "format": case["format"], "draws": case["name"] not in NO_DRAW}


def _walk(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{path}{key}/")
        else:
            yield f"{path}{key}", value


def _at(tree: dict[str, Any], path: str) -> Any:
    for key in path.split("/"):
        tree = tree[key]
    return tree


def _bits(tensor: Any) -> Any:
    """Bytes: equal also where values are not numbers, and for dtypes that torch cannot compare."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _shaped(found: dict[str, Any]) -> dict[str, Any]:
    """Two ways of RLinf's in which a field has other axes than the rest: values with more rows than steps, saved with
    steps and environments in one axis; and flags with one column for all environments."""
    steps, envs = found["rewards"].shape[:2]
    made = dict(found)
    values, flags = found.get("prev_values"), found.get("intervene_flags")
    if values is not None and (values.shape[1] != envs or values.shape[0] > 2 * steps):
        made["prev_values"] = values.reshape(-1, envs, *values.shape[1:])
    if flags is not None and flags.shape[:2] == (steps, 1):
        made["intervene_flags"] = flags.expand(steps, envs, *flags.shape[2:])
    return made


def _compare(found: dict[int, Any] | str, expected: dict[int, Any]) -> None:
    """The same trajectories: ids, fields, dtypes, shapes, and every byte."""
    assert not isinstance(found, str), found
    assert list(found) == list(expected), f"ids {list(found)}, expected {list(expected)}"
    for number in expected:
        got, wanted = (dict(_walk(_shaped(one[number]))) for one in (found, expected))
        assert got.keys() == wanted.keys(), f"{number}: {sorted(got)}, expected {sorted(wanted)}"
        for path, tensor in wanted.items():
            other = got[path]
            if path == "prev_values" and tensor.shape[1:2] == (1,) and other.dim() == tensor.dim() + 1:
                tensor = tensor[:, None]  # of one environment: which axis RLinf left out cannot be seen in one file
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), f"{number} {path}: {other.shape}"
            assert bool((_bits(other) == _bits(tensor)).all()), f"{number} {path}: other values"


def _same_index(folder: Path, other: Path) -> None:
    """RLinf's index says the same of the trajectories, as far as the folder has them."""
    one, two = (json.loads((path / "trajectory_index.json").read_text()) for path in (folder, other))
    count = len(one["trajectory_id_list"])
    assert one["trajectory_id_list"] == two["trajectory_id_list"][:count]
    for number, facts in one["trajectory_index"].items():
        for name in ("num_samples", "trajectory_id", "shape", "max_episode_length"):
            assert facts[name] == two["trajectory_index"][number][name], f"{number} {name}"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["size"], metadata["trajectory_counter"]) == (count, count)
    assert metadata["total_samples"] == sum(facts["num_samples"] for facts in one["trajectory_index"].values())


def _wait_for_index(folder: Path, count: int) -> None:
    """Of a folder that is open: RLinf's files come a second after a change at the latest."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if json.loads((folder / "metadata.json").read_text())["size"] == count:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"{folder}: its metadata.json does not count {count} trajectories")


# ---- callers ---------------------------------------------------------------------------------------------------------


def _uses(path: Path) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """Receiver, name, number of positional arguments (-1: no call) and keywords of every use of a buffer."""
    tree = ast.parse(path.read_text())
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        call = called.get(id(node))
        count = -1 if call is None else len(call.args)
        keywords = () if call is None else tuple(word.arg for word in call.keywords if word.arg)
        if isinstance(node, ast.Name) and node.id in ("TrajectoryReplayBuffer", "PriorityStore") and call is not None:
            yield "", node.id, count, keywords
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
            continue
        inner = node.value
        is_own = isinstance(inner.value, ast.Name) and inner.value.id in ("self", "viz")
        names = {"replay_buffer", "demo_buffer", "rollout_store"}
        if path.name in ("collect_real_data.py", "visualize.py", "visualize_headless.py"):
            names.add("buffer")
        if is_own and inner.attr in names:
            yield inner.attr, node.attr, count, keywords
