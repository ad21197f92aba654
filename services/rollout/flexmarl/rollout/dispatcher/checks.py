"""What others ask of the dispatcher, checked where it comes in.

Whatever is taken is worked on by parts that others share: a row that the store refuses, or an id
that nobody can read, would be told of there, and end the run instead of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flexmarl.api.meg_store.v1.graph_pb2 import PolicyManifest
from flexmarl.api.rollout.v1.engine_pb2 import HostHello
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.core.dispatch_events import split_attempt_id
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.ids import SampleId, check_name


def check_spec(spec: SampleSpec) -> None:
    """Refuses a sample whose id cannot be read, or says something else than its other fields.

    Raises:
        DomainError: INVALID_ARGUMENT.
    """
    try:
        sample = SampleId.parse(spec.sample_id)
    except ValueError as error:
        raise _invalid(f"samples: {error}") from None
    batch = sample.group.batch
    said = (spec.group_id, spec.batch, spec.batch_attempt, spec.ordinal, spec.sample_attempt)
    meant = (str(sample.group), batch.batch, batch.attempt, sample.ordinal, sample.attempt)
    if said != meant or (spec.group_ordinal, spec.evaluation) != (
        sample.group.ordinal,
        batch.evaluation,
    ):
        raise _invalid(f"samples: {spec.sample_id} is not the sample that its other fields name")


def check_policies(policies: Mapping[str, PolicyManifest], known: Iterable[str]) -> None:
    """Refuses weights of a policy that the run has not, or without a content.

    Raises:
        DomainError: INVALID_ARGUMENT.
    """
    for name in sorted(policies.keys() - set(known)):
        raise _invalid(f"policies: the run has no policy {name!r}")
    for name in sorted(policies):
        if not policies[name].weights_hash:
            raise _invalid(f"policies.{name}: weights_hash is empty")


def check_hello(hello: HostHello) -> None:
    """Refuses a host whose name or attempts cannot be read.

    Raises:
        DomainError: INVALID_ARGUMENT.
    """
    try:
        check_name(hello.host_id, what="host_id")
        for attempt_id in hello.attempt_ids:
            split_attempt_id(attempt_id)
    except ValueError as error:
        raise _invalid(f"hello: {error}") from None


def _invalid(message: str) -> DomainError:
    return DomainError(ErrorReason.INVALID_ARGUMENT, message)
