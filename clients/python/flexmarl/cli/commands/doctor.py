"""`flexmarl doctor`: looks at a host before, or while, services run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from flexmarl.cli.doctor.host import (
    DEFAULT_TIER_BYTES,
    SHARED_MEMORY,
    check_disk,
    check_gpus,
    check_open_files,
    check_shared_memory,
    check_versions,
    nearest_existing,
)
from flexmarl.cli.doctor.network import ask, look_at
from flexmarl.cli.doctor.rendezvous import meet
from flexmarl.cli.doctor.settings import Settings, ask_services, read_settings
from flexmarl.cli.errors import EXIT_FAILED, CliError
from flexmarl.cli.output import print_json, print_line
from flexmarl.core.doctor import (
    Finding,
    Level,
    is_well,
    judge_own_port,
    judge_peer,
    judge_settings,
)
from flexmarl.core.peer_credentials import PeerCredentials, current_credentials
from flexmarl.runtime.config import ClientConfig
from flexmarl.runtime.tls import client_credentials

_MEET_TIMEOUT_S = 30.0


def doctor(
    *,
    configs: Sequence[Path],
    peers: Sequence[str],
    data_dir: Path,
    meet_at: str,
    rank: int,
    interface: str,
    as_json: bool,
) -> int:
    """Look at everything; returns 0 when nothing is wrong, else 1.

    Args:
        configs: Configuration files of this host's services, or folders of them.
        peers: Addresses to reach, besides those that the files name.
        data_dir: Where a local cluster would write.
        meet_at: Address of rank 0 of a process group to make with another host; empty: none.
        rank: This host's rank in it.
        interface: Network interface of it.
        as_json: Print JSON.

    Raises:
        CliError: An address or a file's name is none.
    """
    for address in (*peers, *([meet_at] if meet_at else [])):
        _check_address(address)
    settings = ask_services([read_settings(path) for path in _files(configs)])
    num_gpus = max((each.num_gpus for each in settings), default=0)
    findings = [
        *check_versions([each.service for each in settings]),
        *judge_settings({str(each.path): each.problem for each in settings}),
        check_gpus(num_gpus),
        *_check_folders(settings, data_dir),
        check_open_files(),
        *asyncio.run(_check_addresses(settings, peers)),
    ]
    if meet_at:
        findings.append(
            meet(
                meet_at,
                rank=rank,
                backend="nccl" if num_gpus else "gloo",
                interface=interface,
                timeout_s=_MEET_TIMEOUT_S,
            )
        )
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    return 0 if is_well(findings) else EXIT_FAILED


def _files(configs: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in configs:
        if path.is_dir():
            found += sorted(path.glob("*.toml"))
        elif path.exists():
            found.append(path)
        else:
            raise CliError(f"--config: no file or folder {path}")
    return found


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise CliError(f"{address!r}: write the address as HOST:PORT")


def _check_folders(settings: Sequence[Settings], data_dir: Path) -> list[Finding]:
    tiers = {
        each.shm_dir or SHARED_MEMORY: each.memory_tier_bytes or DEFAULT_TIER_BYTES
        for each in settings
        if each.shm_dir is not None or each.memory_tier_bytes
    } or {SHARED_MEMORY: DEFAULT_TIER_BYTES}
    folders = {each.data_dir for each in settings if each.data_dir is not None} or {data_dir}
    there = {nearest_existing(folder) for folder in folders}
    return [
        *(check_shared_memory(path, wanted_bytes=size) for path, size in tiers.items()),
        *(check_disk(folder) for folder in sorted(there)),
    ]


async def _check_addresses(settings: Sequence[Settings], peers: Sequence[str]) -> list[Finding]:
    own = [(each.service, each.address, _credentials(each)) for each in settings if each.address]
    asked = {address: current_credentials() for address in peers}
    for each in settings:
        asked |= {address: _credentials(each) for address in each.peers}
    own_answers = await asyncio.gather(*(look_at(address, shown) for _, address, shown in own))
    answers = await asyncio.gather(*(ask(address, shown) for address, shown in asked.items()))
    findings = [
        judge_own_port(service, address, answer)
        for (service, address, _), answer in zip(own, own_answers, strict=True)
    ]
    for address, answer in zip(asked, answers, strict=True):
        findings += judge_peer(address, answer)
    return findings


def _credentials(settings: Settings) -> PeerCredentials:
    if settings.problem or settings.client == ClientConfig():
        return current_credentials()
    return client_credentials(settings.client)


def _print(findings: Sequence[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        print_line(f"{finding.level:<7}  {finding.check:<{width}}  {finding.said}")
        if finding.remedy:
            print_line(f"{'':<7}  {'':<{width}}  -> {finding.remedy}")
    counts = {level: sum(each.level is level for each in findings) for level in Level}
    print_line(", ".join(f"{count} {level}" for level, count in counts.items()))
