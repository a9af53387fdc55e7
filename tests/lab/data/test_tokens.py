"""Multi30k from its raw files: tokenised as published, and every bad file named."""
# ruff: noqa: RUF001 (normalising is about look-alike characters)

import gzip
import hashlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nero_lab.data import FILES, DataError, load, pairs, sources

#: Read at import: the tests unset the variable.
REAL = os.environ.get("NERO_DATA")
RAW = tuple(sources.MULTI30K_RAW.values())
TOKENISED = tuple(sources.MULTI30K_RAW)
#: Sentences, and their tokens by Moses's own Perl scripts, in the version of Multi30k's authors.
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
def _sentences_published(monkeypatch: pytest.MonkeyPatch):
    """Register the checksums of the sentences above."""
    monkeypatch.setattr(sources, "MIRRORS", {"multi30k": ()})
    monkeypatch.delenv("NERO_DATA", raising=False)
    for name, content in {**CONTENTS, **WANTED}.items():
        monkeypatch.setitem(FILES["multi30k"], name, checksum(content))


def checksum(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def put_raw(folder: Path, *, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in CONTENTS.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


def written(folder: Path) -> dict[str, bytes]:
    """Return all files in the folder of tokenised files."""
    kept = folder / "multi30k/tok"
    return {path.name: path.read_bytes() for path in kept.iterdir()} if kept.exists() else {}


@pytest.mark.parametrize("language", MOSES)
def test_tokenise_matches_moses(language: str):
    assert dict(zip(MOSES[language], pairs.tokenise(MOSES[language], language), strict=True)) == MOSES[language]


@pytest.mark.parametrize("place", ["multi30k/raw", "multi30k", "."])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_raw_files_are_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, packed: bool):
    put_raw(tmp_path / place, packed=packed)
    monkeypatch.setattr(pairs, "PROGRESS_EVERY", 4)
    reports: list[tuple[str, int, int]] = []
    found = load("multi30k", tmp_path, progress=lambda *report: reports.append(report))
    assert written(tmp_path) == WANTED
    assert [len(getattr(found, part).words) for part in ("train", "valid", "test")] == [6, 6, 6]
    assert found.references == tuple(MOSES["en"].values())
    assert reports == [
        (f"tokenising {name}{'.gz' if packed else ''}", len(text(*list(MOSES[name[-2:]])[:done])), len(content))
        for name, content in CONTENTS.items()
        for done in (4, 6)
    ]
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    assert load("multi30k", tmp_path).vocabulary == found.vocabulary  # from the files


def test_raw_files_beside_tokenised_ones_are_found(tmp_path: Path):
    """The error of a failed download names this folder."""
    with pytest.raises(DataError, match=rf"or the raw {', '.join(RAW)} into {tmp_path}/multi30k/tok by hand"):
        load("multi30k", tmp_path)
    put_raw(tmp_path / "multi30k/tok")
    load("multi30k", tmp_path)
    assert written(tmp_path) == {**CONTENTS, **WANTED}


def test_foreign_files_of_equal_names_are_ignored(tmp_path: Path):
    put_raw(tmp_path)
    (tmp_path / RAW[0]).write_bytes(b"of another corpus\n")
    with pytest.raises(DataError, match="could not download"):
        load("multi30k", tmp_path)
    assert not written(tmp_path)


def test_tokenised_files_are_kept(tmp_path: Path):
    raw = put_raw(tmp_path / "multi30k/raw")
    load("multi30k", tmp_path)
    (tmp_path / "multi30k/tok" / TOKENISED[2]).unlink()
    for name in (RAW[0], RAW[1], RAW[4]):
        (raw / name).write_bytes(b"not read")
    work: list[str] = []
    load("multi30k", tmp_path, progress=lambda name, *_: work.append(name))
    assert set(work) == {f"tokenising {RAW[2]}"}
    assert written(tmp_path) == WANTED


def test_incomplete_raw_files_are_ignored(tmp_path: Path):
    put_raw(tmp_path / RAW_PLACE)
    (tmp_path / RAW_PLACE / RAW[0]).write_bytes(b"of another corpus")
    (tmp_path / RAW_PLACE / RAW[5]).unlink()
    with pytest.raises(DataError, match=f"could not download {TOKENISED[0]}"):
        load("multi30k", tmp_path)
    assert written(tmp_path) == {}


def test_plain_file_wins_over_gzipped_one(tmp_path: Path):
    put_raw(tmp_path / RAW_PLACE, packed=True)
    (tmp_path / RAW_PLACE / RAW[3]).write_bytes(CONTENTS[RAW[3]])
    (tmp_path / RAW_PLACE / f"{RAW[3]}.gz").write_bytes(b"not read")
    load("multi30k", tmp_path)
    assert written(tmp_path) == WANTED


PACKED = gzip.compress(CONTENTS[RAW[0]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train.de is damaged or incomplete: its 0 bytes.*Delete it and run again"),
        (text("Ein Hund."), "train.de is damaged or incomplete: its 10 bytes.*Delete it and run again"),
        (
            text("Ein großer Hund.").decode().encode("latin-1"),
            r"train.de is not UTF-8: byte 7 is 0xdf\. Save it as UTF-8",
        ),
        (CONTENTS[RAW[0]].decode().encode("utf-16"), "train.de is not UTF-8: byte 0 is 0xff"),
    ],
    ids=["empty", "another", "latin-1", "utf-16"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_raw_file_damaged_is_named(tmp_path: Path, content: bytes, message: str, packed: bool):
    put_raw(tmp_path / RAW_PLACE, packed=packed)
    (tmp_path / RAW_PLACE / f"{RAW[0]}{'.gz' if packed else ''}").write_bytes(
        gzip.compress(content) if packed else content
    )
    assert_refused(tmp_path, message.replace("train.de", r"train\.de\.gz, unpacked,") if packed else message)


@pytest.mark.parametrize(
    "content",
    [b"no gzip", PACKED[:-9], PACKED[:40], PACKED[:-4] + b"????"],
    ids=["no gzip", "without its end", "its start", "of another length"],  # explicit: gzip content holds the time
)
def test_raw_file_that_does_not_unpack_is_named(tmp_path: Path, content: bytes):
    put_raw(tmp_path / RAW_PLACE, packed=True)
    (tmp_path / RAW_PLACE / f"{RAW[0]}.gz").write_bytes(content)
    assert_refused(tmp_path, r"train\.de\.gz is malformed: it does not unpack \(.*\)\. Delete it and run again")


def test_raw_files_are_all_verified_before_the_first_write(tmp_path: Path):
    put_raw(tmp_path / RAW_PLACE)
    (tmp_path / RAW_PLACE / RAW[5]).write_bytes(b"")
    assert_refused(tmp_path, "test_2016_flickr.en is damaged or incomplete: its 0 bytes")


def test_sacremoses_missing_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_raw(tmp_path / RAW_PLACE)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    assert_refused(tmp_path, r"needs sacremoses 0\.1 or newer \(.*\): pip install '\.\[lab\]'")


def test_sacremoses_too_old_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_raw(tmp_path / RAW_PLACE)
    old = ModuleType("sacremoses")
    old.MosesPunctNormalizer = old.MosesTokenizer = lambda lang: lang
    monkeypatch.setitem(sys.modules, "sacremoses", old)
    assert_refused(tmp_path, r"sacremoses 0\.1 or newer \(.*perl_parity.*\): pip install '\.\[lab\]'")


def test_sacremoses_that_tokenises_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_raw(tmp_path / RAW_PLACE)
    monkeypatch.setattr("sacremoses.MosesTokenizer.tokenize", lambda _, sentence, **__: sentence)
    assert_refused(
        tmp_path, r"train\.de, tokenised by .*, differs from the published train\.lc\.norm\.tok\.de: pip install"
    )


def assert_refused(folder: Path, message: str) -> None:
    """Assert that loading fails with a one-line error and writes nothing."""
    with pytest.raises(DataError, match=message) as caught:
        load("multi30k", folder)
    assert "\n" not in str(caught.value)
    assert written(folder) == {}


def test_interruption_leaves_complete_files_only(tmp_path: Path):
    put_raw(tmp_path / RAW_PLACE)

    def interrupt(work: str, *_: int) -> None:
        if work == f"tokenising {RAW[2]}":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load("multi30k", tmp_path, progress=interrupt)
    assert written(tmp_path) == {name: WANTED[name] for name in TOKENISED[:2]}
    load("multi30k", tmp_path)
    assert written(tmp_path) == WANTED


@pytest.mark.skipif(
    not REAL or not all(Path(REAL, f"multi30k/{name}.gz").is_file() for name in RAW),
    reason="no raw files of Multi30k: set NERO_DATA",
)
def test_published_raw_files_give_published_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    for name in RAW:
        (tmp_path / f"{name}.gz").symlink_to(Path(REAL, f"multi30k/{name}.gz").resolve())
    found = load("multi30k", tmp_path)
    assert {name: checksum(content) for name, content in written(tmp_path).items()} == {
        name: FILES["multi30k"][name] for name in TOKENISED
    }
    assert sum(content.count(b"\n") for content in written(tmp_path).values()) == 62_028
    assert len(found.vocabulary) == 9529
