"""Downloads over https that are verified by checksum and never leave a partial file."""

import hashlib
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cache, partial
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, TypeAlias

from nero_lab import atomic
from nero_lab.data import sources
from nero_lab.data.dataset import DataError

#: Called with an activity such as "downloading train.txt", the bytes done, and the total bytes (0 if unknown).
Progress: TypeAlias = Callable[[str, int, int], None]

#: Seconds without an answer after which a server counts as unreachable.
TIMEOUT_S = 30.0
#: Attempts per mirror.
ATTEMPTS = 2
CHUNK_BYTES = 1 << 18

#: Write a data file atomically: yields a temporary path, renamed to the given one at the end.
replacing = partial(atomic.replacing, raises=DataError, remedy="or choose another folder by --data or $NERO_DATA")


class _MirrorError(Exception):
    """A mirror that did not deliver the file. Not an OSError, which here means the local disk."""


class _Chunk(NamedTuple):
    content: bytes
    done: int
    total: int


def new_hash(checksum: str) -> "hashlib._Hash":
    """Return an empty hash of the algorithm that a checksum such as "sha256:440f..." names."""
    return hashlib.new(checksum.partition(":")[0], usedforsecurity=False)


@cache
def opener() -> urllib.request.OpenerDirector:
    """Return what opens addresses: https alone, also where a server redirects to another address."""
    made = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,  # raises for http, ftp and file
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        made.add_handler(handler())
    return made


def download(urls: Sequence[str], path: Path, checksum: str | None, progress: Progress | None, remedy: str) -> None:
    """Download a file from the first mirror that delivers it intact.

    Args:
        urls: addresses of the file, the preferred one first.
        path: where to write it; its folder is created.
        checksum: the expected checksum, as "sha256:..." or "md5:..."; None if the caller verifies the content.
        progress: called as bytes arrive.
        remedy: advice if every mirror fails, without a full stop.

    Raises:
        DataError: if every mirror fails, or the disk does.
    """
    failures = []
    with replacing(path) as part:
        for url in [*urls] * ATTEMPTS:
            try:
                _fetch(url, part, checksum, partial(progress, f"downloading {path.name}") if progress else None)
            except _MirrorError as error:  # noqa: PERF203
                failures.append(f"{url}: {error}")
            else:
                return
        tried = "\n".join(f"  {failure}" for failure in dict.fromkeys(failures)) or "  no mirror is known"
        raise DataError(f"could not download {path.name}. {remedy}. Tried:\n{tried}")


def _fetch(url: str, part: Path, checksum: str | None, progress: Callable[[int, int], None] | None) -> None:
    received = new_hash(checksum or "sha256")
    with closing(_chunks(url)) as chunks, part.open("wb") as file:
        for chunk in chunks:
            file.write(chunk.content)
            received.update(chunk.content)
            if progress is not None:
                progress(chunk.done, chunk.total)
    if checksum is not None and received.hexdigest() != checksum.partition(":")[2]:
        raise _MirrorError(f"the checksum must be {checksum}, got {received.hexdigest()}")


def _chunks(url: str) -> Generator[_Chunk, None, None]:
    """Yield the chunks of a file as they arrive, after an empty one when the server answers."""
    try:
        with opener().open(url, timeout=TIMEOUT_S) as response:
            done, total = 0, int(response.headers.get("Content-Length") or 0)
            yield _Chunk(b"", done, total)
            while content := response.read(CHUNK_BYTES):
                done += len(content)
                if done > sources.MAX_FILE_BYTES:
                    raise _MirrorError(f"has more than {sources.MAX_FILE_BYTES:,} bytes")
                yield _Chunk(content, done, total)
    except (OSError, HTTPException, ValueError) as error:
        raise _MirrorError(str(error) or type(error).__name__) from error
    if done < total:
        raise _MirrorError(f"broke off after {done:,} of {total:,} bytes")
