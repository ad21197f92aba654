"""`flexmarl doctor`: one finding a thing, a remedy for each that is not fine, and an exit code."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from ports import own_port
from runtime.echo_service import NAME, Echo

from flexmarl.cli.commands import doctor as command
from flexmarl.cli.doctor import host
from flexmarl.cli.doctor.network import ask, look_at
from flexmarl.cli.doctor.rendezvous import meet
from flexmarl.cli.doctor.settings import ask_services, read_settings
from flexmarl.cli.errors import CliError
from flexmarl.core.doctor import Level, PortState
from flexmarl.core.peer_credentials import PeerCredentials
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.server import GrpcServer

NOBODY = PeerCredentials()


@asynccontextmanager
async def running(*, ready=True):
    server = GrpcServer(
        ServerConfig(grace_s=0.1),
        name="echo",
        add_to_server=[Echo().add_to_server],
        services=[NAME],
    )
    await server.start()
    server.set_ready(ready)
    try:
        yield server.address
    finally:
        await server.stop()


@pytest.fixture
def foreign():
    """A program that holds a port and speaks another language."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=5)


def examine(capsys, tmp_path, *configs, peers=()):
    """Exit code and findings, as a program reads them."""
    code = command.doctor(
        configs=configs, peers=peers, data_dir=tmp_path, meet_at="", rank=0, interface="lo",
        as_json=True,
    )  # fmt: skip
    return code, json.loads(capsys.readouterr().out)


def test_a_wrong_setting_is_found_with_its_remedy(capsys, tmp_path, foreign):
    config = tmp_path / "meg-store.toml"
    config.write_text(
        f"""
        [server]
        port = {foreign}
        tls = {{ cert = "{tmp_path}/missing.pem", key = "{tmp_path}/missing.key" }}
        [store]
        data_dir = "{tmp_path}/data"
        shm_dir = "/dev/shm/flexmarl-test-none"
        memory_tier_bytes = {1 << 50}
        """
    )
    peer = "127.0.0.1:1"
    code, findings = examine(capsys, tmp_path, tmp_path, peers=[peer])
    wrong = {each["check"]: each for each in findings if each["level"] == "wrong"}
    assert code == 1
    assert "missing.pem: No such file" in wrong["settings"]["said"]
    assert f"127.0.0.1:{foreign} is taken" in wrong["ports"]["said"]
    assert f"{peer} is not reached" in wrong["peers"]["said"]
    assert "the memory tier may take" in wrong["shared memory"]["said"]
    assert all(bool(each["remedy"]) == (each["level"] != "ok") for each in findings)


async def test_addresses_tell_what_is_behind_them(foreign):
    async with running() as address:
        answer = await look_at(address, NOBODY)
        assert answer.state is PortState.SERVING
        assert abs(answer.clock_offset_s) <= answer.round_trip_s
    assert (await look_at(address, NOBODY)).state is PortState.FREE
    async with running(ready=False) as address:
        assert (await ask(address, NOBODY)).state is PortState.NOT_SERVING
    assert (await look_at(f"127.0.0.1:{foreign}", NOBODY)).state is PortState.FOREIGN
    in_clear = await ask("10.0.0.1:7001", PeerCredentials(token="t"))
    assert in_clear.state is PortState.UNREACHABLE
    assert "in clear" in in_clear.detail


async def test_another_clock_is_seen(monkeypatch):
    ahead = SimpleNamespace(time=lambda: time.time() + 100.0)
    monkeypatch.setattr("flexmarl.runtime.health.time", ahead)
    async with running() as address:
        answer = await ask(address, NOBODY)
    assert answer.clock_offset_s == pytest.approx(100.0, abs=20)


def test_a_host_without_shared_memory(tmp_path):
    finding = host.check_shared_memory(tmp_path / "a" / "b", wanted_bytes=1)
    assert finding.level is Level.WRONG
    assert "no shared memory" in finding.said


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert host.check_disk(file).level is Level.WRONG
    assert host.nearest_existing(tmp_path / "not" / "yet") == tmp_path
    assert host.check_disk(tmp_path).level is not Level.WRONG


def test_a_service_is_asked_what_it_has_against_its_file(tmp_path):
    texts = {
        "trainer": "slot = ['slot0']",
        "engine-host": "role = 'engine-host'",
        "of-nobody": "slot = 1",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.toml").write_text(text)
    asked = ask_services([read_settings(tmp_path / f"{name}.toml") for name in texts])
    assert [each.problem for each in asked] == [
        f"{tmp_path}/trainer.toml: unknown key 'slot', did you mean 'slots'?",
        "",
        "",
    ]


def test_gpus_that_are_asked_for_and_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = host.check_gpus(2)
    assert finding.level is Level.WRONG
    assert "0 of the 2 that the trainer's slots ask for (no nvidia-smi)" in finding.said
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA H200'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert host.check_gpus(2).said == "NVIDIA H200, NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[server", "not TOML"),
        ("[server]\nhost = '0.0.0.0'\n", "server.host = '0.0.0.0' is reached from other machines"),
        ("[server]\nprot = 1\n", "server or client: prot"),
        ("[client]\ntoken_file = '/nowhere'\n", "client.token_file: /nowhere: No such file"),
        ("[server.tls]\nclient_ca = 'ca.pem'\n", "server.tls.cert is not set"),
        ("[server]\ntokens = '/nowhere'\n", "server.tokens: /nowhere: No such file"),
        ("trainers = ['a:1', 'b:2']\nrollout = 'c:3'\n", ""),
    ],
)
def test_settings_say_what_is_wrong_with_them(tmp_path, text, problem):
    file = tmp_path / "orchestrator.toml"
    file.write_text(text)
    settings = read_settings(file)
    assert problem in settings.problem
    assert bool(problem) == bool(settings.problem)
    if not problem:
        assert settings.peers == ("c:3", "a:1", "b:2")


@pytest.mark.parametrize(
    "text",
    ["store = 1", "store.memory_tier_bytes = 'x'", "slots = 3\ndevice = 'cuda'", "server = 1",
     "client = []", "store.data_dir = 1", "trainers = 5"],
)  # fmt: skip
def test_a_setting_of_the_wrong_kind_is_a_finding_and_no_crash(capsys, tmp_path, text):
    config = tmp_path / "of-nobody.toml"  # what is wrong with it its service would say
    config.write_text(text)
    _, findings = examine(capsys, tmp_path, config)
    said = [each["said"] for each in findings if each["check"] == "settings"]
    assert len(said) == 1
    assert str(config) in said[0]


def test_what_a_service_needs_beyond_the_others_is_asked_for(capsys, monkeypatch, tmp_path):
    for name in ("meg-store", "trainer"):
        (tmp_path / f"{name}.toml").write_text("")
    monkeypatch.setattr(command, "ask_services", list)
    there = host._version
    monkeypatch.setattr(host, "_version", lambda name: "" if name == "torch" else there(name))
    code, findings = examine(capsys, tmp_path, tmp_path)
    said = {each["said"]: each for each in findings if each["check"] == "versions"}
    assert code == 1
    assert any(line.startswith("rocksdict ") for line in said)
    assert said["torch is not installed"]["remedy"].startswith("pip install 'torch>=")


@pytest.mark.parametrize("address", ["host", "host:", ":", "host:port"])
def test_an_address_that_is_none_is_refused(tmp_path, address):
    with pytest.raises(CliError, match="HOST:PORT"):
        command.doctor(
            configs=[], peers=[address], data_dir=tmp_path, meet_at="", rank=0, interface="lo",
            as_json=True,
        )  # fmt: skip
    with pytest.raises(CliError, match="no file or folder"):
        command.doctor(
            configs=[tmp_path / "none"], peers=[], data_dir=tmp_path, meet_at="", rank=0,
            interface="lo", as_json=True,
        )  # fmt: skip


@pytest.mark.real
def test_a_host_without_gpus_meets_nobody_over_nccl(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = meet("127.0.0.1:1", rank=0, backend="nccl", interface="lo", timeout_s=5.0)
    assert finding.level is Level.WRONG
    assert finding.said == (
        "no rendezvous at 127.0.0.1:1 over nccl: torch finds no GPU on this host"
    )


@pytest.mark.real
def test_two_hosts_meet():
    port = own_port()
    command_line = [
        sys.executable, "-m", "flexmarl.cli.main", "doctor", "--json",
        "--meet", f"127.0.0.1:{port}", "--rank",
    ]  # fmt: skip
    ranks = [
        subprocess.Popen([*command_line, rank], stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    for process in ranks:
        out, _ = process.communicate(timeout=100)
        (met,) = [each for each in json.loads(out) if each["check"] == "rendezvous"]
        assert met["level"] == "ok", met
