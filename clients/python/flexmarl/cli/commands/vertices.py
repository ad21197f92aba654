"""`flexmarl vertices`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.cli.cluster.folder import ClusterFolder
from flexmarl.cli.connect import with_run
from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_json, print_line, print_table
from flexmarl.client.store import StoreClient

_COLUMNS: Final = (
    "vertex", "agent", "version", "status", "tokens", "seconds", "reward", "advantage", "fate",
)  # fmt: skip
_NumberT = TypeVar("_NumberT", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class VertexQuery:
    """The options as they were typed; empty ones select everything."""

    agent: str = ""
    policy: str = ""
    batch: int | None = None
    group: str = ""
    sample: str = ""
    prefix: str = ""
    kind: str = ""
    status: str = ""
    void: str = ""
    micro_batch: str = ""
    version: str = ""
    reward: str = ""
    since: str = ""
    until: str = ""
    claimable: bool = False
    order: str = "id"
    descending: bool = False

    def to_filter(self) -> pb.VertexFilter:
        """The filter of the contract.

        Raises:
            CliError: An option is no range, time or name.
        """
        min_version, max_version = _range("--version", self.version, int)
        min_reward, max_reward = _range("--reward", self.reward, float)
        return pb.VertexFilter(
            batch=self.batch,
            group_id=self.group,
            sample_id=self.sample,
            id_prefix=self.prefix,
            agent=self.agent,
            policy=self.policy,
            kind=_value(common_pb2.VertexKind, "VERTEX_KIND_", "--kind", self.kind),
            status=_value(common_pb2.VertexStatus, "VERTEX_STATUS_", "--status", self.status),
            void_reason=_value(common_pb2.VoidReason, "VOID_REASON_", "--void", self.void),
            micro_batch_id=self.micro_batch,
            min_version=min_version,
            max_version=max_version,
            min_reward=min_reward,
            max_reward=max_reward,
            finished_from_unix_ns=_time("--since", self.since),
            finished_before_unix_ns=_time("--until", self.until),
            claimable=self.claimable,
        )

    def to_order(self) -> pb.VertexOrder.ValueType:
        """The order of the contract.

        Raises:
            CliError: There is no such order.
        """
        order: pb.VertexOrder.ValueType = _value(
            pb.VertexOrder, "VERTEX_ORDER_", "--order", self.order
        )
        return order


def vertices(
    run_id: str,
    query: VertexQuery,
    *,
    limit: int,
    data_dir: Path,
    cluster: Sequence[str],
    as_json: bool,
) -> None:
    """List vertices.

    Raises:
        CliError: An option cannot be read, or names an agent or policy that the run does not have.
        DomainError: No such run.
    """
    chosen, order = query.to_filter(), query.to_order()

    async def read(
        store: StoreClient, _folder: ClusterFolder, run: graph_pb2.Run
    ) -> list[graph_pb2.VertexMeta]:
        found = store.list_vertices(
            run_id, chosen, order=order, descending=query.descending, page_size=min(limit + 1, 1000)
        )
        metas: list[graph_pb2.VertexMeta] = []
        async for vertex in found:
            metas.append(vertex.meta)
            if len(metas) > limit:
                break
        if not metas:
            await _check_names(store, run, query)
        return metas

    metas = with_run(read, run_id, data_dir=data_dir, cluster=cluster)
    rows = [describe(meta) for meta in metas[:limit]]
    if as_json:
        print_json(rows)
        return
    print_table(rows, _COLUMNS)
    if len(metas) > limit:
        print_line(f"... there are more; see --limit (now {limit})")


def describe(meta: graph_pb2.VertexMeta) -> dict[str, Any]:
    """Meta columns as people and programs read them."""
    void = _name(common_pb2.VoidReason, "VOID_REASON_", meta.void_reason)
    return {
        "vertex": meta.vertex_id,
        "agent": meta.agent,
        "policy": meta.policy or None,
        "kind": _name(common_pb2.VertexKind, "VERTEX_KIND_", meta.kind),
        "status": _name(common_pb2.VertexStatus, "VERTEX_STATUS_", meta.status),
        "version": meta.policy_version,
        "batch": meta.batch,
        "group": meta.group_id,
        "sample": meta.sample_id,
        "attempt": meta.attempt,
        "tokens": meta.num_response_tokens,
        "prompt_tokens": meta.num_prompt_tokens,
        "seconds": (meta.finished_unix_ns - meta.ready_unix_ns) / 1e9,
        "finished_unix_ns": meta.finished_unix_ns,
        "reward": meta.reward if meta.HasField("reward") else None,
        "advantage": meta.advantage if meta.HasField("advantage") else None,
        "void_reason": void,
        "micro_batch": meta.micro_batch_id or None,
        "fate": f"void {void}" if void else meta.micro_batch_id or None,
        "ready_columns": list(meta.ready_columns),
        "upstream": list(meta.upstream_vertex_ids),
        "failure": meta.failure.message or None,
    }


async def _check_names(store: StoreClient, run: graph_pb2.Run, query: VertexQuery) -> None:
    """Tells a name that was mistyped from one that has nothing to show."""
    called = (await store.describe_agents(run.run_id)).agents
    declared = json.loads(run.config_json).get("agents", {})
    for option, name, known in (
        ("--agent", query.agent, {*declared, *(each.agent for each in called)}),
        ("--policy", query.policy, {*run.models, *(each.policy for each in called)}),
    ):
        if name and name not in known:
            names = ", ".join(sorted(filter(None, known)))
            raise CliError(f"{option} {name!r}: not one of this run; it has: {names}")


def _name(enum: Any, prefix: str, number: int) -> str | None:  # noqa: ANN401 - generated enum
    name: str = enum.Name(number)
    return name.removeprefix(prefix).lower() if number else None


def _value(enum: Any, prefix: str, option: str, text: str) -> Any:  # noqa: ANN401 - generated enum
    if not text:
        return 0
    known = [name.removeprefix(prefix).lower() for name in enum.keys()[1:]]
    if text not in known:
        raise CliError(f"{option} {text!r}: use one of {', '.join(known)}")
    return enum.Value(prefix + text.upper())


def _range(
    option: str, text: str, read: Callable[[str], _NumberT]
) -> tuple[_NumberT | None, _NumberT | None]:
    """Reads `X`, `A..B`, `A..` or `..B`; both ends belong to it."""
    if not text:
        return None, None
    first, dots, last = text.partition("..")
    try:
        low = read(first) if first else None
        high = (read(last) if last else None) if dots else low
    except ValueError:
        raise CliError(
            f"{option} {text!r}: use a number, or a range such as 0..2, 1.. or ..5"
        ) from None
    ends = [end for end in (low, high) if end is not None]
    if any(math.isnan(end) for end in ends) or (read is int and any(end < 0 for end in ends)):
        raise CliError(f"{option} {text!r}: not a number that it can be")
    return low, high


def _time(option: str, text: str) -> int:
    """Unix nanoseconds of an ISO 8601 time; local time where it names no zone."""
    if not text:
        return 0
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError:
        raise CliError(f"{option} {text!r}: use a time such as 2026-01-31T12:00:00Z") from None
