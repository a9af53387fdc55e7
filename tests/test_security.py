"""The promises of SECURITY.md: no code from files, no downloads in the clear, and archives that do no harm.

Wrong checksums and broken downloads are in lab/data/test_images.py.
"""

import ast
import gzip
import io
import subprocess
import sys
import tarfile
import urllib.request
from email.message import Message
from pathlib import Path
from urllib.response import addinfourl

import pytest
import torch

from nero_lab.data import DataError, books, download, formats, sources
from nero_lab.store import Store, StoreError
from nero_lab.tasks import task_named

ROOT = Path(__file__).parents[1]
CODE = [path for folder in ("src", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
WANTED = "cifar-10-batches-bin/data_batch_1.bin"
SMALL_LIMIT = 100_000


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.marker,)


def loads_in(tree: ast.AST) -> list[bool]:
    """Return for each call of torch.load whether it says weights_only=True."""
    return [
        any(option.arg == "weights_only" and ast.unparse(option.value) == "True" for option in node.keywords)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]


def test_every_load_is_of_weights_only():
    found = {str(path.relative_to(ROOT)): loads_in(ast.parse(path.read_text())) for path in CODE}
    assert sum(map(len, found.values())) >= 3
    assert [path for path, safe in found.items() if not all(safe)] == []
    unsafe = "torch.load(a), torch.load(a, weights_only=False), torch.load(a, weights_only=True)"
    assert loads_in(ast.parse(unsafe)) == [False, False, True]


def test_library_imports_no_network_process_or_pickle():
    brought = set()
    for path in (ROOT / "src/nero").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        brought |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        brought |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in brought
    unwanted = {"asyncio", "ftplib", "http", "marshal", "multiprocessing", "pickle", "requests", "socket", "subprocess"}
    assert {name.partition(".")[0] for name in brought} & {*unwanted, "ssl", "urllib"} == set()


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import pickle\n\npickle.loads(b'')\n", "S301"),
        ("eval(input())\n", "S307"),
        ("exec(input())\n", "S102"),
        ("import os\n\nos.system(input())\n", "S605"),
        ("import subprocess\n\nsubprocess.run(input(), shell=True)\n", "S602"),
        ("import tarfile\n\ntarfile.open('a').extractall()\n", "S202"),
        ("import tempfile\n\ntempfile.mktemp()\n", "S306"),
        ("import urllib.request\n\nurllib.request.urlopen(input())\n", "S310"),
    ],
)
def test_lint_refuses_unsafe_call(code: str, rule: str):
    pytest.importorskip("ruff")
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename=src/nero/a.py", "-"]
    done = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True, check=False)
    assert f" {rule} " in done.stdout, done


def test_checkpoint_with_code_is_refused(tmp_path: Path):
    task, store, marker = task_named("mnist-deep"), Store(tmp_path), tmp_path / "marker"
    settings = task.settings("nero")
    path = store.path(task, settings, ".checkpoint")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"run": Payload(marker)}, path)
    with pytest.raises(StoreError, match=r"cannot be read .*UnpicklingError"):
        store.begin(task, settings, torch.device("cpu"))
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the payload is live
    assert marker.exists()


def test_downloads_are_https_with_sha256():
    urls = [url for mirrors in sources.MIRRORS.values() for url in mirrors]
    assert [url for url in urls if not url.startswith("https://")] == []
    weak = [name for files in sources.FILES.values() for name, sum_ in files.items() if not sum_.startswith("sha256:")]
    assert weak == [sources.CIFAR10_ARCHIVE]  # its members have SHA-256 sums


@pytest.mark.parametrize("scheme", ["http", "ftp", "file"])
def test_download_without_https_is_refused(tmp_path: Path, scheme: str):
    with pytest.raises(DataError, match=f"unknown url type: {scheme}"):
        download.download([f"{scheme}://127.0.0.1/etc/hostname"], tmp_path / "file", None, None, "")
    assert list(tmp_path.iterdir()) == []


def test_download_redirected_from_https_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Redirecting(urllib.request.HTTPSHandler):
        handler_order = 1  # before the one that asks a server

        def https_open(self, request: urllib.request.Request) -> addinfourl:
            headers = Message()
            headers["Location"] = "http://127.0.0.1/file"
            answer = addinfourl(io.BytesIO(), headers, request.full_url, 302)
            answer.msg = "Found"
            return answer

    opener = download.opener.__wrapped__()
    opener.add_handler(Redirecting())
    monkeypatch.setattr(download, "opener", lambda: opener)
    with pytest.raises(DataError, match="unknown url type: http>"):
        download.download(["https://127.0.0.1/file"], tmp_path / "file", None, None, "")


def test_download_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "opener", urllib.request.build_opener)
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", SMALL_LIMIT)
    (tmp_path / "large").write_bytes(bytes(SMALL_LIMIT + 1))
    with pytest.raises(DataError, match="has more than 100,000 bytes"):
        download.download([f"file://{tmp_path}/large"], tmp_path / "file", None, None, "")
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def tar_of(*members: tarfile.TarInfo) -> bytes:
    """Return a gzipped archive of members, whose contents are zeros."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return buffer.getvalue()


def member_of(name: str, size: int = 0, **fields: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    for field, value in fields.items():
        setattr(member, field, value)
    return member


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_archive_with_link_for_file_is_refused(tmp_path: Path, kind: bytes):
    (tmp_path / "secret").write_text("secret")
    content = tar_of(member_of(WANTED, type=kind, linkname=str(tmp_path / "secret")))
    with pytest.raises(DataError, match=f"does not hold {WANTED}"):
        formats.untar(content, [WANTED], "archive")


def test_archive_with_paths_outside_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    outside = [member_of(name, 9) for name in ("../evil", f"{tmp_path}/evil", "a/../../evil.md", "a/b/evil.md")]
    archive = tar_of(*outside, member_of(WANTED, 5))
    assert formats.untar(archive, [WANTED], "archive") == {WANTED: bytes(5)}
    (tmp_path / "books.tar.gz").write_bytes(archive)
    assert books.read_archive(tmp_path / "books.tar.gz", None) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["books.tar.gz"]
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.parametrize(
    "bomb",
    [
        member_of(WANTED, 10 * SMALL_LIMIT),
        member_of("not/wanted.txt", 10 * SMALL_LIMIT),
        member_of("n" * 10 * SMALL_LIMIT),  # a header that tarfile reads whole
    ],
    ids=["wanted", "other", "header"],
)
def test_archive_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, bomb: tarfile.TarInfo, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", SMALL_LIMIT)
    content = tar_of(bomb, member_of("last", 1))
    assert len(content) < SMALL_LIMIT / 10
    with pytest.raises(DataError, match="it has more than 100,000 bytes"):
        formats.untar(content, [WANTED], "archive")
    (tmp_path / "books.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match="it has more than 100,000 bytes"):
        books.read_archive(tmp_path / "books.tar.gz", None)


def test_gzip_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "MAX_FILE_BYTES", SMALL_LIMIT)
    assert formats.gunzip(gzip.compress(bytes(SMALL_LIMIT)), "file") == bytes(SMALL_LIMIT)
    with pytest.raises(DataError, match="it has more than 100,000 bytes"):
        formats.gunzip(gzip.compress(bytes(SMALL_LIMIT + 1)), "file")
