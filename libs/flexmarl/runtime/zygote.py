"""A process that imports heavy modules once and forks children from then on, in milliseconds.

The standard library's forkserver is not used: it reports exit codes through a pipe that a second
reader destroys, re-imports the service's main module in every child, and speaks pickle. Here the
requests are JSON with the child's end of its link attached, exits come back as frames, and the
process ends with the service like any other child.

Nothing here may start threads that compute, and preloaded modules may not either, before the fork.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from flexmarl.runtime.child_link import (
    LINK_FD_VARIABLE,
    ChildLink,
    end_group,
    forget_watches,
    link_socket,
    watch_parent,
)
from flexmarl.runtime.frames import HEADER

_CHUNK_BYTES = 1 << 16


class Zygote:
    """Serves fork requests until the service closes the link, which exits this process.

    The loop waits for a request (freed by the service) or a child's end (freed by SIGCHLD).
    """

    def __init__(self, *, requests: socket.socket, link_sock: socket.socket) -> None:
        self._requests = requests
        self._link_sock = link_sock
        self._link = ChildLink(link_sock)
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)

    def serve(self) -> None:
        """Fork and reap until the end."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler is needed to be woken at all
        signal.set_wakeup_fd(self._wake_w.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._requests, selectors.EVENT_READ)
        selector.register(self._wake_r, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._wake_r:
                    self._wake_r.recv(_CHUNK_BYTES)
                    self._reap()
                elif not self._fork_next(selector):
                    return

    def _fork_next(self, selector: selectors.BaseSelector) -> bool:
        received = _receive(self._requests)
        if received is None:
            return False
        request, fd = received
        pid = os.fork()
        if pid == 0:
            selector.close()
            self._become_child(request, fd)
        os.close(fd)
        self._tell({"request": request["request"], "pid": pid})
        return True

    def _reap(self) -> None:
        while True:
            try:
                # Seen and not collected: until then the number names this child's group only.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            end_group(pid)
            _, status = os.waitpid(pid, 0)
            self._tell({"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, Any]) -> None:
        self._link.send(json.dumps(message).encode())

    def _become_child(self, request: dict[str, Any], fd: int) -> None:
        code = 1
        try:
            os.setsid()  # a process group of its own, so that all of it can be ended
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in (self._requests, self._link_sock, self._wake_r, self._wake_w):
                # `close` would wait for the link's reader: an open copy hides the zygote's death.
                os.close(sock.detach())
            os.close(int(os.environ[LINK_FD_VARIABLE]))
            forget_watches()
            os.environ.update(request["env"])
            os.environ[LINK_FD_VARIABLE] = str(fd)
            watch_parent(fd)
            _redirect(request["log_file"])
            random.seed()  # forked children would draw the same numbers
            sys.argv = [request["target"]]
            code = _call(request["target"], request["args"])
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        except BaseException:  # noqa: BLE001 - a process edge
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _call(target: str, args: Any) -> int:  # noqa: ANN401 - any JSON value
    module, _, function = target.partition(":")
    result = getattr(importlib.import_module(module), function)(args)
    return result if isinstance(result, int) else 0


def _redirect(log_file: str | None) -> None:
    if log_file is None:
        return
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _receive(sock: socket.socket) -> tuple[dict[str, Any], int] | None:
    # One request at a time is under way, so a read never runs into the next one.
    data, fds, _, _ = socket.recv_fds(sock, _CHUNK_BYTES, 1)
    if not data:
        return None
    buffer = bytearray(data)
    while len(buffer) < HEADER.size or len(buffer) < HEADER.size + HEADER.unpack_from(buffer)[0]:
        more = sock.recv(_CHUNK_BYTES)
        if not more:
            return None
        buffer += more
    os.set_inheritable(fds[0], False)
    request: dict[str, Any] = json.loads(bytes(buffer[HEADER.size :]))
    return request, fds[0]


def main() -> None:
    """`... flexmarl.runtime.zygote --requests-fd N MODULE...`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests-fd", type=int, required=True)
    parser.add_argument("modules", nargs="*")
    args = parser.parse_args()
    os.set_inheritable(args.requests_fd, False)
    gc.disable()  # what an import makes stays: looking through it again and again took a sixth
    for module in args.modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # collections in the children leave the shared pages alone
    gc.enable()
    Zygote(requests=socket.socket(fileno=args.requests_fd), link_sock=link_socket()).serve()


if __name__ == "__main__":
    main()
