"""Files between processes: a written file is complete or stays as it was, and a locked one has one holder."""

import errno
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

#: Ending of a file that is still being written.
PART_SUFFIX = ".part"
#: A disk with less free space counts as full, whatever the error says.
MIN_FREE_BYTES = 2**20


@contextmanager
def replacing(path: Path, *, raises: type[Exception], remedy: str) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to ``path`` if the block succeeds.

    Creates the folder of ``path``. If the block fails, the temporary file is removed and ``path`` is unchanged.

    Args:
        path: the file to create or replace.
        raises: the exception type for a disk that does not accept the file.
        remedy: the end of that exception's message, after "fix that" or "make room".
    """
    part = path.with_name(f"{path.name}.{os.getpid()}{PART_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())  # before the rename, so that a power cut cannot leave an empty file
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        # torch.save hides an interrupt, and the disk's own error, behind a RuntimeError
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt(*error.__context__.args) from None
        if isinstance(error, raises) or not isinstance(error, OSError | RuntimeError):
            raise
        raise raises(f"cannot write {path}: {_reason(error, path)}, {remedy}") from error


def _reason(error: Exception, path: Path) -> str:
    """Describe a failed write and what to do about it."""
    hidden = error.__context__
    cause = hidden if isinstance(hidden, OSError) and not isinstance(error, OSError) else error
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    is_full = getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if is_full or shutil.disk_usage(folder).free < MIN_FREE_BYTES:
        return "the disk is full; make room"
    return f"{cause}; fix that"


def lock(path: Path) -> int:
    """Create a file that holds a lock until :func:`unlock` or the end of this process, and return its descriptor.

    Locks nothing on Windows, nor on a file system without locks.

    Raises:
        BlockingIOError: if another process holds the lock; the message names it.
        OSError: if the file cannot be made.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT)
        except PermissionError:  # left by another user
            file = os.open(path, os.O_RDONLY)
        if sys.platform == "win32":
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the second on SMB
            holder = os.pread(file, 200, 0).decode(errors="replace")
            os.close(file)
            raise BlockingIOError(holder or "another process") from None
        except OSError:
            pass  # a file system without locks
        if _is_at(path, file):
            break
        os.close(file)  # its last holder has just removed it
    with suppress(OSError):  # of another user
        os.truncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return file


def unlock(path: Path, file: int) -> None:
    """Remove a file that this process has locked, and end the lock."""
    if _is_at(path, file):  # else somebody has removed it, and another process may hold a new one
        with suppress(OSError):
            path.unlink()
    os.close(file)


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False
