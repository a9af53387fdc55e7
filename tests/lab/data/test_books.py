"""classic-books: the recipe of its texts, downloads, the tokenizer, files of tokens, and windows."""

import gzip
import hashlib
import io
import tarfile
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")

from nero_lab.data import FILES, DataError, books, bpe, download, load, sources
from nero_lab.data.folder import Folder

ODD = "Zoë's naïve café, 7½ 'λόγος' \t\r\n\x01\x7f 🜚 \u200b\U0010ffff don't  \n\n  end"


def markdown(title: str, year: str = "1900", words: int = 600) -> bytes:
    body = "\n\n".join(f"{title} {number}.\u00a0 It  was\tso. " for number in range(words))
    return f"\ufeff# Title: {title}\r\n\r\n## Year: {year}\r\n\r\n-------\r\n\r\n\r\n\r\n{body}".encode()


#: Six books of four authors, one of them too new, and files that are no books.
ARCHIVE = {
    "README.md": b"# Books",
    "Ann/README.md": markdown("no book"),
    "Ann/first.md": markdown("first"),
    "Ann/second.md": markdown("second", "1850-1851", 700),
    "Bob/third.md": markdown("third"),
    "Bob/new.md": markdown("new", "1900, revised 1930"),
    "Cid/short.md": markdown("short", words=5),
    "Cid/picture.png": b"\xff",
    "Dee/fourth.md": markdown("fourth"),
    "Samuel Richardson/Clarissa.md": markdown("left out"),
}


def packed(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"books-0123/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def expected_texts() -> tuple[bytes, bytes]:
    """Return both texts of the archive, with Ann's books too large for validation and Bob's enough."""

    def text(title: str, words: int = 600) -> bytes:
        return "\n\n".join(f"{title} {number}. It was so." for number in range(words)).encode() + b"\n\0"

    order = sorted(["Ann/first", "Ann/second", "Bob/third", "Dee/fourth"], key=lambda path: digest(f"{path}.md"))
    texts = {"Ann/first": text("first"), "Ann/second": text("second", 700)}
    texts |= {"Bob/third": text("third"), "Dee/fourth": text("fourth")}
    valid = min(("Bob", "Dee"), key=digest)
    return (
        b"".join(texts[path] for path in order if not path.startswith(valid)),
        b"".join(texts[path] for path in order if path.startswith(valid)),
    )


def digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """Scale the recipe down to the archive, and register the checksums of its texts."""
    monkeypatch.setattr(books, "MIN_BODY_CHARACTERS", 10_000)
    monkeypatch.setattr(books, "MAX_VALID_AUTHOR_BYTES", 20_000)
    monkeypatch.setattr(books, "ENOUGH_VALID_BYTES", 10_000)
    texts = expected_texts()
    for name, text in zip(sources.BOOKS, texts, strict=True):
        monkeypatch.setitem(FILES["books"], name, f"sha256:{hashlib.sha256(text).hexdigest()}")
    return texts


def publish(folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / sources.BOOKS_COMMIT).write_bytes(content)
    monkeypatch.setitem(sources.MIRRORS, "books", (f"file://{folder}/",))
    monkeypatch.setattr(download, "opener", urllib.request.build_opener)  # opens file: too


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_books_download_builds_both_texts(tmp_path: Path, recipe, monkeypatch: pytest.MonkeyPatch):
    publish(tmp_path / "mirror", packed(ARCHIVE), monkeypatch)
    works = []
    (tmp_path / "data").mkdir()
    data = load("books", tmp_path / "data", progress=lambda work, done, total: works.append((work, done, total)))
    folder = tmp_path / "data/classic-books"
    assert ((folder / "train.txt").read_bytes(), (folder / "valid.txt").read_bytes()) == recipe
    tokens = {f"{part}.{bpe.CHECKSUM[:12]}.tokens" for part in ("train", "valid")}
    assert names_in(tmp_path / "data") == {*sources.BOOKS, *tokens}
    assert len(data.train) > 0.2 * len(recipe[0])
    assert [work.split()[0] for work in dict.fromkeys(work for work, *_ in works)] == [
        "downloading",
        "unpacking",
        "encoding",
        "encoding",
    ]
    assert all(done <= total for _, done, total in works)


def test_books_archive_put_by_hand_is_kept(tmp_path: Path, recipe):
    path = tmp_path / "classic-books" / sources.BOOKS_ARCHIVE
    path.parent.mkdir()
    path.write_bytes(packed(ARCHIVE))
    folder = Folder("books", tmp_path, None)
    assert books.read_text(folder, "valid.txt") == recipe[1]
    assert names_in(tmp_path) == {*sources.BOOKS, sources.BOOKS_ARCHIVE}


def test_books_missing_without_network_raises(tmp_path: Path):
    with pytest.raises(DataError, match=r"(?s)could not download.*by hand and run again.*--data"):
        load("books", tmp_path)
    assert names_in(tmp_path) == set()


def test_books_damaged_text_is_named(tmp_path: Path):
    (tmp_path / "classic-books").mkdir()
    (tmp_path / "classic-books/train.txt").write_bytes(b"Call me Ishmael.\0")
    with pytest.raises(DataError, match=r"train\.txt is damaged.*sha256:5d2ac"):
        load("books", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (packed(ARCHIVE)[:-200], "does not unpack"),
        (b"<html>", "does not unpack"),
        (packed({**ARCHIVE, "Ann/first.md": markdown("First")}), "another commit"),
        (packed({**ARCHIVE, "Ann/first.md": b"\xff\xfe"}), "does not unpack"),
    ],
    ids=["cut", "page", "changed", "encoding"],
)
@pytest.mark.usefixtures("recipe")
def test_books_damaged_archive_is_explained(tmp_path: Path, content: bytes, message: str, monkeypatch):
    publish(tmp_path / "mirror", content, monkeypatch)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match=f"{message}.*Delete .* and run again"):
        load("books", tmp_path / "data")
    assert names_in(tmp_path / "data") == {sources.BOOKS_ARCHIVE}


def test_recipe_enough_training_bytes_ends_the_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(books, "ENOUGH_TRAIN_BYTES", 5)
    monkeypatch.setattr(books, "MAX_VALID_BYTES", 0)
    texts = {f"{name}/b.md": name.encode() * 4 for name in "abcd"}
    first, second, *_ = sorted(texts, key=digest)
    assert books.split(texts) == (texts[first] + b"\0", b"")
    monkeypatch.setattr(books, "ENOUGH_TRAIN_BYTES", 6)
    assert books.split(texts) == (texts[first] + b"\0" + texts[second] + b"\0", b"")


def test_tokenizer_round_trip_keeps_odd_text():
    coder = bpe.tokenizer()
    tokens = bpe.encode(f"{ODD}\0{ODD}".encode())
    assert tokens.dtype == torch.int16
    assert coder.decode(tokens.tolist()) == f"{ODD}\0{ODD}"
    assert int(bpe.token_bytes()[tokens.long()].sum()) == len(f"{ODD}\0{ODD}".encode())
    assert coder.get_vocab_size() == len(bpe.token_bytes()) == bpe.VOCABULARY


def test_tokenizer_has_every_byte_and_nul_alone():
    # all characters of up to two bytes, and the first bytes of longer ones: every byte that UTF-8 has
    text = "\0".join([*map(chr, range(0x800)), *(chr(number << 12) for number in (1, 8, 15, 64, 256))])
    tokens = bpe.encode(text.encode())
    assert bpe.tokenizer().decode(tokens.tolist()) == text
    vocabulary = bpe.tokenizer().get_vocab()
    assert sorted(vocabulary[byte] for byte in vocabulary if len(byte) == 1) == list(range(256))
    (nul,) = bpe.encode(b"\0").tolist()
    assert tokens.tolist().count(nul) == text.count("\0")


def test_tokenizer_trained_again_gives_the_same():
    text = expected_texts()[0]
    content = bpe.train(text)
    assert content == bpe.train(text)
    left, right = gzip.decompress(content).decode().splitlines()[0].split(" ")
    assert len(left) == len(right) == 1


def test_tokenizer_has_its_checksum():
    assert hashlib.sha256(gzip.decompress(bpe.MERGES.read_bytes())).hexdigest() == bpe.CHECKSUM


@pytest.mark.usefixtures("recipe")
def test_token_file_is_reused_without_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(tmp_path / "mirror", packed(ARCHIVE), monkeypatch)
    (tmp_path / "data").mkdir()
    before = load("books", tmp_path / "data")
    for name in sources.BOOKS:
        (tmp_path / "data/classic-books" / name).unlink()
    monkeypatch.setitem(sources.MIRRORS, "books", ())
    monkeypatch.setattr(bpe, "encode", None)
    after = load("books", tmp_path / "data")
    assert torch.equal(after.train, before.train)
    assert torch.equal(after.valid, before.valid)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "of another text"])
@pytest.mark.usefixtures("recipe")
def test_token_file_that_does_not_fit_is_rebuilt(tmp_path: Path, damage: str, recipe):
    own = tmp_path / "classic-books"
    own.mkdir()
    for name, text in zip(sources.BOOKS, recipe, strict=True):
        (own / name).write_bytes(text)
    folder = Folder("books", tmp_path, None)
    wanted = books.load_tokens(folder, "train.txt")
    path = books.token_path(folder, "train.txt")
    good = path.read_bytes()
    books.load_tokens(folder, "valid.txt")
    other = books.token_path(folder, "valid.txt").read_bytes()
    changed = good[:-1] + bytes([good[-1] ^ 1])
    path.write_bytes({"cut": good[:-2], "changed": changed, "empty": b"", "of another text": other}[damage])
    assert torch.equal(books.load_tokens(folder, "train.txt"), wanted)
    assert path.read_bytes() == good


def text_of(length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int16)


def test_windows_never_leave_the_text():
    """A text of two windows' places: every start occurs, and each label is the next token."""
    data = books.Books("books", text_of(258), text_of(300), torch.ones(300), examples=40)
    batches = data.epoch(8, torch.Generator().manual_seed(0), None)
    assert [tuple(inputs.shape) for inputs, _ in batches] == [(8, 256)] * 5
    for inputs, labels in batches:
        assert torch.equal(labels, inputs + 1)
    firsts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert set(firsts.tolist()) == {0, 1}


def test_windows_follow_from_the_seed():
    data = books.Books("books", text_of(3000), text_of(300), torch.ones(3000), examples=6)
    first, again, other = (data.epoch(4, torch.Generator().manual_seed(seed), None) for seed in (1, 1, 2))
    assert torch.equal(first[1][0], again[1][0])
    assert not torch.equal(first[1][0], other[1][0])


@pytest.mark.parametrize("length", [257, 300, 513, 256 * 64 + 1, 256 * 64 + 2])
def test_all_windows_label_each_token_once(length: int):
    data = books.Books("books", text_of(300), text_of(length), torch.ones(length))
    batches = list(data.batches("all"))
    assert {tuple(inputs.shape) for inputs, _ in batches} == {(64, 256)}
    labels = torch.cat([labels.flatten() for _, labels in batches])
    assert labels[labels >= 0].tolist() == list(range(1, length))
    for inputs, labels in batches:
        assert torch.equal(inputs[labels >= 0] + 1, labels[labels >= 0])


def test_curve_windows_are_an_even_sample():
    data = books.Books("books", text_of(300), (torch.arange(256 * 2500) % 8192).short(), torch.ones(8192))
    batches = list(data.batches("valid"))
    assert len(batches) * 64 == books.CURVE_WINDOWS
    assert all(bool((labels >= 0).all()) for _, labels in batches)
    (first, _), (last, _) = batches[0], batches[-1]
    assert first[1, 0] == 2 * 256  # every second window
    assert last[-1, 0] == 2 * 1023 * 256 % 8192
    short = books.Books("books", text_of(300), text_of(600), torch.ones(600))
    assert sum(int((labels >= 0).sum()) for _, labels in short.batches("valid")) == 599
