"""Atomic file writes: a file is complete, or it stays as it was."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
