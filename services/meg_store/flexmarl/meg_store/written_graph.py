"""WriteGraph as the store reads it: the data columns of vertices stay the bytes that came.

On the wire a message and a string of bytes are the same, so a class that declares `payload` as
bytes reads the contract's requests, and what is only checked and stored is never made again. The
class is built from the contract's own descriptors, so that no field can differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.api.meg_store.v1 import meg_store_pb2 as pb
from flexmarl.core import row_limits
from flexmarl.core import store_keys as keys
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.meg_store import vertex_checks as checks
from flexmarl.meg_store import wire
from flexmarl.meg_store.rows import encode_meta

_PACKAGE: Final = "flexmarl.meg_store.written"

_SLICE: Final = 128 << 10
"""What is checked in one go, in bytes: less than a millisecond's work."""

_ROW: Final = 2 << 10
"""What a row costs apart from its bytes, in bytes."""

_PAYLOAD_TAG: Final = b"\x0a"
_parts: Final = attrgetter("meta", "payload")
_payloads: Final = attrgetter("payloads")


class WrittenVertex(Protocol):
    """A `Vertex` whose payload was not decoded."""

    @property
    def meta(self) -> graph_pb2.VertexMeta:
        """Meta columns."""
        ...

    @property
    def payload(self) -> bytes:
        """The serialised `VertexPayload`."""
        ...

    def HasField(self, field_name: str) -> bool:  # noqa: N802 - of protobuf
        """Whether a field was sent."""
        ...


class WrittenGraph(Protocol):
    """A `WriteGraphRequest` whose payloads were not decoded."""

    request_id: str
    run_id: str
    term: int
    groups: Sequence[graph_pb2.Group]
    vertices: Sequence[WrittenVertex]
    samples: Sequence[graph_pb2.Sample]


class CheckedVertex(NamedTuple):
    """A vertex that may be written, as far as it says itself.

    Attributes:
        vertex_id: Its id.
        key: Of its row.
        meta: Its meta columns.
        columns: These as they are stored.
        payload: Its data columns as they are stored; None: it came without.
        objects: Keys of the objects that it refers to.
    """

    vertex_id: str
    key: bytes
    meta: graph_pb2.VertexMeta
    columns: bytes
    payload: bytes | None
    objects: Sequence[str]


class CheckedVertices:
    """The vertices of a call, checked before anything is decided over them, some at a time.

    What is known of them is kept by column, in the order in which they came: a call of many rows
    handles most columns whole.

    Args:
        run_id: Their run.
        vertices: As they came.
        declared: Types of the run's declared columns.

    Attributes:
        declared: The same.
        ids: Their ids.
        keys: Of their rows.
        metas: Their meta columns.
        columns: These as they are stored.
        payloads: Their data columns as they are stored; None for a vertex that came without.
        upstream: Ids of upstream vertices, of those that have any, by id.
        objects: Keys of the objects that a vertex refers to, of those that do, by position.
        alike: One vertex of each kind; what the vertices of a kind have in common says whether
            the stored graph takes them.
    """

    def __init__(
        self, run_id: str, vertices: Iterable[WrittenVertex], declared: Mapping[str, int]
    ) -> None:
        self._run_id = run_id
        self._vertices = iter(vertices)
        self._refused: Exception | None = None
        self.declared = declared
        self.ids: list[str] = []
        self.keys: list[bytes] = []
        self.metas: list[graph_pb2.VertexMeta] = []
        self.columns: list[bytes] = []
        self.payloads: list[bytes | None] = []
        self.upstream: dict[str, list[str]] = {}
        self.objects: dict[int, Sequence[str]] = {}
        self.alike: checks.Alike = {}

    def in_slices(self) -> Iterator[None]:
        """Check; pauses between any two slices for others to run, and refuses nothing yet."""
        try:
            while self._check_some():
                yield
        except (DomainError, ValueError) as error:
            self._refused = error
            self._vertices = iter(())

    def finish(self) -> None:
        """Check those that were not checked yet; once, for a refusal is told once.

        Raises:
            DomainError: INVALID_ARGUMENT, MESSAGE_TOO_LARGE.
            ValueError: An id or a value is malformed.
        """
        for _ in self.in_slices():
            pass
        try:
            if self._refused is not None:
                raise self._refused
        finally:
            self._refused = None  # its traceback holds this, which holds what the call brought

    def each(self) -> Iterator[CheckedVertex]:
        """One after the other."""
        objects = (self.objects.get(position, ()) for position in range(len(self.ids)))
        rows = (self.ids, self.keys, self.metas, self.columns, self.payloads, objects)
        return map(CheckedVertex._make, zip(*rows, strict=True))

    def _check_some(self) -> bool:
        """Returns whether more may be left."""
        metas: list[graph_pb2.VertexMeta] = []
        payloads: list[bytes | None] = []
        left = _SLICE
        for vertex in self._vertices:
            meta, payload = _parts(vertex)
            metas.append(meta)
            payloads.append(payload or (b"" if vertex.HasField("payload") else None))
            left -= _ROW + len(payload)
            if left <= 0:
                break
        self._check(metas, payloads)
        return left <= 0

    def _check(
        self, metas: Sequence[graph_pb2.VertexMeta], payloads: Sequence[bytes | None]
    ) -> None:
        data: Iterable[graph_pb2.VertexPayload | None] = _decoded(payloads)
        if None in payloads:
            data = [None if p is None else d for p, d in zip(payloads, data, strict=True)]
        checked = checks.check_vertices(metas, data, alike=self.alike, declared=self.declared)
        ids = checked.ids
        for position, objects in checked.objects.items():
            self.objects[len(self.ids) + position] = objects
        self.upstream.update(checked.upstream)
        columns = [encode_meta(meta) for meta in metas]  # with what their payloads make ready
        _check_sizes(ids, columns, row_limits.MAX_META_BYTES)
        _check_sizes(ids, [payload or b"" for payload in payloads], row_limits.MAX_PAYLOAD_BYTES)
        run_id = self._run_id
        self.keys += [
            keys.row(run_id, meta.agent, vertex_id)
            for meta, vertex_id in zip(metas, ids, strict=True)
        ]
        self.ids += ids
        self.metas += metas
        self.columns += columns
        self.payloads += payloads


def _check_sizes(ids: Sequence[str], values: Sequence[bytes], limit: int) -> None:
    if max(map(len, values), default=0) > limit:
        for vertex_id, value in zip(ids, values, strict=True):
            checks.check_size(vertex_id, len(value), limit)


def _decoded(payloads: Iterable[bytes | None]) -> Sequence[graph_pb2.VertexPayload]:
    """Payloads as messages: decoded together they cost a quarter less than one by one."""
    parts: list[bytes] = []
    for payload in payloads:
        data = payload or b""
        parts += (_PAYLOAD_TAG, wire.varint(len(data)), data)
    try:
        decoded: Sequence[graph_pb2.VertexPayload] = _payloads(
            _PAYLOADS.FromString(b"".join(parts))
        )
    except DecodeError:
        raise malformed() from None
    return decoded


def malformed() -> DomainError:
    """The refusal of bytes that are not the message that they should be."""
    return DomainError(
        ErrorReason.INVALID_ARGUMENT, "the request is not a valid message: is all text UTF-8?"
    )


def _classes() -> tuple[type[Message], type[Message]]:
    """The class behind `WrittenGraph`, and one that repeats payloads in its field 1."""
    file = descriptor_pb2.FileDescriptorProto(
        name="flexmarl/meg_store/written.proto",
        package=_PACKAGE,
        syntax="proto3",
        dependency=[graph_pb2.DESCRIPTOR.name, pb.DESCRIPTOR.name],
    )
    vertex = _copied(file, graph_pb2.Vertex.DESCRIPTOR)
    payload = next(field for field in vertex.field if field.name == "payload")
    payload.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    payload.ClearField("type_name")
    # A message has presence, bytes have it when they are optional.
    payload.proto3_optional = True
    payload.oneof_index = len(vertex.oneof_decl)
    vertex.oneof_decl.add(name="_payload")
    request = _copied(file, pb.WriteGraphRequest.DESCRIPTOR)
    vertices = next(field for field in request.field if field.name == "vertices")
    vertices.type_name = f".{_PACKAGE}.{vertex.name}"
    payloads = file.message_type.add(name="Payloads")
    payloads.field.add(
        name="payloads",
        number=1,
        label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
        type=descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
        type_name=f".{graph_pb2.VertexPayload.DESCRIPTOR.full_name}",
    )
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    first, second = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{message.name}"))
        for message in (request, payloads)
    )
    return first, second


def _copied(
    file: descriptor_pb2.FileDescriptorProto, message: Descriptor
) -> descriptor_pb2.DescriptorProto:
    copy = file.message_type.add()
    message.CopyToProto(copy)
    return copy


WRITTEN_GRAPH, _PAYLOADS = _classes()
"""Read requests of WriteGraph as `WrittenGraph`, and many payloads at once."""
