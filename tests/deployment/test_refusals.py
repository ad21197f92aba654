"""What a host can have wrong: each service or command says it in one line, and does not start.

Real processes, each with one thing missing. A file that may not be read needs a process without
root's right to read everything; the rest of root's rights do no harm.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from locks import Locks, has_openssl
from ports import own_port

from flexmarl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED
from flexmarl.runtime.main import EXIT_START_REFUSED
from flexmarl.runtime.secret_files import write_secret

pytestmark = pytest.mark.real

FLEXMARL = str(Path(sys.executable).with_name("flexmarl"))

WITHOUT_A_MODULE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
"""A `sitecustomize`: the interpreter as it is where an extra was not installed."""


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Locks:
    if not has_openssl():
        pytest.skip("there is no openssl command to make certificates with")
    return Locks.made_in(tmp_path_factory.mktemp("locks"))


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code, and what was said on standard error, to its last line break."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stderr


def serve(service: str, folder: Path, **settings: object) -> list[str]:
    """The command of a service with its data in a folder; `a__b` sets `a.b`."""
    data = "store__data_dir" if service == "meg_store" else "data_dir"
    command = [sys.executable, "-m", f"flexmarl.{service}"]
    for key, value in {"log__level": "error", data: folder / "data", **settings}.items():
        command += ["--set", f"{key.replace('__', '.')}={value}"]
    return command


def as_anybody(command: Sequence[str]) -> list[str]:
    """The same for a process that the modes of files bind."""
    if os.geteuid() != 0:
        return list(command)
    prefix = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    # Where this project belongs to somebody else, it cannot be read then either.
    probe = [*prefix, sys.executable, "-c", "import flexmarl.runtime.config, flexmarl.cli.app"]
    if shutil.which("setpriv") is None or subprocess.run(probe, check=False).returncode:
        pytest.skip("root's rights cannot be given up here")
    return [*prefix, *command]


def no_longer_readable(file: Path, folder: Path) -> Path:
    copy = Path(shutil.copy(file, folder))
    copy.chmod(0)
    return copy


def assert_refused(service: str, done: tuple[int, str], why: str) -> None:
    assert done == (EXIT_START_REFUSED, f"flexmarl {service}: {why}\n")


def test_a_missing_certificate(locks: Locks, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    tls = {"server__tls__cert": missing, "server__tls__key": locks.server.key}
    done = run(serve("orchestrator", tmp_path, **tls), tmp_path)
    assert_refused("orchestrator", done, f"server.tls.cert: {missing}: No such file or directory")


def test_a_key_without_permission(locks: Locks, tmp_path: Path) -> None:
    key = no_longer_readable(locks.server.key, tmp_path)
    tls = {"server__tls__cert": locks.server.cert, "server__tls__key": key}
    done = run(as_anybody(serve("orchestrator", tmp_path, **tls)), tmp_path)
    assert_refused("orchestrator", done, f"server.tls.key: {key}: Permission denied")


def test_a_token_without_permission(locks: Locks, tmp_path: Path) -> None:
    token = no_longer_readable(locks.folder / "read.token", tmp_path)
    done = run(
        as_anybody([FLEXMARL, "runs", "--cluster", "store=127.0.0.1:1"]),
        tmp_path,
        {"FLEXMARL_CLIENT__TOKEN_FILE": str(token)},
    )
    assert done == (EXIT_BAD_INPUT, f"error: client.token_file: {token}: Permission denied\n")


def test_an_unknown_role_of_a_service(tmp_path: Path) -> None:
    done = run(serve("rollout", tmp_path, role="boss"), tmp_path)
    why = "config: role: Input should be 'dispatcher' or 'engine-host'"
    assert_refused("rollout", done, why)


def test_an_unknown_role_of_a_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    write_secret(file, f'[tokens.alice]\nrole = "boss"\nsha256 = "{"0" * 64}"\n'.encode())
    code, said = run(serve("orchestrator", tmp_path, server__tokens=file), tmp_path)
    assert code == EXIT_START_REFUSED
    assert said.startswith(f"flexmarl orchestrator: server.tokens: {file}: ")
    assert "unknown role 'boss': use one of read, submit, admin" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("key", ["port", "metrics_port"])
def test_a_port_that_is_taken(key: str, taken_port: int, tmp_path: Path) -> None:
    done = run(serve("orchestrator", tmp_path, **{f"server__{key}": taken_port}), tmp_path)
    why = {
        "port": f"cannot listen on 127.0.0.1:{taken_port}: Address already in use",
        "metrics_port": f"metrics port 127.0.0.1:{taken_port} cannot be bound: "
        "Address already in use",
    }
    assert_refused("orchestrator", done, f"PORT_IN_USE: {why[key]}")


def test_a_peer_that_nobody_reaches(tmp_path: Path) -> None:
    peer = f"127.0.0.1:{own_port()}"
    code, said = run([FLEXMARL, "runs", "--cluster", f"store={peer}"], tmp_path)
    assert code == EXIT_FAILED
    assert said.startswith(f"error: {peer}: no answer for ")
    assert said.count("\n") == 1


def test_a_host_without_shared_memory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = serve("meg_store", tmp_path, store__data_dir=data)
    script = 'mount -t tmpfs -o ro tmpfs /dev/shm && exec "$@"'
    isolated = ["unshare", "--mount"]
    mounts = "mount -t tmpfs tmpfs /dev/shm"
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            [*isolated, "sh", "-c", mounts], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no mount of its own can be made here")
    code, said = run([*isolated, "sh", "-c", script, "sh", *command], tmp_path)
    assert code == EXIT_START_REFUSED
    assert said.startswith("flexmarl meg_store: store.shm_dir: /dev/shm/flexmarl-")
    assert said.endswith(" cannot be made: Read-only file system; name another folder\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("service", "module"),
    [("meg_store", "rocksdict"), ("trainer", "torch")],
)
def test_an_image_without_the_extra(service: str, module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_A_MODULE.format(module=module))
    done = run(serve(service, tmp_path), tmp_path, {"PYTHONPATH": str(tmp_path)})
    extra = service.replace("_", "-")
    why = (
        f"{module} is not installed here: pip install 'flexmarl[{extra}]', or use the image of "
        "this service"
    )
    assert_refused(service, done, why)
