"""ReturnToWhole: the newest version that is whole becomes the newest one, in one write.

Memory is lost with the host, or a run's folder was copied to another one: then some segments are
gone. What stays must name none of them, or every later binding would fail on it.
"""

from __future__ import annotations

import time

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import fencing
from flexmarl.core.version_return import Return, plan_return
from flexmarl.meg_store.database import Draft
from flexmarl.meg_store.runs import Runs
from flexmarl.meg_store.segments import Segments
from flexmarl.meg_store.training import Training


class StateReturn:
    """Returns the runs whose home is here."""

    def __init__(self, runs: Runs, segments: Segments, training: Training) -> None:
        self._runs = runs
        self._segments = segments
        self._training = training

    def to_whole(self, draft: Draft, request: pb.ReturnToWholeRequest) -> pb.ReturnToWholeResponse:
        """Return a run to its newest whole version; nothing is written where nothing is lost.

        Raises:
            DomainError: RUN_NOT_FOUND, TERM_STALE, INVALID_ARGUMENT away from the home shard,
                SEGMENT_NOT_FOUND where no version is whole.
        """
        entry = self._runs.require(request.run_id)
        self._runs.require_home(entry)
        self._runs.check_term(draft, entry, fencing.ORCHESTRATOR_SCOPE, request.term)
        plan = self._plan(request.run_id)
        run = self._runs.read(request.run_id)
        if plan is None:
            return pb.ReturnToWholeResponse(run=run)
        if plan.abandons:
            assert plan.version is not None, "only a committed version is returned to"
            run.returns.add(
                version=plan.version, newest=plan.newest, returned_unix_ns=time.time_ns()
            )
            self._runs.put(draft, run)
        self._training.give_up(
            draft,
            entry,
            after=plan.version,
            states=self._states(request.run_id, plan),
            policies=plan.reset,
        )
        return pb.ReturnToWholeResponse(run=run, reset_policies=sorted(plan.reset))

    def _plan(self, run_id: str) -> Return | None:
        manifests, saved = self._training.named(run_id)
        newest = dict(sorted(saved))
        return plan_return(
            run_id,
            versions={v: self._segments.is_whole(named) for v, named in manifests.items()},
            states={
                policy: self._segments.is_whole(saved[policy, version])
                for policy, version in newest.items()
            },
        )

    def _states(self, run_id: str, plan: Return) -> list[graph_pb2.StateRecord]:
        """The version's state of each policy that is reset; none where no version was committed."""
        if plan.version is None:
            return []
        asked = pb.GetManifestRequest(run_id=run_id, version=plan.version)
        manifest = self._training.manifest(asked)
        assert manifest is not None, "a whole version has a manifest"
        return [_state(name, manifest.policies[name], manifest.term) for name in sorted(plan.reset)]


def _state(policy: str, entry: graph_pb2.PolicyManifest, term: int) -> graph_pb2.StateRecord:
    """The set that a manifest names, without a gradient sum."""
    state = graph_pb2.StateRecord(
        policy=policy,
        version=entry.state_version,
        term=term,
        num_updates=entry.num_updates,
        weights=entry.weights,
        weights_hash=entry.weights_hash,
        saved_unix_ns=time.time_ns(),
    )
    if entry.HasField("master"):
        state.master.CopyFrom(entry.master)
    if entry.HasField("moments"):
        state.moments.CopyFrom(entry.moments)
    return state
