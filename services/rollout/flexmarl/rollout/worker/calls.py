"""Parts of a call: its edges, its hash, its tool vertex."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from typing import Any, Final

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1.graph_pb2 import Vertex, VertexMeta, VertexPayload
from flexmarl.api.rollout.v1.engine_pb2 import SamplingParams
from flexmarl.api.rollout.v1.rollout_pb2 import SampleSpec
from flexmarl.core.row_limits import MAX_UPSTREAM_BYTES, MAX_VALUE_BYTES, too_large
from flexmarl.rollout.prompting import Agent
from flexmarl.rollout.workflow import Output, Simulated

_MAX_DEPTH: Final = 8
_HOLDERS: Final = (dict, list, tuple)
_LOOKED_INTO: Final = (Output, *_HOLDERS)
_LENGTH: Final = struct.Struct("<I")
_ID_BYTES: Final = 3
"""What an id costs apart from its characters."""


def outputs_in(value: Any, *, depth: int = 0) -> Iterable[Output]:  # noqa: ANN401
    """Outputs among a value's parts, in order; those become edges."""
    if isinstance(value, Output):
        yield value
    elif depth < _MAX_DEPTH and isinstance(value, _HOLDERS):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, _LOOKED_INTO):  # most are text, which no generator is made for
                yield from outputs_in(item, depth=depth + 1)


def upstream_ids(
    after: Output | Iterable[Output] | None,
    inputs: Any,  # noqa: ANN401
    *,
    sample_id: str,
    what: str,
) -> list[str]:
    """Ids of the vertices that a call needs, each once, in order.

    Args:
        after: Outputs that are given in so many words.
        inputs: Holds further ones.
        sample_id: The sample.
        what: Names the agent or tool, for the message.

    Raises:
        TypeError: `after` holds something else than outputs.
        ValueError: An output is another sample's.
        DomainError: ROW_TOO_LARGE.
    """
    explicit = [after] if isinstance(after, Output) else list(after or ())
    for item in explicit:
        if not isinstance(item, Output):
            raise TypeError(f"after= takes outputs of calls, not {type(item).__name__}")
    ids = dict.fromkeys([o.vertex_id for o in (*explicit, *outputs_in(inputs))])
    own = f"{sample_id}/"
    for vertex_id in ids:
        if not vertex_id.startswith(own):
            raise ValueError(
                f"output {vertex_id} belongs to another sample: keep outputs in local variables"
            )
    size_bytes = sum(map(len, ids)) + _ID_BYTES * len(ids)
    if size_bytes > MAX_UPSTREAM_BYTES:
        raise too_large(
            f"{what}: the ids of the {len(ids)} outputs that it depends on",
            size_bytes=size_bytes,
            max_bytes=MAX_UPSTREAM_BYTES,
            remedy="join them in steps, or pass texts instead of outputs",
        )
    return list(ids)


class CallForm:
    """What the calls of one agent have in common, made once: calls are many.

    Attributes:
        sampling: How their tokens are drawn, but for the seed and what a simulated engine is told.
    """

    __slots__ = ("_begun", "_rules", "sampling")

    def __init__(self, agent: Agent, *, greedy: bool) -> None:
        config = agent.config
        temperature = 0.0 if greedy else agent.temperature
        draws = (config.max_tokens, temperature, agent.top_p, agent.top_k, agent.stop_token_ids)
        self._begun = hashlib.sha256(b"agent")
        _add_part(self._begun, agent.name.encode())
        _add_part(self._begun, repr(draws).encode())
        # Only what is set: calls that set none of these keep the hash that older rows have.
        self._rules = [
            repr(rule).encode() for rule in (agent.min_p, config.stop, config.structured) if rule
        ]
        self.sampling = SamplingParams(
            max_tokens=config.max_tokens,
            temperature=temperature,
            top_p=agent.top_p,
            top_k=agent.top_k,
            min_p=agent.min_p,
            stop_token_ids=agent.stop_token_ids,
            stop=config.stop,
        )
        if (structured := config.structured) is not None:
            form = self.sampling.structured
            form.json_schema = structured.json_schema or ""
            form.regex = structured.regex or ""
            form.choices.extend(structured.choices)

    def input_hash(self, prompt: list[int], simulated: Simulated | None) -> bytes:
        """Hash of agent, prompt and sampling; not of the seed, which follows from the path."""
        digest = self._begun.copy()
        _add_part(digest, struct.pack(f"<{len(prompt)}I", *prompt))
        for rule in self._rules:
            _add_part(digest, rule)
        if simulated:
            _add_part(digest, repr(simulated).encode())
        return digest.digest()


class CallForms:
    """The forms of a worker's agents."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bool], CallForm] = {}

    def of(self, agent: Agent, *, greedy: bool) -> CallForm:
        """The form of an agent's calls, in samples that are drawn greedily or not."""
        key = (agent.name, greedy)
        form = self._made.get(key)
        if form is None:
            form = self._made[key] = CallForm(agent, greedy=greedy)
        return form


def tool_input_hash(name: str, arguments: bytes) -> bytes:
    """Hash of tool and arguments."""
    digest = hashlib.sha256(b"tool")
    _add_part(digest, name.encode())
    _add_part(digest, arguments)
    return digest.digest()


def _add_part(digest: hashlib._Hash, part: bytes) -> None:
    digest.update(_LENGTH.pack(len(part)) + part)


def to_json(value: Any, *, what: str) -> bytes:  # noqa: ANN401
    """Canonical JSON; outputs stand for their values.

    Raises:
        TypeError: JSON cannot hold it.
        DomainError: ROW_TOO_LARGE.
    """
    try:
        text = json.dumps(
            value, default=_plain, sort_keys=True, allow_nan=False, separators=(",", ":")
        )
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: not a JSON value: {error}") from None
    return _bounded(text.encode(), what=what)


def to_shown_json(value: Any, *, what: str) -> bytes:  # noqa: ANN401
    """JSON for people: what it cannot hold is shown as its repr.

    Raises:
        DomainError: ROW_TOO_LARGE.
    """
    try:
        text = json.dumps(value, default=_shown, allow_nan=False)
    except Exception:  # noqa: BLE001 - odd keys, NaN, cycles, depth, the user's own repr
        text = json.dumps(_repr(value))
    return _bounded(text.encode(), what=what)


def _bounded(encoded: bytes, *, what: str) -> bytes:
    if len(encoded) > MAX_VALUE_BYTES:
        raise too_large(
            what,
            size_bytes=len(encoded),
            max_bytes=MAX_VALUE_BYTES,
            remedy="keep it in a file, and pass its name",
        )
    return encoded


def _repr(value: Any) -> str:  # noqa: ANN401
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - it is the user's
        return f"(a {type(value).__name__} that cannot be shown)"


def _plain(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Output):
        return value.value
    raise TypeError(f"{type(value).__name__} is not JSON serialisable")


def _shown(value: Any) -> Any:  # noqa: ANN401
    return value.value if isinstance(value, Output) else repr(value)


def tool_vertex(
    spec: SampleSpec,
    *,
    name: str,
    path: str,
    input_hash: bytes,
    tool_input: bytes,
    upstream: list[str],
    ready_unix_ns: int,
    finished_unix_ns: int,
    output: bytes = b"",
    failure: common_pb2.Failure | None = None,
) -> Vertex:
    """The row of a tool call that ended."""
    status = common_pb2.VERTEX_STATUS_DONE if failure is None else common_pb2.VERTEX_STATUS_FAILED
    return Vertex(
        meta=VertexMeta(
            vertex_id=f"{spec.sample_id}/{path}",
            sample_id=spec.sample_id,
            group_id=spec.group_id,
            batch=spec.batch,
            batch_attempt=spec.batch_attempt,
            sample_attempt=spec.sample_attempt,
            attempt=1,
            path=path,
            agent=name,
            kind=common_pb2.VERTEX_KIND_TOOL,
            status=status,
            input_hash=input_hash,
            upstream_vertex_ids=upstream,
            policy_version=spec.version,
            finish_reason="tool",
            ready_columns=("output", "tool_input"),
            failure=failure,
            ready_unix_ns=ready_unix_ns,
            dispatched_unix_ns=ready_unix_ns,
            finished_unix_ns=finished_unix_ns,
        ),
        payload=VertexPayload(output=output, tool_input=tool_input),
    )
