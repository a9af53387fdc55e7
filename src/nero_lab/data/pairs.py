"""Multi30k: German sentences and their English translations, as numbers of words."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nero_lab.data import sources
from nero_lab.data.errors import DataError
from nero_lab.data.folder import Folder, read
from nero_lab.data.formats import lines
from nero_lab.data.texts import NOTHING, Texts
from nero_lab.data.tokens import tokenise

#: The first words of the vocabulary: nothing, a rare word, and the ends of a sentence.
SPECIAL = ("<blank>", "<unk>", "<s>", "</s>")
BLANK, UNKNOWN, BEGIN, END = range(4)
#: How often a word comes up in its language, at least, to be one of the vocabulary.
OFTEN = 3
#: The longest sentence that is trained on, in words.
LONGEST = 100
#: Lengths of batches are multiples of this, so that there are few of them: each is a graph of its own.
STEP = 8
#: And so are the words that matter in a batch, with some blanks.
ROOM = 128
#: How many pairs are looked at together.
LOOK = 200
#: Added to a seed, so that the order of pairs and what is dropped do not come from the same numbers.
OFFSET = 0x9E3779B9


@dataclass(frozen=True)
class Sentences:
    """Pairs of sentences.

    Attributes:
        words: (N, 2, L): what is read, and what is written, from its beginning on; filled up with blanks, one at least.
        labels: (N, L): what is to be written next, to the end.
        lengths: of the two, on the host.
    """

    words: Tensor
    labels: Tensor
    lengths: tuple[tuple[int, int], ...]

    def to(self, device: torch.device | str) -> "Sentences":
        return replace(self, words=self.words.to(device), labels=self.labels.to(device))

    def batches(self, size: int, order: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The pairs in batches, in an order or as they are.

        Returns:
            of each batch, words without most of the blanks that sentences end with; (2, T) places of the words that
            are none, filled up with places of blanks, one at least, in what is read and what is written, each taken
            as a line; and the labels of the latter.
        """
        there = None if order is None else self._there(order)
        order = range(len(self.lengths)) if order is None else order
        found = []
        for start in range(0, len(order), size):
            lengths = [self.lengths[each] for each in order[start : start + size]]
            length = min(_up(1 + max(map(max, lengths)), STEP), self.labels.shape[1])
            count = min(_up(1 + max(map(sum, zip(*lengths, strict=True))), ROOM), len(lengths) * length)
            chosen = slice(start, start + size) if there is None else there[start : start + size]
            words = self.words[chosen, :, :length]
            blank = (words == BLANK).transpose(0, 1).flatten(1).byte()
            places = blank.argsort(dim=1, stable=True)[:, :count]
            found.append((words, places, self.labels[chosen, :length].flatten()[places[1]]))
        return found

    def _there(self, order: Sequence[int]) -> Tensor:
        """An order on the device, which is not waited for."""
        here = torch.tensor(order)
        return (here.pin_memory() if self.words.is_cuda else here).to(self.words.device, non_blocking=True)


@dataclass(frozen=True)
class Pairs(Texts[Sentences]):
    """A corpus in two languages, whose vocabulary has the special words, then those of both.

    Attributes:
        references: what is to be written of ``test``, in words.
    """

    references: tuple[str, ...]

    def epoch(self, batch: int, generator: torch.Generator, augment: object) -> Sequence[tuple[Tensor, ...]]:  # noqa: ARG002
        """All pairs in an order that the generator's seed decides, on the host, which has to know the lengths."""
        host = torch.Generator().manual_seed(generator.initial_seed() + OFFSET)
        return self.train.batches(batch, torch.randperm(self.examples, generator=host).tolist())

    def batches(self, part: str) -> Iterator[tuple[Tensor, ...]]:
        sentences: Sentences = getattr(self, part)
        yield from sentences.batches(LOOK)

    def said(self, words: Sequence[int]) -> str:
        """A sentence in words, up to its end."""
        until = list(words).index(END) if END in words else len(words)
        return " ".join(self.vocabulary[word] for word in words[:until])


def _up(count: int, step: int) -> int:
    """The next multiple."""
    return -(-count // step) * step


def multi30k(folder: Folder) -> Pairs:
    """Multi30k from its six files, which are made from the raw ones if these are there."""
    tokenise(folder)
    by_hand = (*sources.MULTI30K_RAW, f"or the raw {', '.join(sources.MULTI30K_RAW.values())}")

    def sentences(name: str) -> list[list[str]]:
        path = folder.find(name) or folder.bring(name, sources.FOLDERS["multi30k"], by_hand)
        return [line.split() for line in lines(read(path), str(path))]

    def both(german: str, english: str) -> list[tuple[list[str], list[str]]]:
        first, second = sentences(german), sentences(english)
        if len(first) != len(second):
            raise DataError(
                f"{german} has {len(first):,} sentences and {english} has {len(second):,}: these do not belong "
                f"together. Delete both from {folder.path} and run again"
            )
        return list(zip(first, second, strict=True))

    return numbered("multi30k", *(both(*pair) for pair in sources.MULTI30K))


def numbered(
    name: str,
    train: list[tuple[list[str], list[str]]],
    valid: list[tuple[list[str], list[str]]],
    test: list[tuple[list[str], list[str]]],
) -> Pairs:
    """Pairs of sentences with one vocabulary: the words that come up often enough in either language."""
    train = [pair for pair in train if max(map(len, pair)) <= LONGEST]
    if not all((train, valid, test)):
        raise DataError("there is no sentence to train on, or none to look at: the files are empty")
    counts = [Counter(word for pair in train for word in pair[side]) for side in (0, 1)]
    often = [word for count in counts for word, times in count.items() if times >= OFTEN]
    numbers = {word: number for number, word in enumerate(dict.fromkeys((*SPECIAL, *often)))}

    def read_as(sentence: list[str]) -> list[int]:
        return [BEGIN, *(numbers.get(word, UNKNOWN) for word in sentence), END]

    def laid(pairs: list[tuple[list[str], list[str]]]) -> Sentences:
        both = [(read_as(one), read_as(other)) for one, other in pairs]
        lengths = tuple((len(one), len(other) - 1) for one, other in both)
        longest = 1 + max(map(max, lengths))
        words = torch.full((len(both), 2, longest), BLANK)
        labels = torch.full((len(both), longest), NOTHING)
        for place, (one, other) in enumerate(both):
            words[place, 0, : len(one)] = torch.tensor(one)
            words[place, 1, : len(other) - 1] = torch.tensor(other[:-1])
            labels[place, : len(other) - 1] = torch.tensor(other[1:])
        return Sentences(words, labels, lengths)

    references = tuple(" ".join(english) for _, english in test)
    return Pairs(name, tuple(numbers), laid(train), laid(valid), laid(test), references)
