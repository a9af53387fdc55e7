"""The tokenizer of classic-books: byte-level BPE with 8,192 tokens.

Its merges were trained once on the training text. :func:`train` gives the same again, in a few minutes::

    Path("bpe-8192.txt.gz").write_bytes(bpe.train(Path("classic-books/train.txt").read_bytes()))
"""

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nero.messages import how_to_install
from nero_lab.data.dataset import DataError

VOCABULARY = 8192
#: Ends each book of a text.
END_OF_BOOK = b"\0"
#: Tokens of a single byte, which come first.
BYTES = 256
#: One merge per line, in order: two tokens in the characters that stand for bytes.
MERGES = Path(__file__).with_name("bpe-8192.txt.gz")
#: SHA-256 of the unpacked merges, by which files of tokens are named.
CHECKSUM = "2e277d1153ce06fd499b78b950fd6ffa3fb21cfcf03296b1ab7780b027090dcd"
#: Text that is encoded between two reports of progress.
CHUNK_BYTES = 1 << 22


@cache
def merges() -> tuple[tuple[str, str], ...]:
    """Return the pairs of tokens that are merged, in order."""
    lines = (line.split(" ") for line in gzip.decompress(MERGES.read_bytes()).decode().splitlines())
    return tuple((left, right) for left, right in lines)


def token_bytes() -> Tensor:
    """Return the number of bytes that each token stands for."""
    return torch.tensor([1] * BYTES + [len(left + right) for left, right in merges()])


def tokenizer() -> Any:
    """Return the tokenizer, of the library ``tokenizers``."""
    library = _library()
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(left + right for left, right in merges())]
    return _byte_level(library.models.BPE({token: number for number, token in enumerate(tokens)}, list(merges())))


def encode(text: bytes, report: Callable[[int, int], None] | None = None) -> Tensor:
    """Encode a text, book by book, on all cores.

    Args:
        text: UTF-8 text.
        report: called with the bytes done and the total bytes.

    Returns:
        the tokens, int16.

    Raises:
        DataError: if the library is missing.
    """
    coder, tokens, done = tokenizer(), [torch.zeros(0, dtype=torch.int16)], 0
    for chunk in _chunks(text):
        books = coder.encode_batch_fast([book.decode() for book in chunk])
        tokens += [torch.tensor(book.ids, dtype=torch.int16) for book in books]
        done += sum(map(len, chunk))
        if report is not None:
            report(done, len(text))
    return torch.cat(tokens)


def train(text: bytes) -> bytes:
    """Train the merges on a text; return them gzipped."""
    library = _library()
    coder = _byte_level(library.models.BPE())
    trainer = library.trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet())
    )
    coder.train_from_iterator(text.decode().split(END_OF_BOOK.decode()), trainer)
    pairs = json.loads(coder.to_str())["model"]["merges"]
    content = "".join(f"{left} {right}\n" for left, right in pairs).encode()
    return gzip.compress(content, mtime=0)


def _byte_level(model: Any) -> Any:
    """Return a tokenizer that splits text at words and works on their bytes."""
    library = _library()
    coder = library.Tokenizer(model)
    coder.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = library.decoders.ByteLevel()
    return coder


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"encoding text needs the library tokenizers ({error}): {how_to_install('lab')}") from error
    return tokenizers


def _chunks(text: bytes) -> list[list[bytes]]:
    """Cut a text into books, each with its end, and gather these into chunks of about :data:`CHUNK_BYTES`."""
    *books, rest = text.split(END_OF_BOOK)
    chunks: list[list[bytes]] = [[]]
    for book in [*(book + END_OF_BOOK for book in books), *([rest] if rest else [])]:
        if sum(map(len, chunks[-1])) >= CHUNK_BYTES:
            chunks.append([])
        chunks[-1].append(book)
    return chunks
