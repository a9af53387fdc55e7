"""Multi30k: encoding, batches and files."""

import hashlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lab.data_cases import real_folder

from nero_lab.data import FILES, DataError, load, pairs, sources


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
    with pytest.raises(DataError, match="must be sentences to train on"):
        pairs.build_pairs("made", [long], [long], [long])


def test_multi30k_is_found_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "multi30k" / "tok"
    folder.mkdir(parents=True)

    def write(name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        monkeypatch.setitem(FILES, name, f"sha256:{hashlib.sha256(content).hexdigest()}")

    for german, english in sources.MULTI30K:
        write(german, "ein süßer hund .\n".encode() * 4)
        write(english, b"a sweet dog .\n" * 4)
    found = load("multi30k", tmp_path)
    assert found.vocabulary[4:] == ("ein", "süßer", "hund", ".", "a", "sweet", "dog")
    assert found.examples == 4
    write(sources.MULTI30K[2][0], b"")
    write(sources.MULTI30K[2][1], b"")
    with pytest.raises(DataError, match="a file is empty"):
        load("multi30k", tmp_path)
    write(sources.MULTI30K[1][1], b"a sweet dog .\n")
    with pytest.raises(DataError, match=r"val\.lc\.norm\.tok\.de has 4 sentences, but .* has 1\."):
        load("multi30k", tmp_path)


def test_multi30k_published_files_have_known_sizes():
    tokenised = [name for pair in sources.MULTI30K for name in pair]  # load() would write missing ones
    found = load("multi30k", real_folder("multi30k", *tokenised))
    assert len(found.vocabulary) == 9529
    assert [len(getattr(found, part).words) for part in ("train", "valid", "test")] == [29000, 1014, 1000]
