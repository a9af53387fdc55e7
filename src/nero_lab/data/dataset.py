"""The interface between a data set and the training loop, the base of text data sets, and the package's exception."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

#: Maps pixels and a random generator to augmented pixels.
Augment: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
#: Label of a padded position, which torch's losses ignore.
IGNORED_LABEL = -100


class DataError(RuntimeError):
    """Missing, damaged or unobtainable data. The message names the file and the remedy."""


class Dataset(Protocol):
    """Data set as the training loop sees it. Labels of -100 are ignored by the loss."""

    @property
    def name(self) -> str:
        """Name that tasks refer to."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Held-out parts that are evaluated after each epoch."""

    @property
    def examples(self) -> int:
        """Number of training examples."""

    @property
    def device(self) -> torch.device:
        """Device of the batches."""

    @property
    def sizes(self) -> dict[str, int]:
        """Keyword arguments of the model that depend on the data; empty if the model's defaults fit."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on another device."""

    def epoch(self, batch: int, generator: torch.Generator, augment: Augment | None) -> Sequence[tuple[Tensor, ...]]:
        """Return the shuffled batches of one epoch, each one or more inputs followed by the labels."""

    def batches(self, part: str) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over the batches of a held-out part, each one or more inputs followed by the labels."""


class WordTensors(Protocol):
    """Word numbers on a device."""

    @property
    def words(self) -> Tensor:
        """One row per example."""

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on another device."""


T = TypeVar("T", bound=WordTensors)


@dataclass(frozen=True)
class Texts(Generic[T]):
    """Training, validation and test text with one vocabulary.

    Attributes:
        name: name that tasks refer to.
        vocabulary: the words, by number.
        train, valid, test: the texts.
    """

    name: str
    vocabulary: tuple[str, ...]
    train: T
    valid: T
    test: T

    @property
    def parts(self) -> tuple[str, ...]:
        return ("valid", "test")

    @property
    def sizes(self) -> dict[str, int]:
        return {}

    @property
    def examples(self) -> int:
        return len(self.train.words)

    @property
    def device(self) -> torch.device:
        return self.train.words.device

    def to(self, device: torch.device | str) -> Self:
        return replace(self, train=self.train.to(device), valid=self.valid.to(device), test=self.test.to(device))
