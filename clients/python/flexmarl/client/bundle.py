"""Folders as objects: packed the same way everywhere, unpacked without trust.

A run's workflow package and its base models travel as tar archives under their hash. The archive
of a folder is a function of the names, contents and executable bits of its files alone, so that
the same folder is the same object on every machine and at every time.

Files and folders whose name starts with "." and `__pycache__` are left out. Symbolic links and
special files are refused by name: what they point at may differ where the archive is unpacked.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import stat
import tarfile
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final, Protocol

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.core.errors import DomainError, ErrorReason

MAX_BUNDLE_BYTES: Final = 1 << 30
"""Largest sum of file sizes that is packed or unpacked."""

MAX_BUNDLE_FILES: Final = 100_000
"""Most files in one archive."""

_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedFolder:
    """A folder that was packed.

    Attributes:
        archive: The tar file.
        content_hash: What `folder_hash` gives for the folder.
        num_files: Files in it.
        size_bytes: Sum of their sizes.
    """

    archive: Path
    content_hash: str
    num_files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    path: Path
    size_bytes: int
    executable: bool


class ObjectReader(Protocol):
    """The part of the store's client that `materialise` needs."""

    async def download_object(self, key: str, path: Path) -> common_pb2.ObjectRef:
        """Download an object into a file and return its reference."""
        ...


def folder_hash(
    folder: Path,
    *,
    exclude: Collection[Path] = (),
    max_bytes: int | None = None,
    follow_links: bool = False,
) -> str:
    """Hash of names, contents and executable bits of a folder's files: "sha256:<hex>".

    Args:
        folder: Folder to read.
        exclude: Files and folders in it to leave out, such as the output of earlier runs.
        max_bytes: Largest sum of file sizes; None: unlimited (models that travel by path only).
        follow_links: Take links to files for the files, as the folders of Hugging Face's cache need
            it; a package of code must not reach out of its folder.

    Raises:
        DomainError: INVALID_ARGUMENT naming the file: a link, a special file, or too large.
    """
    digest = hashlib.sha256()
    found = _entries(folder, exclude=exclude, max_bytes=max_bytes, follow_links=follow_links)
    for entry in found:
        _hash_entry(digest, entry)
    return f"sha256:{digest.hexdigest()}"


def folder_size(
    folder: Path,
    *,
    exclude: Collection[Path] = (),
    max_bytes: int | None = None,
    follow_links: bool = False,
) -> int:
    """Sum of the sizes of the files that would be packed, bytes; reads none of them.

    Raises:
        DomainError: See `folder_hash`.
    """
    found = _entries(folder, exclude=exclude, max_bytes=max_bytes, follow_links=follow_links)
    return sum(entry.size_bytes for entry in found)


def pack_folder(
    folder: Path,
    archive: Path,
    *,
    exclude: Collection[Path] = (),
    max_bytes: int = MAX_BUNDLE_BYTES,
    follow_links: bool = False,
) -> PackedFolder:
    """Write a folder's archive; equal folders give equal bytes.

    Raises:
        DomainError: See `folder_hash`.
    """
    digest = hashlib.sha256()
    entries = _entries(folder, exclude=exclude, max_bytes=max_bytes, follow_links=follow_links)
    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(archive)
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            for entry in entries:
                _hash_entry(digest, entry)
                with entry.path.open("rb") as file:
                    tar.addfile(_tar_info(entry), file)
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
    return PackedFolder(
        archive=archive,
        content_hash=f"sha256:{digest.hexdigest()}",
        num_files=len(entries),
        size_bytes=sum(entry.size_bytes for entry in entries),
    )


def unpack(archive: Path, folder: Path, *, max_bytes: int = MAX_BUNDLE_BYTES) -> Path:
    """Unpack an archive that came over a wire; the folder appears whole or not at all.

    A folder that is there already is left alone: its name says what is in it.

    Raises:
        DomainError: INVALID_ARGUMENT: not an archive of ours (links, absolute or ".." paths,
            special files), or larger than `max_bytes`.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(folder)
    try:
        temporary.mkdir()
        _extract(archive, temporary, max_bytes=max_bytes)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


async def materialise(
    store: ObjectReader,
    source: common_pb2.ObjectRef | graph_pb2.ModelRef,
    cache_dir: Path,
) -> Path:
    """The folder behind a reference, unpacked once per host.

    A model's own path is taken where a folder of the same hash lies there; else its archive.

    Returns:
        Folder to read; nobody may write in it.

    Raises:
        DomainError: MODEL_INVALID when a model is neither at its path nor in the store;
            CHECKSUM_MISMATCH when the content is not what the reference says.
    """
    if isinstance(source, common_pb2.ObjectRef):
        return await _fetch(store, source, cache_dir / _hex(source.key), expected="")
    local = Path(source.path)
    same = await asyncio.to_thread(_has_hash, local, source.content_hash)
    if same and source.path:
        return local
    if not source.HasField("archive"):
        raise DomainError(
            ErrorReason.MODEL_INVALID,
            f"no model folder of hash {source.content_hash} at {source.path}, and the run stores "
            "no archive of it; copy the folder there",
            {"path": source.path, "content_hash": source.content_hash},
        )
    folder = cache_dir / _hex(source.content_hash)
    return await _fetch(store, source.archive, folder, expected=source.content_hash)


async def _fetch(
    store: ObjectReader, ref: common_pb2.ObjectRef, folder: Path, *, expected: str
) -> Path:
    if await asyncio.to_thread(folder.is_dir):
        return folder
    await asyncio.to_thread(folder.parent.mkdir, parents=True, exist_ok=True)
    archive = _beside(folder)
    try:
        await store.download_object(ref.key, archive)
        await asyncio.to_thread(_check_and_unpack, archive, folder, ref, expected)
    finally:
        archive.unlink(missing_ok=True)
    return folder


def _check_and_unpack(
    archive: Path, folder: Path, ref: common_pb2.ObjectRef, expected: str
) -> None:
    wanted = ref.key if ref.key.startswith("sha256:") else ref.checksum
    if wanted.startswith("sha256:"):
        _must_match(f"object {ref.key}", file_hash(archive), wanted)
    fresh = unpack(archive, _beside(folder))
    try:
        if expected:
            _must_match(f"folder in object {ref.key}", folder_hash(fresh), expected)
        _publish(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def file_hash(path: Path) -> str:
    """Hash of a file's content: "sha256:<hex>", the key of its object."""
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _must_match(what: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise DomainError(
            ErrorReason.CHECKSUM_MISMATCH,
            f"{what} has {found}, not {wanted}",
            {"expected": wanted, "actual": found},
        )


def _has_hash(folder: Path, wanted: str) -> bool:
    try:
        return folder.is_dir() and folder_hash(folder, follow_links=True) == wanted
    except (DomainError, OSError):
        return False


def _entries(
    folder: Path, *, exclude: Collection[Path], max_bytes: int | None, follow_links: bool
) -> list[_Entry]:
    if not folder.is_dir():
        raise _refused(f"{folder}: not a folder", folder)
    left_out = {path.resolve() for path in exclude}
    entries: list[_Entry] = []
    total = 0
    for entry in _walk(folder.resolve(), PurePosixPath(), left_out, follow_links):
        entries.append(entry)
        total += entry.size_bytes
        if max_bytes is not None and total > max_bytes:
            largest = max(entries, key=lambda item: item.size_bytes)
            raise _refused(
                f"{folder}: more than {max_bytes} bytes; the largest file so far is "
                f"{largest.name} with {largest.size_bytes}; move data out of the folder",
                largest.path,
            )
        if len(entries) > MAX_BUNDLE_FILES:
            raise _refused(f"{folder}: more than {MAX_BUNDLE_FILES} files", folder)
    return sorted(entries, key=lambda item: item.name)


def _walk(
    folder: Path, prefix: PurePosixPath, left_out: set[Path], follow_links: bool
) -> Iterator[_Entry]:
    with os.scandir(folder) as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        path = Path(item.path)
        if item.name.startswith(".") or item.name == "__pycache__" or path in left_out:
            continue
        name = prefix / item.name
        # A linked folder is never followed: links to folders may make circles.
        status = item.stat(follow_symlinks=follow_links and item.is_file())
        mode = status.st_mode
        if stat.S_ISDIR(mode):
            yield from _walk(path, name, left_out, follow_links)
        elif stat.S_ISREG(mode):
            yield _Entry(str(name), path, status.st_size, bool(mode & stat.S_IXUSR))
        elif stat.S_ISLNK(mode):
            raise _refused(f"{path}: is a symbolic link; put the file itself there", path)
        else:
            raise _refused(f"{path}: is neither a file nor a folder; move it away", path)


def _hash_entry(digest: hashlib._Hash, entry: _Entry) -> None:
    # Every part is length-prefixed, so that no two folders can give the same stream of bytes.
    name = entry.name.encode("utf-8", "surrogateescape")
    digest.update(len(name).to_bytes(4, "little") + name)
    digest.update(bytes([entry.executable]) + entry.size_bytes.to_bytes(8, "little"))
    seen = 0
    with entry.path.open("rb") as file:
        for chunk in _chunks(file):
            seen += len(chunk)
            digest.update(chunk)
    if seen != entry.size_bytes:
        raise _refused(f"{entry.path}: changed while it was read", entry.path)


def _tar_info(entry: _Entry) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.name)
    info.size = entry.size_bytes
    info.mode = 0o755 if entry.executable else 0o644
    return info  # mtime, uid and gid stay 0, the names empty


def _extract(archive: Path, folder: Path, *, max_bytes: int) -> None:
    total = 0
    try:
        with tarfile.open(archive, "r:") as tar:
            for count, member in enumerate(tar):
                total += member.size
                if total > max_bytes or count >= MAX_BUNDLE_FILES:
                    raise _refused(f"{archive}: unpacks to more than {max_bytes} bytes", archive)
                _extract_member(tar, member, folder)
    except tarfile.TarError as error:
        raise _refused(f"{archive}: not a tar archive: {error}", archive) from None


def _extract_member(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or not name.parts or "\0" in member.name:
        raise _refused(f"archive member {member.name!r}: leads out of the folder", folder)
    if not member.isreg():
        raise _refused(f"archive member {member.name!r}: not a regular file", folder)
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None, "a regular member has content"
    # "x": a name that comes twice would overwrite what was checked before.
    with source, _create(target, member.name) as file:
        shutil.copyfileobj(source, file, _CHUNK_BYTES)
    target.chmod(0o755 if member.mode & stat.S_IXUSR else 0o644)


def _create(target: Path, name: str) -> BinaryIO:
    try:
        return target.open("xb")
    except OSError as error:
        raise _refused(f"archive member {name!r}: {error.strerror}", target) from None


def _publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else somebody else was faster, with the same content
            raise


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _hex(key: str) -> str:
    """File name for a key: the digest, or the digest of a key that is none."""
    algorithm, _, digest = key.partition(":")
    if algorithm == "sha256" and len(digest) == 64 and digest.isalnum():
        return digest
    return hashlib.sha256(key.encode()).hexdigest()


def _refused(message: str, path: Path) -> DomainError:
    return DomainError(ErrorReason.INVALID_ARGUMENT, message, {"path": str(path)})
