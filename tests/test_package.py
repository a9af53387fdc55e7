"""The packages: what the sdist and the wheel hold, how PyPI shows the README, and errors without the extras."""

import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import nero

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an sdist, and the wheel that was built from it."""
    for module in ("build", "hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def names_in_sdist(built: Path) -> set[str]:
    with tarfile.open(built / f"nero_optim-{nero.__version__}.tar.gz") as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def open_wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(built / f"nero_optim-{nero.__version__}-py3-none-any.whl")


def test_sdist_holds_every_tracked_file(built: Path):
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in done.stdout.splitlines() if not name.startswith((".ci/", ".github/"))}
    assert tracked - names_in_sdist(built) == set()


def test_wheel_holds_both_packages_and_nothing_else(built: Path):
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    }
    with open_wheel(built) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == sources
    assert {name.partition("/")[0] for name in names} == {"nero", "nero_lab"}
    assert {"nero/py.typed", "nero_lab/data/bpe-8192.txt.gz", "nero_lab/report/published.json"} <= names


def test_metadata_names_version_licence_and_command(built: Path):
    folder = f"nero_optim-{nero.__version__}.dist-info"
    with open_wheel(built) as wheel:
        metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
        commands = wheel.read(f"{folder}/entry_points.txt").decode()
    assert metadata["Version"] == nero.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "nero = nero_lab.command:main" in commands
    unconditional = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert [re.match(r"[\w-]+", each)[0] for each in unconditional] == ["torch"]


def test_readme_on_pypi_has_no_relative_link_or_formula(built: Path):
    with open_wheel(built) as wheel:
        text = email.message_from_bytes(wheel.read(f"nero_optim-{nero.__version__}.dist-info/METADATA")).get_payload()
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert "$" not in text
    assert text.count("\n#") == (ROOT / "README.md").read_text().count("\n#")  # no section is lost
    assert "](https://arxiv.org/abs/2102.07227)" in text


@pytest.mark.parametrize(
    ("missing", "statement", "message"),
    [
        ("jax", "import nero.jax", "ModuleNotFoundError: nero.jax needs jax: pip install '.[jax]'"),
        ("optax", "import nero.jax", "ModuleNotFoundError: nero.jax needs optax: pip install '.[jax]'"),
        ("typer", "import nero_lab.cli", "the command `nero` needs typer: pip install '.[lab]'"),
    ],
)
def test_missing_extra_is_named(missing: str, statement: str, message: str):
    code = f"import sys; sys.modules[{missing!r}] = None; {statement}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{message} in a clone of nero-optim" in done.stderr.splitlines()[-1]
