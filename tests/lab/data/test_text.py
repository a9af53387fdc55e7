"""WikiText-2 and Multi30k: words, rows, encoding, batches and files."""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lab.data_cases import real_folder

from nero_lab.data import FILES, DataError, corpus, load, pairs, sources


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


def test_wikitext2_is_found_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for name, word in zip(sources.WIKITEXT2, "abc", strict=True):
        content = f" {word} word \n".encode() * 30
        (folder / name).write_bytes(content)
        monkeypatch.setitem(FILES["wikitext2"], name, f"sha256:{hashlib.sha256(content).hexdigest()}")
    found = load("wikitext2", tmp_path)
    assert found.vocabulary == ("a", "word", "<eos>", "b", "c")
    assert found.name == "wikitext2"
    (tmp_path / "train.txt").write_bytes(b"the user's own file")
    assert load("wikitext2", tmp_path).examples == load("wikitext2", folder).examples == found.examples
    (folder / "train.txt").rename(folder / "elsewhere.txt")
    with pytest.raises(DataError, match=r"put train\.txt, valid\.txt, test\.txt into .*wikitext-2 by hand"):
        load("wikitext2", tmp_path)
    (folder / "elsewhere.txt").rename(folder / "train.txt")
    (folder / "valid.txt").write_bytes(b"another")
    with pytest.raises(DataError, match=r"valid\.txt is damaged or incomplete: its 7 bytes"):
        load("wikitext2", tmp_path)


def test_wikitext2_published_files_have_known_sizes():
    found = load("wikitext2", real_folder("wikitext2", *sources.WIKITEXT2))
    assert len(found.vocabulary) == 33278
    assert found.examples == 20 * 2984
    assert int((found.train.labels >= 0).sum()) == 20 * (2_088_628 // 20 - 1)


def test_build_pairs_encodes_and_pads():
    train = [(["a", "b"], ["x"]), (["a"], ["x", "y", "x"]), (["a", "rare"], ["y", "y"])]
    found = pairs.build_pairs("made", train, train[:1], train[1:2])
    assert found.vocabulary == ("<blank>", "<unk>", "<s>", "</s>", "a", "x", "y")  # "b" and "rare" occur once
    a, x, y = 4, 5, 6
    assert found.train.words.tolist() == [
        [[2, a, 1, 3, 0], [2, x, 0, 0, 0]],
        [[2, a, 3, 0, 0], [2, x, y, x, 0]],
        [[2, a, 1, 3, 0], [2, y, y, 0, 0]],
    ]
    nothing = pairs.IGNORED_LABEL
    assert found.train.labels.tolist() == [
        [x, 3, nothing, nothing, nothing],
        [x, y, x, 3, nothing],
        [y, y, 3, nothing, nothing],
    ]
    assert found.train.lengths == ((4, 2), (3, 4), (4, 3))
    assert found.valid.words.shape == (1, 2, 5)


def test_epoch_has_every_pair_once_in_few_lengths():
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (50, 2), generator=chance).tolist()
    train = [([f"s{i}"] * one, [f"t{i}"] * other) for i, (one, other) in enumerate(lengths)]
    found = pairs.build_pairs("made", train, train[:3], train[3:5])
    orders = []
    for seed in (1, 1, 2):
        batches = found.epoch(8, torch.Generator().manual_seed(seed), None)
        assert [len(words) for words, *_ in batches] == [8] * 6 + [2]
        for words, places, labels in batches:
            assert words.shape[2] % 8 == 0 or words.shape[2] == found.train.labels.shape[1]
            assert labels.shape == places.shape[1:]
            assert len(labels) % 128 == 0 or len(labels) == words[:, 0].numel()
            for line, chosen in zip(words.transpose(0, 1).flatten(1), places, strict=True):
                assert len(set(chosen.tolist())) == len(chosen)
                assert torch.equal(line[chosen][: (line > 0).sum()], line[line > 0])  # every word, in order
                assert line[chosen][-1] == 0  # then a blank
            assert torch.equal(labels >= 0, words[:, 1].flatten()[places[1]] > 0)
        whole = [F.pad(words, (0, 40 - words.shape[2])) for words, *_ in batches]
        orders.append(torch.cat(whole))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    own = torch.randperm(50, generator=torch.Generator().manual_seed(1))  # the numbers that dropout draws
    assert not torch.equal(orders[0], F.pad(found.train.words[own], (0, 40 - found.train.words.shape[2])))
    wanted = F.pad(found.train.words, (0, 40 - found.train.words.shape[2])).flatten(1).tolist()
    assert sorted(orders[0].flatten(1).tolist()) == sorted(wanted)
    assert sum(len(words) for words, *_ in found.batches("valid")) == 3


def test_build_pairs_drops_long_training_sentences():
    long = (["a"] * 101, ["b"])
    found = pairs.build_pairs("made", [(["a"], ["b"]), long], [long], [long])
    assert found.examples == 1
    assert found.valid.words.shape[2] == 104


def test_multi30k_is_found_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "multi30k" / "tok"
    folder.mkdir(parents=True)

    def write(name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        monkeypatch.setitem(FILES["multi30k"], name, f"sha256:{hashlib.sha256(content).hexdigest()}")

    for german, english in sources.MULTI30K:
        write(german, "ein süßer hund .\n".encode() * 4)
        write(english, b"a sweet dog .\n" * 4)
    found = load("multi30k", tmp_path)
    assert found.vocabulary[4:] == ("ein", "süßer", "hund", ".", "a", "sweet", "dog")
    assert found.examples == 4


def test_multi30k_published_files_have_known_sizes():
    tokenised = [name for pair in sources.MULTI30K for name in pair]  # load() would write missing ones
    found = load("multi30k", real_folder("multi30k", *tokenised))
    assert len(found.vocabulary) == 9529
    assert [len(getattr(found, part).words) for part in ("train", "valid", "test")] == [29000, 1014, 1000]
