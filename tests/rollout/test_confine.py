"""User code gets what the service allows, and runs as whom it says."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys

import pytest
from rollout.worker_harness import (
    PRELOAD,
    SAMPLE,
    WorkerHarness,
    run_config,
    spec,
    write_model,
    write_team,
)

from flexmarl.api.common.v1alpha1 import common_pb2
from flexmarl.api.rollout.v1alpha1.worker_pb2 import WorkerSample
from flexmarl.rollout.config import UserCodeConfig
from flexmarl.rollout.worker.confine import check_confinement
from flexmarl.runtime.children import Children
from flexmarl.runtime.config import ConfigError

GREEDY = """
import resource

async def team(ctx, query):
    taken = []
    try:
        if query["what"] == "memory":
            taken = bytearray(8 << 30)
        else:
            taken = [open("/dev/null") for _ in range(100_000)]
    except (MemoryError, OSError) as error:
        return f"{type(error).__name__} {resource.getrlimit(resource.RLIMIT_NOFILE)}"
    return "took all"

def reward(sample):
    return 1.0
"""


async def test_a_worker_gets_no_more_than_its_limits(tmp_path):
    limits = {"address_space_mib": 4096, "open_files": 128}
    model = write_model(tmp_path / "model")
    package = write_team(tmp_path / "package", GREEDY)
    config = run_config(model, package, workflow={"worker_memory_mib": 1 << 20})
    async with Children(preload=PRELOAD) as children:
        worker = await WorkerHarness.start(children, tmp_path, limits=limits)
        ready = await worker.set_up(config, package)
        assert not ready.HasField("failure"), ready.failure
        said = {}
        for index, what in enumerate(("memory", "files")):
            sample_id = f"{SAMPLE[:-3]}{index}a0"
            sample = WorkerSample(spec=spec(sample_id, query={"what": what}))
            ends = await worker.run(sample)
            assert ends[sample_id].status == common_pb2.SAMPLE_STATUS_DONE
            said[what] = json.loads(ends[sample_id].output_json)
        assert said == {"memory": "MemoryError (128, 128)", "files": "OSError (128, 128)"}
        await worker.child.stop(grace_s=1.0)


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
