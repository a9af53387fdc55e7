"""Multi30k: German sentences and their English translations, as word numbers.

Raw sentences are tokenised as the data set's authors did it: by the rules of Moses, from sacremoses.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nero.messages import how_to_install
from nero_lab.data import sources
from nero_lab.data.dataset import IGNORED_LABEL, DataError, Texts
from nero_lab.data.download import replacing
from nero_lab.data.folder import Folder
from nero_lab.data.formats import gunzip, lines

#: The first words of the vocabulary: padding, a rare word, the start and the end of a sentence.
SPECIAL = ("<blank>", "<unk>", "<s>", "</s>")
BLANK, UNKNOWN, BEGIN, END = range(4)
#: Occurrences in its language that put a word into the vocabulary.
MIN_OCCURRENCES = 3
#: Longer sentences are not trained on.
MAX_TRAIN_WORDS = 100
#: Batch lengths are multiples of this: each length costs a CUDA graph.
LENGTH_MULTIPLE = 8
#: The number of selected positions in a batch is a multiple of this, for the same reason.
POSITIONS_MULTIPLE = 128
#: Pairs per batch of an evaluation.
EVAL_BATCH = 200
#: Added to the seed of the order, so that it does not share random numbers with dropout.
ORDER_SEED_OFFSET = 0x9E3779B9
#: Sentences between two reports of progress.
PROGRESS_EVERY = 100


@dataclass(frozen=True)
class Sentences:
    """Pairs of padded sentences.

    Attributes:
        words: (N, 2, L): the source sentence, and the target sentence without its end; each padded by at least one
            blank.
        labels: (N, L): the target sentence without its start.
        lengths: lengths of source and target, on the host.
    """

    words: Tensor
    labels: Tensor
    lengths: tuple[tuple[int, int], ...]

    def to(self, device: torch.device | str) -> "Sentences":
        return replace(self, words=self.words.to(device), labels=self.labels.to(device))

    def batches(self, size: int, order: Sequence[int] | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Cut the pairs into batches.

        Args:
            size: pairs per batch.
            order: order of the pairs; None: as they are.

        Returns:
            For each batch: words, (n, 2, l) with most of the padding removed; positions, (2, T), of the words in the
            flattened source and target, filled up with positions of blanks, at least one; and the labels, (T,), at the
            positions of the target.
        """
        chosen_order = None if order is None else self._copy_order(order)
        order = range(len(self.lengths)) if order is None else order
        batches = []
        for start in range(0, len(order), size):
            lengths = [self.lengths[each] for each in order[start : start + size]]
            length = min(_round_up(1 + max(map(max, lengths)), LENGTH_MULTIPLE), self.labels.shape[1])
            most = max(map(sum, zip(*lengths, strict=True)))
            count = min(_round_up(1 + most, POSITIONS_MULTIPLE), len(lengths) * length)
            rows = slice(start, start + size) if chosen_order is None else chosen_order[start : start + size]
            words = self.words[rows, :, :length]
            blank = (words == BLANK).transpose(0, 1).flatten(1).byte()
            positions = blank.argsort(dim=1, stable=True)[:, :count]  # words first, then blanks
            batches.append((words, positions, self.labels[rows, :length].flatten()[positions[1]]))
        return batches

    def _copy_order(self, order: Sequence[int]) -> Tensor:
        """Copy an order to the device without synchronising."""
        host = torch.tensor(order)
        return (host.pin_memory() if self.words.is_cuda else host).to(self.words.device, non_blocking=True)


@dataclass(frozen=True)
class Pairs(Texts[Sentences]):
    """Corpus in two languages. The vocabulary holds the special words, then the words of both languages.

    Attributes:
        references: the target sentences of ``test``, in words.
    """

    references: tuple[str, ...]

    def epoch(self, batch: int, generator: torch.Generator, augment: object) -> Sequence[tuple[Tensor, ...]]:  # noqa: ARG002
        """Return all pairs in an order set by the generator's seed; drawn on the host, which needs the lengths."""
        host = torch.Generator().manual_seed(generator.initial_seed() + ORDER_SEED_OFFSET)
        return self.train.batches(batch, torch.randperm(self.examples, generator=host).tolist())

    def batches(self, part: str) -> Iterator[tuple[Tensor, ...]]:
        sentences: Sentences = getattr(self, part)
        yield from sentences.batches(EVAL_BATCH)

    def to_text(self, words: Sequence[int]) -> str:
        """Join the words of a sentence, up to its end."""
        until = list(words).index(END) if END in words else len(words)
        return " ".join(self.vocabulary[word] for word in words[:until])


def multi30k(folder: Folder) -> Pairs:
    """Load Multi30k from its six tokenised files; tokenise the raw files first if they are there."""
    tokenise_raw_files(folder)
    by_hand = (*sources.MULTI30K_RAW, f"or the raw {', '.join(sources.MULTI30K_RAW.values())}")

    def sentences(name: str) -> list[list[str]]:
        path = folder.find(name) or folder.download(name, sources.FOLDERS["multi30k"], by_hand)
        return [line.split() for line in lines(folder.read(path), str(path))]

    texts = (zip(sentences(german), sentences(english), strict=True) for german, english in sources.MULTI30K)
    return build_pairs("multi30k", *map(list, texts))


def build_pairs(
    name: str,
    train: list[tuple[list[str], list[str]]],
    valid: list[tuple[list[str], list[str]]],
    test: list[tuple[list[str], list[str]]],
) -> Pairs:
    """Number pairs of sentences by one vocabulary: the words that are frequent in either language."""
    train = [pair for pair in train if max(map(len, pair)) <= MAX_TRAIN_WORDS]
    counts = [Counter(word for pair in train for word in pair[side]) for side in (0, 1)]
    frequent = [word for count in counts for word, times in count.items() if times >= MIN_OCCURRENCES]
    numbers = {word: number for number, word in enumerate(dict.fromkeys((*SPECIAL, *frequent)))}

    def encode(sentence: list[str]) -> list[int]:
        return [BEGIN, *(numbers.get(word, UNKNOWN) for word in sentence), END]

    def pad(pairs: list[tuple[list[str], list[str]]]) -> Sentences:
        return _pad([(encode(german), encode(english)) for german, english in pairs])

    references = tuple(" ".join(english) for _, english in test)
    return Pairs(name, tuple(numbers), pad(train), pad(valid), pad(test), references)


def _pad(pairs: list[tuple[list[int], list[int]]]) -> Sentences:
    """Stack encoded pairs; the target loses its end as an input and its start as a label."""
    lengths = tuple((len(source), len(target) - 1) for source, target in pairs)
    longest = 1 + max(map(max, lengths))
    words = torch.full((len(pairs), 2, longest), BLANK)
    labels = torch.full((len(pairs), longest), IGNORED_LABEL)
    for row, (source, target) in enumerate(pairs):
        words[row, 0, : len(source)] = torch.tensor(source)
        words[row, 1, : len(target) - 1] = torch.tensor(target[:-1])
        labels[row, : len(target) - 1] = torch.tensor(target[1:])
    return Sentences(words, labels, lengths)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def tokenise_raw_files(folder: Folder) -> None:
    """Write the tokenised files that are missing, if all raw files exist; else do nothing.

    Raises:
        DataError: if a raw file is damaged, or sacremoses is missing or tokenises differently.
    """
    raw = _find_raw_files(folder)
    missing = [name for name in raw if folder.find(name) is None]
    pairs = [pair for pair in sources.MULTI30K if set(pair) & set(missing)]
    texts = {name: _read_lines(folder, raw[name]) for pair in pairs for name in pair}
    for name in missing:
        _write_tokens(folder, name, raw[name], texts[name])


def tokenise(sentences: Iterable[str], language: str) -> Iterator[str]:
    """Lower-case sentences, normalise their punctuation, separate tokens by spaces, and escape XML characters.

    Example:
        >>> list(tokenise(["Der Hund sagt: „Wau.“"], "de"))
        ['der hund sagt : &quot; wau &quot; .']
    """
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer

        normaliser = MosesPunctNormalizer(language, perl_parity=True)
    except (ImportError, TypeError) as error:
        raise DataError(
            f"tokenising raw sentences needs sacremoses 0.1 or newer ({error}): {how_to_install('lab')}"
        ) from error
    tokeniser = MosesTokenizer(language)
    for sentence in sentences:
        # with its newline, as Moses reads it: a full stop leaves its quotation marks only if something follows
        yield tokeniser.tokenize(normaliser.normalize(f"{sentence.lower()}\n"), return_str=True)


def _find_raw_files(folder: Folder) -> dict[str, Path]:
    """Return the raw files by the names of the tokenised ones, from the first folder with all of them; else none."""
    for place in sources.RAW_FOLDERS:
        paths = {
            name: path
            for name, raw in sources.MULTI30K_RAW.items()
            for ending in (".gz", "")
            if (path := folder.path / place / f"{raw}{ending}").is_file()
        }
        if len(paths) < len(sources.MULTI30K_RAW):
            continue
        # directly in the data folder, files of these names may belong to something else
        if place or all(_is_published(folder, path) for path in paths.values()):
            return paths
    return {}


def _is_published(folder: Folder, path: Path) -> bool:
    try:
        return bool(_read_lines(folder, path))
    except DataError:
        return False


def _read_lines(folder: Folder, path: Path) -> list[str]:
    content, source = path.read_bytes(), str(path)
    if path.suffix == ".gz":
        content, source = gunzip(content, source), f"{source}, unpacked,"
    text = lines(content, source)  # before the checksum: an encoding error says more
    folder.verify(content, path.name.removesuffix(".gz"), source)
    return text


def _write_tokens(folder: Folder, name: str, raw: Path, text: list[str]) -> None:
    tokenised, done, total = [], 0, sum(len(line.encode()) + 1 for line in text)
    for line, tokens in zip(text, tokenise(text, name.rpartition(".")[2]), strict=True):
        tokenised.append(f"{tokens}\n")
        done += len(line.encode()) + 1
        if folder.progress is not None and (len(tokenised) % PROGRESS_EVERY == 0 or done == total):
            folder.progress(f"tokenising {raw.name}", done, total)
    content = "".join(tokenised).encode()
    if not folder.is_intact(content, name):
        raise DataError(
            f"{raw}, tokenised by the installed sacremoses, differs from the published {name}: "
            "pip install sacremoses==0.2.0"
        )
    with replacing(folder.path / sources.FOLDERS["multi30k"] / name) as part:
        part.write_bytes(content)
