"""Parsers of the published file formats: bytes in, whose checksums were verified, and tensors out."""

import gzip
import io
import math
import tarfile
import zlib
from collections.abc import Collection
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nero_lab.data import sources
from nero_lab.data.dataset import DataError

#: Bytes before the first image, and before the first label, in MNIST's files.
MNIST_IMAGES_START, MNIST_LABELS_START = 16, 8
CIFAR10_SHAPE = (3, 32, 32)


def mnist_images(content: bytes) -> Tensor:
    """Parse a file of MNIST images into uint8 (N, 1, 28, 28)."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=MNIST_IMAGES_START).view(-1, 1, 28, 28)


def mnist_labels(content: bytes) -> Tensor:
    """Parse a file of MNIST labels into int64 (N,)."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=MNIST_LABELS_START).long()


def cifar10_batch(content: bytes) -> tuple[Tensor, Tensor]:
    """Parse a binary batch of CIFAR-10 into images, uint8 (N, 3, 32, 32), and labels, int64 (N,)."""
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, 1 + math.prod(CIFAR10_SHAPE))
    return rows[:, 1:].reshape(-1, *CIFAR10_SHAPE), rows[:, 0].long()


class Unpacked:
    """The unpacked bytes of a gzip file, to be read from start to end.

    Reading more than :data:`sources.MAX_FILE_BYTES` raises an OSError, so that no small file can fill the memory.
    """

    def __init__(self, packed: BinaryIO) -> None:
        self._file, self._left = gzip.GzipFile(fileobj=packed), sources.MAX_FILE_BYTES

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most ``size``; none at the end."""
        content = self._file.read(min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise OSError(f"it has more than {sources.MAX_FILE_BYTES:,} bytes")
        return content


def gunzip(content: bytes, source: str) -> bytes:
    """Decompress a gzip file."""
    try:
        return Unpacked(io.BytesIO(content)).read(sources.MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _malformed(source, f"it does not unpack ({error})") from error


def open_tar(packed: BinaryIO) -> tarfile.TarFile:
    """Open a gzipped tar archive, whose members are read in their order."""
    unpacked: Any = Unpacked(packed)  # has all that tarfile needs of a stream
    return tarfile.open(fileobj=unpacked, mode="r|")


def untar(content: bytes, wanted: Collection[str], source: str) -> dict[str, bytes]:
    """Read the wanted members of a gzipped tar archive in memory; return their contents by name."""
    contents = {}
    try:
        with open_tar(io.BytesIO(content)) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.name in wanted and member.isfile() else None
                if file is not None:
                    contents[member.name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _malformed(source, f"it does not unpack ({error})") from error
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise _malformed(source, f"it does not hold {', '.join(missing)}")
    return contents


def lines(content: bytes, source: str) -> list[str]:
    r"""Split UTF-8 text at newlines. Unlike ``str.splitlines``, split at ``\n`` only."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8: byte {error.start:,} is {content[error.start]:#x}. Save it as UTF-8, "
            "or replace it by an intact copy"
        ) from error
    return text.removesuffix("\n").split("\n") if text else []


def _malformed(source: str, fault: str) -> DataError:
    return DataError(f"{source} is malformed: {fault}. Delete it and run again, to download it anew")
