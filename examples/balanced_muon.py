"""Train a small transformer with Muon and AdamW, as they are and balanced, and print the losses by learning rate.

The text is the language reference that comes with Python, letter by letter. torch.optim.Muon needs torch 2.9 or newer.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

import nero

CONTEXT, BATCH = 64, 16


class Transformer(nn.Module):
    """A language model of letters."""

    def __init__(self, letters: int, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next letter."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.tokens(text) + self.places.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden, mask, is_causal=True)))
        return logits


def train(text: Tensor, steps: int, lr: float, is_balanced: bool) -> float:
    """Return the mean loss of the last tenth of the steps."""
    torch.manual_seed(0)
    model = Transformer(int(text.max()) + 1)
    matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    rest = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=0.003, weight_decay=0.0)
    if is_balanced:
        nero.balance_after_step(muon, model)  # the hidden matrices
        nero.balance_after_step(adamw, model)  # the tables and the head
    optimisers: list[torch.optim.Optimizer] = [muon, adamw]
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.0, steps) for each in optimisers]
    losses = []
    for _ in range(steps):
        rows = text[torch.randint(len(text) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)]
        model.zero_grad()
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main(argv: list[str] | None = None) -> int:
    """Train and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=250, help="steps of each run (default: 250)")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.02, 0.05, 0.1], help="learning rates of Muon")
    options = parser.parse_args(argv)
    letters = sorted(set("".join(topics.values())))
    numbers = {letter: number for number, letter in enumerate(letters)}
    text = torch.tensor([numbers[letter] for letter in "".join(topics.values())])
    torch.set_num_threads(1)  # the matrices are too small for threads to help
    for lr in options.lr:
        free, balanced = (train(text, options.steps, lr, is_balanced) for is_balanced in (False, True))
        print(f"lr {lr:g}: loss {free:.3f}, balanced {balanced:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
