"""User code gets what the service allows, and runs as whom it says."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys

import pytest

from flexmarl.rollout.config import UserCodeConfig
from flexmarl.rollout.worker.confine import check_confinement
from flexmarl.runtime.config import ConfigError

CONFINED = """
import json, os, sys
from flexmarl.rollout.worker.confine import confine
confine({"user": sys.argv[1], "open_files": 64})
facts = {"ids": [os.getresuid(), os.getresgid(), os.getgroups()]}
for name in ("setuid", "open"):
    try:
        os.setuid(0) if name == "setuid" else open(sys.argv[2])
        facts[name] = "done"
    except PermissionError:
        facts[name] = "refused"
print(json.dumps(facts))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_reads_no_secret_and_gets_nothing_back(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("secret")
    secret.chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, "nobody", str(secret)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    nobody = pwd.getpwnam("nobody")
    facts = json.loads(done.stdout)
    users, groups, more = facts["ids"]
    assert users == [nobody.pw_uid] * 3
    assert groups == [nobody.pw_gid] * 3
    assert set(more) <= {nobody.pw_gid}
    assert (facts["setuid"], facts["open"]) == ("refused", "refused")


def test_what_cannot_be_is_refused_at_start(monkeypatch):
    with pytest.raises(ConfigError, match="no such user"):
        check_confinement(UserCodeConfig(user="nobody-at-all"))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="only a service that root started"):
        check_confinement(UserCodeConfig(user="nobody"))
    check_confinement(UserCodeConfig())
