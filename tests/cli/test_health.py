"""`flexmarl health`, and which file `flexmarl serve` takes."""

from __future__ import annotations

import json
import socket

import pytest

from flexmarl.cli.commands.health import health, health_of
from flexmarl.cli.commands.serve import host_config, serve
from flexmarl.cli.errors import CliError
from flexmarl.runtime.config import ServerConfig
from flexmarl.runtime.server import GrpcServer


async def test_a_service_is_asked_what_it_says_of_itself():
    server = GrpcServer(ServerConfig(), name="x", add_to_server=[], services=["x.X"])
    await server.start()
    try:
        assert await health_of([server.address], timeout_s=5) == ["not_serving"]
        server.set_ready(True)
        assert await health_of([server.address] * 2, timeout_s=5) == ["serving", "serving"]
    finally:
        await server.stop()


def test_nobody_there_is_told_and_counts_as_not_ready(capsys):
    with socket.socket() as holder:  # bound, but nobody listens
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        assert health([address], timeout_s=5, as_json=True) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["address"] == address
    assert row["health"].startswith("no answer (")


@pytest.mark.parametrize("address", ["trainer", "trainer:", ":7004", "trainer:grpc"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(CliError, match="HOST:PORT"):
        health([address], timeout_s=1, as_json=False)


def test_a_host_configures_each_service_and_role_by_a_file_of_its_own(tmp_path):
    assert host_config(tmp_path, "meg-store", "") is None
    for name in ("meg-store", "rollout", "engine-host"):
        (tmp_path / f"{name}.toml").touch()
    assert host_config(tmp_path, "meg_store", "") == tmp_path / "meg-store.toml"
    assert host_config(tmp_path, "rollout", "dispatcher") == tmp_path / "rollout.toml"
    assert host_config(tmp_path, "rollout", "engine-host") == tmp_path / "engine-host.toml"
    assert host_config(tmp_path, "trainer", "") is None


def test_serve_takes_the_hosts_file_unless_one_is_named(tmp_path, monkeypatch):
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command[1:]))
    monkeypatch.setenv("FLEXMARL_CONFIG_DIR", str(tmp_path))
    mine, hosts = tmp_path / "mine.toml", tmp_path / "trainer.toml"
    mine.touch()
    serve("trainer", role="", config=None, overrides=())
    hosts.touch()
    serve("trainer", role="", config=None, overrides=["device=cuda"])
    serve("trainer", role="", config=mine, overrides=())
    module = ["-m", "flexmarl.trainer"]
    assert started == [
        module,
        [*module, "--config", str(hosts), "--set", "device=cuda"],
        [*module, "--config", str(mine)],
    ]
