"""MNIST and CIFAR-10: reading, the published files, malformed ones, and downloads that leave no partial file."""

import errno
import gzip
import hashlib
import io
import os
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from lab.data_cases import CIFAR10, MNIST, archive_of, checksum, files_of, real_folder, tiny_cifar10, tiny_mnist
from torch import Tensor

from nero_lab.data import FILES, DataError, ImageDataset, Images, download, images, load, sources
from nero_lab.data.folder import Folder


@pytest.mark.parametrize("inside", ["mnist", "."])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_mnist_gzipped_or_plain_is_read(tmp_path: Path, put, inside: str, packed: bool):
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


def test_data_set_with_mnists_file_names_has_own_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    contents, train, _ = tiny_mnist()
    monkeypatch.setitem(sources.FOLDERS, "fashion", "fashion")
    monkeypatch.setitem(FILES, "fashion", {name: checksum(content, name) for name, content in contents.items()})
    (tmp_path / "fashion").mkdir()
    for name, content in contents.items():
        (tmp_path / "fashion" / name).write_bytes(content)
    dataset = images._idx_dataset(Folder("fashion", tmp_path, None), mean=0.286, std=0.353)
    assert (dataset.name, dataset.mean) == ("fashion", (0.286,))
    assert torch.equal(dataset.train.pixels, train.pixels)


@pytest.mark.parametrize("inside", ["cifar-10-batches-bin", ".", "archive"])
def test_cifar10_unpacked_or_in_archive_is_read(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch, inside: str):
    contents, labels, pixels = tiny_cifar10()
    for name, content in contents.items():
        if inside == "archive":
            monkeypatch.setitem(FILES["cifar10"], name, checksum(content, name))
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_normalise_matches_float64_formula(device: str):
    images = Images(torch.randint(256, (5, 3, 4, 6), dtype=torch.uint8), torch.arange(5))
    dataset = ImageDataset("made", images, images, (0.1, 0.5, 0.7), (0.2, 0.3, 0.4)).to(device)
    assert dataset.train.pixels.device.type == dataset.test.labels.device.type == device
    before = dataset.train.pixels.clone()
    mean = torch.tensor(dataset.mean, dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor(dataset.std, dtype=torch.float64).view(3, 1, 1)
    for pixels in (dataset.train.pixels, dataset.train.pixels.float()):
        got = dataset.normalise(pixels)
        assert got.dtype == torch.float32
        assert got.device == pixels.device
        torch.testing.assert_close(got.cpu().double(), (before.cpu() / 255.0 - mean) / std, rtol=0, atol=2e-6)
        assert torch.equal(pixels, before.to(pixels.dtype))  # unmodified


def test_mnist_published_files_have_known_moments(tmp_path: Path):
    folder = real_folder("mnist", *(f"{name}.gz" for name in MNIST))
    dataset = load("mnist", folder)
    assert dataset.train.pixels.shape == (60_000, 1, 28, 28)
    assert dataset.test.pixels.shape == (10_000, 1, 28, 28)
    assert dataset.train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert dataset.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert moments(dataset.train.pixels) == (dataset.mean, dataset.std)
    for name in MNIST:
        (tmp_path / name).write_bytes(gzip.decompress((folder / f"mnist/{name}.gz").read_bytes()))
    assert torch.equal(load("mnist", tmp_path).test.pixels, dataset.test.pixels), "the plain files, by their own sums"


def test_cifar10_published_files_have_known_moments():
    dataset = load("cifar10", real_folder("cifar10", *CIFAR10))
    assert dataset.train.pixels.shape == (50_000, 3, 32, 32)
    assert dataset.test.pixels.shape == (10_000, 3, 32, 32)
    assert dataset.train.labels.bincount().tolist() == [5_000] * 10
    assert dataset.test.labels.bincount().tolist() == [1_000] * 10
    assert moments(dataset.train.pixels) == (dataset.mean, dataset.std)


def moments(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation of each channel to four decimals, from the histogram of its bytes."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in range(pixels.shape[1]):
        share = pixels[:, channel].flatten().bincount(minlength=256).double()
        share /= share.sum()
        mean = (share * values).sum()
        means.append(round(mean.item(), 4))
        deviations.append(round((share * (values - mean).square()).sum().sqrt().item(), 4))
    return tuple(means), tuple(deviations)


def test_archives_damaged_or_incomplete_are_named(tmp_path: Path, put):
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


class Mirror:
    """Local HTTP server: files by path, some cut short, 404 for the rest."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append(self.path)
                content = mirror.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if self.path in mirror.cut else content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setattr(download, "opener", urllib.request.build_opener)  # opens http too
    made = Mirror()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def publish(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, path: str = "good") -> None:
    """Publish tiny data sets on a mirror, with their checksums."""
    mnist = {f"{name}.gz": gzip.compress(content) for name, content in tiny_mnist()[0].items()}
    cifar10, _, _ = tiny_cifar10()
    contents = {**mnist, sources.CIFAR10_ARCHIVE: archive_of(cifar10)}
    for name, content in {**contents, **cifar10}.items():
        monkeypatch.setitem(files_of(name), name, checksum(content, name))
    mirror.files |= {f"/{path}/{name}": content for name, content in contents.items()}
    urls = (f"{mirror.url}/bad/", f"{mirror.url}/good/")
    monkeypatch.setattr(sources, "MIRRORS", {"mnist": urls, "cifar10": urls})


@pytest.mark.parametrize("fault", ["404", "cut", "wrong", "unreachable"])
def test_download_takes_first_mirror_that_delivers(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, fault: str
):
    publish(mirror, monkeypatch)
    if fault in ("cut", "wrong"):
        publish(mirror, monkeypatch, "bad")
        publish(mirror, monkeypatch)
    if fault == "cut":
        mirror.cut = {path for path in mirror.files if path.startswith("/bad")}
    if fault == "unreachable":
        monkeypatch.setattr(sources, "MIRRORS", {"mnist": ("http://127.0.0.1:1/", f"{mirror.url}/good/")})
    reports: list[tuple[str, int, int]] = []
    dataset = load("mnist", tmp_path, progress=lambda *report: reports.append(report))
    assert len(dataset.train.pixels) == 7
    assert files_in(tmp_path) == sorted(f"mnist/{name}.gz" for name in MNIST)
    for name in MNIST:
        size = len(mirror.files[f"/good/{name}.gz"])
        work = f"downloading {name}.gz"
        assert [each for each in reports if each[0] == work][-2:] == [(work, 0, size), (work, size, size)]
    mirror.files.clear()
    again = load("mnist", tmp_path)
    assert torch.equal(again.train.pixels, dataset.train.pixels)


def test_download_of_cifar10_keeps_the_archive(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch):
    publish(mirror, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "made"))
    assert len(load("cifar10").train.labels) == 10
    assert files_in(tmp_path) == [f"made/nero/{sources.CIFAR10_ARCHIVE}"]
    mirror.files.clear()
    assert len(load("cifar10").test.labels) == 2


def test_download_fetches_missing_files_only(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch):
    publish(mirror, monkeypatch)
    load("mnist", tmp_path)
    (tmp_path / f"mnist/{MNIST[2]}.gz").unlink()
    mirror.asked.clear()
    load("mnist", tmp_path)
    assert mirror.asked == [f"/bad/{MNIST[2]}.gz", f"/good/{MNIST[2]}.gz"]


def test_download_reports_each_chunk(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "CHUNK_BYTES", 100)
    mirror.files["/file"] = bytes(250)
    reports: list[tuple[str, int, int]] = []
    wanted = "sha256:" + hashlib.sha256(bytes(250)).hexdigest()
    download.download([f"{mirror.url}/file"], tmp_path / "file", wanted, lambda *report: reports.append(report), "")
    assert reports == [("downloading file", done, 250) for done in (0, 100, 200, 250)]


@pytest.mark.parametrize(
    ("fault", "message"), [("404", "404"), ("cut", "broke off after"), ("wrong", "the checksum must be")]
)
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_download_failed_leaves_no_file(
    tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, name: str, fault: str, message: str
):
    publish(mirror, monkeypatch)
    if fault == "404":
        mirror.files.clear()
    if fault == "cut":
        mirror.cut = set(mirror.files)
    if fault == "wrong":
        mirror.files = dict.fromkeys(mirror.files, b"<html>sign in")
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    text = str(caught.value)
    assert message in text
    first = f"{MNIST[0]}.gz" if name == "mnist" else sources.CIFAR10_ARCHIVE
    assert text.count(f"{mirror.url}/bad/{first}") == text.count(f"{mirror.url}/good/{first}") == 1
    for file in [f"{stem}.gz" for stem in MNIST] if name == "mnist" else [first]:
        assert file in text.splitlines()[0]
    assert f"into {tmp_path / 'mnist' if name == 'mnist' else tmp_path} by hand" in text
    assert files_in(tmp_path) == []
    assert len(mirror.asked) == 2 * download.ATTEMPTS


def test_download_interrupted_leaves_no_file(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch):
    publish(mirror, monkeypatch)

    def interrupt(_name: str, done: int, _total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load("mnist", tmp_path, progress=interrupt)
    assert files_in(tmp_path) == []


def test_download_odd_answers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A timeout and a malformed length become one DataError."""

    class Answer(io.BytesIO):
        headers = {"Content-Length": "many"}  # noqa: RUF012

    class Opener:
        def open(self, url: str, timeout: float) -> Answer:
            assert timeout == download.TIMEOUT_S
            if url == "slow":
                raise TimeoutError
            return Answer()

    monkeypatch.setattr(download, "opener", Opener)
    with pytest.raises(DataError, match=r"(?s)do this instead.*slow: TimeoutError.*odd: invalid literal"):
        download.download(["slow", "odd"], tmp_path / "file", "sha256:0", None, "do this instead")


def test_download_disk_failure_is_explained(tmp_path: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch):
    publish(mirror, monkeypatch)

    class Full(io.FileIO):
        def write(self, content: bytes) -> int:
            super().write(content[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", lambda path, mode: Full(path, mode))
    with pytest.raises(DataError, match=r"cannot write .*mnist/train-images.*: the disk is full; make room, or"):
        load("mnist", tmp_path)
    assert files_in(tmp_path) == []
    assert len(mirror.asked) == 2  # no second attempt, which would not help


def test_folder_named_but_missing_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataError, match=r"the data folder .*nowhere does not exist: create it"):
        load("mnist", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"nowhere does not exist: name another$"):
        load("imagenet", tmp_path / "nowhere")  # cannot be downloaded
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a folder"):
        load("mnist", tmp_path / "file")
    monkeypatch.setenv("NERO_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"of \$NERO_DATA, .*nowhere does not exist"):
        load("mnist")


def test_folder_default_follows_argument_variable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error of a failed download names the folder."""

    def assert_folder(folder: Path, argument: Path | None = None) -> None:
        with pytest.raises(DataError, match=f"put train-images.* into {folder}/mnist by hand"):
            load("mnist", argument)

    monkeypatch.setenv("HOME", str(tmp_path))
    assert_folder(tmp_path / ".cache/nero")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert_folder(tmp_path / ".cache/nero")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert_folder(tmp_path / "xdg/nero")
    for name in ("variable", "argument"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("NERO_DATA", "~/variable")
    assert_folder(tmp_path / "variable")
    assert_folder(tmp_path / "argument", tmp_path / "argument")


def test_file_without_permission_is_named(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch):
    path = put(tmp_path / f"{MNIST[0]}.gz", b"...")

    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=f"cannot read the data.*{path}"):
        load("mnist", tmp_path)


def test_mnist_damaged_file_is_named(tmp_path: Path, put):
    contents, _, _ = tiny_mnist()
    paths = [put(tmp_path / "mnist" / name, content) for name, content in contents.items()]
    paths[1].write_bytes(contents[MNIST[1]][:-1])
    with pytest.raises(DataError, match=f"{paths[1]} is damaged or incomplete.*Delete it and run again"):
        load("mnist", tmp_path)


def test_cifar10_damaged_file_is_named(tmp_path: Path, put, monkeypatch: pytest.MonkeyPatch):
    contents, _, _ = tiny_cifar10()
    paths = [put(tmp_path / name, content) for name, content in contents.items()]
    paths[4].write_bytes(b"?" + contents[CIFAR10[4]][1:])
    with pytest.raises(DataError, match=f"{paths[4]} is damaged or incomplete.*Delete it and run again"):
        load("cifar10", tmp_path)
    paths[4].unlink()
    path = put(tmp_path / sources.CIFAR10_ARCHIVE, archive_of(contents))
    monkeypatch.setitem(FILES["cifar10"], CIFAR10[4], "sha256:0")
    with pytest.raises(DataError, match=rf"{path} \(member .*{CIFAR10[4]}\) is damaged or incomplete"):
        load("cifar10", tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=f"{path} is damaged or incomplete.*md5:"):
        load("cifar10", tmp_path)
