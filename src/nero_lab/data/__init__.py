"""Data sets of the experiments: found or downloaded, verified, and loaded.

:func:`load` returns a :class:`Dataset`: small images in memory (MNIST, CIFAR-10), words (WikiText-2, Multi30k), tokens
of books (classic-books), or photographs in folders of classes (ImageNet and its stand-ins), which may exceed memory.
For Pong it returns a game.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from nero_lab.data.arcade import Game, pong
from nero_lab.data.books import Books, classic_books
from nero_lab.data.corpus import Corpus, wikitext2
from nero_lab.data.dataset import DataError, Dataset
from nero_lab.data.folder import Folder
from nero_lab.data.images import ImageDataset, Images, cifar10, mnist
from nero_lab.data.pairs import Pairs, multi30k
from nero_lab.data.photos import Photos, imagenet
from nero_lab.data.sources import FILES, FOLDERS

__all__ = [
    "FILES",
    "FOLDERS",
    "Books",
    "Corpus",
    "DataError",
    "Dataset",
    "Game",
    "ImageDataset",
    "Images",
    "Pairs",
    "Photos",
    "load",
    "load_once",
]

#: Loaders by name.
LOADERS: dict[str, Callable[[Folder], Dataset | Game]] = {
    "mnist": mnist,
    "cifar10": cifar10,
    "wikitext2": wikitext2,
    "multi30k": multi30k,
    "books": classic_books,
    "pong": pong,
    "imagenet": imagenet,
}


def load(
    name: str, folder: Path | None = None, *, progress: Callable[[str, int, int], None] | None = None
) -> Dataset | Game:
    """Load a data set or game from a folder, and download missing files into it.

    Args:
        name: "mnist", "cifar10", "wikitext2", "multi30k", "books" (classic-books), "imagenet" (any folder of classes)
            or the game "pong".
        folder: the data folder; None: $NERO_DATA, else ``~/.cache/nero``.
        progress: called while a file is downloaded, unpacked or tokenised, with the activity and file name, the bytes
            done and the total bytes (0 if the server does not say).

    Raises:
        DataError: if a file is damaged or malformed, or is missing and cannot be downloaded.
    """
    try:
        return LOADERS[name](Folder(name, folder, progress))
    except OSError as error:
        raise DataError(f"cannot read the data: {error}; fix its permissions, or name another folder") from error


@cache
def load_once(name: str, folder: Path | None, device: torch.device) -> Dataset | Game:
    """Load a data set or game onto a device, once per process, for the several runs that a worker makes."""
    return load(name, folder).to(device)
