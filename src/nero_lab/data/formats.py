"""Readers of the published formats: bytes in, tensors out, and an error for what is malformed."""

import gzip
import io
import math
import struct
import tarfile
import zlib
from collections.abc import Collection

import torch
from torch import Tensor

from nero_lab.data.errors import DataError

CLASSES = 10
MNIST_SHAPE = (28, 28)
CIFAR10_SHAPE = (3, 32, 32)


def mnist_images(content: bytes, source: str) -> Tensor:
    """The images of one of MNIST's files, as uint8 (N, 1, 28, 28)."""
    images = _idx(content, 3, source)
    if tuple(images.shape[1:]) != MNIST_SHAPE:
        raise _malformed(source, f"its images are {images.shape[1]} x {images.shape[2]}, where MNIST's are 28 x 28")
    return images.unsqueeze(1)


def mnist_labels(content: bytes, source: str) -> Tensor:
    """The labels of one of MNIST's files, as int64 (N,)."""
    return _labels(_idx(content, 1, source), source)


def cifar10_batch(content: bytes, source: str) -> tuple[Tensor, Tensor]:
    """The images, as uint8 (N, 3, 32, 32), and labels, as int64 (N,), of one of CIFAR-10's binary batches."""
    row = 1 + math.prod(CIFAR10_SHAPE)
    if not content or len(content) % row:
        raise _malformed(source, f"its {len(content):,} bytes are not one or more rows of {row:,}")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, row)
    return rows[:, 1:].reshape(-1, *CIFAR10_SHAPE), _labels(rows[:, 0], source)


def gunzip(content: bytes, source: str) -> bytes:
    """What a gzip file holds."""
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _malformed(source, f"it does not unpack ({error})") from error


def untar(content: bytes, wanted: Collection[str], source: str) -> dict[str, bytes]:
    """The wanted files of a gzipped archive, in memory, by their names in it; of the rest nothing is read."""
    found = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for member in archive:  # in the archive's order: going back would unpack it again from the start
                file = archive.extractfile(member) if member.name in wanted and member.isfile() else None
                if file is not None:
                    found[member.name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _malformed(source, f"it does not unpack ({error})") from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise _malformed(source, f"it does not hold {', '.join(missing)}")
    return found


def lines(content: bytes, source: str) -> list[str]:
    """The lines of a text in UTF-8; they end with a newline, and with no other sign that may end a line."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not UTF-8: byte {error.start:,} is {content[error.start]:#x}. Save it as UTF-8, "
            "or put a good copy in its place"
        ) from error
    return text.removesuffix("\n").split("\n") if text else []


def _idx(content: bytes, axes: int, source: str) -> Tensor:
    """The bytes of an IDX file: two zeros, 8 for unsigned bytes, how many axes, their lengths, the bytes."""
    start = 4 + 4 * axes
    if content[:4] != bytes([0, 0, 8, axes]) or len(content) < start:
        begin = content[:4].hex(" ") or "nothing"
        raise _malformed(source, f"it begins with {begin} and not with 00 00 08 0{axes} and {axes} lengths")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if math.prod(shape) != len(content) - start or not math.prod(shape):
        said = " x ".join(map(str, shape))
        raise _malformed(source, f"it says that it holds {said} bytes, and holds {len(content) - start:,}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)


def _labels(labels: Tensor, source: str) -> Tensor:
    largest = int(labels.max())
    if largest >= CLASSES:
        raise _malformed(source, f"it has a label {largest}, where labels run from 0 to {CLASSES - 1}")
    return labels.long()


def _malformed(source: str, what: str) -> DataError:
    return DataError(f"{source} is malformed: {what}. Delete it and run again, to have the data brought anew")
