"""The GPT and its tasks: causality, sizes, roles, bits per byte, and runs from the start and from a checkpoint."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lab.helpers import comparable, finish
from lab.loop_cases import saved_and_loaded
from torch import nn

import nero
from nero_lab.data.books import Books
from nero_lab.loops.supervised import Supervised
from nero_lab.models.gpt import GPT, Rotary
from nero_lab.store import Store
from nero_lab.tasks import TASKS
from nero_lab.tasks.today.gpt import bits_per_byte

WORDS = 40
tiny_gpt = partial(GPT, depth=2, width=64)


def make_books(examples=8):
    """Make a text that a model can learn: numbers that grow by three."""
    tokens = (3 * torch.arange(2000) % WORDS).short()
    return Books("books", tokens, tokens[:600], 1 + torch.arange(WORDS) % 5, examples=examples, window=32)


def tiny(name="gpt", precision="float32", **changes):
    """Make a small task; in float32, since many a processor emulates bf16."""
    return replace(TASKS[name], model=tiny_gpt, batch=4, precision=precision, **changes)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny_gpt(WORDS)


def test_gpt_later_token_changes_no_earlier_logit(model):
    tokens = torch.randint(WORDS, (3, 50))
    changed = tokens.clone()
    changed[:, 30] = (changed[:, 30] + 1) % WORDS
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :30], after[:, :30])
    assert not torch.isclose(before[:, 30:], after[:, 30:]).all(-1).any()


def test_gpt_token_order_changes_logits(model):
    tokens = torch.tensor([[1, 2, 3, 4, 5], [2, 1, 3, 4, 5]])
    first, second = model(tokens)[:, -1]
    assert not torch.allclose(first, second, rtol=1e-3)


def test_rotary_products_depend_on_distance_alone():
    rotary = Rotary(100)
    query, key = torch.randn(2, 1, 64).expand(2, 100, 64)
    queries, keys = rotary(query), rotary(key)
    scores = queries @ keys.T
    for distance in (0, 1, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(queries.norm(dim=-1), query.norm(dim=-1))
    assert torch.equal(queries[0], query[0])


def test_attention_ignores_the_scale_of_queries(model):
    """Queries and keys are normalised, so the norms of their weights do not matter."""
    attention, inputs = model.blocks[0].attention, torch.randn(2, 9, 64)
    before = attention(inputs)
    other = tiny_gpt(WORDS).blocks[0].attention
    other.load_state_dict(attention.state_dict())
    with torch.no_grad():
        other.into.weight[:128] *= 5
    torch.testing.assert_close(other(inputs), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "inner", "depth"),
    [
        ("gpt", 10.6e6, 6),
        ("gpt-large", 39.3e6, 8),
        ("gpt-w256", 3.15e6, 4),
        ("gpt-w1024", 50.4e6, 4),
        ("gpt-d16", 12.6e6, 16),
    ],
)
def test_gpt_parameter_counts(name, inner, depth):
    with torch.device("meta"):
        model = TASKS[name].model(vocabulary=8192)
    count = sum(weight.numel() for weight in model.blocks.parameters())
    assert count == pytest.approx(inner, rel=0.01)
    assert len(model.blocks) == depth
    outer = sum(weight.numel() for weight in model.parameters()) - count
    assert outer == (2 * 8192 + 1) * model.norm.weight.numel()


def test_gpt_roles_are_neurons_by_rows_and_gains(model):
    roles = nero.roles_of(model)
    for name, weight in model.named_parameters():
        role = roles[name]
        if "norm" in name:
            assert role.kind == "gain", name
        else:
            assert (role.kind, tuple(role.fan_in_axes)) == ("neuron", (1,)), name
            assert weight.shape[1] in (64, 256)


def test_gpt_first_loss_is_that_of_chance(model):
    tokens = torch.randint(WORDS, (4, 33))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(WORDS), rel=0.05)


def test_gpt_autocast_keeps_the_stream_in_float32(model):
    seen = []
    hook = model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    tokens = torch.randint(WORDS, (2, 20))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens)
    hook.remove()
    assert seen == [torch.float32]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), model(tokens), rtol=0.05, atol=0.02)


class Constant(nn.Module):
    """Model that gives every token the same logits: probabilities 1/2, 1/4, 1/8 and 1/8."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(*tokens.shape, 4)


def test_bits_per_byte_matches_hand_computation():
    """The labels 0, 1, 2, 100 times each, have 1, 2 and 3 bits, and stand for 1, 2 and 6 bytes."""
    valid = torch.tensor([3] + [0, 1, 2] * 100, dtype=torch.int16)
    data = Books("books", valid, valid, torch.tensor([1, 2, 6, 9]))
    results = bits_per_byte(Constant(), data)
    assert results["valid_bits_per_byte"] == pytest.approx(600 / 900)
    assert results["full_valid_loss"] == pytest.approx(600 * math.log(2) / 300)


def test_bits_per_byte_of_diverged_model_is_absent():
    valid = torch.zeros(300, dtype=torch.int16)
    data = Books("books", valid, valid, torch.ones(4, dtype=torch.long))
    assert bits_per_byte(lambda tokens: torch.full((*tokens.shape, 4), math.nan), data) == {}


def test_gpt_schedule_warms_up_then_falls_to_zero():
    rates = [TASKS["gpt-large"].schedule(step, 100) for step in range(1501)]
    assert rates[0] == pytest.approx(1 / 75)
    assert rates[74] == rates[75] == 1.0
    assert rates[1500] == 0
    assert rates[750] == pytest.approx(750 / 1425)


def test_gpt_tasks_share_protocol():
    tasks = [task for name, task in TASKS.items() if name.startswith("gpt")]
    assert {(task.batch, task.metric, task.precision, task.is_compiled) for task in tasks} == {
        (64, "valid_loss", "bf16", True)
    }
    counts = {task.name: {len(task.grid_of(name)) for name in task.contenders} for task in tasks}
    assert counts.pop("gpt") == {7}
    assert counts.pop("gpt-large") == {3}
    assert counts.pop("gpt-variants") == {1, 2, 3}
    assert set.union(*counts.values()) == {5}
    assert TASKS["gpt-variants"].epochs == TASKS["gpt"].epochs
    assert len({TASKS[f"gpt-{size}"].epochs for size in ("w256", "w512", "w1024", "d8", "d16")}) == 1


@pytest.mark.parametrize("contender", ["adamw", "muon", "nero", "nero-auto"])
def test_gpt_contender_trains_and_records(contender, tmp_path):
    task = tiny()
    training = finish(Supervised(task, task.settings(contender, epochs=1), make_books()))
    record = Store(tmp_path).finish(training)
    assert training.steps_done == 2
    assert set(record["curve"]) == {"train_loss", "train_accuracy", "valid_loss", "valid_accuracy"}
    assert record["full_valid_loss"] == pytest.approx(record["curve"]["valid_loss"][0], rel=0.02)
    assert 0 < record["valid_bits_per_byte"] < 10


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("float32", 4)])
def test_gpt_verdict_has_the_precision_of_the_run(precision, size):
    def logit_bytes(model, data):
        inputs, _ = next(data.batches("all"))
        return {"logit_bytes": model(inputs).element_size()}

    task = tiny(verdict=logit_bytes)
    training = Supervised(task, task.settings("adamw", precision=precision), make_books())
    assert training.final_results() == {"logit_bytes": size}


@pytest.mark.parametrize("contender", ["adamw", "nero-momentum"])
def test_gpt_run_resumes_where_it_stopped(contender, tmp_path):
    task, data = tiny(), make_books(examples=12)
    settings = task.settings(contender, epochs=2, precision="float32")
    whole = finish(Supervised(task, settings, data))
    broken = Supervised(task, settings, data)
    for _ in range(4):
        broken.advance()
    resumed = finish(Supervised(task, settings, data, saved_and_loaded(broken.state())))
    first, second = (comparable(Store(tmp_path).make_record(run)) for run in (whole, resumed))
    assert first == second


def test_gpt_learns_a_sequence():
    task = tiny(epochs=3)
    training = finish(Supervised(task, task.settings("adamw", 0.01), make_books(examples=80)))
    losses = training.curve["valid_loss"]
    assert losses[-1] < 0.3 * math.log(WORDS)
    assert losses == sorted(losses, reverse=True)
