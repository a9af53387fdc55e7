"""Multi30k's raw sentences in tokens, as its authors made them: by Moses's rules, which sacremoses has in Python."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from nero_lab.data import sources
from nero_lab.data.download import replacing
from nero_lab.data.errors import DataError
from nero_lab.data.folder import Folder, checked, intact
from nero_lab.data.formats import gunzip, lines

#: After how many sentences progress is told.
OFTEN = 100


def tokenise(folder: Folder) -> None:
    """Write those of the tokenised files that are not there, if all raw ones are; where downloads go.

    Raises:
        DataError: if a raw file is broken, two do not belong together, or sacremoses is not there or splits otherwise.
    """
    raw = _raw(folder)
    missing = [name for name in raw if folder.find(name) is None]
    pairs = [pair for pair in sources.MULTI30K if set(pair) & set(missing)]
    texts = {name: _text(raw[name]) for pair in pairs for name in pair}
    for german, english in pairs:
        if len(texts[german]) != len(texts[english]):
            raise DataError(
                f"{raw[german]} has {len(texts[german]):,} lines and {raw[english]} has {len(texts[english]):,}: these "
                "do not belong together. Delete both and run again, to have the data brought anew"
            )
    for name in missing:
        _write(folder, name, raw[name], texts[name])


def tokenised(sentences: Iterable[str], language: str) -> Iterator[str]:
    """Sentences lower-cased, with plain punctuation, in tokens between spaces, and what XML reserves escaped.

    Example:
        >>> list(tokenised(["Der Hund sagt: „Wau.“"], "de"))
        ['der hund sagt : &quot; wau &quot; .']
    """
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer

        normaliser = MosesPunctNormalizer(language, perl_parity=True)
    except (ImportError, TypeError) as error:
        raise DataError(
            f"raw sentences are tokenised by sacremoses, 0.1 or newer ({error}): pip install 'nero-optim[paper]'"
        ) from error
    tokeniser = MosesTokenizer(language)
    for sentence in sentences:
        # Moses sees a line with its end, and moves a full stop out of quotation marks if anything follows them
        yield tokeniser.tokenize(normaliser.normalize(f"{sentence.lower()}\n"), return_str=True)


def _raw(folder: Folder) -> dict[str, Path]:
    """The raw files by what they are called when tokenised, from the first place that has all; else none."""
    for place in sources.RAW_FOLDERS:
        found = {
            name: path
            for name, raw in sources.MULTI30K_RAW.items()
            for ending in (".gz", "")
            if (path := folder.path / place / f"{raw}{ending}").is_file()
        }
        # in a folder of the user's, files of such names may be of anything
        if len(found) == len(sources.MULTI30K_RAW) and (place or all(map(_is_published, found.values()))):
            return found
    return {}


def _is_published(path: Path) -> bool:
    try:
        return bool(_text(path))
    except DataError:
        return False


def _text(path: Path) -> list[str]:
    """The lines of a raw file."""
    content, source = path.read_bytes(), str(path)
    if path.suffix == ".gz":
        content, source = gunzip(content, source), f"{source}, unpacked,"
    text = lines(content, source)  # what is wrong with these says more than a checksum
    checked(content, path.name.removesuffix(".gz"), source)
    return text


def _write(folder: Folder, name: str, raw: Path, text: list[str]) -> None:
    made, done, total = [], 0, sum(len(line.encode()) + 1 for line in text)
    for line, tokens in zip(text, tokenised(text, name.rpartition(".")[2]), strict=True):
        made.append(f"{tokens}\n")
        done += len(line.encode()) + 1
        if folder.progress is not None and (len(made) % OFTEN == 0 or done == total):
            folder.progress(f"tokenising {raw.name}", done, total)
    content = "".join(made).encode()
    if not intact(content, name):
        raise DataError(
            f"{raw}, tokenised by the sacremoses that is here, is not {name} as it was published: "
            "pip install sacremoses==0.2.0, by which it is"
        )
    with replacing(folder.path / sources.FOLDERS["multi30k"] / name) as part:
        part.write_bytes(content)
