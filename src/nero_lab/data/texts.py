"""The base of the text data sets."""

from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

#: Label of a padded position, which torch's losses ignore.
IGNORED_LABEL = -100


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
