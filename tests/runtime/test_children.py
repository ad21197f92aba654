"""Child processes: links, exit codes, and no child that outlives its service (I15)."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.child_link import EXIT_ORPHANED, ChildLink
from flexmarl.runtime.child_record import ChildRecord, end_leftovers
from flexmarl.runtime.children import Children
from flexmarl.runtime.preloader import Preloader

HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture
async def children(tmp_path):
    async with Children(
        preload=["json.tool"], preload_env=HERE, record=tmp_path / "children.json"
    ) as children:
        yield children


@pytest.fixture(params=["exec", "forked"])
async def child(request, children):
    return await start(children, request.param)


async def start(children, kind, *, name="child"):
    if kind == "exec":
        return await children.spawn_exec("child_targets", ["exec", "a", "b"], name=name, env=HERE)
    return await children.spawn_preloaded("child_targets:serve", ["a", "b"], name=name)


async def ask(child, frame):
    await child.link.send(frame)
    async with asyncio.timeout(30):
        return await child.link.recv()


async def gone(*pids):
    """Wait until processes have ended; zombies count as ended."""
    async with asyncio.timeout(20):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 - nothing tells us of strangers
            await asyncio.sleep(0.01)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("ending", ["exit", "kill"])
async def test_what_a_child_started_ends_with_it(child, ending):
    """I15 also below: a child that ends by itself, or is killed by others, leaves nobody behind."""
    grandchild = int(await ask(child, b"grandchild"))
    assert alive(grandchild)
    if ending == "kill":
        os.kill(child.pid, signal.SIGKILL)
    else:
        await child.link.send(b"exit")
    await child.wait(timeout_s=30)
    await gone(grandchild)


async def test_frames_go_both_ways_whole_and_in_order(child):
    assert await ask(child, b"args") == b"['a', 'b']"
    assert await ask(child, b"") == b""
    big = os.urandom(20 << 20)
    assert await ask(child, big) == big
    await child.link.send(b"flood 5000 0")
    got = [await child.link.recv() for _ in range(5000)]
    assert got == [str(number).encode() for number in range(5000)]


@pytest.mark.parametrize(("frame", "code"), [(b"exit", 7), (b"raise", 1), (b"sys-exit", 9)])
async def test_exit_codes_arrive_and_end_the_link(child, children, frame, code):
    told = []
    child.on_exit(lambda ended: told.append((ended.name, ended.exit_code)))
    await child.link.send(frame)
    assert await child.wait(timeout_s=30) == code
    assert await child.link.recv() is None
    await asyncio.sleep(0)
    assert told == [("child", code)]
    with pytest.raises(DomainError) as caught:
        await child.link.send(b"anyone?")
    assert caught.value.reason is ErrorReason.CHILD_DIED


async def test_a_killed_child_is_noticed(child):
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait(timeout_s=30) == -signal.SIGKILL
    child.kill()  # of a collected pid does nothing


async def test_a_busy_child_exits_when_its_link_closes(child):
    assert await ask(child, b"busy") == b"busy"
    child.link.close()
    assert await child.wait(timeout_s=30) == EXIT_ORPHANED


@pytest.mark.parametrize("how", ["exec", "forked"])
async def test_asyncio_children_talk_and_exit_when_their_loop_is_blocked(children, how):
    if how == "exec":
        child = await children.spawn_exec("child_targets", ["async"], name="a", env=HERE)
    else:
        child = await children.spawn_preloaded("child_targets:serve_async_target", name="a")
    for number in range(100):
        assert await ask(child, str(number).encode()) == str(number).encode()
    assert await ask(child, b"block") == b"blocking"
    child.link.close()
    assert await child.wait(timeout_s=30) == EXIT_ORPHANED


async def test_forked_children_have_the_modules_and_their_own_environment(children):
    child = await children.spawn_preloaded("child_targets:serve", name="c", env={"MINE": "yes"})
    assert await ask(child, b"modules") == b"True"
    assert await ask(child, b"env MINE") == b"yes"
    other = await children.spawn_preloaded("child_targets:serve", name="d")
    assert await ask(other, b"env MINE") == b"-"


async def test_forked_children_hold_nothing_of_the_zygote_or_of_each_other(children):
    kids = [await children.spawn_preloaded("child_targets:serve", name=f"{n}") for n in range(4)]
    assert len({await ask(kid, b"fds") for kid in kids}) == 1
    # Would a sibling hold the first one's end, its link would not end here.
    os.kill(kids[0].pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        assert await kids[0].link.recv() is None


async def test_the_zygotes_death_ends_its_children_and_the_next_child_has_a_new_one(children):
    child = await children.spawn_preloaded("child_targets:serve", name="c")
    (zygote,) = children._preloader.pids
    os.kill(zygote, signal.SIGKILL)
    assert await child.wait(timeout_s=30) == -signal.SIGKILL
    await gone(child.pid)
    again = await children.spawn_preloaded("child_targets:serve", name="again")
    assert await ask(again, b"hello") == b"hello"
    assert children._preloader.pids != {zygote}


async def test_a_zygote_that_hangs_is_ended_and_the_next_child_has_a_new_one():
    started = []
    preloader = Preloader(modules=[], on_start=started.append, env=HERE)

    async def spawn():
        return await preloader.spawn("child_targets:serve", [], name="c", env={}, log_file=None)

    try:
        first = await spawn()
        os.kill(started[0].pid, signal.SIGSTOP)
        enough_s, preloader._timeout_s = preloader._timeout_s, 0.5
        with pytest.raises(DomainError, match=r"not forked within 0\.5 s") as caught:
            await spawn()
        preloader._timeout_s = enough_s
        assert caught.value.reason is ErrorReason.DEADLINE_EXCEEDED
        assert not alive(started[0].pid)
        second = await spawn()
        assert await ask(second, b"x")
        assert len(started) == 2
        await gone(first.pid)
    finally:
        await preloader.close()


async def test_a_module_that_cannot_be_preloaded_is_told(tmp_path):
    async with Children(preload=["no_such_module"]) as children:
        with pytest.raises(DomainError, match="no_such_module") as caught:
            await children.spawn_preloaded("child_targets:serve", name="c")
    assert caught.value.reason is ErrorReason.CHILD_DIED


async def test_a_target_that_does_not_exist_is_an_exit_code_and_a_log(children, tmp_path):
    log_file = tmp_path / "child.log"
    child = await children.spawn_preloaded("child_targets:nope", name="c", log_file=log_file)
    assert await child.wait(timeout_s=30) == 1
    assert "nope" in log_file.read_text()


async def test_stop_kills_what_ignores_sigterm(children):
    child = await children.spawn_preloaded("child_targets:refuse_term", name="stubborn")
    assert await child.link.recv() == b"ready"
    assert await child.stop(grace_s=0.1) == -signal.SIGKILL


async def test_kill_ends_the_whole_group(child):
    grandchild = int(await ask(child, b"grandchild"))
    child.kill()
    await gone(child.pid, grandchild)


async def test_close_ends_all_and_empties_the_record(tmp_path):
    record = tmp_path / "children.json"
    children = Children(preload=["json.tool"], preload_env=HERE, record=record)
    kids = [await start(children, kind, name=kind) for kind in ("exec", "forked")]
    assert all(f'"{kid.name}"' in record.read_text() for kid in kids)
    await children.close()
    await gone(*(kid.pid for kid in kids))
    assert record.read_text() == "[]"
    with pytest.raises(RuntimeError, match="after close"):
        await start(children, "exec")


async def test_a_receiver_that_does_not_read_stops_the_sender(children):
    child = await children.spawn_exec("child_targets", ["exec"], name="c", env=HERE)
    child.link._send_timeout_s = 0.2
    await ask(child, b"busy")
    with pytest.raises(DomainError) as caught:
        while True:
            await child.link.send(bytes(1 << 20))
    assert caught.value.reason is ErrorReason.DEADLINE_EXCEEDED


async def test_frames_that_nobody_reads_are_bounded(children):
    child = await children.spawn_exec("child_targets", ["exec"], name="c", env=HERE)
    count = 2000
    await child.link.send(b"flood %d 65536" % count)
    async with asyncio.timeout(30):
        while not child.link._reading_paused:  # noqa: ASYNC110 - a look from outside
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert child.link._unread_bytes < 16 << 20 < count << 16
    async with asyncio.timeout(60):
        got = [int(await child.link.recv()) for _ in range(count)]
    assert got == list(range(count))


async def test_torch_computes_in_forked_children():
    async with Children(preload=["torch"], preload_env=HERE) as children:
        kids = [await children.spawn_preloaded("child_targets:serve", name=f"{n}") for n in (0, 1)]
        losses = {await ask(kid, b"torch") for kid in kids}
        assert len(losses) == 1
        assert await ask(kids[0], b"torch") in losses


def test_kill_dash_nine_of_the_service_ends_its_busy_children_and_the_zygote(tmp_path):
    service, pids = start_service(tmp_path)
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    service.kill()
    service.wait(timeout=20)
    asyncio.run(gone(*pids))


def start_service(folder):
    service = subprocess.Popen(
        [sys.executable, "-m", "child_targets", "service", str(folder)],
        env={**os.environ, **HERE},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert service.stdout is not None
    while not (line := service.stdout.readline()).strip().replace(" ", "").isdigit():
        assert line, "the service died"
    return service, [int(word) for word in line.split()]


def test_outside_of_a_service_there_is_no_link():
    with pytest.raises(RuntimeError, match="FLEXMARL_LINK_FD is not set"):
        ChildLink.from_environment()


@pytest.fixture
def stranger():
    """A process with a group of its own, with a member, that no link watches."""
    script = "import subprocess,time; subprocess.Popen(['sleep','600']); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    yield process
    with contextlib.suppress(ProcessLookupError):  # its group, of which a test may have ended all
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


def test_leftovers_of_a_crashed_service_are_ended(tmp_path, stranger):
    path = tmp_path / "children.json"
    ChildRecord(path).add(pid=stranger.pid, name="leftover")
    members = [stranger.pid]
    assert end_leftovers(path) == ["leftover"]
    stranger.wait(timeout=20)
    asyncio.run(gone(*members))
    assert not path.exists()
    assert end_leftovers(path) == []


def test_a_reused_pid_is_left_alone(tmp_path, stranger):
    path = tmp_path / "children.json"
    ChildRecord(path).add(pid=stranger.pid, name="was")
    started_s = psutil.Process(stranger.pid).create_time()
    path.write_text(path.read_text().replace(str(started_s), str(started_s - 60)))
    assert end_leftovers(path) == []
    assert stranger.poll() is None


@pytest.mark.parametrize("text", ["", "{", '[{"pid": 1}]', "[1]", '{"pid": 1}'])
def test_a_foreign_record_names_nobody(tmp_path, text):
    path = tmp_path / "children.json"
    path.write_text(text)
    assert end_leftovers(path) == []
