"""What texts have in common, whatever their rows hold."""

from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

#: The label of a place behind the end of a text or a sentence, which torch's losses pass over.
NOTHING = -100


class Numbered(Protocol):
    """Words as numbers, on some device."""

    @property
    def words(self) -> Tensor:
        """One row an example."""

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""


T = TypeVar("T", bound=Numbered)


@dataclass(frozen=True)
class Texts(Generic[T]):
    """Three texts with one vocabulary, to train on, to choose by, and to test on.

    Attributes:
        name: as tasks call it.
        vocabulary: the words, by their numbers.
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
