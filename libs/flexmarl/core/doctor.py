"""What is wrong with a host, and what to do about it: facts in, findings out.

Probes measure, elsewhere; here is how much is too much, and why. Every finding that is not fine
says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MIN_PYTHON: Final = (3, 11)
MIN_OPEN_FILES: Final = 4096
"""A store with a few thousand segments and watches, or a host with many engines, needs as many."""

MAX_CLOCK_SKEW_S: Final = 1.0
"""Beyond it the spans and logs of two hosts cannot be laid side by side, and fresh certificates
may not be valid yet."""

SLOW_FSYNC_S: Final = 0.02
BROKEN_FSYNC_S: Final = 0.2
"""Each acknowledged write of a store waits for one fsync."""

MIN_FREE_DISK_BYTES: Final = 2 << 30
_GIB: Final = 1 << 30


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, slowly or not for long."""
    WRONG = "wrong"
    """It will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What was looked at.
        level: How bad it is.
        said: What was found.
        remedy: What to do; empty when it is fine.
    """

    check: str
    level: Level
    said: str
    remedy: str = ""


class PortState(StrEnum):
    """What is behind an address."""

    FREE = "free"
    SERVING = "serving"
    NOT_SERVING = "not serving"
    FOREIGN = "foreign"
    """Somebody holds the port and does not answer as a service does."""
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How an address answered.

    Attributes:
        state: What is behind it.
        detail: What was said instead of an answer.
        clock_offset_s: Its clock less ours; None: it did not tell.
        round_trip_s: How long it took; half of it is the offset's uncertainty.
    """

    state: PortState
    detail: str = ""
    clock_offset_s: float | None = None
    round_trip_s: float = 0.0


def judge_python(version: tuple[int, int]) -> Finding:
    """Whether the interpreter is new enough."""
    said = "Python {}.{}".format(*version)
    if version >= MIN_PYTHON:
        return Finding("versions", Level.OK, said)
    wanted = "{}.{}".format(*MIN_PYTHON)
    return Finding("versions", Level.WRONG, said, f"install FlexMARL with Python {wanted} or newer")


def judge_package(name: str, *, found: str, wanted: tuple[int, ...]) -> Finding:
    """Whether a library is there and new enough.

    Args:
        name: Of its distribution.
        found: Its version; empty: it is not installed.
        wanted: Least version.
    """
    least = ".".join(map(str, wanted))
    remedy = f"pip install '{name}>={least}'"
    if not found:
        return Finding("versions", Level.WRONG, f"{name} is not installed", remedy)
    if _numbers(found)[: len(wanted)] < wanted:
        return Finding("versions", Level.WRONG, f"{name} {found} is older than {least}", remedy)
    return Finding("versions", Level.OK, f"{name} {found}")


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def judge_own_port(service: str, address: str, answer: Answer) -> Finding:
    """Whether a service of this host serves at its address, or could."""
    match answer.state:
        case PortState.FREE:
            return Finding("ports", Level.OK, f"{service}: {address} is free")
        case PortState.SERVING:
            return Finding("ports", Level.OK, f"{service}: {address} serves")
        case PortState.NOT_SERVING:
            said = f"{service}: {address} answers and is not ready"
            return Finding("ports", Level.WARNING, said, "see the service's log: what it waits for")
        case _:
            said = f"{service}: {address} is taken, and no service answers there: {answer.detail}"
            remedy = (
                "end the other program or set another server.port; if it is the service, give this "
                "command the credentials that it asks for"
            )
            return Finding("ports", Level.WRONG, said, remedy)


def judge_peer(address: str, answer: Answer) -> list[Finding]:
    """Whether a service on another host is reached, and its clock agrees."""
    if answer.state not in (PortState.SERVING, PortState.NOT_SERVING):
        remedy = (
            "start it; check the address, the firewall between the hosts, and that certificates "
            "and token are those that it asks for"
        )
        said = f"{address} is not reached: {answer.detail}"
        return [Finding("peers", Level.WRONG, said, remedy)]
    reached = f"{address} answers in {answer.round_trip_s * 1e3:.1f} ms"
    if answer.state is PortState.NOT_SERVING:
        remedy = "see its log: what it waits for"
        findings = [Finding("peers", Level.WARNING, f"{reached} and is not ready", remedy)]
    else:
        findings = [Finding("peers", Level.OK, reached)]
    if answer.clock_offset_s is not None:
        findings.append(_judge_clock(address, answer.clock_offset_s, answer.round_trip_s))
    return findings


def _judge_clock(address: str, offset_s: float, round_trip_s: float) -> Finding:
    said = f"the clock of {address} is {offset_s:+.3f} s from this host's"
    if abs(offset_s) <= MAX_CLOCK_SKEW_S + round_trip_s / 2:
        return Finding("clocks", Level.OK, said)
    return Finding("clocks", Level.WRONG, said, "keep time on both hosts: chrony or timesyncd")


def judge_rendezvous(address: str, *, backend: str, seconds: float, failure: str) -> Finding:
    """Whether process groups can be made with another host.

    Args:
        address: Where the two met.
        backend: "gloo" or "nccl".
        seconds: How long it took.
        failure: Why they did not; empty: they did.
    """
    if not failure:
        return Finding(
            "rendezvous", Level.OK, f"met at {address} in {seconds:.1f} s over {backend}"
        )
    remedy = (
        "run the other rank's command at the same time, name the interface of the private network "
        "(trainer: interface, rendezvous_host), and let both hosts reach all ports of each other"
    )
    said = f"no rendezvous at {address} over {backend}: {failure}"
    return Finding("rendezvous", Level.WRONG, said, remedy)


def judge_gpus(*, wanted: int, names: Sequence[str], failure: str) -> Finding:
    """Whether there are as many GPUs as the trainer has slots for.

    Args:
        wanted: GPUs that the configuration asks for.
        names: Those that were found.
        failure: Why none could be listed.
    """
    if len(names) >= wanted:
        return Finding("gpus", Level.OK, ", ".join(names) or "none, and none is asked for")
    said = f"{len(names)} of the {wanted} that the trainer's slots ask for"
    if failure:
        said += f" ({failure})"
    return Finding(
        "gpus", Level.WRONG, said, 'install the driver, or set fewer slots or device = "cpu"'
    )


def judge_shared_memory(
    path: str, *, total_bytes: int | None, free_bytes: int, is_tmpfs: bool, wanted_bytes: int
) -> Finding:
    """Whether the memory tier has room.

    Args:
        path: Its folder.
        total_bytes: Size of the file system; None: the folder is not there.
        free_bytes: Room in it.
        is_tmpfs: Whether it lies in memory.
        wanted_bytes: Bound of the memory tier.
    """
    enlarge = f"mount -o remount,size={wanted_bytes // _GIB + 1}G {path} (docker: --shm-size)"
    if total_bytes is None:
        said = f"{path} is not there: this host has no shared memory"
        return Finding("shared memory", Level.WRONG, said, f"mount -t tmpfs tmpfs {path}")
    said = f"{path}: {_gib(free_bytes)} of {_gib(total_bytes)} free"
    if not is_tmpfs:
        said += ", and it is no tmpfs"
        remedy = "set store.shm_dir to a folder in a tmpfs: state would be copied at a disk's speed"
        return Finding("shared memory", Level.WARNING, said, remedy)
    if total_bytes < wanted_bytes:
        said += f", the memory tier may take {_gib(wanted_bytes)}"
        remedy = f"{enlarge}, or lower store.memory_tier_bytes"
        return Finding("shared memory", Level.WRONG, said, remedy)
    return Finding("shared memory", Level.OK, said)


def judge_open_files(*, soft: int, hard: int) -> Finding:
    """Whether a process may open enough files.

    Args:
        soft: Limit in force; less than 0: none.
        hard: Limit that it may be raised to.
    """
    said = f"{'unlimited' if soft < 0 else soft} open files"
    if soft < 0 or soft >= MIN_OPEN_FILES:
        return Finding("limits", Level.OK, said)
    is_ours = hard < 0 or hard >= MIN_OPEN_FILES
    remedy = f"ulimit -n {MIN_OPEN_FILES}" if is_ours else "raise nofile in limits.conf"
    return Finding("limits", Level.WARNING, said, f"{remedy} (systemd: LimitNOFILE)")


def judge_disk(path: str, *, fsync_s: float, free_bytes: int, failure: str) -> Finding:
    """Whether a disk is fast and empty enough.

    Args:
        path: Folder on it.
        fsync_s: Median time of a small durable write.
        free_bytes: Room on it.
        failure: Why it cannot be written; empty: it can.
    """
    if failure:
        remedy = "give the services' user this folder, or name another one"
        return Finding("disk", Level.WRONG, f"{path} cannot be written: {failure}", remedy)
    said = f"{path}: fsync in {fsync_s * 1e3:.2f} ms, {_gib(free_bytes)} free"
    if fsync_s > SLOW_FSYNC_S:
        level = Level.WRONG if fsync_s > BROKEN_FSYNC_S else Level.WARNING
        remedy = 'put the store on a local SSD, or set durability = "process"'
        return Finding("disk", level, said, remedy)
    if free_bytes < MIN_FREE_DISK_BYTES:
        return Finding("disk", Level.WARNING, said, "make room, or move the folder")
    return Finding("disk", Level.OK, said)


def judge_settings(problems: Mapping[str, str]) -> list[Finding]:
    """What is wrong with configuration files.

    Args:
        problems: One line by file; empty: it is fine.
    """
    remedy = "correct the file; what each key means: docs/reference/config.md"
    return [
        Finding("settings", Level.WRONG, problem, remedy)
        if problem
        else Finding("settings", Level.OK, path)
        for path, problem in problems.items()
    ]


def is_well(findings: Sequence[Finding]) -> bool:
    """Whether nothing is wrong; warnings may be left."""
    return all(finding.level is not Level.WRONG for finding in findings)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
