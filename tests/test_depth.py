"""How deep a network is, and rates that fit it."""

import copy
import math
import pickle
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import nero
from nero.depth import TRUST

pytest.importorskip("typer")
from nero.paper.tasks import TASKS


def perceptron(layers=3, width=8):
    body = [each for _ in range(layers - 1) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 2))


class Block(nn.Module):
    """A way through some layers and one around them, with a norm behind or before, or without."""

    def __init__(self, layers, norm=None):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        self.before = nn.LayerNorm(8) if norm == "before" else nn.Identity()
        self.behind = nn.LayerNorm(8) if norm == "behind" else nn.Identity()

    def forward(self, inputs):
        return self.behind(inputs + self.body(self.before(inputs)))


class Branches(nn.Module):
    """Two ways of different depth, side by side."""

    def __init__(self):
        super().__init__()
        self.short, self.long = nn.Linear(8, 8), perceptron(4)

    def forward(self, inputs):
        return torch.cat([self.short(inputs), self.long(inputs)], -1)


class Tied(nn.Module):
    """One table for what is read and what is written."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, words):
        return self.table(words) @ self.table.weight.T


def rms(*depths, shares=None):
    shares = shares or [1] * len(depths)
    return math.sqrt(sum(share * depth**2 for share, depth in zip(shares, depths, strict=True)) / sum(shares))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layers", [1, 2, 7, 50])
def test_layers_in_a_row_count_one_each(layers):
    assert nero.depth_of(perceptron(layers), X) == layers


def test_of_branches_the_deepest_counts():
    assert nero.depth_of(Branches(), X) == 4


def test_a_sum_counts_each_branch_by_its_share():
    assert nero.depth_of(Block(2), X) == pytest.approx(rms(0, 2))
    one = rms(0, 2)
    assert nero.depth_of(nn.Sequential(Block(2), Block(2)), X) == pytest.approx(rms(one, one + 2))
    with_norms = nn.Sequential(Block(2, "before"), Block(2, "before"))
    assert nero.depth_of(with_norms, X) == pytest.approx(rms(one, one + 2, shares=[2, 1]))
    after = nn.Sequential(Block(2, "behind"), Block(2, "behind"))
    assert nero.depth_of(after, X) == pytest.approx(rms(one, one + 2))


def test_norms_before_let_a_network_be_deeper_than_norms_behind():
    counted = {
        norm: [nero.depth_of(nn.Sequential(*(Block(2, norm) for _ in range(count))), X) for count in (4, 16, 64)]
        for norm in ("before", "behind")
    }
    grown = {norm: [after - before for before, after in pairwise(found)] for norm, found in counted.items()}
    assert grown["behind"] == pytest.approx([12, 48], rel=0.05)  # one a block: half of its layers
    assert grown["before"] == pytest.approx([2 * math.log(4)] * 2, rel=0.1)  # with the logarithm of their count


def test_what_else_networks_are_made_of():
    images = torch.randn(2, 3, 8, 8)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    convolutions(images)
    assert nero.depth_of(convolutions, images) == 2
    assert nero.depth_of(Tied(), torch.arange(4)) == 2
    normed = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), perceptron(2))
    assert nero.depth_of(normed, X) == 3
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # values and out; then two more
    assert nero.depth_of(layer, X[None]) == pytest.approx(rms(rms(0, 2), rms(0, 2) + 2))


def test_counting_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(8), perceptron(2))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    nero.depth_of(model, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="mat1"):
        nero.depth_of(model[1], torch.randn(2, 3))
    assert nero.depth_of(model, X) == 2


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="no layer was found"):
        nero.depth_of(nn.ReLU(), X)
    with pytest.raises(ValueError, match="no layer was found"):
        nero.depth_of(nn.BatchNorm1d(8), X)


def turned(model, optimiser):
    """The angle of the first step, of a neuron of the first layer."""
    first = model[0]
    before = first.weight.detach().clone()
    optimiser.zero_grad()
    model(X).square().sum().backward()
    optimiser.step()
    return torch.nn.functional.cosine_similarity(first.weight, before).clamp(max=1).acos().max().item()


@pytest.mark.parametrize("backend", ["eager", "foreach", "auto"])
@pytest.mark.parametrize("layers", [2, 10])
def test_an_automatic_rate_is_a_shared_one(backend, layers):
    torch.manual_seed(0)
    model = perceptron(layers, width=8).double()
    optimiser = nero.Nero(model, lr="auto", backend=backend)
    twin = copy.deepcopy(model)
    plain = nero.Nero(twin, lr=TRUST / layers, backend=backend)
    for _ in range(3):
        for network, each in ((model, optimiser), (twin, plain)):
            each.zero_grad()
            network(X.double()).square().sum().backward()
            each.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert {group["depth"] for group in optimiser.param_groups} == {layers}
    assert {group["lr"] for group in optimiser.param_groups} == {TRUST}


def test_a_rate_as_a_tensor_is_divided_too():
    torch.manual_seed(0)
    model = perceptron(4)
    assert turned(model, nero.Nero(model, lr=torch.tensor(0.04), depth=4)) == pytest.approx(0.01, rel=0.1)
    assert turned(model, nero.Nero(model, lr=0.04, depth=4.0, maximize=True)) == pytest.approx(0.01, rel=0.1)


def test_schedulers_change_an_automatic_rate():
    model = perceptron(4)
    optimiser = nero.Nero(model, lr="auto")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)
    first = turned(model, optimiser)
    assert first == pytest.approx(TRUST / 4, rel=0.1)
    scheduler.step()
    assert {group["lr"] for group in optimiser.param_groups} == {TRUST / 2}


def test_it_counts_once_and_is_gone():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    assert model._forward_hooks
    assert model._forward_pre_hooks
    with torch.no_grad():
        model(X)  # a look before training will do
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    model.append(nn.Linear(2, 2))
    optimiser.add_param_group({"params": model[-1].parameters()})
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}


def test_a_model_that_fails_is_counted_at_the_next_try():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    with pytest.raises(RuntimeError, match="mat1"):
        model(torch.randn(2, 3))
    model(X)
    assert optimiser.param_groups[0]["depth"] == 3


def test_no_step_is_made_in_the_dark():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    before = copy.deepcopy(model.state_dict())
    model[4](model[2:4](X)).sum().backward()  # parts of it, which tell nothing
    with pytest.raises(RuntimeError, match="run it forward once"):
        optimiser.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_copies_and_checkpoints():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    assert nero.depth_of(pickle.loads(pickle.dumps(model)), X) == 3
    copied = copy.deepcopy(model)
    copied(X)
    assert optimiser.param_groups[0]["depth"] == "auto"  # it is not this one's to count
    turned(model, optimiser)
    again = nero.Nero(copied, lr="auto")
    again.load_state_dict(optimiser.state_dict())
    assert {group["depth"] for group in again.param_groups} == {3.0}
    older = optimiser.state_dict()
    for group in older["param_groups"]:
        del group["depth"]
    again.load_state_dict(older)
    assert {group["depth"] for group in again.param_groups} == {1.0}


@pytest.mark.parametrize("depth", [0, -1, math.nan, math.inf, "deep", None, True])
def test_a_bad_depth_is_refused(depth):
    with pytest.raises(ValueError, match="depth must be finite and positive"):
        nero.Nero(perceptron(), depth=depth)


def test_parameters_alone_have_no_depth():
    for options in ({"lr": "auto"}, {"depth": "auto"}):
        with pytest.raises(ValueError, match="need the model itself"):
            nero.Nero(perceptron().parameters(), **options)
    with pytest.raises(ValueError, match="lr must be"):
        nero.Nero(perceptron(), lr="automatic")


def test_groups_made_by_hand_can_be_told_of_the_model():
    model = perceptron(3)
    optimiser = nero.Nero(nero.param_groups(model), lr=0.06)
    optimiser.count_depth(model)
    assert turned(model, optimiser) == pytest.approx(0.02, rel=0.1)
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}


def test_the_optimiser_can_be_let_go():
    model = perceptron(3)
    nero.Nero(model, lr="auto")  # and nobody holds it
    model(X)
    assert not model._forward_hooks


PAGE = Path(__file__).parents[1] / "docs/auto.md"
#: What the page's networks run on.
RUNS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "perceptron of 100 layers": lambda: (TASKS["mnist-deep"].model(), (torch.randn(1, 1, 28, 28),)),
    "VGG-11": lambda: (TASKS["cifar10-vgg11"].model(), (torch.randn(1, 3, 32, 32),)),
    "ResNet-18": lambda: (TASKS["cifar10-resnet18"].model(), (torch.randn(2, 3, 32, 32),)),
    "language model, 2 blocks without norms": lambda: (TASKS["wikitext2"].model(), (torch.arange(35)[None],)),
    "translator, 6 + 6 blocks, norms behind": lambda: (
        TASKS["translation"].model(),
        (torch.arange(1, 17).view(1, 2, 8),),
    ),
    "Pong's actor and critic": lambda: (TASKS["pong"].model(), (torch.zeros(1, 4, 84, 84, dtype=torch.uint8),)),
    "GAN, generator": lambda: (TASKS["cgan"].model().generator, (torch.randn(1, 80), torch.tensor([3]))),
    "GAN, discriminator": lambda: (
        TASKS["cgan"].model().discriminator,
        (torch.randn(1, 3, 32, 32), torch.tensor([3])),
    ),
    "ResNet-50": lambda: (TASKS["imagenet"].model(), (torch.randn(1, 3, 64, 64),)),
}


def test_the_pages_depths_are_counted():
    rows = re.findall(r"^\| (.+?) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == list(RUNS)
    tuned = {"perceptron of 100 layers": "mnist-deep", "translator, 6 + 6 blocks, norms behind": "translation"}
    for name, layers, depth, angle, best in rows:
        with torch.device("meta"):  # the form is all that counts
            model, inputs = RUNS[name]()
        inputs = [each.to("meta") for each in inputs]
        assert int(layers) == sum(role.kind == "neuron" for role in nero.roles_of(model).values()), name
        counted = nero.depth_of(model, *inputs)
        assert depth == f"{counted:.1f}", name
        assert angle == f"{TRUST / counted:.2g}", name
        assert float(best) == (TASKS[tuned[name]].contenders["nero"].best if name in tuned else 0.01), name


def test_the_pages_code_runs(capsys):
    code, shown = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL).groups()
    exec(code, {})
    assert capsys.readouterr().out == shown
