"""A service whose locks are missing or wrong does not start, and says why in one line."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from flexmarl.runtime.config import ClientConfig, ConfigError, ServerConfig, ServerTlsConfig
from flexmarl.runtime.server import GrpcServer
from flexmarl.runtime.tls import client_credentials
from flexmarl.runtime.tokens import read_tokens


async def start(config: ServerConfig) -> None:
    server = GrpcServer(config, name="locked", add_to_server=[], services=[])
    await server.start()
    await server.stop()


async def test_beyond_loopback_takes_locks_or_the_word_of_the_operator(locks):
    with pytest.raises(ConfigError, match=r"server\.tls\.cert and .* server\.tokens is not set"):
        await start(ServerConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"server\.tokens is not set"):
        tls = ServerTlsConfig(cert=locks.server.cert, key=locks.server.key)
        await start(ServerConfig(host="0.0.0.0", tls=tls))
    await start(ServerConfig(host="0.0.0.0", insecure=True, grace_s=0.0))
    await start(locks.server_config(host="0.0.0.0"))


@pytest.mark.real
def test_a_service_that_stands_open_refuses_in_one_line(tmp_path):
    command = [sys.executable, "-m", "flexmarl.meg_store"]
    for item in ("server.host=0.0.0.0", f"store.data_dir={tmp_path}", "log.level=error"):
        command += ["--set", item]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("flexmarl meg_store: server.host = '0.0.0.0' is reached from")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
async def test_a_missing_file_is_named(locks, tmp_path, name):
    files = {
        "cert": locks.server.cert,
        "key": locks.server.key,
        "client_ca": locks.authority.cert,
        name: tmp_path / "missing.pem",
    }
    with pytest.raises(ConfigError, match=rf"server\.tls\.{name}: .*missing\.pem: No such file"):
        await start(ServerConfig(tls=ServerTlsConfig(**files)))


@pytest.mark.parametrize("given", ["cert", "key", "client_ca"])
async def test_a_setting_that_needs_another_names_it(locks, given):
    tls = ServerTlsConfig(**{given: locks.server.cert})
    with pytest.raises(ConfigError, match=r"server\.tls\.(cert|key) is not set"):
        await start(ServerConfig(tls=tls))


async def test_a_key_that_others_can_read_is_refused(locks, tmp_path):
    key = shutil.copy(locks.server.key, tmp_path / "open.key")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"open\.key has mode 0644, .* chmod 600"):
        await start(ServerConfig(tls=ServerTlsConfig(cert=locks.server.cert, key=key)))


async def test_what_is_no_certificate_or_of_another_key_is_refused(locks, strangers, tmp_path):
    text = tmp_path / "text.pem"
    text.write_text("hello\n")
    tls = [
        ServerTlsConfig(cert=text, key=locks.server.key),
        ServerTlsConfig(cert=locks.server.cert, key=strangers.server.key),
        ServerTlsConfig(cert=locks.server.cert, key=locks.server.key, client_ca=text),
    ]
    for wrong in tls:
        with pytest.raises(ConfigError, match=r"server\.tls\.\w+") as caught:
            await start(ServerConfig(tls=wrong))
        assert "\n" not in str(caught.value)


def test_a_client_says_what_is_wrong_with_its_own(locks, strangers, tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    empty.chmod(0o600)
    spaced = tmp_path / "spaced"
    spaced.write_text("a token\n")
    spaced.chmod(0o600)
    ca, cert = locks.authority.cert, locks.client.cert
    for config, said in (
        (ClientConfig(ca=tmp_path / "no.pem"), r"client\.ca: .*no\.pem: No such file"),
        (ClientConfig(ca=empty), r"client\.ca: .* is empty"),
        (ClientConfig(ca=ca, cert=cert), r"client\.key and client\.ca go together"),
        (ClientConfig(ca=ca, cert=cert, key=strangers.client.key), r"client\.cert and client"),
        (ClientConfig(token_file=tmp_path / "no"), r"client\.token_file: .*/no: No such file"),
        (ClientConfig(token_file=empty), r"client\.token_file: .* is empty"),
        (ClientConfig(token_file=spaced), r"does not hold one token"),
    ):
        with pytest.raises(ConfigError, match=said):
            client_credentials(config)


HASH = "0" * 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("tokens = [", "is not TOML"),
        ("[run_keys]\nsecret = 'short-secret'\n", "run_keys.secret"),
        (f"[run_keys]\nsecret = '{HASH}'\n", "names no token"),
        (f"[tokens.a]\nrole = 'root'\nsha256 = '{HASH}'\n", "unknown role 'root': use one of read"),
        ("[tokens.a]\nrole = 'read'\nsha256 = 'my-own-secret'\n", "tokens.a.sha256"),
        ("[tokens.a]\nrole = 'read'\ntoken = 'my-own-secret'\n", "tokens.a"),
        (f"[tokens.'a b']\nrole = 'read'\nsha256 = '{HASH}'\n", "token 'a b'"),
    ],
)
def test_a_wrong_file_of_tokens_is_told_without_its_secrets(tmp_path, text, said):
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_tokens(file)
    message = str(caught.value)
    assert said in message
    assert str(file) in message
    assert "secret'" not in message
    assert "my-own" not in message
    assert "\n" not in message


def test_a_file_of_tokens_that_others_can_read_is_refused(locks, tmp_path):
    file = shutil.copy(locks.tokens, tmp_path / "tokens.toml")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"tokens\.toml has mode 0640"):
        read_tokens(file)
