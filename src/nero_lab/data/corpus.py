"""WikiText-2: articles as a stream of words, cut into rows for a language model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nero_lab.data import sources
from nero_lab.data.dataset import IGNORED_LABEL, Texts
from nero_lab.data.folder import Folder
from nero_lab.data.formats import lines

#: Word at the end of each line.
END_OF_LINE = "<eos>"
#: Words per row, the context of the language model.
ROW_WORDS = 35
#: Parallel streams that a text is cut into.
TRAIN_STREAMS, EVAL_STREAMS = 20, 10
#: Rows per batch of an evaluation.
EVAL_BATCH = 100


@dataclass(frozen=True)
class Rows:
    """Text in rows of :data:`ROW_WORDS` words; the labels are the words that follow."""

    words: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> "Rows":
        return Rows(self.words.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Corpus(Texts[Rows]):
    """Three texts in rows. The first :data:`TRAIN_STREAMS` rows of ``train`` begin the streams, the next continue them.

    The vocabulary holds every word of the three texts, in order of first occurrence.
    """

    def epoch(self, batch: int, generator: object, augment: object) -> Sequence[tuple[Tensor, Tensor]]:  # noqa: ARG002
        """Return the training rows in their order; nothing is random."""
        return list(zip(torch.split(self.train.words, batch), torch.split(self.train.labels, batch), strict=True))

    def batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        rows: Rows = getattr(self, part)
        yield from zip(torch.split(rows.words, EVAL_BATCH), torch.split(rows.labels, EVAL_BATCH), strict=True)


def wikitext2(folder: Folder) -> Corpus:
    """Load WikiText-2 from its three files."""

    def words(name: str) -> list[str]:
        path = folder.find(name) or folder.download(name, sources.FOLDERS["wikitext2"], sources.WIKITEXT2)
        return split_words(folder.read(path), str(path))

    return build_corpus("wikitext2", *map(words, sources.WIKITEXT2))


def split_words(content: bytes, source: str) -> list[str]:
    """Split a text into words, with :data:`END_OF_LINE` after each line."""
    return [word for line in lines(content, source) for word in (*line.split(), END_OF_LINE)]


def build_corpus(name: str, train: list[str], valid: list[str], test: list[str]) -> Corpus:
    """Number the words of three texts by one vocabulary, and cut the texts into rows."""
    numbers = {word: number for number, word in enumerate(dict.fromkeys((*train, *valid, *test)))}

    def rows(text: Iterable[str], streams: int) -> Rows:
        return cut_into_rows(torch.tensor([numbers[word] for word in text]), streams)

    return Corpus(
        name,
        tuple(numbers),
        rows(train, TRAIN_STREAMS),
        rows(valid, EVAL_STREAMS),
        rows(test, EVAL_STREAMS),
    )


def cut_into_rows(text: Tensor, streams: int, length: int = ROW_WORDS) -> Rows:
    """Cut a text into streams of equal length, and the streams into rows; drop the remainder.

    The first rows begin the streams, the next ones continue them; the last ones are padded.

    Example:
        >>> rows = cut_into_rows(torch.arange(9), streams=2, length=2)
        >>> rows.words.tolist(), rows.labels.tolist()
        ([[0, 1], [4, 5], [2, 0], [6, 0]], [[1, 2], [5, 6], [3, -100], [7, -100]])
    """
    stream_length = len(text) // streams
    inputs = stream_length - 1  # the last word of a stream is a label only
    stacked = text[: stream_length * streams].view(streams, stream_length)
    padded = -(-inputs // length) * length
    words, labels = torch.zeros(streams, padded, dtype=torch.long), torch.full((streams, padded), IGNORED_LABEL)
    words[:, :inputs], labels[:, :inputs] = stacked[:, :-1], stacked[:, 1:]
    return Rows(*(part.view(streams, -1, length).transpose(0, 1).reshape(-1, length) for part in (words, labels)))
