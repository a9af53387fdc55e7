"""The project as a whole: a light import, one-way arrows, documented names, small files, examples and packages."""

import ast
import email
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageSequence

import nero

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs/figures"
SOURCES = sorted((ROOT / "src").rglob("*.py"))
BACKENDS = sorted((ROOT / "src/nero/backends").rglob("*.py"))
MAX_IMPORT_S = 0.03
MAX_SOURCE_LINES, MAX_TEST_LINES, MAX_FILES = 450, 600, 443
# importing again in one process costs as much as in a fresh one, without the seconds of torch
IMPORT_NERO = """
import gc, json, sys, time, torch
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
before = set(sys.modules)
gc.disable()
times = []
for _ in range(6):
    start = time.process_time()
    from nero import Nero, balance_, describe, roles_of  # what most training needs
    times.append(time.process_time() - start)
    new = set(sys.modules) - before
    for name in [name for name in new if name.partition(".")[0] == "nero"]:
        del sys.modules[name]
print(json.dumps({"seconds": times, "modules": sorted(new)}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Import nero several times after torch: the CPU seconds of each, and the new modules."""
    command = [sys.executable, "-W", "error", "-c", IMPORT_NERO, str(tmp_path_factory.mktemp("pycache"))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_import_takes_at_most_30_ms_beyond_torch(imported: dict[str, list]):
    assert min(imported["seconds"][1:]) < MAX_IMPORT_S  # the first compiles


def test_import_brings_torch_alone(imported: dict[str, list]):
    brought = {name.partition(".")[0] for name in imported["modules"]} - set(sys.stdlib_module_names)
    assert brought <= {"nero", "torch"}


def test_import_leaves_the_code_of_devices_to_their_steps(imported: dict[str, list]):
    apart = tuple(f"nero.backends.{name}" for name in ("cut", "foreach_cpu", "numba", "triton"))
    assert not [name for name in imported["modules"] if name.startswith(apart)]


def test_public_names_are_listed_and_found():
    assert {*nero.__all__, "jax", "theory", "__version__"} <= set(dir(nero))
    assert all(getattr(nero, name) is getattr(nero, name) for name in nero.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nero.nothing


def test_rule_imports_torch_alone():
    tree = ast.parse((ROOT / "src/nero/rule.py").read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) == {"torch"}


@pytest.mark.parametrize("path", [ROOT / "src/nero/rule.py", *BACKENDS], ids=lambda path: path.name)
def test_rule_and_backends_see_no_module(path: Path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    assert not {"Module", "roles_of"} & names


def test_roles_see_no_gradient():
    tree = ast.parse((ROOT / "src/nero/roles.py").read_text())
    assert not {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"grad", "backward"}


@pytest.mark.parametrize("name", nero.__all__)
def test_public_names_are_documented(name: str):
    assert inspect.getdoc(getattr(nero, name)), f"{name} has no docstring"
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "api")]
    is_shown = any(re.search(rf"\bnero\.{name}\b", page.read_text()) for page in pages)
    assert is_shown or name in ("Description", "CentredWeightNorm", "Watch"), f"no page shows {name}"


def test_citation_names_this_version_and_the_paper():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["type"], citation["license"]) == (nero.__version__, "software", "Apache-2.0")
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Liu", "Bernstein", "Meister", "Yue"]
    assert paper["url"] == "https://arxiv.org/abs/2102.07227"


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_form_has_what_the_site_asks_for(name: str):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    path = ROOT / f".github/ISSUE_TEMPLATE/{name}.yml"
    if not path.exists():
        pytest.skip("the sdist has no forms")
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    for field in form["body"]:
        assert field["type"] in ("input", "textarea")
        assert field["id"]
        assert field["attributes"]["label"]


def test_source_files_are_short():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {path: lines for path, lines in long.items() if lines > MAX_SOURCE_LINES}


def test_test_files_are_short():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    assert not {path: lines for path, lines in long.items() if lines > MAX_TEST_LINES}


def test_tracked_files_are_few():
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("needs git and a clone")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) <= MAX_FILES


def test_demo_trains_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main = runpy.run_path(str(ROOT / "examples/demo.py"))["main"]
    main.__globals__["RATES"] = (0.01,)
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    assert {"Nero", "SGD", "Adam", "LAMB"} <= set(re.findall(r"\w+", capsys.readouterr().out))
    assert (tmp_path / "demo.png").stat().st_size > 20_000


def test_demo_record_has_nero_and_balanced_adam_above_chance():
    runs = json.loads((ROOT / "docs/figures/demo.json").read_text())["runs"]
    best = max((run for run in runs if run["optimiser"] == "Nero"), key=lambda run: run["training"])
    assert best["rate"] == 0.01
    assert best["training"] > 0.5
    balanced = [run["training"] for run in runs if run["optimiser"] == "Adam (balanced)"]
    assert max(balanced) > 0.5
    others = [run for run in runs if run["optimiser"] not in ("Nero", "Adam (balanced)")]
    assert {run["optimiser"] for run in others} == {"SGD", "Adam", "LAMB"}
    assert all(run["training"] < 0.13 for run in others)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_example_of_balanced_muon_prints_both_losses(capsys: pytest.CaptureFixture[str]):
    threads = torch.get_num_threads()
    assert runpy.run_path(str(ROOT / "examples/balanced_muon.py"))["main"](["--steps", "2", "--lr", "0.02"]) == 0
    torch.set_num_threads(threads)
    losses = [float(loss) for loss in re.findall(r"(?:loss|balanced) ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 2
    assert all(3 < loss < 7 for loss in losses)  # the logarithm of about a hundred letters


def test_example_in_jax_trains_by_nero(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("flax", reason="needs flax")
    main = runpy.run_path(str(ROOT / "examples/jax_mlp.py"))["main"]
    main.__globals__["RATES"] = {"Nero": (0.01,)}
    assert main(["--depth", "3", "--epochs", "2"]) == 0
    assert float(re.search(r"test accuracy ([\d.]+)", capsys.readouterr().out)[1]) > 60


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [("watch", ["--epochs", "1"], "test accuracy"), ("gains", ["--quick", "--seeds", "1"], "every run")],
)
def test_example_runs_and_writes_its_figure(
    script: str, options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    threads = torch.get_num_threads()
    done = runpy.run_path(str(ROOT / f"examples/{script}.py"))["main"]([*options, "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    assert done == 0
    assert says in capsys.readouterr().out
    assert (tmp_path / f"{script}.png").stat().st_size > 20_000
    found, committed = (
        json.loads((folder / f"{script}.json").read_text()) for folder in (tmp_path, ROOT / "docs/figures")
    )
    assert found.keys() == committed.keys()


def test_example_of_the_sphere_draws_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    threads = torch.get_num_threads()
    example = runpy.run_path(str(ROOT / "examples/sphere.py"))
    assert example["main"](["--steps", "2", "--out", str(tmp_path)]) == 0
    torch.set_num_threads(threads)
    assert "in 2 steps" in capsys.readouterr().out
    with Image.open(tmp_path / "sphere.gif") as film:
        assert film.n_frames == 3
        assert film.info["comment"].decode() == sha256((tmp_path / "sphere.json").read_bytes()).hexdigest()
    found, committed = (json.loads((folder / "sphere.json").read_text()) for folder in (tmp_path, FIGURES))
    assert found.keys() == committed.keys()
    assert found["neurons"][0] == [pytest.approx(neuron, abs=1e-4) for neuron in committed["neurons"][0]]


def test_sphere_is_drawn_from_its_committed_record():
    record = (FIGURES / "sphere.json").read_bytes()
    neurons, losses = (torch.tensor(json.loads(record)[key]) for key in ("neurons", "train_loss"))
    assert neurons.sum(-1).abs().max() < 1e-4  # the record is rounded
    assert (neurons.norm(dim=-1) - 1).abs().max() < 1e-4
    assert losses[-1] < losses[0] / 4
    assert (FIGURES / "sphere.gif").stat().st_size < 1_500_000
    with Image.open(FIGURES / "sphere.gif") as film:
        assert film.info["comment"].decode() == sha256(record).hexdigest()
        assert film.info["loop"] == 0
        assert film.n_frames == len(losses)
        frames = [
            (frame.info["duration"], frame.convert("RGB").getpixel((1, 1))) for frame in ImageSequence.Iterator(film)
        ]
    assert 5000 <= sum(duration for duration, _ in frames) <= 8000
    assert {corner for _, corner in frames} == {(255, 255, 255)}


def test_picture_of_a_step_is_of_the_rule(tmp_path: Path):
    example = runpy.run_path(str(ROOT / "examples/sphere.py"))
    rate = example["STEP_RATE"]
    step = example["take_step"](rate)
    assert (step.moved - step.start).norm().item() == pytest.approx(rate)  # |w| is one
    for balanced in (step.start, step.end):
        assert balanced.sum().item() == pytest.approx(0, abs=1e-6)
        assert balanced.norm().item() == pytest.approx(1)
    assert step.centred.sum().item() == pytest.approx(0, abs=1e-6)
    assert step.centred.norm() * step.end == pytest.approx(step.centred)
    example["write_step"](tmp_path / "constraint.svg")
    drawn, committed = ((folder / "constraint.svg").read_text() for folder in (tmp_path, FIGURES))
    assert "<text" not in committed  # letters are outlines, so that no font is needed
    numbers = [[float(number) for number in re.findall(r"-?\d+\.\d+", text)] for text in (drawn, committed)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.01), "run python examples/sphere.py --draw --out docs/figures"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").rglob("figures/*.png")), ids=lambda path: path.name)
def test_figure_is_opaque(path: Path):
    with Image.open(path) as figure:
        assert figure.convert("RGBA").getchannel("A").getextrema() == (255, 255)


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
