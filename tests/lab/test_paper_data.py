"""Data sets: found or downloaded, checked, read; every way in which that can fail says which file, and what to do."""

import errno
import gzip
import hashlib
import io
import math
import os
import re
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nero_lab.data import FILES, DataError, Images, Pictures, augment, corpus, download, load, pairs, sources
from nero_lab.data.augment import crop_flip_rotate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MNIST = (*sources.MNIST_TRAIN, *sources.MNIST_TEST)
CIFAR10 = (*sources.CIFAR10_TRAIN, sources.CIFAR10_TEST)
#: Read at once: the tests take the variable away.
REAL = os.environ.get("NERO_DATA")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch):
    """No network, and no folder of the user's, unless a test says so."""
    monkeypatch.setattr(sources, "HOMES", {"mnist": (), "cifar10": (), "wikitext2": (), "multi30k": ()})
    for variable in ("NERO_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("no_proxy", "*")


# -- made data ---------------------------------------------------------------------------------


def idx(tensor: Tensor) -> bytes:
    return bytes([0, 0, 8, tensor.ndim]) + struct.pack(f">{tensor.ndim}I", *tensor.shape) + bytes(tensor.flatten())


def digits(count: int) -> Images:
    return Images(torch.randint(256, (count, 1, 28, 28), dtype=torch.uint8), torch.randint(10, (count,)))


def tiny_mnist() -> tuple[dict[str, bytes], Images, Images]:
    """Four files by name, of 7 and 3 images, and what they should be read as."""
    train, test = digits(7), digits(3)
    contents = {}
    for (pixels, labels), images in ((sources.MNIST_TRAIN, train), (sources.MNIST_TEST, test)):
        contents[pixels] = idx(images.pixels.squeeze(1))
        contents[labels] = idx(images.labels.byte())
    return contents, train, test


def tiny_cifar10() -> tuple[dict[str, bytes], Tensor, Tensor]:
    """Six files by name, of two images each, and all their rows."""
    labels = torch.randint(10, (12, 1), dtype=torch.uint8)
    pixels = torch.randint(256, (12, 3072), dtype=torch.uint8)
    rows = torch.cat([labels, pixels], 1).view(6, 2, 3073)
    return {name: bytes(rows[i].flatten()) for i, name in enumerate(CIFAR10)}, labels.flatten().long(), pixels


def archive_of(contents: dict[str, bytes], folder: str = "cifar-10-batches-bin") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {"readme.html": b"<html>", **contents}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def checksum(content: bytes, name: str) -> str:
    kind = FILES[name].partition(":")[0]
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, bytes], Path]:
    """Write a file and have it taken for the published one of its name."""

    def write(path: Path, content: bytes) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        monkeypatch.setitem(FILES, path.name, checksum(content, path.name))
        return path

    return write


@pytest.mark.parametrize("inside", ["mnist", "."])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_mnist_is_read(tmp_path: Path, put, inside: str, packed: bool):
    contents, train, test = tiny_mnist()
    for name, content in contents.items():
        put(tmp_path / inside / (f"{name}.gz" if packed else name), gzip.compress(content) if packed else content)
    dataset = load("mnist", tmp_path)
    assert (dataset.name, dataset.mean, dataset.std) == ("mnist", (0.1307,), (0.3081,))
    for read, made in ((dataset.train, train), (dataset.test, test)):
        assert read.pixels.dtype == torch.uint8
        assert read.labels.dtype == torch.int64
        assert torch.equal(read.pixels, made.pixels)
        assert torch.equal(read.labels, made.labels)


@pytest.mark.parametrize("inside", ["cifar-10-batches-bin", ".", "archive"])
def test_cifar10_is_read(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch, inside: str):
    contents, labels, pixels = tiny_cifar10()
    for name, content in contents.items():
        if inside == "archive":
            monkeypatch.setitem(FILES, name, checksum(content, name))
        else:
            put(tmp_path / inside / name, content)
    if inside == "archive":
        put(tmp_path / sources.CIFAR10_ARCHIVE, archive_of(contents))
    dataset = load("cifar10", tmp_path)
    assert torch.equal(dataset.train.pixels.flatten(1), pixels[:10])
    assert torch.equal(dataset.test.pixels.flatten(1), pixels[10:])
    assert dataset.train.pixels.shape[1:] == (3, 32, 32)
    assert torch.equal(torch.cat([dataset.train.labels, dataset.test.labels]), labels)
    assert dataset.train.labels.dtype == torch.int64


@pytest.mark.parametrize("device", DEVICES)
def test_normalised(device: str):
    images = Images(torch.randint(256, (5, 3, 4, 6), dtype=torch.uint8), torch.arange(5))
    dataset = Pictures("made", images, images, (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)).to(device)
    assert dataset.train.pixels.device.type == dataset.test.labels.device.type == device
    before = dataset.train.pixels.clone()
    mean = torch.tensor(dataset.mean, dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor(dataset.std, dtype=torch.float64).view(3, 1, 1)
    for pixels in (dataset.train.pixels, dataset.train.pixels.float()):
        got = dataset.normalised(pixels)
        assert got.dtype == torch.float32
        assert got.device == pixels.device
        torch.testing.assert_close(got.cpu().double(), (before.cpu() / 255.0 - mean) / std, rtol=0, atol=2e-6)
        assert torch.equal(pixels, before.to(pixels.dtype)), "what is given is left alone"


# -- the folder --------------------------------------------------------------------------------


def test_an_unknown_data_set():
    with pytest.raises(DataError, match=r"no data set 'svhn'.*mnist, cifar10"):
        load("svhn")


def test_a_folder_that_is_named_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError, match=r"nowhere, that was asked for, does not exist: make it"):
        load("mnist", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"nowhere, that was asked for, does not exist: name another$"):
        load("imagenet", tmp_path / "nowhere")  # which is not downloaded
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is no folder"):
        load("mnist", tmp_path / "file")
    monkeypatch.setenv("NERO_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"nowhere, that \$NERO_DATA names, does not exist"):
        load("mnist")


def test_the_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The argument, $NERO_DATA, the standard's cache, ~/.cache: as the error says where to put files."""

    def asks_for(folder: Path, argument: Path | None = None) -> None:
        with pytest.raises(DataError, match=f"put train-images.* into {folder}/mnist by hand"):
            load("mnist", argument)

    monkeypatch.setenv("HOME", str(tmp_path))
    asks_for(tmp_path / ".cache/nero")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    asks_for(tmp_path / ".cache/nero")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    asks_for(tmp_path / "xdg/nero")
    for name in ("variable", "argument"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("NERO_DATA", "~/variable")
    asks_for(tmp_path / "variable")
    asks_for(tmp_path / "argument", tmp_path / "argument")


def test_a_file_that_cannot_be_read(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch):
    path = put(tmp_path / f"{MNIST[0]}.gz", b"...")

    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=f"cannot be read.*{path}"):
        load("mnist", tmp_path)


# -- broken and malformed files ----------------------------------------------------------------


def test_a_broken_file_of_mnist(tmp_path: Path, put):
    contents, _, _ = tiny_mnist()
    paths = [put(tmp_path / "mnist" / name, content) for name, content in contents.items()]
    paths[1].write_bytes(contents[MNIST[1]][:-1])
    with pytest.raises(DataError, match=f"{paths[1]} is broken or incomplete.*Delete it and run again"):
        load("mnist", tmp_path)


def test_a_broken_file_of_cifar10(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch):
    contents, _, _ = tiny_cifar10()
    paths = [put(tmp_path / name, content) for name, content in contents.items()]
    paths[4].write_bytes(b"?" + contents[CIFAR10[4]][1:])
    with pytest.raises(DataError, match=f"{paths[4]} is broken or incomplete.*Delete it and run again"):
        load("cifar10", tmp_path)
    paths[4].unlink()
    path = put(tmp_path / sources.CIFAR10_ARCHIVE, archive_of(contents))
    monkeypatch.setitem(FILES, CIFAR10[4], "sha256:0")
    with pytest.raises(DataError, match=rf"{path} \(its .*{CIFAR10[4]}\) is broken or incomplete"):
        load("cifar10", tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=f"{path} is broken or incomplete.*md5:"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("which", "content", "says"),
    [
        (0, b"", "begins with nothing"),
        (0, idx(torch.zeros(2, 28, dtype=torch.uint8)), "begins with 00 00 08 02"),
        (0, b"\0\0\x0d\x03" + bytes(12), "begins with 00 00 0d 03"),
        (0, b"\0\0\x08\x03\0\0", "3 lengths"),
        (0, idx(torch.zeros(2, 28, 28, dtype=torch.uint8))[:-1], "holds 2 x 28 x 28 bytes, and holds 1,567"),
        (0, idx(torch.zeros(0, 28, 28, dtype=torch.uint8)), "0 x 28 x 28"),
        (0, idx(torch.zeros(2, 28, 27, dtype=torch.uint8)), "images are 28 x 27"),
        (1, idx(torch.tensor([1, 2, 10], dtype=torch.uint8)), "a label 10"),
    ],
    ids=["empty", "labels for images", "floats", "a short header", "cut short", "no image", "shape", "label"],
)
def test_a_malformed_file_of_mnist(tmp_path: Path, put, which: int, content: bytes, says: str):
    contents, _, _ = tiny_mnist()
    contents[MNIST[which]] = content
    for name, its in contents.items():
        put(tmp_path / name, its)
    with pytest.raises(DataError, match=f"{tmp_path / MNIST[which]} is malformed: .*{says}"):
        load("mnist", tmp_path)


def test_what_does_not_unpack(tmp_path: Path, put):
    for content in (b"no gzip", gzip.compress(b"content")[:-9], gzip.compress(b"x" * 99)[:12] + b"?" * 20):
        put(tmp_path / f"{MNIST[0]}.gz", content)
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is malformed: it does not unpack"):
            load("mnist", tmp_path)
    contents, _, _ = tiny_cifar10()
    whole = archive_of(contents)
    for content in (b"no archive", gzip.compress(b"no archive"), whole[: len(whole) // 2]):
        put(tmp_path / sources.CIFAR10_ARCHIVE, content)
        with pytest.raises(DataError, match=r"tar.gz is malformed: it does not unpack"):
            load("cifar10", tmp_path)
    del contents[CIFAR10[2]]
    for content in (archive_of(contents), archive_of(tiny_cifar10()[0], folder="elsewhere")):
        put(tmp_path / sources.CIFAR10_ARCHIVE, content)
        with pytest.raises(DataError, match=r"tar.gz is malformed: it does not hold .*data_batch_3.bin"):
            load("cifar10", tmp_path)


def test_mnist_of_two_minds(tmp_path: Path, put):
    contents, _, _ = tiny_mnist()
    contents[MNIST[1]] = idx(torch.zeros(6, dtype=torch.uint8))
    for name, content in contents.items():
        put(tmp_path / name, content)
    with pytest.raises(DataError, match=r"7 images and .* 6 labels"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "0 bytes"), (bytes(3072), "3,072 bytes"), (bytes([17]) + bytes(3072), "a label 17")]
)
def test_a_malformed_file_of_cifar10(tmp_path: Path, put, content: bytes, says: str):
    contents, _, _ = tiny_cifar10()
    contents[CIFAR10[1]] = content
    for name, its in contents.items():
        put(tmp_path / name, its)
    with pytest.raises(DataError, match=f"{CIFAR10[1]} is malformed: .*{says}"):
        load("cifar10", tmp_path)


# -- downloads ---------------------------------------------------------------------------------


class Home:
    """A server of this machine: files by path, some cut short, all else 404."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []
        home = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                home.asked.append(self.path)
                content = home.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if self.path in home.cut else content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def publish(home: Home, monkeypatch: pytest.MonkeyPatch, mirror: str = "good") -> None:
    """Tiny data sets at a home, which are taken for the published ones."""
    mnist = {f"{name}.gz": gzip.compress(content) for name, content in tiny_mnist()[0].items()}
    cifar10, _, _ = tiny_cifar10()
    contents = {**mnist, sources.CIFAR10_ARCHIVE: archive_of(cifar10)}
    for name, content in {**contents, **cifar10}.items():
        monkeypatch.setitem(FILES, name, checksum(content, name))
    home.files |= {f"/{mirror}/{name}": content for name, content in contents.items()}
    urls = (f"{home.url}/bad/", f"{home.url}/good/")
    monkeypatch.setattr(sources, "HOMES", {"mnist": urls, "cifar10": urls})


@pytest.mark.parametrize("fault", ["404", "cut", "wrong", "unreachable"])
def test_downloads_from_the_first_home_that_has_it(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch, fault: str
):
    publish(home, monkeypatch)
    if fault in ("cut", "wrong"):
        publish(home, monkeypatch, "bad")
        publish(home, monkeypatch)
    if fault == "cut":
        home.cut = {path for path in home.files if path.startswith("/bad")}
    if fault == "unreachable":
        monkeypatch.setattr(sources, "HOMES", {"mnist": ("http://127.0.0.1:1/", f"{home.url}/good/")})
    said: list[tuple[str, int, int]] = []
    dataset = load("mnist", tmp_path, progress=lambda *what: said.append(what))
    assert len(dataset.train.pixels) == 7
    assert files_in(tmp_path) == sorted(f"mnist/{name}.gz" for name in MNIST)
    for name in MNIST:
        size = len(home.files[f"/good/{name}.gz"])
        work = f"downloading {name}.gz"
        assert [what for what in said if what[0] == work][-2:] == [(work, 0, size), (work, size, size)]
    home.files.clear()
    again = load("mnist", tmp_path)
    assert torch.equal(again.train.pixels, dataset.train.pixels), "what is there is not downloaded again"


def test_downloads_cifar10(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch):
    publish(home, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "made"))
    assert len(load("cifar10").train.labels) == 10
    assert files_in(tmp_path) == [f"made/nero/{sources.CIFAR10_ARCHIVE}"]
    home.files.clear()
    assert len(load("cifar10").test.labels) == 2


def test_only_what_is_missing_is_downloaded(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch):
    publish(home, monkeypatch)
    load("mnist", tmp_path)
    (tmp_path / f"mnist/{MNIST[2]}.gz").unlink()
    home.asked.clear()
    load("mnist", tmp_path)
    assert home.asked == [f"/bad/{MNIST[2]}.gz", f"/good/{MNIST[2]}.gz"]


def test_large_files_come_in_pieces(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "PIECE", 100)
    home.files["/file"] = bytes(250)
    said: list[tuple[str, int, int]] = []
    wanted = "sha256:" + hashlib.sha256(bytes(250)).hexdigest()
    download.download([f"{home.url}/file"], tmp_path / "file", wanted, lambda *what: said.append(what), "")
    assert said == [("downloading file", done, 250) for done in (0, 100, 200, 250)]


@pytest.mark.parametrize(
    ("fault", "says"), [("404", "404"), ("cut", "broke off after"), ("wrong", "not the file, by its checksum")]
)
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_download_that_fails_leaves_nothing(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch, name: str, fault: str, says: str
):
    publish(home, monkeypatch)
    if fault == "404":
        home.files.clear()
    if fault == "cut":
        home.cut = set(home.files)
    if fault == "wrong":
        home.files = dict.fromkeys(home.files, b"<html>sign in")
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    said = str(caught.value)
    assert says in said
    first = f"{MNIST[0]}.gz" if name == "mnist" else sources.CIFAR10_ARCHIVE
    assert said.count(f"{home.url}/bad/{first}") == said.count(f"{home.url}/good/{first}") == 1, "what was tried, once"
    for file in [f"{stem}.gz" for stem in MNIST] if name == "mnist" else [first]:
        assert file in said.splitlines()[-1]
    assert f"into {tmp_path / 'mnist' if name == 'mnist' else tmp_path} by hand" in said
    assert files_in(tmp_path) == []
    assert len(home.asked) == 2 * download.ROUNDS


def test_an_interrupted_download_leaves_nothing(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch):
    publish(home, monkeypatch)

    def interrupt(_name: str, done: int, _total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load("mnist", tmp_path, progress=interrupt)
    assert files_in(tmp_path) == []


def test_an_answer_that_makes_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither a timeout, nor a length that is no number, nor a broken line ends in a traceback."""

    class Answer(io.BytesIO):
        headers = {"Content-Length": "many"}  # noqa: RUF012

    def answer(url: str, timeout: float) -> Answer:
        assert timeout == download.TIMEOUT
        if url == "slow":
            raise TimeoutError
        return Answer()

    monkeypatch.setattr(download.urllib.request, "urlopen", answer)
    with pytest.raises(DataError, match=r"(?s)slow: TimeoutError.*odd: invalid literal.*do this instead"):
        download.download(["slow", "odd"], tmp_path / "file", "sha256:0", None, "do this instead")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "cannot write .*mnist/train-images.*: the disk is full; .*--data"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EROFS, "cannot write .*train-images-idx3-ubyte.gz: .*Read-only file system"),
    ],
)
@pytest.mark.parametrize("when", ["opening", "writing", "renaming"])
def test_a_disk_that_fails(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch, number: int, says: str, when: str
):
    publish(home, monkeypatch)
    error = OSError(number, os.strerror(number))

    class Full(io.FileIO):
        def write(self, content: bytes) -> int:
            super().write(content[:5])
            raise error

    def opened(self: Path, mode: str) -> io.FileIO:
        if when == "opening":
            raise error
        return Full(self, mode)

    def replace(*_: Path) -> None:
        raise error

    if when == "renaming":
        monkeypatch.setattr(Path, "replace", replace)
    else:
        monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(DataError, match=says):
        load("mnist", tmp_path)
    assert files_in(tmp_path) == []
    assert len(home.asked) <= 2, "another home would not help"


# -- the real data, where it is ----------------------------------------------------------------


def real(name: str, *files: str) -> Path:
    """The folder that has a data set, from $NERO_DATA or beside the checkout."""
    folders = [Path(REAL)] if REAL else []
    folders.append(Path(__file__).parents[3] / "shared/data")
    for folder in folders:
        if all((folder / sources.FOLDERS[name] / file).is_file() for file in files):
            return folder
    pytest.skip(f"{name} is not in $NERO_DATA")


def test_the_real_mnist(tmp_path: Path):
    folder = real("mnist", *(f"{name}.gz" for name in MNIST))
    dataset = load("mnist", folder)
    assert dataset.train.pixels.shape == (60_000, 1, 28, 28)
    assert dataset.test.pixels.shape == (10_000, 1, 28, 28)
    assert dataset.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert dataset.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert moments(dataset.train.pixels) == (dataset.mean, dataset.std)
    for name in MNIST:
        (tmp_path / name).write_bytes(gzip.decompress((folder / f"mnist/{name}.gz").read_bytes()))
    assert torch.equal(load("mnist", tmp_path).test.pixels, dataset.test.pixels), "the plain files, by their own sums"


def test_the_real_cifar10():
    dataset = load("cifar10", real("cifar10", *CIFAR10))
    assert dataset.train.pixels.shape == (50_000, 3, 32, 32)
    assert dataset.test.pixels.shape == (10_000, 3, 32, 32)
    assert dataset.train.labels.bincount().tolist() == [5_000] * 10
    assert dataset.test.labels.bincount().tolist() == [1_000] * 10
    assert moments(dataset.train.pixels) == (dataset.mean, dataset.std)


def moments(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and standard deviation of each channel, to four decimals, from how often each byte occurs."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(pixels.shape[1]):
        share = pixels[:, channel].flatten().bincount(minlength=256).double()
        share /= share.sum()
        mean = (share * values).sum()
        means.append(round(mean.item(), 4))
        deviations.append(round((share * (values - mean).square()).sum().sqrt().item(), 4))
    return tuple(means), tuple(deviations)


# -- augmentation ------------------------------------------------------------------------------


def seeded(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def bytes_at_random(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=seeded(1)).to(device)


def slowly(pixels: Tensor, draws: augment._Draws, padding: int) -> Tensor:
    """Crop, flip and rotate: image by image, step by step, pixel by pixel."""
    count, _, height, width = pixels.shape
    result = torch.zeros_like(pixels)
    for i in range(count):
        down, right = (draws.shifts[i] + padding).tolist()
        image = torch.nn.functional.pad(pixels[i], (padding,) * 4)[:, down : down + height, right : right + width]
        if draws.flips[i]:
            image = image.flip(2)
        cos, sin = math.cos(draws.angles[i]), math.sin(draws.angles[i])
        for y in range(height):
            for x in range(width):
                from_middle_x, from_middle_y = x + 0.5 - width / 2, y + 0.5 - height / 2
                source_x = math.floor(cos * from_middle_x - sin * from_middle_y + width / 2)
                source_y = math.floor(sin * from_middle_x + cos * from_middle_y + height / 2)
                if 0 <= source_x < width and 0 <= source_y < height:
                    result[i, :, y, x] = image[:, source_y, source_x]
    return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "padding", "degrees"),
    [
        ((6, 3, 32, 32), 4, 15.0),
        ((5, 1, 28, 28), 2, 40),
        ((9, 2, 7, 12), 3, 180.0),
        ((40, 1, 4, 3), 9, 15.0),  # some crops are padding alone
        ((5, 3, 16, 16), 0, 15.0),
        ((5, 3, 16, 16), 4, 0),
        ((0, 3, 16, 16), 4, 15.0),
    ],
)
def test_as_a_slow_loop(device: str, shape: tuple[int, ...], padding: int, degrees: float):
    pixels = bytes_at_random(*shape, device=device)
    before = pixels.clone()
    moved = crop_flip_rotate(pixels, seeded(device=device), padding=padding, degrees=degrees)
    draws = augment._draw(shape[0], seeded(device=device), padding, degrees, pixels.device)
    assert moved.dtype == torch.uint8
    assert moved.device == pixels.device
    assert torch.equal(moved.cpu(), slowly(pixels.cpu(), augment._Draws(*(draw.cpu() for draw in draws)), padding))
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_do_not_matter_and_seeds_reproduce(device: str):
    pixels = bytes_at_random(50, 3, 12, 12, device=device)
    moved = crop_flip_rotate(pixels, seeded(device=device))
    for chunk in (1, 7, 50, 51):
        assert torch.equal(moved, crop_flip_rotate(pixels, seeded(device=device), chunk=chunk))
    assert not torch.equal(moved, crop_flip_rotate(pixels, seeded(7, device)))
    generator = seeded(device=device)
    assert torch.equal(moved, crop_flip_rotate(pixels, generator))
    assert not torch.equal(moved, crop_flip_rotate(pixels, generator)), "the next epoch's are others"


def test_images_in_another_layout():
    pixels = bytes_at_random(9, 3, 12, 10)
    expected = crop_flip_rotate(pixels, seeded())
    other = pixels.to(memory_format=torch.channels_last)
    assert torch.equal(crop_flip_rotate(other, seeded(), chunk=4), expected)


def test_without_crop_and_rotation_half_are_mirrored_exactly():
    pixels = bytes_at_random(2000, 3, 5, 6)
    moved = crop_flip_rotate(pixels, seeded(), padding=0, degrees=0)
    same, mirrored = ((moved == other).flatten(1).all(1) for other in (pixels, pixels.flip(3)))
    assert bool((same ^ mirrored).all())
    assert 900 < int(mirrored.sum()) < 1100  # 4.5 standard deviations


def test_draws_are_uniform():
    shifts, _, angles = augment._draw(9000, seeded(), 4, 15.0, torch.device("cpu"))
    for axis in (0, 1):
        counts = (shifts[:, axis] + 4).bincount(minlength=9)
        assert len(counts) == 9
        assert 850 < int(counts.min()) <= int(counts.max()) < 1150  # 5 standard deviations
    degrees = angles.rad2deg()
    assert degrees.abs().max() <= 15
    counts = degrees.histc(9, -15, 15)
    assert 850 < int(counts.min()) <= int(counts.max()) < 1150


@pytest.mark.parametrize("angle", [-15.0, -7.3, -0.4, 0.0, 3.7, 11.1, 14.9, 47.0])
@pytest.mark.parametrize("size", [(32, 32), (28, 21)])
def test_rotates_as_pillow(monkeypatch: pytest.MonkeyPatch, angle: float, size: tuple[int, int]):
    """Its fixed-point arithmetic may only tip the balance where two pixels are as near as makes no difference."""
    image_module = pytest.importorskip("PIL.Image")
    height, width = size
    pixels = bytes_at_random(3, 1, height, width)
    turn = torch.full((3,), math.radians(angle), dtype=torch.float64)
    draws = augment._Draws(torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.bool), turn)
    monkeypatch.setattr(augment, "_draw", lambda *_: draws)
    ours = crop_flip_rotate(pixels, seeded())
    down, right = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) + 0.5 - height / 2,
        torch.arange(width, dtype=torch.float64) + 0.5 - width / 2,
        indexing="ij",
    )
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    places = torch.stack([cos * right - sin * down + width / 2, sin * right + cos * down + height / 2])
    undecided = ((places - places.round()).abs() < 2e-3).any(0)
    for i in range(3):
        image = image_module.frombytes("L", (width, height), bytes(pixels[i].flatten()))
        turned = image.rotate(angle, image_module.Resampling.NEAREST).tobytes()
        theirs = torch.frombuffer(bytearray(turned), dtype=torch.uint8).view(height, width)
        differ = ours[i, 0] != theirs
        assert not bool((differ & ~undecided).any())
        assert int(differ.sum()) <= 8


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"padding": -1}, "padding must not be negative, but it is -1"),
        ({"degrees": -15.0}, r"degrees must be between 0 and 180, but it is -15\.0"),
        ({"degrees": math.nan}, "degrees"),
        ({"degrees": math.inf}, "degrees"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"pixels": torch.zeros(2, 3, 4, 4)}, r"uint8 \(N, C, H, W\), but they are torch.float32"),
        ({"pixels": torch.zeros(3, 4, 4, dtype=torch.uint8)}, r"\(3, 4, 4\)"),
    ],
)
def test_bad_arguments_raise(options: dict, says: str):
    with pytest.raises(ValueError, match=says):
        crop_flip_rotate(**{"pixels": bytes_at_random(2, 3, 4, 4), "generator": seeded(), **options})


# -- words -------------------------------------------------------------------------------------


def test_rows_are_a_text_cut_into_streams():
    """Against the plainest way: a stream after the other, and in each a row after the other."""
    text = torch.arange(1000, 1107)
    rows = corpus.cut(text, streams=3, length=4)
    streams = [text[35 * i : 35 * (i + 1)].tolist() for i in range(3)]  # two words are left over
    steps = [[stream[k : k + 4] for stream in streams] for k in range(0, 34, 4)]
    after = [[stream[k + 1 : k + 5] for stream in streams] for k in range(0, 34, 4)]
    found = [(words, labels) for words, labels in zip(rows.words.tolist(), rows.labels.tolist(), strict=True)]
    wanted = [pair for inputs, labels in zip(steps, after, strict=True) for pair in zip(inputs, labels, strict=True)]
    assert len(found) == len(wanted) == 27
    for (words, labels), (inputs, following) in zip(found, wanted, strict=True):
        known = len(following)
        assert labels == following + [corpus.NOTHING] * (4 - known)
        assert words[:known] == inputs[:known]


def test_words_are_numbered_as_they_come_up():
    found = corpus.numbered("made", ["b", "a", "b"] * 20, ["a", "c"] * 20, ["d"] * 20)
    assert found.vocabulary == ("b", "a", "c", "d")
    assert found.parts == ("valid", "test")
    assert found.test.words.unique().tolist() == [0, 3]  # and what fills rows up, which no label asks for
    assert set(found.valid.labels.unique().tolist()) == {corpus.NOTHING, 1, 2}
    words, labels = (torch.cat(part) for part in zip(*found.epoch(7, torch.Generator(), None), strict=True))
    assert len(words) == found.examples == 20
    assert torch.equal(words, found.train.words)
    assert torch.equal(labels, found.train.labels)
    for part in found.parts:
        both = list(found.batches(part))
        assert torch.equal(torch.cat([words for words, _ in both]), getattr(found, part).words)
        assert torch.equal(torch.cat([labels for _, labels in both]), getattr(found, part).labels)
    assert found.to("cpu").device == torch.device("cpu")


def test_a_line_ends_with_a_mark_and_with_nothing_but_a_newline():
    text = " = A \u2028 title = \n\n word\x85 \x0b two \n" + "x \n" * 20
    assert corpus.words(text.encode(), "made")[:9] == ["=", "A", "title", "=", "<eos>", "<eos>", "word", "two", "<eos>"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a word \xff here", "made.txt is not UTF-8: byte 7 is 0xff. Save it as UTF-8"),
        (b"", "made.txt has 0 words, and a text needs 40"),
        (b"few words\n", "made.txt has 3 words, and a text needs 40"),
    ],
)
def test_a_text_that_is_none(content: bytes, message: str):
    with pytest.raises(DataError, match=re.escape(message)):
        corpus.words(content, "made.txt")


def test_the_corpus_is_found_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for name, word in zip(sources.WIKITEXT2, "abc", strict=True):
        content = f" {word} word \n".encode() * 30
        (folder / name).write_bytes(content)
        monkeypatch.setitem(FILES, name, f"sha256:{hashlib.sha256(content).hexdigest()}")
    found = load("wikitext2", tmp_path)
    assert found.vocabulary == ("a", "word", "<eos>", "b", "c")
    assert found.name == "wikitext2"
    (tmp_path / "train.txt").write_bytes(b"the user's own, which is nobody else's business")
    assert load("wikitext2", tmp_path).examples == found.examples
    (folder / "train.txt").rename(folder / "elsewhere.txt")
    with pytest.raises(DataError, match=r"put train\.txt, valid\.txt, test\.txt into .*wikitext-2 by hand"):
        load("wikitext2", tmp_path)
    (folder / "elsewhere.txt").rename(folder / "train.txt")
    (folder / "valid.txt").write_bytes(b"another")
    with pytest.raises(DataError, match=r"valid\.txt is broken or incomplete: it has 7 bytes"):
        load("wikitext2", tmp_path)


@pytest.mark.skipif(not REAL or not Path(REAL, "wikitext-2").is_dir(), reason="no WikiText-2: set NERO_DATA")
def test_the_real_corpus():
    found = load("wikitext2", Path(REAL))
    assert len(found.vocabulary) == 33278
    assert found.examples == 20 * 2984
    assert int((found.train.labels >= 0).sum()) == 20 * (2_088_628 // 20 - 1)


# -- pairs -------------------------------------------------------------------------------------


def test_pairs_are_read_and_written_word_by_word():
    train = [(["a", "b"], ["x"]), (["a"], ["x", "y", "x"]), (["a", "rare"], ["y", "y"])]
    found = pairs.numbered("made", train, train[:1], train[1:2])
    assert found.vocabulary == ("<blank>", "<unk>", "<s>", "</s>", "a", "x", "y")  # b comes up once, rare once
    a, x, y = 4, 5, 6
    assert found.train.words.tolist() == [
        [[2, a, 1, 3, 0], [2, x, 0, 0, 0]],
        [[2, a, 3, 0, 0], [2, x, y, x, 0]],
        [[2, a, 1, 3, 0], [2, y, y, 0, 0]],
    ]
    nothing = pairs.NOTHING
    assert found.train.labels.tolist() == [
        [x, 3, nothing, nothing, nothing],
        [x, y, x, 3, nothing],
        [y, y, 3, nothing, nothing],
    ]
    assert found.train.lengths == ((4, 2), (3, 4), (4, 3))
    assert found.valid.words.shape == (1, 2, 5)


def test_an_epoch_of_pairs_has_each_once_and_few_lengths():
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (50, 2), generator=chance).tolist()
    train = [([f"s{i}"] * one, [f"t{i}"] * other) for i, (one, other) in enumerate(lengths)]
    found = pairs.numbered("made", train, train[:3], train[3:5])
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
                assert torch.equal(line[chosen][: (line > 0).sum()], line[line > 0])  # every word, in its order
                assert line[chosen][-1] == 0  # and a blank
            assert torch.equal(labels >= 0, words[:, 1].flatten()[places[1]] > 0)
        whole = [F.pad(words, (0, 40 - words.shape[2])) for words, *_ in batches]
        orders.append(torch.cat(whole))
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    own = torch.randperm(50, generator=torch.Generator().manual_seed(1))  # what dropout would draw from
    assert not torch.equal(orders[0], F.pad(found.train.words[own], (0, 40 - found.train.words.shape[2])))
    wanted = F.pad(found.train.words, (0, 40 - found.train.words.shape[2])).flatten(1).tolist()
    assert sorted(orders[0].flatten(1).tolist()) == sorted(wanted)
    assert sum(len(words) for words, *_ in found.batches("valid")) == 3


def test_long_sentences_are_not_trained_on():
    long = (["a"] * 101, ["b"])
    found = pairs.numbered("made", [(["a"], ["b"]), long], [long], [long])
    assert found.examples == 1
    assert found.valid.words.shape[2] == 104
    with pytest.raises(DataError, match="no sentence to train on"):
        pairs.numbered("made", [long], [long], [long])


def test_the_pairs_are_found_checked_and_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
    with pytest.raises(DataError, match="the files are empty"):
        load("multi30k", tmp_path)
    write(sources.MULTI30K[1][1], b"a sweet dog .\n")
    with pytest.raises(DataError, match=r"val\.lc\.norm\.tok\.de has 4 sentences and .* has 1: these do not belong"):
        load("multi30k", tmp_path)


@pytest.mark.skipif(not REAL or not Path(REAL, "multi30k/tok").is_dir(), reason="no Multi30k: set NERO_DATA")
def test_the_real_pairs():
    found = load("multi30k", Path(REAL))
    assert len(found.vocabulary) == 9529
    assert [len(getattr(found, part).words) for part in ("train", "valid", "test")] == [29000, 1014, 1000]
