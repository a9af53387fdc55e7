"""classic-books: English books published by 1929, as tokens for a language model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nero_lab.data import bpe, sources
from nero_lab.data.book_files import read_text
from nero_lab.data.dataset import IGNORED_LABEL
from nero_lab.data.download import replacing
from nero_lab.data.folder import Folder

#: Tokens that a window holds, the context of the language model; the labels are the tokens that follow.
WINDOW = 256
#: Training windows per epoch, which is an interval between two evaluations: 100 steps of 64.
WINDOWS_PER_EPOCH = 6_400
#: Windows per batch of an evaluation.
EVAL_BATCH = 64
#: Windows of the validation text that are evaluated after each epoch: 262,144 tokens.
CURVE_WINDOWS = 1_024
DIGEST_BYTES = 32


@dataclass(frozen=True)
class Books:
    """Tokens of the training and the validation text, on one device.

    Attributes:
        name: name that tasks refer to.
        train, valid: the tokens, int16.
        token_bytes: the number of bytes that each token of the vocabulary stands for.
        examples: random windows per epoch.
        window: tokens per window.
    """

    name: str
    train: Tensor
    valid: Tensor
    token_bytes: Tensor
    examples: int = WINDOWS_PER_EPOCH
    window: int = WINDOW

    @property
    def parts(self) -> tuple[str, ...]:
        return ("valid",)

    @property
    def sizes(self) -> dict[str, int]:
        return {"vocabulary": len(self.token_bytes)}

    @property
    def device(self) -> torch.device:
        return self.train.device

    def to(self, device: torch.device | str) -> "Books":
        tensors = {name: getattr(self, name).to(device) for name in ("train", "valid", "token_bytes")}
        return replace(self, **tensors)

    def epoch(self, batch: int, generator: torch.Generator, augment: object) -> Sequence[tuple[Tensor, Tensor]]:  # noqa: ARG002
        """Return batches of windows that start anywhere in the training text; they may overlap."""
        starts = torch.randint(
            len(self.train) - self.window, (self.examples, 1), generator=generator, device=self.device
        )
        windows = self.train[starts + torch.arange(self.window + 1, device=self.device)].long()
        return [(chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()) for chunk in torch.split(windows, batch)]

    def batches(self, part: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over windows of the validation text: ``"valid"`` is an even sample of them, ``"all"`` all of them.

        Windows do not overlap, and every token but the first is a label of one of them. All batches have one shape;
        the last window and the last batch are padded.
        """
        last = len(self.valid) - 1  # the last token is a label only
        count = -(-last // self.window)
        if part == "valid":  # full windows, evenly spread
            step = max(1, last // self.window // CURVE_WINDOWS)
            chosen = torch.arange(0, count, step, device=self.device)[:CURVE_WINDOWS]
        else:
            chosen = torch.arange(count, device=self.device)
        for numbers in torch.split(chosen, EVAL_BATCH):
            places = numbers[:, None] * self.window + torch.arange(self.window, device=self.device)
            places = F.pad(places, (0, 0, 0, EVAL_BATCH - len(places)), value=last)
            labels = self.valid[(places + 1).clamp(max=last)].long()
            yield self.valid[places.clamp(max=last)].long(), labels.where(places < last, IGNORED_LABEL)


def classic_books(folder: Folder) -> Books:
    """Load classic-books from its tokens, which are encoded and kept in a file beside the text at first use."""
    train, valid = (load_tokens(folder, name) for name in sources.BOOKS)
    return Books("books", train, valid, bpe.token_bytes())


def load_tokens(folder: Folder, name: str) -> Tensor:
    """Read the tokens of a text. If there is no intact file of them, encode the text and write it.

    The text itself is not needed if there is one.
    """
    path = token_path(folder, name)
    tokens = read_tokens(path, sources.FILES["books"][name])
    if tokens is None:
        report = partial(folder.progress, f"encoding {name}") if folder.progress is not None else None
        tokens = bpe.encode(read_text(folder, name), report)
        content = tokens.numpy().tobytes()
        with replacing(path) as part:
            part.write_bytes(_digest(content, sources.FILES["books"][name]) + content)
    return tokens


def token_path(folder: Folder, name: str) -> Path:
    """Return the file of a text's tokens, which is named after the tokenizer."""
    return folder.path / sources.FOLDERS["books"] / f"{Path(name).stem}.{bpe.CHECKSUM[:12]}.tokens"


def read_tokens(path: Path, text_checksum: str) -> Tensor | None:
    """Return the tokens of a file; None if it is missing, damaged, or of another text."""
    if not path.is_file():
        return None
    content = bytearray(path.read_bytes())
    body = memoryview(content)[DIGEST_BYTES:]
    if content[:DIGEST_BYTES] != _digest(body, text_checksum):
        return None
    return torch.frombuffer(content, dtype=torch.int16, offset=DIGEST_BYTES)


def _digest(content: bytes | memoryview, text_checksum: str) -> bytes:
    digest = sha256(text_checksum.encode())
    digest.update(content)
    return digest.digest()
