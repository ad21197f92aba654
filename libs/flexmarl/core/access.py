"""Who may call what: roles, the keys of single runs, and the rule of every method.

One table for all services. The server's interceptor asks `refusal` before a handler runs; a method
that has no row takes an administrator, so a forgotten row shuts a door instead of opening one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Final

from flexmarl.core.errors import DomainError, ErrorReason

_STORE: Final = "/flexmarl.api.meg_store.v1.MegStoreService/"
_ORCHESTRATOR: Final = "/flexmarl.api.orchestrator.v1.OrchestratorService/"
_ROLLOUT: Final = "/flexmarl.api.rollout.v1.RolloutService/"
_TRAINER: Final = "/flexmarl.api.trainer.v1.TrainerService/"
_HEALTH: Final = "/grpc.health.v1.Health/"
_REFLECTION: Final = (
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
)

_CONTENT_PREFIX: Final = "sha256:"


class Role(IntEnum):
    """What a token is for; each role may do what the ones before it may."""

    READ = 1
    """Look at runs, their graphs and weights."""
    SUBMIT = 2
    """Create, start, stop and resume runs."""
    ADMIN = 3
    """Everything: what services do for each other, deleting, operating the cluster."""


class Reach(Enum):
    """How the key of one run is held to that run by a method."""

    RUN = "run"
    """The request names a run: it must be the key's."""
    CONTENT = "content"
    """The request names an object: by the hash of its content, which one must know to ask."""
    ANY = "any"
    """Says nothing of any run."""
    CLUSTER = "cluster"
    """Concerns more than a run: no run's key is enough."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Least role that may call a method, and what the key of a run reaches by it."""

    role: Role
    reach: Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a caller's token allows.

    Attributes:
        name: Who holds it, for logs.
        role: What it is for.
        run_id: The one run that it is a key of; empty: it is for all.
    """

    name: str
    role: Role
    run_id: str = ""


def _rows(service: str, role: Role, reach: Reach, *methods: str) -> dict[str, Rule]:
    return {service + method: Rule(role, reach) for method in methods}


RULES: Final[Mapping[str, Rule | None]] = MappingProxyType(
    {
        # MEG Store: what anybody who may look at a run needs.
        **_rows(
            _STORE, Role.READ, Reach.RUN,
            "GetRun", "GetVertices", "ListVertices", "ListClaimable", "ListSamples", "ListGroups",
            "GetSampleGraph", "GetNeighbourhood", "DescribeAgents", "CountVertices", "Watch",
            "ListMicroBatches", "GetState", "GetManifest", "ListManifests", "FindWholeVersions",
            "OpenSegment", "ReadSegment",
        ),
        **_rows(_STORE, Role.READ, Reach.CONTENT, "GetObject", "StatObject"),
        **_rows(_STORE, Role.READ, Reach.ANY, "GetStats", "CloseSegment"),
        **_rows(_STORE, Role.READ, Reach.CLUSTER, "ListRuns"),
        # What makes a run, and keeps one of its versions.
        **_rows(_STORE, Role.SUBMIT, Reach.CLUSTER, "CreateRun", "PutObject"),
        **_rows(_STORE, Role.SUBMIT, Reach.RUN, "PinVersion", "UnpinVersion"),
        # What the other services write.
        **_rows(
            _STORE, Role.ADMIN, Reach.RUN,
            "UpdateRunStatus", "LoseShard", "ReturnToWhole", "DeleteRun", "AcquireTerm",
            "WriteGraph", "CloseGroups", "VoidRows", "WriteColumns", "CloseSubgraph",
            "CreateMicroBatch", "MarkRows", "SaveState", "Commit", "AllocateSegment",
            "SealSegment", "FetchSegment",
        ),
        **_rows(_STORE, Role.ADMIN, Reach.CLUSTER, "CreateSnapshot", "HoldWrites"),
        # Orchestrator.
        **_rows(_ORCHESTRATOR, Role.READ, Reach.RUN, "GetRunStatus", "WatchProgress"),
        **_rows(_ORCHESTRATOR, Role.SUBMIT, Reach.RUN, "SubmitRun", "ResumeRun", "StopRun"),
        **_rows(_ORCHESTRATOR, Role.ADMIN, Reach.RUN, "DeleteRun"),
        # Rollout and Trainer serve the Orchestrator and the engine hosts.
        **_rows(_ROLLOUT, Role.READ, Reach.RUN, "GetStatus", "WatchStatus"),
        **_rows(
            _ROLLOUT, Role.ADMIN, Reach.RUN,
            "OpenRun", "CloseRun", "StartSamples", "CancelSamples", "ComputeAdvantages",
            "PrepareWeights", "ActivateVersion",
        ),
        **_rows(_ROLLOUT, Role.ADMIN, Reach.CLUSTER, "ConnectEngineHost"),
        **_rows(_TRAINER, Role.READ, Reach.CLUSTER, "GetStatus", "WatchStatus"),
        **_rows(
            _TRAINER, Role.ADMIN, Reach.RUN,
            "OpenRun", "CloseRun", "BindPolicy", "ComputeGradients", "SaveGradients",
            "ApplyUpdate", "SuspendPolicy", "PrefetchPolicy",
        ),
        **_rows(
            _TRAINER, Role.ADMIN, Reach.CLUSTER, "WaitOperation", "CancelOperation", "LendSlots"
        ),
        # Probes carry no token.
        **dict.fromkeys((_HEALTH + "Check", _HEALTH + "Watch", _HEALTH + "List")),
        **dict.fromkeys(_REFLECTION, Rule(Role.READ, Reach.ANY)),
    }
)  # fmt: skip
"""Rule of each method by its full name; None: anybody."""

_FOR_ADMINS: Final = Rule(Role.ADMIN, Reach.CLUSTER)


def rule_of(method: str) -> Rule | None:
    """The rule of a method (`/package.Service/Method`); None when anybody may call it."""
    return RULES.get(method, _FOR_ADMINS)


def refusal(
    method: str, rule: Rule, grant: Grant, *, run_id: str = "", object_key: str = ""
) -> DomainError | None:
    """Why a caller may not make a call; None when it may.

    Args:
        method: Full name, for the message.
        rule: Of the method.
        grant: What the caller's token allows.
        run_id: Run that the request names.
        object_key: Object that the request names.
    """
    if grant.role < rule.role:
        said = f"the role is {grant.role.name.lower()}, it takes {rule.role.name.lower()}"
        return _denied(method, said)
    if not grant.run_id or rule.reach is Reach.ANY:
        return None
    if rule.reach is Reach.RUN:
        is_own = run_id == grant.run_id
        return None if is_own else _denied(method, f"the key is of run {grant.run_id!r} alone")
    if rule.reach is Reach.CONTENT:
        by_hash = object_key.startswith(_CONTENT_PREFIX)
        return None if by_hash else _denied(method, "a run's key reads objects by their hash only")
    return _denied(method, "it concerns more than a run, and the key is of one run")


def _denied(method: str, said: str) -> DomainError:
    name = method.rpartition("/")[2]
    return DomainError(ErrorReason.PERMISSION_DENIED, f"{name} is refused: {said}")


def parse_role(text: str) -> Role:
    """The role of this name.

    Raises:
        ValueError: There is none; the message names those that are.
    """
    known = {role.name.lower(): role for role in Role}
    if text not in known:
        raise ValueError(f"unknown role {text!r}: use one of {', '.join(known)}")
    return known[text]


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach what listens on `host`."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def exposure_refusal(*, host: str, has_tls: bool, has_tokens: bool, insecure: bool) -> str | None:
    """Why a service must not listen on an address; None when it may.

    Args:
        host: Address to bind.
        has_tls: Whether connections are encrypted.
        has_tokens: Whether callers must show a token.
        insecure: The operator takes the risk: another wall stands around the network.
    """
    if is_loopback(host) or insecure or (has_tls and has_tokens):
        return None
    asked = (("server.tls.cert and server.tls.key", has_tls), ("server.tokens", has_tokens))
    missing = " and ".join(keys for keys, given in asked if not given)
    return (
        f"server.host = {host!r} is reached from other machines, and {missing} is not set: "
        "set it, bind 127.0.0.1, or say server.insecure = true when a wall of your own stands "
        "around this network"
    )
