"""WikiText-2: articles as a stream of words, cut into rows for a language model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nero_lab.data import sources
from nero_lab.data.errors import DataError
from nero_lab.data.folder import Folder, read
from nero_lab.data.formats import lines
from nero_lab.data.texts import NOTHING, Texts

#: What stands for the end of a line.
END = "<eos>"
#: How many words a network reads at a time.
LENGTH = 35
#: How many streams a text is cut into, to be read side by side: to train on, and to look at.
STREAMS, STREAMS_LOOKED_AT = 20, 10
#: How many rows are looked at together.
LOOK = 100


@dataclass(frozen=True)
class Rows:
    """A text in rows of :data:`LENGTH` words, each with the words that follow them as its labels."""

    words: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> "Rows":
        return Rows(self.words.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Corpus(Texts[Rows]):
    """Three texts in rows. The first :data:`STREAMS` rows of ``train`` are read together first, and so on.

    Its vocabulary has every word of the three, in the order in which they first come up.
    """

    def epoch(self, batch: int, generator: object, augment: object) -> Sequence[tuple[Tensor, Tensor]]:  # noqa: ARG002
        """The text as it was written: nothing is left to chance."""
        return list(zip(torch.split(self.train.words, batch), torch.split(self.train.labels, batch), strict=True))

    def batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        rows: Rows = getattr(self, part)
        yield from zip(torch.split(rows.words, LOOK), torch.split(rows.labels, LOOK), strict=True)


def wikitext2(folder: Folder) -> Corpus:
    """WikiText-2 from its three files."""
    texts = [words(*file(folder, name)) for name in sources.WIKITEXT2]
    return numbered("wikitext2", *texts)


def file(folder: Folder, name: str) -> tuple[bytes, str]:
    """A file's content, downloaded if it is not there, and where it is from."""
    path = folder.find(name) or folder.bring(name, sources.FOLDERS["wikitext2"], sources.WIKITEXT2)
    return read(path), str(path)


def words(content: bytes, source: str) -> list[str]:
    """The words of a text, and at the end of each line a mark."""
    found = [word for line in lines(content, source) for word in (*line.split(), END)]
    least = 2 * max(STREAMS, STREAMS_LOOKED_AT)  # a word and one to follow it, in each stream
    if len(found) < least:
        raise DataError(
            f"{source} has {len(found)} words, and a text needs {least}. Delete it and run again, "
            "to have the data brought anew"
        )
    return found


def numbered(name: str, train: list[str], valid: list[str], test: list[str]) -> Corpus:
    """Texts with one vocabulary, in rows."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys((*train, *valid, *test)))}

    def rows(text: Iterable[str], streams: int) -> Rows:
        return cut(torch.tensor([numbers[word] for word in text]), streams)

    return Corpus(
        name,
        tuple(numbers),
        rows(train, STREAMS),
        rows(valid, STREAMS_LOOKED_AT),
        rows(test, STREAMS_LOOKED_AT),
    )


def cut(text: Tensor, streams: int, length: int = LENGTH) -> Rows:
    """A text cut into streams of equal length, what is left over dropped, and these into rows, one after the other.

    The first rows are the beginnings of all streams, the next ones what follows; the last ones are filled up.

    Example:
        >>> rows = cut(torch.arange(9), streams=2, length=2)
        >>> rows.words.tolist(), rows.labels.tolist()
        ([[0, 1], [4, 5], [2, 0], [6, 0]], [[1, 2], [5, 6], [3, -100], [7, -100]])
    """
    each = len(text) // streams
    laid = text[: each * streams].view(streams, each)
    filled = -(-(each - 1) // length) * length
    words, labels = torch.zeros(streams, filled, dtype=torch.long), torch.full((streams, filled), NOTHING)
    words[:, : each - 1], labels[:, : each - 1] = laid[:, :-1], laid[:, 1:]
    return Rows(*(part.view(streams, -1, length).transpose(0, 1).reshape(-1, length) for part in (words, labels)))
