"""Facts in, findings out; whatever is not fine has a remedy."""

import pytest

from flexmarl.core.doctor import (
    Answer,
    Finding,
    Level,
    PortState,
    is_well,
    judge_disk,
    judge_gpus,
    judge_open_files,
    judge_own_port,
    judge_package,
    judge_peer,
    judge_python,
    judge_rendezvous,
    judge_settings,
    judge_shared_memory,
)

GIB = 1 << 30


def check(finding, level, *parts):
    assert finding.level is level, finding
    assert (finding.remedy == "") == (level is Level.OK), finding
    for part in parts:
        assert part in f"{finding.said} {finding.remedy}", finding


def test_python():
    check(judge_python((3, 11)), Level.OK, "Python 3.11")
    check(judge_python((4, 0)), Level.OK)
    check(judge_python((3, 10)), Level.WRONG, "3.10", "3.11 or newer")


@pytest.mark.parametrize(
    ("found", "level"),
    [
        ("1.78.0", Level.OK), ("1.100", Level.OK), ("2.0rc1", Level.OK), ("1.78rc1", Level.OK),
        ("1.9.3", Level.WRONG), ("", Level.WRONG), ("unknown", Level.WRONG),
    ],
)  # fmt: skip
def test_packages(found, level):
    check(judge_package("grpcio", found=found, wanted=(1, 78)), level, "grpcio")


def test_own_ports():
    for state, level in (
        (PortState.FREE, Level.OK),
        (PortState.SERVING, Level.OK),
        (PortState.NOT_SERVING, Level.WARNING),
        (PortState.FOREIGN, Level.WRONG),
        (PortState.UNREACHABLE, Level.WRONG),
    ):
        check(judge_own_port("store", "a:1", Answer(state=state)), level, "store: a:1")


def test_peers():
    (lost,) = judge_peer("a:1", Answer(state=PortState.UNREACHABLE, detail="refused"))
    check(lost, Level.WRONG, "a:1 is not reached: refused", "firewall")
    (late,) = judge_peer("a:1", Answer(state=PortState.NOT_SERVING, round_trip_s=0.002))
    check(late, Level.WARNING, "2.0 ms", "not ready")
    well = judge_peer("a:1", Answer(state=PortState.SERVING, clock_offset_s=-0.4))
    assert [finding.level for finding in well] == [Level.OK, Level.OK]


@pytest.mark.parametrize(
    ("offset_s", "round_trip_s", "level"),
    [(1.0, 0.0, Level.OK), (-1.0, 0.0, Level.OK), (1.2, 0.5, Level.OK), (-1.2, 0.2, Level.WRONG)],
)
def test_clocks(offset_s, round_trip_s, level):
    answer = Answer(state=PortState.SERVING, clock_offset_s=offset_s, round_trip_s=round_trip_s)
    check(judge_peer("a:1", answer)[1], level, "a:1", f"{offset_s:+.3f}")


def test_rendezvous():
    met = judge_rendezvous("a:1", backend="nccl", seconds=0.4, failure="")
    check(met, Level.OK, "0.4 s over nccl")
    alone = judge_rendezvous("a:1", backend="gloo", seconds=9, failure="timed out")
    check(alone, Level.WRONG, "over gloo: timed out")


def test_gpus():
    check(judge_gpus(wanted=0, names=[], failure="no nvidia-smi"), Level.OK, "none is asked")
    check(judge_gpus(wanted=1, names=["H200"], failure=""), Level.OK, "H200")
    check(judge_gpus(wanted=2, names=["H200"], failure=""), Level.WRONG, "1 of the 2")
    check(judge_gpus(wanted=2, names=[], failure="no nvidia-smi"), Level.WRONG, "no nvidia-smi")


@pytest.mark.parametrize(
    ("total", "is_tmpfs", "level", "said"),
    [
        (None, False, Level.WRONG, "no shared memory"),
        (64 << 20, True, Level.WRONG, "may take 8.0 GiB"),
        (9 * GIB, False, Level.WARNING, "no tmpfs"),
        (9 * GIB, True, Level.OK, "1.0 GiB of 9.0 GiB"),
    ],
)
def test_shared_memory(total, is_tmpfs, level, said):
    finding = judge_shared_memory(
        "/dev/shm", total_bytes=total, free_bytes=GIB, is_tmpfs=is_tmpfs, wanted_bytes=8 * GIB
    )
    check(finding, level, said)


@pytest.mark.parametrize(
    ("soft", "hard", "level", "said"),
    [
        (-1, -1, Level.OK, "unlimited"), (4096, 4096, Level.OK, "4096"),
        (1024, 1 << 20, Level.WARNING, "ulimit -n 4096"), (1024, -1, Level.WARNING, "ulimit"),
        (1024, 2048, Level.WARNING, "limits.conf"),
    ],
)  # fmt: skip
def test_open_files(soft, hard, level, said):
    check(judge_open_files(soft=soft, hard=hard), level, said)


@pytest.mark.parametrize(
    ("fsync_s", "free", "failure", "level", "said"),
    [
        (0.001, 9 * GIB, "", Level.OK, "1.00 ms"),
        (0.001, 1, "", Level.WARNING, "make room"),
        (0.03, 9 * GIB, "", Level.WARNING, "SSD"),
        (0.3, 9 * GIB, "", Level.WRONG, "SSD"),
        (0.0, 0, "read-only", Level.WRONG, "read-only"),
    ],
)
def test_disk(fsync_s, free, failure, level, said):
    finding = judge_disk("/data", fsync_s=fsync_s, free_bytes=free, failure=failure)
    check(finding, level, "/data", said)


def test_settings_and_the_whole():
    good, bad = judge_settings({"a.toml": "", "b.toml": "b.toml: unknown key 'x'"})
    check(good, Level.OK, "a.toml")
    check(bad, Level.WRONG, "unknown key 'x'")
    assert is_well([good, Finding("x", Level.WARNING, "slow", "faster")])
    assert not is_well([good, bad])
