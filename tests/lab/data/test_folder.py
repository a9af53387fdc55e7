"""The data folder: its place, and damaged files in it."""

import errno
from pathlib import Path

import pytest
from lab.data_cases import CIFAR10, MNIST, archive_of, tiny_cifar10, tiny_mnist

from nero_lab.data import FILES, DataError, load, sources


def test_load_unknown_name_lists_the_known():
    with pytest.raises(DataError, match=r"unknown data set 'svhn'.*mnist, cifar10"):
        load("svhn")


def test_folder_named_but_missing_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError, match=r"the data folder .*nowhere does not exist: create it"):
        load("mnist", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"nowhere does not exist: name another$"):
        load("imagenet", tmp_path / "nowhere")  # cannot be downloaded
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a folder"):
        load("mnist", tmp_path / "file")
    monkeypatch.setenv("NERO_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"of \$NERO_DATA, .*nowhere does not exist"):
        load("mnist")


def test_folder_default_follows_argument_variable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error of a failed download names the folder."""

    def assert_folder(folder: Path, argument: Path | None = None) -> None:
        with pytest.raises(DataError, match=f"put train-images.* into {folder}/mnist by hand"):
            load("mnist", argument)

    monkeypatch.setenv("HOME", str(tmp_path))
    assert_folder(tmp_path / ".cache/nero")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert_folder(tmp_path / ".cache/nero")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert_folder(tmp_path / "xdg/nero")
    for name in ("variable", "argument"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("NERO_DATA", "~/variable")
    assert_folder(tmp_path / "variable")
    assert_folder(tmp_path / "argument", tmp_path / "argument")


def test_file_without_permission_is_named(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch):
    path = put(tmp_path / f"{MNIST[0]}.gz", b"...")

    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=f"cannot read the data.*{path}"):
        load("mnist", tmp_path)


def test_mnist_damaged_file_is_named(tmp_path: Path, put):
    contents, _, _ = tiny_mnist()
    paths = [put(tmp_path / "mnist" / name, content) for name, content in contents.items()]
    paths[1].write_bytes(contents[MNIST[1]][:-1])
    with pytest.raises(DataError, match=f"{paths[1]} is damaged or incomplete.*Delete it and run again"):
        load("mnist", tmp_path)


def test_cifar10_damaged_file_is_named(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch):
    contents, _, _ = tiny_cifar10()
    paths = [put(tmp_path / name, content) for name, content in contents.items()]
    paths[4].write_bytes(b"?" + contents[CIFAR10[4]][1:])
    with pytest.raises(DataError, match=f"{paths[4]} is damaged or incomplete.*Delete it and run again"):
        load("cifar10", tmp_path)
    paths[4].unlink()
    path = put(tmp_path / sources.CIFAR10_ARCHIVE, archive_of(contents))
    monkeypatch.setitem(FILES, CIFAR10[4], "sha256:0")
    with pytest.raises(DataError, match=rf"{path} \(member .*{CIFAR10[4]}\) is damaged or incomplete"):
        load("cifar10", tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=f"{path} is damaged or incomplete.*md5:"):
        load("cifar10", tmp_path)
