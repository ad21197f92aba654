"""Who may call what."""

import pytest

from flexmarl.core.access import (
    RULES,
    Grant,
    Reach,
    Role,
    Rule,
    exposure_refusal,
    is_loopback,
    parse_role,
    refusal,
    rule_of,
)

STORE = "/flexmarl.api.meg_store.v1.MegStoreService/"
ORCHESTRATOR = "/flexmarl.api.orchestrator.v1.OrchestratorService/"

READER = Grant(name="r", role=Role.READ)
SUBMITTER = Grant(name="s", role=Role.SUBMIT)
ADMIN = Grant(name="a", role=Role.ADMIN)
KEY = Grant(name="key of r1", role=Role.SUBMIT, run_id="r1")


def denied(method, grant, **named):
    error = refusal(method, rule_of(method), grant, **named)
    return "" if error is None else error.message


@pytest.mark.parametrize(
    ("method", "least"),
    [
        (STORE + "GetVertices", Role.READ),
        (STORE + "ListRuns", Role.READ),
        (STORE + "CreateRun", Role.SUBMIT),
        (ORCHESTRATOR + "SubmitRun", Role.SUBMIT),
        (STORE + "Commit", Role.ADMIN),
        (ORCHESTRATOR + "DeleteRun", Role.ADMIN),
    ],
)
def test_a_role_may_what_the_ones_before_it_may_and_no_more(method, least):
    for grant in (READER, SUBMITTER, ADMIN):
        assert (denied(method, grant) == "") == (grant.role >= least), grant
    assert "it takes" in denied(method, Grant(name="n", role=Role(1))) or least is Role.READ


def test_a_method_without_a_row_takes_an_administrator():
    assert rule_of("/foreign.Service/Method") == Rule(Role.ADMIN, Reach.CLUSTER)
    assert "takes admin" in denied("/foreign.Service/Method", SUBMITTER)


def test_probes_carry_no_token():
    assert rule_of("/grpc.health.v1.Health/Check") is None


def test_a_runs_key_opens_its_run_alone():
    assert denied(STORE + "GetVertices", KEY, run_id="r1") == ""
    assert denied(ORCHESTRATOR + "StopRun", KEY, run_id="r1") == ""
    assert "run 'r1' alone" in denied(STORE + "GetVertices", KEY, run_id="r2")
    assert "run 'r1' alone" in denied(STORE + "GetVertices", KEY)
    assert "more than a run" in denied(STORE + "ListRuns", KEY)
    assert "more than a run" in denied(STORE + "CreateRun", KEY, run_id="r1")
    assert denied(STORE + "GetStats", KEY) == ""
    assert "takes admin" in denied(STORE + "WriteGraph", KEY, run_id="r1")


def test_a_runs_key_reads_objects_by_their_hash():
    assert denied(STORE + "GetObject", KEY, object_key="sha256:00ff") == ""
    assert "hash only" in denied(STORE + "GetObject", KEY, object_key="runs/r2/prompt")
    assert denied(STORE + "GetObject", READER, object_key="runs/r2/prompt") == ""


def test_no_run_makes_its_own_keys_administrators():
    """What services write to a run is not within a key's role, whatever it reaches."""
    assert all(rule.reach is not Reach.ANY for rule in RULES.values() if rule and rule.role > 1)


def test_roles_have_names():
    assert [parse_role(name) for name in ("read", "submit", "admin")] == list(Role)
    with pytest.raises(ValueError, match="unknown role 'root': use one of read, submit, admin"):
        parse_role("root")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost", "unix:/a"])
def test_loopback_is_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "store.internal", ""])
def test_everything_else_is_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("locks", "missing"),
    [
        ({}, "server.tls.cert and server.tls.key and server.tokens is not set"),
        ({"has_tls": True}, "and server.tokens is not set"),
        ({"has_tokens": True}, "and server.tls.cert and server.tls.key is not set"),
        ({"has_tls": True, "has_tokens": True}, None),
        ({"insecure": True}, None),
        ({"host": "127.0.0.1"}, None),
    ],
)
def test_what_strangers_reach_is_locked(locks, missing):
    asked = {"host": "0.0.0.0", "has_tls": False, "has_tokens": False, "insecure": False}
    refused = exposure_refusal(**{**asked, **locks})
    assert refused is None if missing is None else missing in refused
