"""Tokens of Multi30k's raw sentences, made as its authors made them: by the rules of Moses, from sacremoses."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from nero.messages import how_to_install
from nero_lab.data import sources
from nero_lab.data.dataset import DataError
from nero_lab.data.download import replacing
from nero_lab.data.folder import Folder
from nero_lab.data.formats import gunzip, lines

#: Sentences between two reports of progress.
PROGRESS_EVERY = 100


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
