"""A finished sample on its way to a reward process: JSON, and back to the same values.

A reward function is given values, not the objects of the workflow: what can be on the way is None,
bool, numbers, text, bytes, lists, tuples, sets, dicts, and the outputs of calls, which stay the
objects that `sample.calls` holds. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.workflow import FinishedSample, Output

_TAG: Final = "$"
_MAX_DEPTH: Final = 64

MAX_JOB_BYTES: Final = 64 << 20
"""Largest sample that is passed on to a reward function, all its texts together."""

_PLAIN: Final = frozenset((type(None), bool, int, float, str))


def encode_job(
    query_json: bytes,
    output: Any,  # noqa: ANN401
    calls: Iterable[Output],
    tools: Iterable[Output],
    *,
    what: str,
) -> bytes:
    """What a reward process is given.

    Args:
        query_json: The query.
        output: What the workflow returned.
        calls: Finished calls of agents, in order.
        tools: Finished calls of tools, in order.
        what: Names the workflow, for the message.

    Raises:
        DomainError: WORKFLOW_RAISED; the workflow returned something that cannot be passed on.
    """
    try:
        returned = _Encoder(_refuse).encode(output)
    except TypeError as error:
        raise _returned(
            what,
            f"{error}: a reward function can be given None, bool, numbers, text, "
            "bytes, lists, tuples, sets, dicts and outputs of calls",
        ) from None
    job = {
        "query": query_json.decode(),
        "output": returned,
        "calls": [_record(call) for call in calls],
        "tools": [_record(call) for call in tools],
    }
    try:
        encoded = json.dumps(job, separators=(",", ":"), default=_shown).encode()
    except ValueError as error:  # a number of thousands of digits
        raise _returned(what, f"something that cannot be passed on: {error}") from None
    if len(encoded) > MAX_JOB_BYTES:
        problem = f"what makes {len(encoded)} bytes with its calls, more than {MAX_JOB_BYTES}"
        raise _returned(what, problem)
    return encoded


def decode_job(job_json: bytes) -> FinishedSample:
    """The finished sample that a reward function is given."""
    job = json.loads(job_json)
    decoder = _Decoder()
    calls = tuple(decoder.add(record) for record in job["calls"])
    tools = tuple(decoder.add(record) for record in job["tools"])
    decoder.connect()
    return FinishedSample(
        query=json.loads(job["query"]),
        output=decoder.decode(job["output"]),
        calls=calls,
        tools=tools,
    )


def _returned(what: str, problem: str) -> DomainError:
    return DomainError(ErrorReason.WORKFLOW_RAISED, f"{what} returned {problem}", {"what": what})


class _Encoder:
    """Values to JSON; what JSON has no form for is tagged.

    Args:
        other: What becomes of a value that cannot be on the way.
    """

    def __init__(self, other: Callable[[Any], Any]) -> None:
        self._other = other

    def encode(self, value: Any, depth: int = 0) -> Any:  # noqa: ANN401
        """The JSON form."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if depth > _MAX_DEPTH:
            return self._other(value)
        if isinstance(value, Output):
            return {_TAG: "output", "of": value.vertex_id}
        if isinstance(value, list):
            return [self.encode(item, depth + 1) for item in value]
        if isinstance(value, (tuple, set, frozenset)):
            items = [self.encode(item, depth + 1) for item in value]
            return {_TAG: "tuple" if isinstance(value, tuple) else "set", "of": items}
        if isinstance(value, bytes):
            return {_TAG: "bytes", "of": value.hex()}
        if isinstance(value, Mapping):
            return self._mapping(value, depth)
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # NumPy and torch scalars
            return self.encode(value.item(), depth + 1)
        return self._other(value)

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> Any:  # noqa: ANN401
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: self.encode(item, depth + 1) for key, item in value.items()}
        pairs = [
            [self.encode(key, depth + 1), self.encode(item, depth + 1)]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "of": pairs}


class _Decoder:
    """The way back; outputs are made once each, and connected when all are there."""

    def __init__(self) -> None:
        self._outputs: dict[str, Output] = {}
        self._inputs: list[tuple[dict[str, Any], Any]] = []

    def add(self, record: list[Any]) -> Output:
        """An output of a call, without its inputs: others may be among them."""
        text, tokens, finish_reason, vertex_id, agent, path, value, given, finished = record
        inputs: dict[str, Any] = {}
        if given:
            self._inputs.append((inputs, given))
        output = self._outputs[vertex_id] = Output(
            text, tuple(tokens), finish_reason, vertex_id, agent, path, value, inputs, finished
        )
        return output

    def connect(self) -> None:
        """Fills in the inputs."""
        for inputs, record in self._inputs:
            inputs.update(self.decode(record))

    def decode(self, value: Any) -> Any:  # noqa: ANN401
        """The value."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        of = value["of"]
        match value[_TAG]:
            case "output":
                return self._outputs[of]
            case "tuple":
                return tuple(self.decode(item) for item in of)
            case "set":
                return {self.decode(item) for item in of}
            case "bytes":
                return bytes.fromhex(of)
            case _:
                return {self.decode(key): self.decode(item) for key, item in of}


def _record(output: Output) -> list[Any]:
    """The fields of an output, in the order in which `Output` takes them.

    Inputs are for people and simple rules: plain JSON, outputs tagged, whatever else as its repr.
    """
    inputs: Any = output.inputs
    if not all(type(value) in _PLAIN or type(value) is Output for value in inputs.values()):
        inputs = _Encoder(repr).encode(dict(inputs))
    return [
        output.text,
        output.tokens,
        output.finish_reason,
        output.vertex_id,
        output.agent,
        output.path,
        output.value,
        inputs,
        output.finished_unix_ns,
    ]


def _shown(value: Any) -> Any:  # noqa: ANN401
    return {_TAG: "output", "of": value.vertex_id} if isinstance(value, Output) else repr(value)


def _refuse(value: Any) -> Any:  # noqa: ANN401
    raise TypeError(f"a {type(value).__name__}")
