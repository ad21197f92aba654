"""A service process: starts by config, drains on SIGTERM, refuses to start in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flexmarl.runtime.config import ServiceConfig
from flexmarl.runtime.main import EXIT_START_REFUSED, run_service

ROOT = str(Path(__file__).parents[1])


async def serve_echo(config):
    """The composition root of the test's service; run in a process of its own."""
    from runtime.echo_service import LONG_LIVED, NAME, Echo

    from flexmarl.runtime.server import GrpcServer

    server = GrpcServer(
        config.server,
        name="echo",
        add_to_server=[Echo().add_to_server],
        services=[NAME],
        long_lived=LONG_LIVED,
    )

    async def drain():
        sys.stderr.write("drained\n")

    server.on_drain(drain)
    await server.start()
    server.set_ready(True)
    await server.serve_until_signal()


async def fail(config):
    """Fails with an expected error, but while running."""
    from flexmarl.core.errors import DomainError, ErrorReason
    from flexmarl.runtime.server import GrpcServer

    server = GrpcServer(config.server, name="echo", add_to_server=[], services=[])
    await server.start()
    server.request_stop("writer", DomainError(ErrorReason.DISK_FULL, "broken while running"))
    await server.serve_until_signal()


async def lack(config):
    """Imports what only an extra brings."""
    import no_such_library.part  # noqa: F401


SCRIPT = """
import sys
from runtime.test_main import fail, lack, serve_echo
from flexmarl.runtime.config import ServiceConfig
from flexmarl.runtime.main import run_service
sys.exit(run_service("echo", ServiceConfig, serve_echo))
"""


@pytest.fixture
def start(tmp_path):
    processes = []

    def run(*args, **environ):
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *args],
            env={**os.environ, "PYTHONPATH": ROOT, **environ},
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait(timeout=20)


def read_address(path):
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, "the service did not get ready"
        time.sleep(0.01)
    return json.loads(path.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_in_order(start, tmp_path, number):
    address_file = tmp_path / "address.json"
    process = start("--set", f"server.address_file={address_file}", "--set", "server.grace_s=0.1")
    described = read_address(address_file)
    assert described["pid"] == process.pid
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    lines = [json.loads(line)["event"] for line in stderr.splitlines() if line.startswith("{")]
    assert lines == ["configuration", "listening", "loopback_only", "stopping", "stopped"]
    assert "drained" in stderr.splitlines()
    assert not address_file.exists()


def test_config_comes_from_file_environment_and_arguments(start, tmp_path):
    config = tmp_path / "echo.toml"
    config.write_text("[server]\ngrace_s = 0.1\naddress_file = 'not this one'\n")
    address_file = tmp_path / "address.json"
    process = start(
        "--config",
        str(config),
        FLEXMARL_ECHO__SERVER__ADDRESS_FILE=str(address_file),
        FLEXMARL_ECHO__SERVER__METRICS_PORT="0",
    )
    assert read_address(address_file)["metrics_port"] > 0
    process.terminate()
    assert process.wait(timeout=30) == 0


def test_a_wrong_key_refuses_to_start_in_one_line(start):
    process = start("--set", "server.prot=1")
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == EXIT_START_REFUSED
    assert (
        stderr == "flexmarl echo: config: unknown key 'server.prot', did you mean 'server.port'?\n"
    )


def test_a_port_in_use_refuses_to_start_in_one_line(start, tmp_path):
    address_file = tmp_path / "address.json"
    start("--set", f"server.address_file={address_file}")
    port = read_address(address_file)["port"]
    second = start("--set", f"server.port={port}")
    _, stderr = second.communicate(timeout=30)
    assert second.returncode == EXIT_START_REFUSED
    assert stderr.splitlines()[-1] == (
        f"flexmarl echo: PORT_IN_USE: cannot listen on 127.0.0.1:{port}: Address already in use"
    )


def test_a_missing_extra_refuses_to_start_in_one_line():
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("serve_echo)", "lack)")],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == EXIT_START_REFUSED
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1] == (
        "flexmarl echo: no_such_library is not installed here: pip install 'flexmarl[echo]', "
        "or use the image of this service"
    )


def test_a_failure_while_running_is_another_exit_code(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    script = SCRIPT.replace("serve_echo)", "fail)")
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert "broken while running" in ended.stderr


def test_help_names_the_options(capsys):
    with pytest.raises(SystemExit) as left:
        run_service("echo", ServiceConfig, serve_echo, argv=["--help"])
    assert left.value.code == 0
    assert {"--config", "--set"} <= set(capsys.readouterr().out.split())
