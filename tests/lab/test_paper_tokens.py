"""Multi30k from its raw files: tokenised as it was published, kept, and every bad file named."""
# ruff: noqa: RUF001 (signs that look like others are what normalising is about)

import errno
import gzip
import hashlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nero_lab.data import FILES, DataError, load, sources, tokens

#: Read at once: the tests take the variable away.
REAL = os.environ.get("NERO_DATA")
RAW = tuple(sources.MULTI30K_RAW.values())
TOKENISED = tuple(sources.MULTI30K_RAW)
#: Sentences, and what Moses's own scripts make of them, in Perl and of the version that Multi30k's authors used.
MOSES = {
    "de": {
        "Ein Hund – schwarz und groß – sagt: „Wau.“": "ein hund - schwarz und groß - sagt : &quot; wau &quot; .",
        "„Wau“, sagt Äpfel-Ännes Hund.": "&quot; wau &quot; , sagt äpfel-ännes hund .",
        "Der Hund's Ball & Levi‘s Hut (hier ) .": "der hund &apos; s ball &amp; levi &apos; s hut ( hier ) .",
        "Herr z.B. Nr. 5 geht. Er rennt usw.": "herr z.b. nr . 5 geht. er rennt usw.",
        "5,3 cm, 10 % …": "5,3 cm , 10 % ...",
        "Ein Hund springt\thoch.  ": "ein hund springt hoch .",
    },
    "en": {
        "A dog – black – says: “Woof.”": "a dog - black - says : &quot; woof . &quot;",
        "The dog's owner, the \"fox\", can't wear a 1990's T-SHIRT.": (
            "the dog &apos;s owner , the &quot; fox , &quot; can &apos;t wear a 1990 &apos;s t-shirt ."
        ),
        "It’s Mr. Smith [5] <b> | 5,300 dogs ... ``x''": (
            "it &apos;s mr. smith &#91; 5 &#93; &lt; b &gt; &#124; 5,300 dogs ... &quot; x &quot;"
        ),
        "A dog runs. It jumps": "a dog runs. it jumps",
        "A Dog.": "a dog .",
        "": "",
    },
}


def text(*sentences: str) -> bytes:
    return "".join(f"{sentence}\n" for sentence in sentences).encode()


RAW_PLACE = "multi30k/raw"
CONTENTS = {name: text(*MOSES[name[-2:]]) for name in RAW}
WANTED = {name: text(*MOSES[name[-2:]].values()) for name in TOKENISED}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch):
    """No network, no folder of the user's, and the sentences above taken for the published ones."""
    monkeypatch.setattr(sources, "HOMES", {"multi30k": ()})
    monkeypatch.delenv("NERO_DATA", raising=False)
    for name, content in {**CONTENTS, **WANTED}.items():
        monkeypatch.setitem(FILES, name, checksum(content))


def checksum(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def put(folder: Path, *, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENTS.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


def made(folder: Path) -> dict[str, bytes]:
    """All that lies where tokenised files are kept."""
    kept = folder / "multi30k/tok"
    return {path.name: path.read_bytes() for path in kept.iterdir()} if kept.exists() else {}


@pytest.mark.parametrize("language", MOSES)
def test_as_moses_does_it(language: str):
    assert dict(zip(MOSES[language], tokens.tokenised(MOSES[language], language), strict=True)) == MOSES[language]


@pytest.mark.parametrize("place", ["multi30k/raw", "multi30k", "."])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_raw_files_are_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, packed: bool):
    put(tmp_path / place, packed=packed)
    monkeypatch.setattr(tokens, "OFTEN", 4)
    said: list[tuple[str, int, int]] = []
    found = load("multi30k", tmp_path, progress=lambda *what: said.append(what))
    assert made(tmp_path) == WANTED
    assert [len(getattr(found, part).words) for part in ("train", "valid", "test")] == [6, 6, 6]
    assert found.references == tuple(MOSES["en"].values())
    assert said == [
        (f"tokenising {name}{'.gz' if packed else ''}", len(text(*list(MOSES[name[-2:]])[:done])), len(content))
        for name, content in CONTENTS.items()
        for done in (4, 6)
    ]
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    assert load("multi30k", tmp_path).vocabulary == found.vocabulary, "what was made is kept"


def test_raw_files_where_tokenised_ones_belong(tmp_path: Path):
    """As the error of a download that fails asks for them."""
    with pytest.raises(DataError, match=rf"or the raw {', '.join(RAW)} into {tmp_path}/multi30k/tok by hand"):
        load("multi30k", tmp_path)
    put(tmp_path / "multi30k/tok")
    load("multi30k", tmp_path)
    assert made(tmp_path) == {**CONTENTS, **WANTED}


def test_files_of_the_users_own_may_have_the_same_names(tmp_path: Path):
    """They are left alone, and a download is tried."""
    put(tmp_path)
    (tmp_path / RAW[0]).write_bytes(b"of another corpus\n")
    with pytest.raises(DataError, match="could not download"):
        load("multi30k", tmp_path)
    assert not made(tmp_path)


def test_what_is_tokenised_is_not_tokenised_again(tmp_path: Path):
    raw = put(tmp_path / "multi30k/raw")
    load("multi30k", tmp_path)
    (tmp_path / "multi30k/tok" / TOKENISED[2]).unlink()
    for name in (RAW[0], RAW[1], RAW[4]):
        (raw / name).write_bytes(b"not looked at")
    said: list[str] = []
    load("multi30k", tmp_path, progress=lambda work, *_: said.append(work))
    assert set(said) == {f"tokenising {RAW[2]}"}
    assert made(tmp_path) == WANTED


def test_a_few_files_of_such_names_are_another_matter(tmp_path: Path):
    """Whatever the user has in train.de is nobody else's business, if the rest is not there."""
    put(tmp_path / RAW_PLACE)
    (tmp_path / RAW_PLACE / RAW[0]).write_bytes(b"of another corpus")
    (tmp_path / RAW_PLACE / RAW[5]).unlink()
    with pytest.raises(DataError, match=f"could not download {TOKENISED[0]}"):
        load("multi30k", tmp_path)
    assert made(tmp_path) == {}


def test_a_packed_file_beside_a_plain_one(tmp_path: Path):
    put(tmp_path / RAW_PLACE, packed=True)
    (tmp_path / RAW_PLACE / RAW[3]).write_bytes(CONTENTS[RAW[3]])
    (tmp_path / RAW_PLACE / f"{RAW[3]}.gz").write_bytes(b"which is not needed")
    load("multi30k", tmp_path)
    assert made(tmp_path) == WANTED


PACKED = gzip.compress(CONTENTS[RAW[0]])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "train.de is broken or incomplete: it has 0 bytes.*Delete it and run again"),
        (text("Ein Hund."), "train.de is broken or incomplete: it has 10 bytes.*Delete it and run again"),
        (
            text("Ein großer Hund.").decode().encode("latin-1"),
            r"train.de is not UTF-8: byte 7 is 0xdf\. Save it as UTF-8",
        ),
        (CONTENTS[RAW[0]].decode().encode("utf-16"), "train.de is not UTF-8: byte 0 is 0xff"),
    ],
    ids=["empty", "another", "latin-1", "utf-16"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_raw_file_that_is_not_what_it_should_be(tmp_path: Path, content: bytes, says: str, packed: bool):
    put(tmp_path / RAW_PLACE, packed=packed)
    (tmp_path / RAW_PLACE / f"{RAW[0]}{'.gz' if packed else ''}").write_bytes(
        gzip.compress(content) if packed else content
    )
    refused(tmp_path, says.replace("train.de", r"train\.de\.gz, unpacked,") if packed else says)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", PACKED[:-9], PACKED[:40], PACKED[:-4] + b"????"],
    ids=["no gzip", "without its end", "its start", "of another length"],  # gzip puts the time into what would be names
)
def test_a_raw_file_that_does_not_unpack(tmp_path: Path, content: bytes):
    put(tmp_path / RAW_PLACE, packed=True)
    (tmp_path / RAW_PLACE / f"{RAW[0]}.gz").write_bytes(content)
    refused(tmp_path, r"train\.de\.gz is malformed: it does not unpack \(.*\)\. Delete it and run again")


def test_raw_files_that_do_not_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path / RAW_PLACE)
    short = text("Ein Hund.", "Zwei Hunde.")
    (tmp_path / RAW_PLACE / RAW[0]).write_bytes(short)
    monkeypatch.setitem(FILES, RAW[0], checksum(short))
    refused(
        tmp_path,
        rf"{tmp_path}/{RAW_PLACE}/train\.de has 2 lines and {tmp_path}/{RAW_PLACE}/train\.en has 6: .* Delete both",
    )


def test_all_are_looked_at_before_any_is_tokenised(tmp_path: Path):
    put(tmp_path / RAW_PLACE)
    (tmp_path / RAW_PLACE / RAW[5]).write_bytes(b"")
    refused(tmp_path, "test_2016_flickr.en is broken or incomplete: it has 0 bytes")


def test_without_sacremoses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path / RAW_PLACE)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    refused(tmp_path, r"tokenised by sacremoses, 0\.1 or newer \(.*\): pip install 'nero-optim\[paper\]'")


def test_with_an_old_sacremoses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path / RAW_PLACE)
    old = ModuleType("sacremoses")
    old.MosesPunctNormalizer = old.MosesTokenizer = lambda lang: lang
    monkeypatch.setitem(sys.modules, "sacremoses", old)
    refused(tmp_path, r"sacremoses, 0\.1 or newer \(.*perl_parity.*\): pip install 'nero-optim\[paper\]'")


def test_with_a_sacremoses_of_another_mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path / RAW_PLACE)
    monkeypatch.setattr("sacremoses.MosesTokenizer.tokenize", lambda _, sentence, **__: sentence)
    refused(tmp_path, r"train\.de, tokenised by .*, is not train\.lc\.norm\.tok\.de as it was published: pip install")


def refused(folder: Path, says: str) -> None:
    """With an error in a line, and nothing left behind."""
    with pytest.raises(DataError, match=says) as caught:
        load("multi30k", folder)
    assert "\n" not in str(caught.value)
    assert made(folder) == {}


def test_an_interruption_leaves_whole_files(tmp_path: Path):
    put(tmp_path / RAW_PLACE)

    def interrupt(work: str, *_: int) -> None:
        if work == f"tokenising {RAW[2]}":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load("multi30k", tmp_path, progress=interrupt)
    assert made(tmp_path) == {name: WANTED[name] for name in TOKENISED[:2]}
    load("multi30k", tmp_path)
    assert made(tmp_path) == WANTED


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, f"cannot write .*tok/{TOKENISED[0]}: the disk is full"),
        (errno.EROFS, f"cannot write .*{TOKENISED[0]}: "),
    ],
)
def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str):
    put(tmp_path / RAW_PLACE)

    def half(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", half)
    refused(tmp_path, says)


@pytest.mark.skipif(
    not REAL or not all(Path(REAL, f"multi30k/{name}.gz").is_file() for name in RAW),
    reason="no raw files of Multi30k: set NERO_DATA",
)
def test_the_real_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    for name in RAW:
        (tmp_path / f"{name}.gz").symlink_to(Path(REAL, f"multi30k/{name}.gz").resolve())
    found = load("multi30k", tmp_path)
    assert {name: checksum(content) for name, content in made(tmp_path).items()} == {
        name: FILES[name] for name in TOKENISED
    }
    assert sum(content.count(b"\n") for content in made(tmp_path).values()) == 62_028
    assert len(found.vocabulary) == 9529
