"""The two texts of classic-books, built from an archive of books in Markdown.

The archive holds one folder per author. A book is kept if it was published by 1929. The books of a few authors make the
validation text, so that no author is in both texts. A NUL byte ends each book.
"""

import re
import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

from nero_lab.data import formats, sources
from nero_lab.data.dataset import DataError
from nero_lab.data.download import Progress, download, replacing
from nero_lab.data.folder import Folder

#: Ends each book.
END_OF_BOOK = b"\0"
LAST_YEAR = 1929
MIN_BODY_CHARACTERS = 20_000
MAX_VALID_AUTHOR_BYTES = 1_500_000
MAX_VALID_BYTES = 4_500_000
ENOUGH_VALID_BYTES = 4_000_000
ENOUGH_TRAIN_BYTES = 150_000_000
#: The published checksums are of texts without this book, though it is old and long enough to be kept.
LEFT_OUT = "Samuel Richardson/Clarissa.md"


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
    for path in sorted(books, key=_digest):
        by_author.setdefault(path.partition("/")[0], []).append(path)
    valid_authors, valid_bytes = set(), 0
    for author in sorted(by_author, key=_digest):
        size = sum(len(books[path]) + 1 for path in by_author[author])
        if size > MAX_VALID_AUTHOR_BYTES or valid_bytes + size > MAX_VALID_BYTES:
            continue
        valid_authors.add(author)
        valid_bytes += size
        if valid_bytes > ENOUGH_VALID_BYTES:
            break
    train, valid = bytearray(), bytearray()
    for path in sorted(books, key=_digest):
        if path.partition("/")[0] in valid_authors:
            valid += books[path] + END_OF_BOOK
        elif len(train) < ENOUGH_TRAIN_BYTES:
            train += books[path] + END_OF_BOOK
    return bytes(train), bytes(valid)


def _digest(name: str) -> bytes:
    return sha256(name.encode()).digest()
