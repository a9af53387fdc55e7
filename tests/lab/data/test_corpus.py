"""WikiText-2: words, rows and files."""

import hashlib
import re
from pathlib import Path

import pytest
import torch
from lab.data_cases import real_folder

from nero_lab.data import FILES, DataError, corpus, load, sources


def test_cut_into_rows_matches_plain_lists():
    """Compares with nested lists of streams and rows."""
    text = torch.arange(1000, 1107)
    rows = corpus.cut_into_rows(text, streams=3, length=4)
    streams = [text[35 * i : 35 * (i + 1)].tolist() for i in range(3)]  # two words are dropped
    steps = [[stream[k : k + 4] for stream in streams] for k in range(0, 34, 4)]
    after = [[stream[k + 1 : k + 5] for stream in streams] for k in range(0, 34, 4)]
    found = [(words, labels) for words, labels in zip(rows.words.tolist(), rows.labels.tolist(), strict=True)]
    wanted = [pair for inputs, labels in zip(steps, after, strict=True) for pair in zip(inputs, labels, strict=True)]
    assert len(found) == len(wanted) == 27
    for (words, labels), (inputs, following) in zip(found, wanted, strict=True):
        known = len(following)
        assert labels == following + [corpus.IGNORED_LABEL] * (4 - known)
        assert words[:known] == inputs[:known]


def test_build_corpus_numbers_words_by_first_occurrence():
    found = corpus.build_corpus("made", ["b", "a", "b"] * 20, ["a", "c"] * 20, ["d"] * 20)
    assert found.vocabulary == ("b", "a", "c", "d")
    assert found.parts == ("valid", "test")
    assert found.test.words.unique().tolist() == [0, 3]  # 0 is padding
    assert set(found.valid.labels.unique().tolist()) == {corpus.IGNORED_LABEL, 1, 2}
    words, labels = (torch.cat(part) for part in zip(*found.epoch(7, torch.Generator(), None), strict=True))
    assert len(words) == found.examples == 20
    assert torch.equal(words, found.train.words)
    assert torch.equal(labels, found.train.labels)
    for part in found.parts:
        both = list(found.batches(part))
        assert torch.equal(torch.cat([words for words, _ in both]), getattr(found, part).words)
        assert torch.equal(torch.cat([labels for _, labels in both]), getattr(found, part).labels)
    assert found.to("cpu").device == torch.device("cpu")


def test_split_words_ends_lines_at_newlines_only():
    text = " = A \u2028 title = \n\n word\x85 \x0b two \n" + "x \n" * 20
    assert corpus.split_words(text.encode(), "made")[:9] == [
        "=",
        "A",
        "title",
        "=",
        "<eos>",
        "<eos>",
        "word",
        "two",
        "<eos>",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a word \xff here", "made.txt is not UTF-8: byte 7 is 0xff. Save it as UTF-8"),
        (b"", "made.txt must have at least 40 words, got 0"),
        (b"few words\n", "made.txt must have at least 40 words, got 3"),
    ],
)
def test_split_words_bad_text_raises(content: bytes, message: str):
    with pytest.raises(DataError, match=re.escape(message)):
        corpus.split_words(content, "made.txt")


def test_wikitext2_is_found_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for name, word in zip(sources.WIKITEXT2, "abc", strict=True):
        content = f" {word} word \n".encode() * 30
        (folder / name).write_bytes(content)
        monkeypatch.setitem(FILES, name, f"sha256:{hashlib.sha256(content).hexdigest()}")
    found = load("wikitext2", tmp_path)
    assert found.vocabulary == ("a", "word", "<eos>", "b", "c")
    assert found.name == "wikitext2"
    (tmp_path / "train.txt").write_bytes(b"the user's own file")
    assert load("wikitext2", tmp_path).examples == found.examples
    (folder / "train.txt").rename(folder / "elsewhere.txt")
    with pytest.raises(DataError, match=r"put train\.txt, valid\.txt, test\.txt into .*wikitext-2 by hand"):
        load("wikitext2", tmp_path)
    (folder / "elsewhere.txt").rename(folder / "train.txt")
    (folder / "valid.txt").write_bytes(b"another")
    with pytest.raises(DataError, match=r"valid\.txt is damaged or incomplete: got 7 bytes"):
        load("wikitext2", tmp_path)


def test_wikitext2_published_files_have_known_sizes():
    found = load("wikitext2", real_folder("wikitext2", *sources.WIKITEXT2))
    assert len(found.vocabulary) == 33278
    assert found.examples == 20 * 2984
    assert int((found.train.labels >= 0).sum()) == 20 * (2_088_628 // 20 - 1)
