"""The folder that data sets lie in: which it is, what is in it, and what has to be brought."""

import os
from functools import cached_property
from pathlib import Path

from nero_lab.data import sources
from nero_lab.data.download import Progress, digest, download
from nero_lab.data.errors import DataError


class Folder:
    """Where the files of one data set lie, or are to lie.

    Args:
        dataset: its name.
        named: the folder the user asked for; None: $NERO_DATA, else nero's own in the user's cache.
        progress: told of what takes long.
    """

    def __init__(self, dataset: str, named: Path | None, progress: Progress | None) -> None:
        self.dataset, self.named, self.progress = dataset, named, progress

    @cached_property
    def path(self) -> Path:
        """The folder itself, which must exist if it was named; a game never asks."""
        return _chosen(self.named, "make it, to download into it, or " if self.dataset in sources.HOMES else "")

    def find(self, *names: str) -> Path | None:
        """The first of the files that is there, in the data set's own folder or directly in the user's.

        Not there if the name could be that of anything.
        """
        own = self.path / sources.FOLDERS[self.dataset]
        folders = (own,) if self.dataset in sources.PLAIN_NAMES else (own, self.path)
        paths = (folder / name for folder in folders for name in names)
        return next((path for path in paths if path.is_file()), None)

    def bring(self, name: str, into: str, all_of_it: tuple[str, ...]) -> Path:
        """Download a file.

        Args:
            name: what it is called, where it is published and here.
            into: where in this folder to put it.
            all_of_it: the files to bring by hand if that fails.
        """
        path = self.path / into / name
        otherwise = (
            f"Without a network, put {', '.join(all_of_it)} into {path.parent} by hand and run again, "
            "or name a folder that has them with --data or $NERO_DATA"
        )
        urls = [home + name for home in sources.HOMES[self.dataset]]
        download(urls, path, sources.FILES[name], self.progress, otherwise)
        return path


def read(path: Path) -> bytes:
    """The content of a file that is what it should be."""
    return checked(path.read_bytes(), path.name, str(path))


def checked(content: bytes, name: str, source: str) -> bytes:
    """The content as it is, if it has the checksum of the file of that name."""
    if not intact(content, name):
        raise DataError(
            f"{source} is broken or incomplete: it has {len(content):,} bytes, and not the checksum "
            f"{sources.FILES[name]}. Delete it and run again, to have the data brought anew"
        )
    return content


def intact(content: bytes, name: str) -> bool:
    """Whether a content has the checksum of the file of that name."""
    seen = digest(sources.FILES[name])
    seen.update(content)
    return seen.hexdigest() == sources.FILES[name].partition(":")[2]


def _chosen(named: Path | None, otherwise: str) -> Path:
    if named is not None:
        return _existing(Path(named).expanduser(), "that was asked for", otherwise)
    if variable := os.environ.get("NERO_DATA"):
        return _existing(Path(variable).expanduser(), "that $NERO_DATA names", otherwise)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the standard says to ignore one that is not absolute
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "nero"


def _existing(path: Path, which: str, otherwise: str) -> Path:
    if not path.is_dir():
        what = "is no folder" if path.exists() else "does not exist"
        raise DataError(f"the data folder {path}, {which}, {what}: {otherwise}name another")
    return path
