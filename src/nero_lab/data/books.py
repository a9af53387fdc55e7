"""classic-books: English books published by 1929, as tokens for a language model.

The two texts are built from an archive of books in Markdown, with one folder per author. A book is kept if it was
published by 1929. The books of a few authors make the validation text, so that no author is in both texts. A NUL byte
ends each book.
"""

import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nero_lab.data import bpe, formats, sources
from nero_lab.data.dataset import IGNORED_LABEL, DataError
from nero_lab.data.download import Progress, download, replacing
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
LAST_YEAR = 1929
MIN_BODY_CHARACTERS = 20_000
MAX_VALID_AUTHOR_BYTES = 1_500_000
MAX_VALID_BYTES = 4_500_000
ENOUGH_VALID_BYTES = 4_000_000
ENOUGH_TRAIN_BYTES = 150_000_000
#: The published checksums are of texts without this book, though it is old and long enough to be kept.
LEFT_OUT = "Samuel Richardson/Clarissa.md"


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


def read_text(folder: Folder, name: str) -> bytes:
    """Return the verified text of a file of :data:`sources.BOOKS`; build both files first if it is missing.

    Raises:
        DataError: if the text is damaged, or is missing and cannot be built.
    """
    path = folder.find(name)
    if path is None:
        build(folder)
        path = folder.path / sources.FOLDERS["books"] / name
    return folder.read(path)


def build(folder: Folder) -> None:
    """Write both texts. An archive that the user has put into the folder is used and kept, else it is downloaded."""
    own = folder.path / sources.FOLDERS["books"]
    found = folder.find(sources.BOOKS_ARCHIVE)
    archive = found or own / sources.BOOKS_ARCHIVE
    if found is None:
        remedy = (
            f"Without a network, put {' and '.join(sources.BOOKS)}, or the archive as {sources.BOOKS_ARCHIVE}, into "
            f"{own} by hand and run again, or name a folder that has them with --data or $NERO_DATA"
        )
        # GitHub packs archives anew from time to time, so only the texts have checksums
        urls = [mirror + sources.BOOKS_COMMIT for mirror in sources.MIRRORS["books"]]
        download(urls, archive, None, folder.progress, remedy)
    texts = dict(zip(sources.BOOKS, split(read_archive(archive, folder.progress)), strict=True))
    for name, content in texts.items():
        if not folder.is_intact(content, name):
            raise DataError(
                f"{archive} is damaged or of another commit: its {name} has {len(content):,} bytes and not the "
                "published checksum. Delete the archive and run again, to download it anew"
            )
    for name, content in texts.items():
        with replacing(own / name) as part:
            part.write_bytes(content)
    if found is None:
        archive.unlink()


def read_archive(path: Path, progress: Progress | None) -> dict[str, bytes]:
    """Return the cleaned books of a gzipped tar archive that are old and long enough, by path (author/title.md)."""
    total, books = path.stat().st_size, {}
    report = partial(progress, f"unpacking {path.name}") if progress else None
    try:
        with path.open("rb") as file, formats.open_tar(file) as archive:
            for name, content in _markdown_files(archive):
                book = clean(content.decode("utf-8-sig"))
                if book is not None:
                    books[name] = book.encode()
                if report is not None:
                    report(file.tell(), total)
    except (tarfile.TarError, OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} is damaged: it does not unpack ({error}). Delete it and run again, to download it anew"
        ) from error
    return books


def _markdown_files(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each book; the paths are without the archive's top folder."""
    for member in archive:
        name = member.name.partition("/")[2]
        is_book = name.endswith(".md") and name.rpartition("/")[2] != "README.md" and name != LEFT_OUT
        if is_book and member.isfile():
            file = archive.extractfile(member)
            assert file is not None  # for files it is not
            yield name, file.read()


def clean(text: str) -> str | None:
    r"""Return the body of a book in plain spaces and single blank lines; None if it is too new or too short.

    Example:
        >>> clean("# Title: A\n\n## Year: 1866-1871\n\n-------\n\n" + "War  and\tpeace. \n\n\n" * 2000)[:32]
        'War and peace.\n\nWar and peace.\n\n'
    """
    header, _, body = text.replace("\r\n", "\n").partition("\n-------\n")
    year_line = re.search(r"^## Year:.*$", header, re.MULTILINE)
    years = re.findall(r"\d+", year_line[0]) if year_line else []
    if not years or int(years[-1]) > LAST_YEAR or len(body) < MIN_BODY_CHARACTERS:
        return None
    body = re.sub(" +", " ", body.replace("\u00a0", " ").replace("\t", " "))
    body = re.sub("\n{3,}", "\n\n", body.replace(" \n", "\n"))
    return body.strip() + "\n"


def split(books: dict[str, bytes]) -> tuple[bytes, bytes]:
    """Return the training and the validation text: books joined in the order of their paths' SHA-256."""
    by_author: dict[str, list[str]] = {}
    for path in sorted(books, key=_order):
        by_author.setdefault(path.partition("/")[0], []).append(path)
    valid_authors, valid_bytes = set(), 0
    for author in sorted(by_author, key=_order):
        size = sum(len(books[path]) + 1 for path in by_author[author])
        if size > MAX_VALID_AUTHOR_BYTES or valid_bytes + size > MAX_VALID_BYTES:
            continue
        valid_authors.add(author)
        valid_bytes += size
        if valid_bytes > ENOUGH_VALID_BYTES:
            break
    train, valid = bytearray(), bytearray()
    for path in sorted(books, key=_order):
        if path.partition("/")[0] in valid_authors:
            valid += books[path] + bpe.END_OF_BOOK
        elif len(train) < ENOUGH_TRAIN_BYTES:
            train += books[path] + bpe.END_OF_BOOK
    return bytes(train), bytes(valid)


def _order(name: str) -> bytes:
    return sha256(name.encode()).digest()
