"""Dropout with a random generator of its own."""

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """:class:`torch.nn.Dropout` that draws from :attr:`generator`.

    torch's own draws from the global generator, which concurrent runs would share.
    """

    def __init__(self, probability: float = 0.5) -> None:
        super().__init__()
        self.keep = 1 - probability
        self.generator: torch.Generator | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs
        mask = torch.empty_like(inputs).bernoulli_(self.keep, generator=self.generator)
        return inputs * mask.div_(self.keep)
