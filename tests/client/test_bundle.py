"""Bundles: the same folder is the same object; a hostile archive writes nothing."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from flexmarl.api.common.v1 import common_pb2
from flexmarl.api.meg_store.v1 import graph_pb2
from flexmarl.client.bundle import (
    file_hash,
    folder_hash,
    folder_size,
    materialise,
    pack_folder,
    unpack,
)
from flexmarl.core.errors import DomainError, ErrorReason


class FolderOfObjects:
    """Objects by key, as the store would give them."""

    def __init__(self, objects: dict[str, Path]) -> None:
        self.objects = objects
        self.downloads = 0

    async def download_object(self, key: str, path: Path) -> common_pb2.ObjectRef:
        self.downloads += 1
        data = self.objects[key].read_bytes()
        path.write_bytes(data)  # noqa: ASYNC240
        return common_pb2.ObjectRef(key=key, size_bytes=len(data))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    (folder / "team" / "__pycache__").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "team" / "flow.py").write_text("async def team(ctx, query): ...\n")
    (folder / "team" / "ä.txt").write_text("umlaut")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "team" / "__pycache__" / "flow.pyc").write_bytes(b"junk")
    (folder / ".git" / "HEAD").write_text("ref")
    return folder


def archive_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_the_archive_depends_on_names_and_contents_alone(package: Path, tmp_path: Path):
    first = pack_folder(package, tmp_path / "a.tar")
    os.utime(package / "team" / "flow.py", (1, 1))
    (package / "team" / "__pycache__" / "other.pyc").write_bytes(b"more junk")
    second = pack_folder(package, tmp_path / "b.tar")
    assert first.archive.read_bytes() == second.archive.read_bytes()
    assert first.content_hash == second.content_hash == folder_hash(package)
    assert first.num_files == 3


@pytest.mark.parametrize("change", ["content", "name", "mode"])
def test_a_changed_file_is_another_folder(package: Path, change: str):
    before = folder_hash(package)
    match change:
        case "content":
            (package / "run.sh").write_text("#!/bin/bash\n")
        case "name":
            (package / "run.sh").rename(package / "go.sh")
        case "mode":
            (package / "run.sh").chmod(0o644)
    assert folder_hash(package) != before


def test_names_and_contents_do_not_run_into_each_other(tmp_path: Path):
    for name, files in {"one": {"a": "bc"}, "two": {"ab": "c"}}.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    assert folder_hash(tmp_path / "one") != folder_hash(tmp_path / "two")


def test_unpacked_is_what_was_packed(package: Path, tmp_path: Path):
    packed = pack_folder(package, tmp_path / "a.tar")
    folder = unpack(packed.archive, tmp_path / "cache" / "x")
    assert folder_hash(folder) == packed.content_hash
    assert (folder / "run.sh").stat().st_mode & 0o100
    assert not (folder / ".git").exists()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["x"]


def test_links_are_refused_by_name(package: Path):
    (package / "team" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(DomainError, match=r"team/secret: is a symbolic link") as caught:
        folder_hash(package)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_a_linked_folder_is_refused_by_name(package: Path, tmp_path: Path):
    (package / "data").symlink_to(tmp_path)
    with pytest.raises(DomainError, match=r"data: is a symbolic link"):
        folder_hash(package)


def test_a_models_links_to_files_are_the_files(tmp_path: Path):
    # Hugging Face's cache keeps a model's files elsewhere and links to them.
    blobs, plain, linked = (tmp_path / name for name in ("blobs", "plain", "linked"))
    for folder in (blobs, plain, linked):
        folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (plain / name).write_text(name)
        (blobs / name).write_text(name)
        (linked / name).symlink_to(Path("..") / "blobs" / name)
    assert folder_hash(linked, follow_links=True) == folder_hash(plain)
    packed = pack_folder(linked, tmp_path / "model.tar", follow_links=True)
    assert folder_hash(unpack(packed.archive, tmp_path / "out")) == folder_hash(plain)
    assert folder_size(linked, follow_links=True) == folder_size(plain)
    (linked / "circle").symlink_to(linked)
    with pytest.raises(DomainError, match="circle: is a symbolic link"):
        folder_hash(linked, follow_links=True)
    (linked / "circle").unlink()
    (linked / "gone").symlink_to("nowhere")
    with pytest.raises(DomainError, match="gone: is a symbolic link"):
        folder_size(linked, follow_links=True)


def test_special_files_are_refused_by_name(package: Path):
    os.mkfifo(package / "pipe")
    with pytest.raises(DomainError, match=r"pipe: is neither"):
        folder_hash(package)


def test_too_large_names_the_largest_file(package: Path, tmp_path: Path):
    (package / "big.bin").write_bytes(bytes(5000))
    with pytest.raises(DomainError, match=r"more than 4096 bytes.*big\.bin with 5000"):
        pack_folder(package, tmp_path / "a.tar", max_bytes=4096)
    assert not list(tmp_path.glob("*.tar"))


def test_excluded_paths_are_left_out(package: Path, tmp_path: Path):
    before = folder_hash(package)
    (package / "runs").mkdir()
    (package / "runs" / "weights").write_bytes(b"w")
    assert folder_hash(package, exclude=[package / "runs"]) == before


def test_a_missing_folder_is_said_plainly(tmp_path: Path):
    with pytest.raises(DomainError, match="not a folder"):
        folder_hash(tmp_path / "none")


@pytest.mark.parametrize("name", ["/etc/evil", "../evil", "a/../../evil"])
def test_paths_out_of_the_folder_are_refused(tmp_path: Path, name: str):
    archive = archive_of(tmp_path / "a.tar", (tarfile.TarInfo(name), b"evil"))
    with pytest.raises(DomainError, match="leads out of the folder"):
        unpack(archive, tmp_path / "in" / "x")
    assert list((tmp_path / "in").iterdir()) == []
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_an_archive_are_refused(tmp_path: Path, kind: bytes):
    info = tarfile.TarInfo("x")
    info.type = kind
    info.linkname = "/etc/passwd"
    with pytest.raises(DomainError, match="not a regular file"):
        unpack(archive_of(tmp_path / "a.tar", (info, b"")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_unpacked_size_is_bounded(tmp_path: Path):
    archive = archive_of(tmp_path / "a.tar", (tarfile.TarInfo("x"), bytes(5000)))
    with pytest.raises(DomainError, match="more than 4096 bytes"):
        unpack(archive, tmp_path / "out", max_bytes=4096)
    assert not (tmp_path / "out").exists()


def test_the_same_name_twice_is_refused(tmp_path: Path):
    archive = archive_of(
        tmp_path / "a.tar", (tarfile.TarInfo("x"), b"1"), (tarfile.TarInfo("x"), b"2")
    )
    with pytest.raises(DomainError, match="'x'"):
        unpack(archive, tmp_path / "out")


def test_garbage_is_not_an_archive(tmp_path: Path):
    (tmp_path / "a.tar").write_bytes(b"x" * 2000)
    with pytest.raises(DomainError, match="not a tar archive"):
        unpack(tmp_path / "a.tar", tmp_path / "out")


async def test_an_object_is_fetched_once(package: Path, tmp_path: Path):
    packed = pack_folder(package, tmp_path / "a.tar")
    ref = common_pb2.ObjectRef(key=file_hash(packed.archive))
    store = FolderOfObjects({ref.key: packed.archive})
    folder = await materialise(store, ref, tmp_path / "cache")
    assert await materialise(store, ref, tmp_path / "cache") == folder
    assert store.downloads == 1
    assert folder_hash(folder) == packed.content_hash
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


async def test_a_broken_object_leaves_nothing(package: Path, tmp_path: Path):
    packed = pack_folder(package, tmp_path / "a.tar")
    ref = common_pb2.ObjectRef(key="sha256:" + "0" * 64)
    store = FolderOfObjects({ref.key: packed.archive})
    with pytest.raises(DomainError, match="CHECKSUM_MISMATCH"):
        await materialise(store, ref, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


async def test_a_model_is_taken_from_its_path_only_when_it_is_the_same(
    package: Path, tmp_path: Path
):
    packed = pack_folder(package, tmp_path / "a.tar")
    key = file_hash(packed.archive)
    model = graph_pb2.ModelRef(
        path=str(package),
        content_hash=packed.content_hash,
        archive=common_pb2.ObjectRef(key=key),
    )
    store = FolderOfObjects({key: packed.archive})
    assert await materialise(store, model, tmp_path / "cache") == package
    (package / "run.sh").write_text("changed")
    folder = await materialise(store, model, tmp_path / "cache")
    assert folder != package
    assert folder_hash(folder) == packed.content_hash


async def test_an_archive_of_another_folder_is_refused(package: Path, tmp_path: Path):
    packed = pack_folder(package, tmp_path / "a.tar")
    key = file_hash(packed.archive)
    model = graph_pb2.ModelRef(
        content_hash="sha256:" + "1" * 64, archive=common_pb2.ObjectRef(key=key)
    )
    with pytest.raises(DomainError, match="CHECKSUM_MISMATCH"):
        await materialise(FolderOfObjects({key: packed.archive}), model, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


async def test_a_model_that_is_nowhere_is_named(tmp_path: Path):
    model = graph_pb2.ModelRef(path=str(tmp_path / "gone"), content_hash="sha256:" + "1" * 64)
    with pytest.raises(DomainError, match=r"gone.*copy the folder there"):
        await materialise(FolderOfObjects({}), model, tmp_path / "cache")
