"""What the test's child processes run."""

import asyncio
import os
import sys
import time

from flexmarl.runtime.child_link import AsyncChildLink, ChildLink


def serve(args):
    """Answer frames as they ask for."""
    link = ChildLink.from_environment()
    while (frame := link.recv()) is not None:
        if frame == b"exit":
            return 7
        if frame == b"raise":
            raise ValueError("child failed")
        if frame == b"sys-exit":
            sys.exit(9)
        if frame == b"busy":
            link.send(b"busy")
            busy()
        if frame == b"args":
            frame = repr(args).encode()
        elif frame == b"modules":
            frame = repr("json.tool" in sys.modules).encode()
        elif frame.startswith(b"env "):
            frame = os.environ.get(frame[4:].decode(), "-").encode()
        elif frame == b"fds":
            frame = str(len(os.listdir("/proc/self/fd"))).encode()
        elif frame == b"grandchild":
            frame = str(grandchild()).encode()
        elif frame == b"torch":
            frame = torch_step().encode()
        elif frame.startswith(b"flood "):
            count, size = map(int, frame[6:].split())
            for number in range(count):
                link.send(str(number).encode().ljust(size))
            continue
        link.send(frame)
    return 0


def busy():
    """Compute without ever looking at the link."""
    while True:
        sum(range(100_000))


def grandchild():
    """A process in the child's group that would live on by itself."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return pid


def torch_step():
    """One training step on two threads: libraries with thread pools must work after a fork."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(2)
    module = torch.nn.Linear(256, 256)
    loss = module(torch.randn(512, 256)).pow(2).mean()
    loss.backward()
    assert module.weight.grad is not None
    return f"{float(loss.detach()):.3f}"


def refuse_term(args):
    """A child that ignores SIGTERM."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ChildLink.from_environment().send(b"ready")
    time.sleep(600)


async def serve_async():
    """Echo from an event loop; block the loop when asked."""
    link = await AsyncChildLink.from_environment()
    async for frame in link:
        if frame == b"block":
            await link.send(b"blocking")
            busy()
        await link.send(frame)


def serve_async_target(args):
    """The asyncio child as a forked target."""
    asyncio.run(serve_async())


async def be_a_service(folder):
    """A service with one busy child of each kind, to be killed; prints their pids."""
    from pathlib import Path

    from flexmarl.runtime.children import Children

    children = Children(preload=["json.tool"], record=Path(folder) / "children.json")
    spawned = [
        await children.spawn_exec("child_targets", ["exec"], name="exec"),
        await children.spawn_preloaded("child_targets:serve", name="forked"),
    ]
    for child in spawned:
        await child.link.send(b"busy")
        await child.link.recv()
    zygotes = sorted(children._preloader.pids)
    print(*(child.pid for child in spawned), *zygotes, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "exec":
        sys.exit(serve(sys.argv[2:]))
    elif sys.argv[1] == "async":
        asyncio.run(serve_async())
    elif sys.argv[1] == "service":
        asyncio.run(be_a_service(sys.argv[2]))
