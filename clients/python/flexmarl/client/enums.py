"""The contracts' enums and core's, one for one.

Core knows no protobuf: its enums are the lower-case names of the contracts' values without prefix.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Generic, TypeVar

from flexmarl.api.common.v1 import common_pb2
from flexmarl.core import states
from flexmarl.core.errors import DomainError, ErrorReason

E = TypeVar("E", bound=StrEnum)


class EnumMap(Generic[E]):
    """Both directions between one contract enum and one core enum.

    Args:
        wire: The generated enum, such as `common_pb2.VertexStatus`.
        core: The core enum.
        prefix: What every wire name starts with.
    """

    def __init__(self, wire: Any, core: type[E], *, prefix: str) -> None:  # noqa: ANN401
        self._prefix = prefix
        self._to_wire: dict[E, int] = {e: wire.Value(prefix + e.value.upper()) for e in core}
        self._to_core: dict[int, E] = {number: e for e, number in self._to_wire.items()}

    def to_core(self, number: int) -> E:
        """Core's value.

        Raises:
            DomainError: INVALID_ARGUMENT for an unset or unknown number.
        """
        value = self._to_core.get(number)
        if value is None:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"{self._prefix.lower().rstrip('_')}: {number} is not a value that can be given",
            )
        return value

    def optional(self, number: int) -> E | None:
        """Core's value; None for unset."""
        return None if number == 0 else self.to_core(number)

    def to_wire(self, value: E) -> Any:  # noqa: ANN401 - the generated value type of the enum
        """The contract's number."""
        return self._to_wire[value]


VERTEX_STATUS = EnumMap(common_pb2.VertexStatus, states.VertexStatus, prefix="VERTEX_STATUS_")
SAMPLE_STATUS = EnumMap(common_pb2.SampleStatus, states.SampleStatus, prefix="SAMPLE_STATUS_")
GROUP_STATUS = EnumMap(common_pb2.GroupStatus, states.GroupStatus, prefix="GROUP_STATUS_")
RUN_STATUS = EnumMap(common_pb2.RunStatus, states.RunStatus, prefix="RUN_STATUS_")
VOID_REASON = EnumMap(common_pb2.VoidReason, states.VoidReason, prefix="VOID_REASON_")
