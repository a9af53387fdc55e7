"""The speed-run: its optimisers, augmentation, schedules, Lookahead, multi-crop evaluation, and resumed runs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

pytest.importorskip("typer")

from lab.helpers import finish, make_data
from lab.loop_cases import saved_and_loaded

import nero
from nero_lab.baselines.airbench import FilterMuon, orthogonalised
from nero_lab.loops import speedrun
from nero_lab.loops.speedrun import multi_crop, multi_crop_accuracy, triangle
from nero_lab.store import Store
from nero_lab.tasks import TASKS

TASK = TASKS["airbench"]
NAMES = list(TASK.contenders)


def shrink(contender):
    """Return the task with two steps an epoch and a narrow network, of one contender."""
    own = TASK.contenders[contender]
    model = partial(own.model or TASK.model, width=1 / 16)
    return replace(TASK, batch=8, epochs=4, contenders={contender: replace(own, model=model)})


def start(contender, state=None):
    task = shrink(contender)
    return task.loop(task, task.settings(contender, precision="float32"), make_data(examples=16, tests=6), state)


def test_task_settings_match_the_publications():
    assert (TASK.epochs, TASK.batch, TASK.smoothing, TASK.is_loss_summed) == (8, 2000, 0.2, True)
    assert (TASK.contenders["muon"].best, TASK.contenders["sgd"].best) == (0.24, 11.5)
    assert TASK.side_by_side == 1  # else the seconds of a run are not its own


@pytest.mark.parametrize("contender", NAMES)
def test_resumed_run_equals_uninterrupted(contender, tmp_path):
    whole, state = start(contender), None
    before = {name: value.detach().clone() for name, value in whole.model.named_parameters()}
    while not whole.is_finished:
        whole.advance()
        if whole.steps_done == 5:
            state = saved_and_loaded(whole.state())
    resumed = finish(start(contender, state))
    assert resumed.resumed == 1
    for one, other in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for name, value in whole.model.named_parameters():
        assert value.isfinite().all()
        assert torch.equal(value, before[name]) == name.endswith("norm.weight"), name
    assert nero.is_balanced(whole.model) == contender.startswith("nero")
    assert nero.is_balanced(whole.model.blocks) == (contender not in ("muon", "sgd"))
    assert whole.curve["train_loss"][-1] < whole.curve["train_loss"][0]
    record = Store(tmp_path).finish(whole)
    assert record["train_seconds"] > 0
    assert 6 * record["tta_accuracy"] in range(7)
    assert len(record["curve"]["test_accuracy"]) == 4


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # warnings of torch's compiler
@pytest.mark.parametrize("contender", NAMES)
def test_gpu_run_captures_both_phases(contender):
    task = replace(shrink(contender), is_compiled=contender == "muon")
    run = finish(task.loop(task, task.settings(contender), make_data(examples=16, tests=6).to("cuda"), None))
    assert run.settings.precision == "bf16"
    assert [len(step.graphs) for step in (run._learn, run._learn_later)] == [1, 1]
    assert None not in run.curve["train_loss"]  # which a NaN would be
    if contender != "sgd":  # whose rate is for batches of 2000
        assert run.curve["train_loss"][-1] < run.curve["train_loss"][0]
    assert nero.is_balanced(run.model.blocks) == (contender not in ("muon", "sgd"))
    assert run.final_results()["train_seconds"] > 0


def test_whitening_bias_rests_after_three_epochs():
    training = start("muon")
    biases = []
    while not training.is_finished:
        training.advance()
        biases.append(training.model.whitening.bias.detach().clone())
    changed = [not torch.equal(now, was) for now, was in zip(biases[1:], biases, strict=False)]
    assert changed == [True] * 5 + [False] * 2  # of two steps an epoch


def test_rates_follow_their_schedules():
    assert [triangle(done) for done in (0, 0.115, 0.23, 0.615, 1)] == pytest.approx([0.2, 0.6, 1, 0.535, 0.07])
    training = start("muon")
    training.epoch = 1  # two of eight steps, and of six of the whitening bias
    training._set_rates()
    (filters,), (biases, whitening, head) = training.optimiser.param_groups, training._others[0].param_groups
    assert filters["lr"].item() == pytest.approx(0.75 * 0.24)
    assert [group["lr"].item() for group in (biases, head)] == pytest.approx([0.75 * 0.053, 0.75 * 0.67])
    assert whitening["lr"].item() == pytest.approx(4 / 6 * 0.053)
    sgd = start("sgd")
    sgd._set_rates()
    rates = [group["lr"].item() for group in sgd.optimiser.param_groups]
    assert rates == pytest.approx([0.2 * 11.5 / (1024 * (1 + 1 / 0.15)) * ratio for ratio in (1, 64, 64)])


def test_images_are_mirrored_in_every_other_epoch(monkeypatch):
    monkeypatch.setattr(speedrun, "MAX_SHIFT", 0)
    training = start("nero")
    pixels = training.data.train.pixels
    numbers = torch.arange(len(pixels))
    epochs = []
    for epoch in range(3):
        training.epoch = epoch
        inputs, order = (torch.cat(part) for part in zip(*training._make_batches(pixels, numbers), strict=True))
        epochs.append((inputs[order.argsort()], order))
    (first, order), (second, other_order), (third, _) = epochs
    plain = training.data.normalise(pixels)
    is_mirrored = [torch.equal(image, one.flip(2)) for image, one in zip(first, plain, strict=True)]
    assert 0 < sum(is_mirrored) < len(plain)
    assert all(
        mirrored or torch.equal(image, one) for mirrored, image, one in zip(is_mirrored, first, plain, strict=True)
    )
    assert torch.equal(second, first.flip(3))
    assert torch.equal(third, first)
    assert not torch.equal(order, other_order)


def test_lookahead_ends_at_slow_weights():
    training = start("sgd")
    while training.steps_done < 7:
        training.advance()
    slow = {name: value.clone() for name, value in training._slow.items()}
    assert not torch.equal(slow["head.weight"], training.model.head.weight)
    training.advance()
    for name, value in training._fast().items():
        assert torch.equal(value, slow[name]), name


def test_lookahead_moves_both_towards_each_other():
    training = start("sgd")
    while training.steps_done < 5:
        training.advance()
    assert all(torch.equal(value, training._fast()[name]) for name, value in training._slow.items())
    fast = training.model.head.weight
    with torch.no_grad():
        was = fast.clone()
        fast += 1.0
    training.step, training.epoch = 1, 2
    training._look_ahead()
    decay = 0.95**5 * (5 / 8) ** 3
    torch.testing.assert_close(fast.detach(), was + 1 - decay)


def test_multi_crop_averages_six_views():
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    views = []

    def network(view):
        views.append(view)
        return view[:, :, 3, 2].exp()

    found = multi_crop(network, images)
    assert len(views) == 6
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    # the pixel (3, 2) and its mirror image (3, 5), in the padded image one further; then shifted by a pixel
    pixels = [(padded[:, :, 4 + move, 3 + move], padded[:, :, 4 + move, 6 + move]) for move in (0, -1, 1)]
    plain, up, down = ((one.exp() + other.exp()) / 2 for one, other in pixels)
    torch.testing.assert_close(found, plain / 2 + up / 4 + down / 4)


def test_multi_crop_accuracy_of_perfect_network_is_one():
    data = make_data(examples=4, tests=20)

    class Perfect(nn.Module):
        def forward(self, images):
            brightness = images.mean((1, 2, 3))
            levels = (torch.arange(10) * 15 + 49.5) / 255 * 4 - 2  # normalised by a mean of 0.5 and a deviation of 0.25
            return -(brightness[:, None] - levels).abs()

    assert multi_crop_accuracy(Perfect(), data) == {"tta_accuracy": 1.0}


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (12, 12)])
def test_newton_schulz_orthogonalises(shape):
    matrix = 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalised(matrix, iterations=8)
    assert found.shape == matrix.shape
    assert all(0.65 < value < 1.25 for value in torch.linalg.svdvals(found).tolist())
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    aligned = left.mT @ found @ right.mT
    torch.testing.assert_close(aligned, aligned.diag().diag(), rtol=0, atol=1e-3)
    torch.testing.assert_close(orthogonalised(1e6 * matrix), orthogonalised(matrix))
    assert not orthogonalised(torch.zeros(shape)).any()


def test_filter_muon_steps_along_nesterov_momentum():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3, 3, 3).contiguous(memory_format=torch.channels_last))
    expected, velocity = weight.detach().flatten(1), torch.zeros(4, 27)
    optimiser = FilterMuon([weight], lr=0.1, momentum=0.5)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        gradient = weight.grad.flatten(1)
        velocity = 0.5 * velocity + gradient
        expected = expected * 2 / expected.norm() - 0.1 * orthogonalised(gradient + 0.5 * velocity)
        optimiser.step()
        torch.testing.assert_close(weight.detach().flatten(1), expected)
