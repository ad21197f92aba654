"""A whole cluster behind certificates and tokens trains, and its secrets stay in their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from locks import SECRET, TOKENS, Locks

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart/config.toml"
SERVICES = ("MEG_STORE", "ROLLOUT", "TRAINER", "ORCHESTRATOR")


def environment(locks: Locks) -> dict[str, str]:
    """The settings of every service; the command line's own show a submitter's token."""
    pair = {
        "CA": locks.authority.cert,
        "CERT": locks.client.cert,
        "KEY": locks.client.key,
    }
    settings = {f"FLEXMARL_CLIENT__{name}": value for name, value in pair.items()}
    settings["FLEXMARL_CLIENT__TOKEN_FILE"] = locks.folder / "submit.token"
    for service in SERVICES:
        own = {f"CLIENT__{name}": value for name, value in pair.items()}
        own |= {
            "CLIENT__TOKEN_FILE": locks.folder / "admin.token",
            "SERVER__TOKENS": locks.tokens,
            "SERVER__TLS__CERT": locks.server.cert,
            "SERVER__TLS__KEY": locks.server.key,
            "SERVER__TLS__CLIENT_CA": locks.authority.cert,
        }
        settings |= {f"FLEXMARL_{service}__{key}": value for key, value in own.items()}
    return {**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in settings.items()}}


def flexmarl(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flexmarl.cli.main", *args]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.real
@pytest.mark.timeout(400)
def test_a_locked_cluster_trains_and_tells_nobody_its_secrets(locks, tmp_path):
    env = environment(locks)
    data, out = tmp_path / "cluster", tmp_path / "runs"
    up = flexmarl("up", "--data-dir", str(data), env=env)
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        sets = ("versions=2", "batch.groups=4", "batch.samples_per_group=4")
        trained = flexmarl(
            "train", str(QUICKSTART), "--cluster", str(data), "--out", str(out), "--run-id", "r1",
            *(part for item in sets for part in ("--set", item)),
            env=env,
        )  # fmt: skip
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert flexmarl("status", "--data-dir", str(data), env=env).returncode == 0
        key = locks.folder / "r1.key"
        key.write_text(locks.key_of("r1"))
        key.chmod(0o600)
        reader = {**env, "FLEXMARL_CLIENT__TOKEN_FILE": str(key)}
        shown = flexmarl("show", "r1", "--data-dir", str(data), "--json", env=reader)
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)
        for command in (("runs",), ("stop", "r1"), ("runs", "delete", "r1")):
            refused = flexmarl(*command, "--data-dir", str(data), env=reader)
            assert refused.returncode == 1, (command, refused.stdout)
            assert "PERMISSION_DENIED" in refused.stderr
            assert refused.stderr.count("\n") == 1
        # Stopped first: a store that runs removes files while they are looked for.
        assert flexmarl("down", "--data-dir", str(data), env=env).returncode == 0
        assert secrets_in(locks, data, out) == []
    finally:
        flexmarl("down", "--purge", "--data-dir", str(data), env=env)


def secrets_in(locks: Locks, *folders: Path) -> list[str]:
    """Files below that hold a secret: logs, databases, configurations, reports."""
    known = [secret.encode() for secret in (*TOKENS.values(), SECRET, locks.key_of("r1"))]
    for pair in (locks.server, locks.client):
        known.append(pair.key.read_bytes().splitlines()[1])  # what makes it this key
    assert all(len(secret) > 12 for secret in known)
    return [
        str(file)
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file() and any(token in file.read_bytes() for token in known)
    ]
