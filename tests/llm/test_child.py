"""Child processes, their channels and doors: how they begin, how they end, what they inherit."""

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sharpwave.errors import NotReady
from sharpwave.llm.channel import Door, PlainChannel
from sharpwave.llm.child import Child, enter
from sharpwave.llm.generators import Sampling
from sharpwave.llm.generators.process import ProcessGenerator

LONG = Sampling(max_tokens=200, ignore_eos=True)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 180))


def test_an_engine_answers_several_channels_and_outlives_all_but_its_parent():
    async def main():
        door = Door()
        generator = await ProcessGenerator.start("test_process_generator:make", door=door)
        others = [ProcessGenerator.meet(door.open()) for _ in range(2)]
        asked = [one.generate([5, 6, 7], LONG.seeded(seed)) for seed, one in enumerate([generator, *others] * 3)]
        answers = await asyncio.gather(*asked)
        for seed, answer in enumerate(answers):
            assert answer.tokens == (await generator.generate([5, 6, 7], LONG.seeded(seed))).tokens
        left = [asyncio.ensure_future(others[0].generate([5], LONG)) for _ in range(20)]
        await asyncio.sleep(0.05)
        await others[0].close()  # its answers are ended: the slots are free for others
        await asyncio.gather(*left, return_exceptions=True)
        assert len((await others[1].generate([5, 6, 7], LONG)).tokens) == 200
        deadline = time.monotonic() + 20
        while (await generator.health()).running:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        late = ProcessGenerator.meet(door.open())  # channels may come at any time
        assert len((await late.generate([5], LONG)).tokens) == 200
        await generator.close()
        with pytest.raises(NotReady, match="the engine has ended"):
            await others[1].join()
        with pytest.raises(NotReady, match="behind the door has ended"):
            door.open()
        door.close()

    run(main())


def test_a_channel_that_stands_still_holds_up_no_other():
    """Its answers wait in the engine's process: more of them than a socket takes."""

    async def main():
        door = Door()
        generator = await ProcessGenerator.start("test_process_generator:make", door=door)
        meet, still = ProcessGenerator.meet(door.open()), door.open()
        still.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent = ProcessGenerator.meet(still)
        asyncio.get_running_loop().remove_reader(still)
        asked = [asyncio.ensure_future(silent.generate([5], LONG)) for _ in range(100)]
        for _ in range(4):
            assert len((await meet.generate([5], LONG)).tokens) == 200
        deadline = time.monotonic() + 20
        while (await meet.health()).running:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert not any(one.done() for one in asked)
        asyncio.get_running_loop().add_reader(still, silent._channel._read)
        assert [len((await one).tokens) for one in asked] == [200] * 100
        await generator.close()
        door.close()

    run(main())


def main():
    """What children of the tests below do; `Child.start` runs it."""
    if sys.argv[2] == "ends a process that has just begun":  # before it has handlers of its own
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    (end,) = enter(sys.argv[1])
    parent, said = PlainChannel(end), None
    if sys.argv[2] == "forks":  # another process has its socket, and lives on in a session of its own
        os.set_inheritable(end.fileno(), True)
        said = subprocess.Popen(["sleep", "60"], close_fds=False, start_new_session=True).pid
    if sys.argv[2].startswith("starts a program"):  # with all files that may be inherited
        said = subprocess.Popen(["sleep", "60"], close_fds=False).pid
    if sys.argv[2] == "says its paths":
        said = [[path for path in sys.path if path], os.environ.get("PYTHONPATH")]
    if sys.argv[2].startswith("ends a process"):
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        forked.start()
        if "begun" not in sys.argv[2]:
            forked.terminate()
        forked.join(20)
        said = forked.exitcode
        forked.kill()
    parent.is_ready(said)
    if sys.argv[2].endswith("stands still"):
        signal.pause()
    for _, number, body in parent.frames():  # until the parent closes its end
        if sys.argv[2] == "answers":
            parent.reply(number, len(body))
            parent.flush(waits=True)


async def start_child(what):
    return await Child.start(__name__, [what], "the child")


def test_the_death_of_a_child_whose_socket_another_process_has_is_seen():
    async def main():
        child = await start_child("forks")
        call = child.call(2)[1]
        try:
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(NotReady, match="the process of the child has ended"):
                await asyncio.wait_for(call, 20)
            assert child.has_ended
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended with the child
                os.kill(child.said, signal.SIGKILL)
            await child.close()

    run(main())


def sockets_of(program):
    found = []
    for one in os.listdir(program / "fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile: a program that begins opens its libraries
            found.append(os.readlink(program / "fd" / one))
    assert found
    return [one for one in found if "socket" in one]


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_programs_that_a_child_has_started_end_with_it(how):
    async def main():
        child = await start_child("starts a program")
        program = Path(f"/proc/{child.said}")
        assert not sockets_of(program)
        os.kill(child.pid, signal.SIGKILL) if how == "killed" else await child.close()
        deadline = time.monotonic() + 20
        while program.exists() and "Z" not in (program / "stat").read_text().rpartition(")")[2][:3]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await child.close()

    run(main())


@pytest.mark.parametrize("what", ["starts a program", "starts a program and stands still"])
def test_programs_that_a_child_has_started_end_with_a_killed_parent(what):
    code = (
        "import asyncio, os, signal, test_child as t\n"
        "async def main():\n"
        f"    print((await t.start_child({what!r})).said, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    program = Path(f"/proc/{parent_that_runs(code)}")
    deadline = time.monotonic() + 30
    while program.exists() and "Z" not in (program / "stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def parent_that_runs(code):
    """What it prints. The pipe is read for one line only: programs that live on have it, too."""
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", code], env=there, stdout=subprocess.PIPE, text=True) as parent:
        return int(parent.stdout.readline())


@pytest.mark.parametrize("what", ["ends a process of its own", "ends a process that has just begun"])
def test_a_process_that_a_child_has_forked_can_be_ended(what):
    """The child passes by SIGTERM, and `multiprocessing` ends its processes by it."""

    async def main():
        child = await start_child(what)
        assert child.said == -signal.SIGTERM
        await child.close()

    run(main())


def test_a_child_says_how_it_ended():
    async def main():
        for number, how in [
            (signal.SIGKILL, r"by SIGKILL; out of memory\?"), (signal.SIGUSR1, "by SIGUSR1"), (40, "by signal 40"),
        ]:  # fmt: skip
            child = await start_child("pauses")
            os.kill(child.pid, number)
            why = rf"the process of the child has ended \({how}\); its output says why"
            with pytest.raises(NotReady, match=why):
                await asyncio.wait_for(child.join(), 20)
            with pytest.raises(NotReady, match=why):  # so does every later call
                child.call(2)
            await child.close()

    run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_meets_a_child_that_has_just_begun_passes_by(monkeypatch, number):
    """As a cluster's scheduler sends it to all processes of a run, while the modules of some are still imported."""

    def popen(*args, **options):
        process = start(*args, **options)
        process.send_signal(number)
        return process

    async def main():
        child = await start_child("answers")
        os.kill(child.pid, number)
        assert await child.call(2, b"a")[1] == 1
        await child.close()

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", popen)
    run(main())


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_child_ends_where_nothing_is_told_of_the_ends_of_children(how):
    """As a task sets it whose programs would else stay as zombies, or the program that has started the run."""

    async def main():
        child = await start_child("pauses")
        if how == "killed":
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(NotReady, match="the process of the child has ended"):
                await asyncio.wait_for(child.join(), 20)
        await child.close()
        assert not Path(f"/proc/{child.pid}").exists()

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        run(main())
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_time_limit_for_sockets_that_a_task_has_set_is_none_for_channels():
    """As a task sets it for its downloads. More is sent than the socket of a stopped child takes."""

    async def main():
        child = await start_child("answers")
        os.kill(child.pid, signal.SIGSTOP)
        call = child.call(2, bytes(1 << 22))[1]
        await asyncio.sleep(0.1)
        os.kill(child.pid, signal.SIGCONT)
        assert await asyncio.wait_for(call, 60) == 1 << 22
        await child.close()

    socket.setdefaulttimeout(0.05)
    try:
        run(main())
    finally:
        socket.setdefaulttimeout(None)


def test_a_child_finds_the_modules_of_its_parent_and_no_others(tmp_path, monkeypatch):
    """A file in the current folder is not found first, and programs that the child starts have the paths of before."""
    for name in ("queue", "json", "asyncio"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path)

    async def main():
        child = await start_child("says its paths")
        assert child.said == [[path for path in sys.path if path], os.environ.get("PYTHONPATH")]
        await child.close()

    run(main())


def test_a_child_can_be_watched_where_many_files_are_open_or_no_process_file_is_to_be_had(monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit[1] < 3000:
        pytest.skip("this system allows few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, limit[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

    async def main():
        for has_file in (True, False):
            if not has_file:
                monkeypatch.setattr(
                    os, "pidfd_open", lambda pid: (_ for _ in ()).throw(PermissionError()), raising=False
                )
            child = await start_child("forks" if has_file else "pauses")
            os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(NotReady, match="the process of the child has ended"):
                await asyncio.wait_for(child.join(), 20)
            await child.close()

    try:
        run(main())
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_door_says_that_no_file_number_is_left():
    door = Door()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours = door.open()
    files = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files[0] + 1, limit[1]))
    try:
        with contextlib.suppress(OSError):  # numbers below that were free
            while True:
                files.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(NotReady, match=r"no file number is left .* \(ulimit -n\)"):
            Door.take(door.inside)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for file in files:
            os.close(file)
    other = door.open()
    taken = Door.take(door.inside)
    other.send(b"a")
    assert taken.recv(1) == b"a"
    assert not taken.get_inheritable()
    for one in (ours, other, taken):
        one.close()
    door.close()
    assert ours.fileno() < 0


def test_a_child_whose_own_code_stands_still_ends_with_its_parent():
    code = (
        "import asyncio, os, signal, test_child as t\n"
        "async def main():\n"
        "    print((await t.start_child('stands still')).pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    child = Path(f"/proc/{parent_that_runs(code)}")
    deadline = time.monotonic() + 30
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_forked_process_keeps_no_channel_open():
    """With a copy of an end in a process that lives on, the other end would never see the death of the first."""

    async def main():
        door = Door()
        generator = await ProcessGenerator.start("test_process_generator:make", door=door)
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
        try:
            other = ProcessGenerator.meet(door.open())
            pid = generator.pid
            began = time.monotonic()
            await generator.close()
            assert time.monotonic() - began < 8  # the engine has seen the end of its channel; a kill comes after 10 s
            with pytest.raises(NotReady):
                await asyncio.wait_for(other.join(), 8)
            assert not Path(f"/proc/{pid}").exists()
        finally:
            os.kill(forked, signal.SIGKILL)
            os.waitpid(forked, 0)
            door.close()

    run(main())
