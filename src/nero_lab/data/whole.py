"""Files that are written whole, or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nero_lab.data.errors import DataError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Another name to write a file by, whose folder is made; it gets its own at the end, if all went well.

    Raises:
        DataError: if the disk does not take it.
    """
    # the name counts for nothing, and no two processes share it, so neither half a file nor a rival does harm
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except OSError as error:
        raise _disk(error, path) from error
    finally:
        with suppress(OSError):  # whatever is the matter with it has been said
            part.unlink(missing_ok=True)


def _disk(error: OSError, path: Path) -> DataError:
    elsewhere = "name another folder with --data or $NERO_DATA"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DataError(f"the disk is full: {path.parent} has no room for {path.name}; make some, or {elsewhere}")
    return DataError(f"{path} cannot be written ({error}): give yourself the right to, or {elsewhere}")
