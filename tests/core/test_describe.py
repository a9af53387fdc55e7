"""The description of a model: its numbers, its reasons and its text."""

import copy
import itertools
import math
import re

import pytest
import torch
from torch import nn

import nero
from nero.description import _bytes, _percent
from nero.parameters import COMPLEX


def bytes_of(state):
    return sum(value.numel() * value.element_size() for entry in state.values() for value in entry.values())


def zeros(*shape):
    return nn.Parameter(torch.zeros(shape))


def with_weight(layer, weight):
    layer.weight = nn.Parameter(weight)
    return layer


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def tied():
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    model[1].weight = model[0].weight
    return model


MODELS = {
    "linear": lambda: nn.Linear(4, 3),
    "perceptron": lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.PReLU(), nn.Linear(16, 1)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 6, 3, groups=2)),
    "depthwise": lambda: nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.ConvTranspose2d(4, 4, 3, groups=4)),
    "attention": lambda: nn.TransformerDecoderLayer(8, 2, 12),
    "recurrent": lambda: nn.LSTM(3, 8, proj_size=2, bidirectional=True),
    "tied": tied,
    "frozen": lambda: frozen(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "0.weight", "0.bias"),
    "all frozen": lambda: nn.Linear(4, 3).requires_grad_(False),
    "float64": lambda: nn.Linear(4, 3, dtype=torch.float64),
    "bfloat16": lambda: nn.Linear(4, 3, dtype=torch.bfloat16),
    "tables": lambda: nn.ParameterList([zeros(1, 7, 4), zeros(4, 1, 1), zeros(), zeros(1, 1, 4)]),
    "empty": lambda: nn.ParameterList([zeros(0, 3), zeros(3, 0), zeros(0)]),
    "nothing": lambda: nn.ReLU(),
}


@pytest.mark.filterwarnings("ignore:nothing to train")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_state_bytes_are_those_of_the_optimisers(make):
    torch.manual_seed(0)
    model = make()
    description = nero.describe(model)
    assert len(description.rows) == len(list(model.parameters()))
    assert description.parameters == sum(each.numel() for each in model.parameters())
    if not description.rows:
        assert description.state_bytes == description.adam_bytes == 0
        return

    heavy = nero.Nero(copy.deepcopy(model), momentum=0.9)
    assert nero.describe(model, momentum=0.9).state_bytes == bytes_of(heavy.state)
    ours, adam = nero.Nero(model), torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    assert description.state_bytes == bytes_of(ours.state)
    ours.step()
    adam.step()
    assert description.state_bytes == bytes_of(ours.state)
    assert description.adam_bytes == bytes_of(adam.state)

    for (name, parameter), row in zip(model.named_parameters(), description.rows, strict=True):
        assert (row.name, row.shape) == (name, tuple(parameter.shape))
        assert row.state_bytes == bytes_of({0: ours.state.get(parameter, {})})
        assert row.adam_bytes == bytes_of({0: adam.state.get(parameter, {})})
        if row.role.kind == "neuron":
            assert row.neurons * row.fan_in == parameter.numel()
            assert not row.state_bytes or row.neurons == ours.state[parameter]["grad_norm"].numel()
        else:
            assert (row.neurons, row.fan_in) == (0, 1)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_describe_changes_no_parameter(make):
    model = make()
    before = [each.clone() for each in model.parameters()]
    nero.describe(model)
    assert all(torch.equal(each, old) for each, old in zip(model.parameters(), before, strict=True))
    assert all(each.grad is None for each in model.parameters())


def test_description_on_meta_device_is_the_same():
    def lines(device):
        return str(nero.describe(nn.TransformerEncoderLayer(8, 2, 12, device=device))).splitlines()

    with torch.device("meta"):
        meta, cpu = lines(None), lines("cpu")
    assert meta == cpu[:-1]
    assert cpu[-1].startswith("balancing")  # the values are needed for it
    huge = nero.describe(nn.Linear(10**6, 10**6, device="meta"))
    assert huge.parameters == 10**12 + 10**6
    assert "8 TB for Adam, 0.0001 % of it" in str(huge)


def test_neurons_counts_trained_neurons_only():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 5))
    assert nero.describe(model).neurons == 8
    frozen_description = nero.describe(frozen(model, "0.weight"))
    assert frozen_description.neurons == 5
    assert frozen_description.rows[0].neurons == 3  # frozen neurons still show in their row
    assert "; 5 neurons" in str(frozen_description)


RANDOM = torch.arange(12.0).reshape(3, 4).square()
ONE_ZERO = RANDOM * torch.tensor([[1.0], [0.0], [1.0]])
ONE_CONSTANT = torch.where(torch.tensor([[True], [False], [True]]), RANDOM, 0.1)
ONE_NAN = torch.where(torch.tensor([[True], [False], [True]]), RANDOM, math.nan)

REASONS = {
    "balanceable": (lambda: with_weight(nn.Linear(4, 3), RANDOM), ""),
    "zero": (
        lambda: with_weight(nn.Linear(4, 3), 0 * RANDOM),
        "3 of 3 neurons zero until a gradient comes, then of norm one at most",
    ),
    "zero row": (
        lambda: with_weight(nn.Linear(4, 3), ONE_ZERO),
        "1 of 3 neurons zero until a gradient comes, then of norm one at most",
    ),
    "padding": (
        lambda: nn.Embedding(5, 4, padding_idx=2),
        "1 of 5 neurons zero until a gradient comes, then of norm one at most",
    ),
    "constant row": (
        lambda: with_weight(nn.Linear(4, 3), ONE_CONSTANT),
        "1 of 3 neurons constant, until their first gradient",
    ),
    "zero and constant rows": (
        lambda: with_weight(nn.Linear(4, 6), torch.cat([ONE_ZERO, ONE_CONSTANT])),
        "2 of 6 neurons zero or constant, until their first gradient",
    ),
    "not a number": (
        lambda: with_weight(nn.Linear(4, 3), ONE_NAN),
        "1 of 3 neurons not finite: initialise them first",
    ),
    "zero column": (
        lambda: with_weight(nn.ConvTranspose1d(3, 4, 1), (RANDOM * (torch.arange(4) > 0))[..., None]),
        "1 of 4 neurons zero until a gradient comes, then of norm one at most",
    ),
    "zero group": (
        lambda: with_weight(
            nn.ConvTranspose1d(4, 2, 2, groups=2), torch.randn(4, 1, 2) * (torch.arange(4) > 1)[:, None, None]
        ),
        "1 of 2 neurons zero until a gradient comes, then of norm one at most",
    ),
    "fan-in 1": (lambda: nn.Linear(1, 3), "gain: its fan-in is 1"),
    "fan-in 2": (lambda: nn.Linear(2, 3), "norm only: its fan-in is 2"),
    "gain": (lambda: nn.LayerNorm(3), "gains have no fan-in"),
    "bias": (lambda: nn.PReLU(3), "biases have no fan-in"),
    "frozen": (lambda: nn.Linear(4, 3).requires_grad_(False), "frozen"),
    "frozen zeros": (lambda: with_weight(nn.Linear(4, 3), 0 * RANDOM).requires_grad_(False), "frozen"),
    "bfloat16 constant": (
        lambda: with_weight(nn.Linear(4, 3), ONE_CONSTANT).to(torch.bfloat16),
        "1 of 3 neurons constant, until their first gradient",
    ),
    "meta zeros": (lambda: with_weight(nn.Linear(4, 3), 0 * RANDOM).to("meta"), ""),
    "complex": (
        lambda: nn.Linear(4, 3, dtype=torch.complex64),
        COMPLEX,
    ),
    "no elements": (lambda: nn.ParameterDict({"weight": zeros(3, 0)}), ""),
}


@pytest.mark.parametrize(("make", "reason"), REASONS.values(), ids=REASONS)
def test_unbalanced_parameter_has_a_reason(make, reason):
    description = nero.describe(make())
    row = next(row for row in description.rows if row.name == "weight")
    assert row.unbalanced == reason
    section = str(description).partition("not balanced:\n")[2].splitlines()
    lines = [line for line in section if "weight" in line.replace(",", "").split()]
    assert [line.strip().startswith(reason) for line in lines] == ([True] if reason else [])


@pytest.mark.filterwarnings("ignore:nothing to train")
@pytest.mark.parametrize("name", [name for name in REASONS if name not in ("not a number", "complex", "meta zeros")])
def test_reason_agrees_with_what_the_optimiser_balances(name):
    make, reason = REASONS[name]
    model = make()
    nero.Nero(model)
    weight, role = model.get_parameter("weight"), nero.roles_of(model)["weight"]
    if role.kind != "neuron" or not weight.numel():
        return
    wide = role.view(weight.detach()).float()
    balanced = (wide.square().sum(role.axes) - 1).abs() < 1e-2
    balanced &= (wide.mean(role.axes).abs() < 1e-2) | reason.startswith("norm only")
    stuck = balanced.numel() if reason == "frozen" else int(reason.split(" of ")[0]) if " of " in reason else 0
    assert int((~balanced).sum()) == stuck


def test_reasons_list_names_and_cut_long_lists():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)], nn.Linear(4, 2), nn.Linear(2, 3), nn.LayerNorm(3))
    section = str(nero.describe(frozen(model, "0.weight"))).partition("not balanced:\n")[2]
    assert section.splitlines() == [
        "  frozen                      0.weight",
        "  biases have no fan-in       0-4.bias (5), 5.bias, 6.bias and 1 more",
        "  norm only: its fan-in is 2  6.weight",
        "  gains have no fan-in        7.weight",
        "balancing" + section.partition("balancing")[2],
    ]
    assert "not balanced" not in str(nero.describe(nn.Linear(4, 3, bias=False)))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_text_is_aligned_in_columns(make):
    description = nero.describe(make())
    header, rule, *rows = str(description).partition("\n\n")[0].splitlines()
    assert header.split("  ")[0].strip() == "name"
    starts = [0, *(place + 2 for place, text in enumerate(rule) if rule[place : place + 2] == "  ")]
    assert len(starts) == 6
    for line in (header, *rows):
        assert line == line.rstrip()
        assert len(line) <= 100
        cells = [line[start:end].rstrip() for start, end in itertools.zip_longest(starts, starts[1:])]
        assert all(cell and cell == cell.strip() for cell in cells)
        for start in starts[1:]:  # every column starts after two spaces
            assert line[start - 2 : start] == "  "
            assert line[start] != " "
    counts = [int(count) for line in rows for count in re.findall(r" \((\d+)\) ", line[: starts[1]])]
    assert len(rows) - len(counts) + sum(counts) == len(description.rows)


class Gated(nn.Module):
    """A layer that is not known."""

    def __init__(self, *shape):
        super().__init__()
        self.mixer = nn.Parameter(torch.randn(shape))
        self.linear = nn.Linear(8, 8)


def test_repeated_layers_fold_into_one_row_with_count():
    model = nn.ModuleDict({"layers": nn.ModuleList([Gated(4, 3) for _ in range(12)]), "head": nn.Linear(8, 2)})
    description = nero.describe(model)
    table = str(description).partition("\n\n")[0].splitlines()[2:]
    assert len(description.rows) == 38
    assert [line.partition("  ")[0] for line in table] == [
        *("layers.0-11.linear.weight (12)", "layers.0-11.linear.bias (12)", "head.weight", "head.bias"),
        "layers.0-11.mixer (12)",  # unknown layers come last
    ]


@pytest.mark.parametrize("shapes", [[(4, 3), (4, 3)], [(4, 3), (3, 4, 2)], [(5,), (4, 3)]])
def test_overrides_of_unknown_parameters_can_be_pasted(shapes):
    model = nn.Sequential(*[Gated(*shape) for shape in shapes], nn.LayerNorm(8))
    text = str(nero.describe(model))
    overrides = eval("dict(" + text[text.index("overrides={") : text.index("\n}") + 2] + ")")["overrides"]
    given = nero.roles_of(model, overrides)
    assert given == nero.roles_of(model)
    assert {name for name, role in given.items() if role.why == "given"} == {f"{i}.mixer" for i in range(len(shapes))}


def test_tied_unknown_parameter_is_listed_as_unknown():
    model = nn.Sequential(Gated(4, 3), Gated(4, 3))
    model[1].mixer = model[0].mixer
    assert "0.mixer" in str(nero.describe(model)).partition("check them:")[2]


@pytest.mark.parametrize("depth", [1, 12])
def test_text_fits_a_terminal_with_long_names(depth):
    model = nn.Linear(10**4, 10**4, device="meta")
    for _ in range(depth):
        model = nn.ModuleDict({"a_long_name_of_a_submodule": model})
    model["unknown"] = nn.ParameterDict({"x": torch.zeros(1, 48, 3, 256, 96, 4, device="meta")})
    lines = str(nero.describe(model)).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.split()[0].endswith("submodule.weight") for line in lines if line)


def test_balancing_change_is_what_the_optimiser_does():
    torch.manual_seed(0)
    model = frozen(nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 4)), "0.weight")
    change = nero.describe(model).balancing_change
    old = [model[index].weight.detach().clone() for index in (1, 3)]
    nero.Nero(model)
    moved = sum((model[i].weight.detach() - before).square().sum() for i, before in zip((1, 3), old, strict=True))
    assert change == pytest.approx(float((moved / sum(each.square().sum() for each in old)).sqrt()))
    assert nero.describe(model).balancing_change < 1e-6
    assert "pretrained" not in str(nero.describe(model))


def test_neurons_that_grew_from_zero_will_not_move():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 7))
    nn.init.zeros_(model[1].weight)
    optimiser = nero.Nero(model)
    model(torch.randn(4, 9)).sum().backward()
    optimiser.step()
    assert model[1].weight.norm() < 0.1
    description = nero.describe(model)
    assert description.balancing_change < 1e-6
    assert description.rows[2].state_bytes == description.rows[0].state_bytes + 4 * (2 * 7 - 5)
    model[0].weight.data.mul_(2)  # now it may be any model
    assert nero.describe(model).balancing_change > 0.1


@pytest.mark.parametrize("name", ["head", "lora_B"])
@pytest.mark.parametrize("fan_in", [2, 5])
def test_short_neurons_beside_a_balanced_layer_are_listed(name: str, fan_in: int):
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(fan_in, 7, bias=False)})
    nn.init.uniform_(model[name].weight, -0.1, 0.1)
    advice, before = "nero.balance_(layer)", model[name].weight.detach().clone()
    assert "kept" not in str(nero.describe(model))
    model["body"] = nero.balance_(nn.Linear(9, 5, bias=False))
    text = str(nero.describe(model))
    assert f"7 of 7 neurons kept shorter than one, as if grown from zero  {name}.weight" in text
    assert (advice in text) == (name == "head")
    nero.Nero(model)
    assert torch.equal(model[name].weight, before), "as described"
    nero.balance_(model[name])
    assert "kept" not in str(nero.describe(model))


def test_large_balancing_change_names_the_option():
    assert "pretrained=True" in str(nero.describe(with_weight(nn.Linear(4, 3), 10 * torch.eye(3, 4))))
    assert math.isnan(nero.describe(nn.LayerNorm(4)).balancing_change)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_repr_is_the_text(make):
    description = nero.describe(make())
    assert repr(description) == str(description) == f"{description}"


def test_text_of_small_model_in_full():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1200, 1024, bias=False), nn.LayerNorm(1024), nn.Linear(1024, 2))
    assert str(nero.describe(frozen(model, "2.bias"))).splitlines() == [
        "name      shape        role    neurons x fan-in  state    why",
        "--------  -----------  ------  ----------------  -------  ----------------",
        "0.weight  1024 x 1200  neuron  1,024 x 1,200     4.11 kB  Linear.weight",
        "1.weight  1024         gain    -                 4.11 kB  LayerNorm.weight",
        "1.bias    1024         bias    -                 4.11 kB  LayerNorm.bias",
        "2.weight  2 x 1024     neuron  2 x 1,024         20 B     Linear.weight",
        "2.bias    2            bias    -                 -        Linear.bias",
        "",
        "1,232,898 parameters in 5 tensors; 1,026 neurons",
        "state: 12.4 kB for Nero, 9.86 MB for Adam, 0.13 % of it",
        "not balanced:",
        "  gains have no fan-in   1.weight",
        "  biases have no fan-in  1.bias",
        "  frozen                 2.bias",
    ]


def test_one_of_a_kind_is_counted_in_the_singular():
    lines = str(nero.describe(nn.Linear(3, 1, bias=False))).splitlines()
    assert "3 parameters in 1 tensor; 1 neuron" in lines


def test_override_shows_in_the_table():
    description = nero.describe(nn.Linear(4, 3), {"weight": (0,)})
    assert (description.rows[0].neurons, description.rows[0].fan_in, description.rows[0].role.why) == (4, 3, "given")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (10**6, "1 MB"),
        (123_456_789, "123 MB"),
        (999_999_999, "1 GB"),
        (2 * 10**12, "2 TB"),
    ],
)
def test_bytes_format_with_unit(count, text):
    assert _bytes(count) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (8.4e-8, "less than 0.0001 %"),
        (1e-6, "0.0001 %"),
        (0.00171, "0.17 %"),
        (0.0999, "10 %"),
        (0.5, "50 %"),
        (0.996, "100 %"),
        (5, "500 %"),
    ],
)
def test_share_formats_as_percent(share, text):
    assert _percent(share) == text
