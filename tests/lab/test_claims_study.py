"""The studies of the paper's claims: their records, the list of claims, and short runs."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_data
from torch import nn

import nero
from nero_lab.claims import Split, evaluate, load_digits, measurements, studies, tables
from nero_lab.claims import __main__ as command
from nero_lab.report.markdown import DIVERGED_NOTE
from nero_lab.store import read_json_lines

ROOT = Path(__file__).parents[2]
CLAIMS = ROOT / "docs/paper/claims.md"
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
ALL_STUDIES = command.STUDIES


def claims() -> list[list[str]]:
    """Return the cells of every claim on the page."""
    return tables.claims_of(CLAIMS.read_text())


def test_every_run_of_every_study_is_on_record_once():
    found = sorted(command.key(record) for record in read_json_lines(ROOT / "results/studies/claims.jsonl"))
    expected = [
        command.key({"study": name, "settings": settings})
        for name, study in ALL_STUDIES.items()
        for settings in study.settings()
    ]
    assert found == sorted(expected)


def test_every_claim_has_a_verdict_and_a_link_that_exists():
    rows = claims()
    assert len(rows) > 70
    for section, claim, runs, result, verdict in rows:
        assert section
        assert claim
        assert result
        assert verdict in tables.VERDICTS, claim
        links = LINK.findall(runs + result)
        assert links or verdict == "not run", claim
        assert all((CLAIMS.parent / link).exists() for link in links), claim


def test_numbers_of_a_claim_stand_on_its_pages():
    for _, claim, runs, result, _ in claims():
        pages = "".join((CLAIMS.parent / link).read_text() for link in LINK.findall(runs + result))
        on_pages = set(NUMBER.findall(pages))
        stated = NUMBER.findall(LINK.sub("]", result))
        assert not [number for number in stated if number not in on_pages], claim


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """One short run of each study, on made-up digits."""
    monkeypatch.setattr(command, "load_digits", lambda _: made_up_digits(monkeypatch))
    for module, name, value in (
        (measurements, "ROUNDS", 1),
        (measurements, "OVERFLOW_STEPS", 3),
        (measurements, "POWERS", {"float32": (0, 30)}),
        (measurements, "ROBUST_EPOCHS", 150),
        (measurements, "ROBUST_EXAMPLES", 50),
    ):
        monkeypatch.setattr(module, name, value)
    chosen = {name: study._replace(settings=partial(one, study)) for name, study in ALL_STUDIES.items()}
    monkeypatch.setattr(command, "STUDIES", chosen)


def one(study: studies.Study) -> list[studies.Settings]:
    """Return one run of a study, of Nero where there is a choice."""
    wanted = {"optimiser": "nero", "way": "printed", "kind": "neurons", "batch": 32, "dtype": "float32"}
    return [
        settings
        for settings in study.settings()
        if all(settings.get(key, value) == value for key, value in wanted.items())
    ][:1]


def made_up_digits(monkeypatch: pytest.MonkeyPatch):
    data = make_data("mnist", examples=500, tests=100)
    monkeypatch.setattr("nero_lab.claims.load", lambda *_: data)
    return load_digits(None)


@pytest.mark.usefixtures("small")
def test_studies_run_resume_and_leave_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "runs.jsonl"
    for _ in range(2):
        command.main([*ALL_STUDIES, "--out", str(out)])
    assert " ".join(capsys.readouterr().out.split()).count("1 run to do") == len(ALL_STUDIES)
    results = {record["study"]: record["results"] for record in read_json_lines(out)}
    assert list(results) == list(ALL_STUDIES)
    assert len(read_json_lines(out)) == len(ALL_STUDIES)
    assert results["overflow"]["is_balanced"] == [True, False]
    assert results["cost"]["ratio"]["plain"] == 1
    assert results["robustness"]["alpha_lower"] <= results["robustness"]["alpha_upper"]
    assert results["gains"]["train_accuracy"] > 0.5  # the made-up digits differ in brightness


def test_clip_by_neuron_gives_each_its_share():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    model[2].bias.grad.zero_()
    model[2].weight.grad.fill_(1e-3)
    studies.clip_neurons(model, 2.0)
    norms = (model[0].weight.grad.square().sum(1) + model[0].bias.grad.square()).sqrt()
    torch.testing.assert_close(norms, torch.ones(3))  # 2 over the root of four neurons
    torch.testing.assert_close(model[2].weight.grad, torch.full((1, 3), 1e-3))


def test_printed_form_is_that_of_the_library_until_it_overflows():
    raw = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    layer = nn.Linear(12, 5)
    with torch.no_grad():
        layer.weight.copy_(raw)
    nero.centred_weight_norm(layer)
    torch.testing.assert_close(measurements.PrintedForm()(raw), layer.weight)
    assert (measurements.PrintedForm()(1e20 * raw) == 0).all()


def test_normalised_network_is_blind_to_scale_of_weights():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-12), nn.ReLU(), nn.Linear(8, 2)
    ).double()
    inputs = torch.randn(16, 6, dtype=torch.float64)
    before = model(inputs)
    with torch.no_grad():
        model[0].weight.mul_(10)
    torch.testing.assert_close(model(inputs), before)


def test_start_counts_whole_runs_once_and_marks_divergence():
    def run(seed: int, accuracy: float, loss: float | None = 1.0, epochs: int = 50, **changes: str) -> dict[str, Any]:
        curve = {"train_loss": [loss], "train_accuracy": [accuracy], "test_accuracy": [accuracy]}
        names = {"task": "mnist-deep-balanced", "optimiser": "adam", "lr": 0.0001, "epochs": epochs}
        return {**names, "seed": seed, "precision": "tf32", "curve": curve, **changes}

    whole = [run(0, 0.9), run(1, 0.8), run(2, 0.1, loss=None)]
    of_tasks = [*whole, run(0, 0.3, epochs=1), run(0, 0.2, precision="float32")]
    table = tables.claims_tables(read_json_lines(ROOT / "results/studies/claims.jsonl"), of_tasks)["balanced-start"]
    assert "| Adam | 0.0001 | 60.00 ± 35.59† | 60.00 ± 35.59† |" in table
    assert DIVERGED_NOTE in table


def test_rank_correlation_of_known_orders():
    assert tables.rank_correlation([1, 2, 3, 4], [1, 4, 9, 16]) == pytest.approx(1)
    assert tables.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert tables.rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)


def test_output_that_is_not_finite_is_an_error():
    class Broken(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.full((len(inputs), 2), torch.nan)

    assert evaluate(Broken(), Split(torch.zeros(3, 1), torch.zeros(3, dtype=torch.long)))[1] == 1
