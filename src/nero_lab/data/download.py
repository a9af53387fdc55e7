"""Bring a file from where it is published: whole and checked, or not at all."""

import hashlib
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, TypeAlias

from nero_lab import atomic
from nero_lab.data.errors import DataError

#: Told, as work on a file goes on: what is done, such as "downloading train.txt", how many bytes of it are done, and of
#: how many (0 where a server does not say).
Progress: TypeAlias = Callable[[str, int, int], None]

#: How long, in seconds, a server may be silent.
TIMEOUT = 30.0
#: How often each home is tried, in turn.
ROUNDS = 2
PIECE = 1 << 18

#: Write a data file atomically: yields a temporary path, renamed to the given one at the end.
replacing = partial(atomic.replacing, raises=DataError, remedy="or choose another folder by --data or $NERO_DATA")


class _HomeError(Exception):
    """A home did not give the file; not an OSError, which here is the disk's."""


class _Piece(NamedTuple):
    content: bytes
    done: int
    total: int


def digest(checksum: str) -> "hashlib._Hash":
    """An empty digest of the kind that a checksum such as "sha256:440f..." names."""
    return hashlib.new(checksum.partition(":")[0], usedforsecurity=False)


def download(urls: Sequence[str], path: Path, checksum: str, progress: Progress | None, otherwise: str) -> None:
    """Write a file, from the first of the homes that gives it whole.

    Args:
        urls: where it is published, the first choice first.
        path: where to write it; its folder is made if need be.
        checksum: what must come, as "sha256:..." or "md5:...".
        progress: told as bytes arrive.
        otherwise: what a person can do if nobody gives the file, for the error.
    """
    failures = []
    with replacing(path) as part:
        for url in [*urls] * ROUNDS:
            try:
                _bring(url, part, checksum, partial(progress, f"downloading {path.name}") if progress else None)
            except _HomeError as error:
                failures.append(f"{url}: {error}")
            else:
                return
        tried = "\n".join(f"  {failure}" for failure in dict.fromkeys(failures)) or "  no home of it is known"
        raise DataError(f"could not download {path.name}; this was tried:\n{tried}\n{otherwise}")


def _bring(url: str, part: Path, checksum: str, progress: Callable[[int, int], None] | None) -> None:
    seen = digest(checksum)
    with closing(_pieces(url)) as pieces, part.open("wb") as file:
        for piece in pieces:
            file.write(piece.content)
            seen.update(piece.content)
            if progress is not None:
                progress(piece.done, piece.total)
    if seen.hexdigest() != checksum.partition(":")[2]:
        raise _HomeError(f"what came is not the file, by its checksum ({checksum} is wanted)")


def _pieces(url: str) -> Generator[_Piece, None, None]:
    """A file as it arrives; a first piece, of nothing, as soon as there is an answer."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            done, total = 0, int(response.headers.get("Content-Length") or 0)
            yield _Piece(b"", done, total)
            while content := response.read(PIECE):
                done += len(content)
                yield _Piece(content, done, total)
    except (OSError, HTTPException, ValueError) as error:
        raise _HomeError(str(error) or type(error).__name__) from error
    if done < total:
        raise _HomeError(f"broke off after {done:,} of {total:,} bytes")
