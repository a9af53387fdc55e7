"""Atomic writes: a failed write leaves the old file and explains itself."""

import errno
import os
from io import BytesIO
from pathlib import Path

import pytest
import torch

from nero_lab import atomic
from nero_lab.store import StoreError, write_atomically


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a" / "file"
    write_atomically(path, lambda file: file.write(b"first"))

    def write_half(file):
        file.write(b"hal")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreError, match=r"the disk is full; make room"):
        write_atomically(path, write_half)
    assert path.read_bytes() == b"first"
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, lambda file: file.write(b"second"))
    assert [file.name for file in path.parent.iterdir()] == ["file"]
    assert path.read_bytes() == b"first"


def test_error_of_the_given_type_passes_unchanged(tmp_path):
    def write():
        with atomic.replacing(tmp_path / "file", raises=StoreError, remedy="wait") as part:
            part.write_bytes(b"bad")
            raise StoreError("checksum differs")

    with pytest.raises(StoreError, match=r"^checksum differs$"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "the disk is full; make room"),
        (errno.EDQUOT, "the disk is full; make room"),
        (errno.EFBIG, "File too large; fix that"),
    ],
)
def test_disk_error_behind_torch_save_is_reported(number, reason, tmp_path, monkeypatch):
    """torch.save raises its own error when it closes the file, after the disk's."""

    class FullDisk(BytesIO):
        def write(self, content):
            if self.tell() > 2**16:
                raise OSError(number, os.strerror(number))
            return super().write(content)

    def open_full(path, *_):
        path.touch()
        return FullDisk()

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(StoreError, match=rf"cannot write .*{reason}, then run the same command again"):
        write_atomically(tmp_path / "file", lambda file: torch.save({"weights": torch.zeros(2**16)}, file))
    assert list(tmp_path.iterdir()) == []


def test_disk_error_behind_mkdir_is_reported(tmp_path, monkeypatch):
    """Path.mkdir creates missing parents after a first error; the second error is the one to report."""
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"cannot write .*File exists: .*/link'"):
        write_atomically(tmp_path / "link/task/file", lambda file: file.write(b"content"))

    def mkdir(path):
        number = errno.ENOENT if str(path).endswith("task") else errno.EDQUOT
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", lambda path, *_: mkdir(path))
    with pytest.raises(StoreError, match="the disk is full; make room"):
        write_atomically(tmp_path / "new/task/file", lambda file: file.write(b"content"))


def test_interrupt_behind_torch_save_is_raised(tmp_path):
    def write(_):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos 1 vs 2")  # torch's writer raises this when it closes

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", write)
    assert list(tmp_path.iterdir()) == []
