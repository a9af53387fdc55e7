"""The data folder: where it is, which files it holds, and verified reading of them."""

import os
from functools import cached_property
from pathlib import Path

from nero_lab.data import sources
from nero_lab.data.dataset import DataError
from nero_lab.data.download import Progress, download, new_hash


class Folder:
    """Folder with the files of one data set.

    Args:
        dataset: name of the data set.
        requested: the folder that the user named; None: $NERO_DATA, else ``nero`` in the user's cache.
        progress: called during downloads and tokenisation.
    """

    def __init__(self, dataset: str, requested: Path | None, progress: Progress | None) -> None:
        self.dataset, self.requested, self.progress = dataset, requested, progress

    @cached_property
    def path(self) -> Path:
        """The folder, which must exist if the user named it, or its subfolder. Lazy: a game needs no folder."""
        path = _resolve(self.requested, "create it to download into it, or " if self.dataset in sources.MIRRORS else "")
        is_subfolder = path.name == sources.FOLDERS.get(self.dataset) and not (path / path.name).exists()
        return path.parent if is_subfolder else path

    def find(self, *names: str) -> Path | None:
        """Return the first file that exists, in the data set's subfolder or directly in the data folder.

        Data sets of :data:`sources.GENERIC_NAMES` are searched for in their subfolder only.
        """
        own = self.path / sources.FOLDERS[self.dataset]
        folders = (own,) if self.dataset in sources.GENERIC_NAMES else (own, self.path)
        paths = (folder / name for folder in folders for name in names)
        return next((path for path in paths if path.is_file()), None)

    def download(self, name: str, into: str, by_hand: tuple[str, ...]) -> Path:
        """Download a file.

        Args:
            name: file name, on the mirrors and here.
            into: subfolder to write it to.
            by_hand: files to fetch by hand if the download fails, for the error message.
        """
        path = self.path / into / name
        remedy = (
            f"Without a network, put {', '.join(by_hand)} into {path.parent} by hand and run again, "
            "or name a folder that has them with --data or $NERO_DATA"
        )
        urls = [mirror + name for mirror in sources.MIRRORS[self.dataset]]
        download(urls, path, self._checksum(name), self.progress, remedy)
        return path

    def read(self, path: Path) -> bytes:
        """Read a file and verify its checksum."""
        return self.verify(path.read_bytes(), path.name, str(path))

    def verify(self, content: bytes, name: str, source: str) -> bytes:
        """Return the content if it has the checksum of the file ``name``.

        Raises:
            DataError: if the checksum differs; the message names the source.
        """
        if not self.is_intact(content, name):
            raise DataError(
                f"{source} is damaged or incomplete: its {len(content):,} bytes do not have the checksum "
                f"{self._checksum(name)}. Delete it and run again, to download it anew"
            )
        return content

    def is_intact(self, content: bytes, name: str) -> bool:
        """Return whether the content has the checksum of the file ``name``."""
        found = new_hash(self._checksum(name))
        found.update(content)
        return found.hexdigest() == self._checksum(name).partition(":")[2]

    def _checksum(self, name: str) -> str:
        return sources.FILES[self.dataset][name]


def _resolve(requested: Path | None, remedy: str) -> Path:
    if requested is not None:
        return _require_folder(Path(requested).expanduser(), "the data folder", remedy)
    if variable := os.environ.get("NERO_DATA"):
        return _require_folder(Path(variable).expanduser(), "the data folder of $NERO_DATA,", remedy)
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG standard says to ignore a relative path
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "nero"


def _require_folder(path: Path, what: str, remedy: str) -> Path:
    if path.exists() and not path.is_dir():
        raise DataError(f"{what} {path} is not a folder: name another")
    if not path.exists():
        raise DataError(f"{what} {path} does not exist: {remedy}name another")
    return path
