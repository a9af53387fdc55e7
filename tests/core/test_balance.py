"""The constraint set, for models, other optimisers and reparameterisation, and neurons that cannot be balanced."""

import copy

import pytest
import torch
from torch import Tensor, nn

import nero
from nero.backends import backends_for
from nero.rule import distance, project, rounding_error


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(96, 5)
    )


def deviations(weight: Tensor) -> tuple[float, float]:
    """Return how far rows are from zero mean and from unit norm, computed without the library."""
    rows = weight.detach().double().flatten(1)
    return float(rows.mean(1).abs().max()), float((rows.square().sum(1).sqrt() - 1).abs().max())


def test_balance_makes_a_model_balanced():
    model = network()
    untouched = copy.deepcopy(model.state_dict())
    assert not nero.is_balanced(model)
    assert nero.balance_(model) is model
    assert nero.is_balanced(model)
    for layer in (model[0], model[4]):
        mean, norm = deviations(layer.weight)
        assert mean < 1e-7
        assert norm < 1e-6
    grouped = model[2].weight.detach().unflatten(0, (2, 2)).transpose(1, 2).flatten(0, 1)  # output channels first
    assert max(deviations(grouped)) < 1e-6
    for name in ("0.bias", "1.weight", "1.bias", "4.bias"):
        assert torch.equal(model.state_dict()[name], untouched[name])


@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("fix_norm", [True, False])
def test_balance_with_one_constraint_fixes_only_that(fix_mean: bool, fix_norm: bool):
    layer = nn.Linear(20, 6)
    before = layer.weight.detach().clone()
    nero.balance_(layer, fix_mean=fix_mean, fix_norm=fix_norm)
    mean, norm = deviations(layer.weight)
    assert (mean < 1e-7) == fix_mean
    assert (norm < 1e-6) == fix_norm
    assert nero.is_balanced(layer, fix_mean=fix_mean, fix_norm=fix_norm)
    assert nero.is_balanced(layer) == (fix_mean and fix_norm)
    assert torch.equal(layer.weight, before) == (not fix_mean and not fix_norm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_is_balanced_allows_the_rounding_of_the_dtype(dtype: torch.dtype):
    layer = nero.balance_(nn.Linear(300, 7).to(dtype))
    assert nero.is_balanced(layer)
    with torch.no_grad():
        layer.weight[3] *= 1.05
    assert not nero.is_balanced(layer)
    assert nero.is_balanced(layer, tolerance=0.1)


def test_balance_of_zero_and_constant_changes_nothing():
    table = nn.Embedding(4, 3, padding_idx=1)
    with torch.no_grad():
        table.weight[2] = 0.7
    before = table.weight.detach().clone()
    nero.balance_(table)
    assert torch.equal(table.weight[[1, 2]], before[[1, 2]])


@pytest.mark.parametrize(
    ("value", "fix_mean", "fix_norm", "balanced"),
    [
        (0.0, True, True, False),
        (0.0, False, True, False),
        (0.0, True, False, True),  # its mean is zero
        (0.7, True, True, False),
        (8**-0.5, False, True, True),
        (0.7, True, False, False),
        (0.0, False, False, True),
    ],
)
def test_is_balanced_of_neurons_without_projection(value, fix_mean, fix_norm, balanced):
    layer = nero.balance_(nn.Linear(8, 3), fix_mean=fix_mean, fix_norm=fix_norm)
    with torch.no_grad():
        layer.weight[1] = value
    assert nero.is_balanced(layer, fix_mean=fix_mean, fix_norm=fix_norm) == balanced


def test_is_balanced_measures_the_nearest_distance():
    layer = nn.Linear(8, 3)
    nn.init.constant_(layer.weight, 0.5)  # of norm √2: √3 from each that is balanced
    assert not nero.is_balanced(layer, tolerance=1.73)
    assert nero.is_balanced(layer, tolerance=1.74)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.LayerNorm(3), nn.Linear(4, 3).requires_grad_(False)])
def test_is_balanced_without_neurons_raises(model):
    with pytest.raises(ValueError, match=r"has no trainable neurons; nero\.describe"):
        nero.is_balanced(model)


def test_balance_of_fan_in_two_fixes_only_the_norm():
    layer = nero.balance_(nn.Linear(2, 5))
    mean, norm = deviations(layer.weight)
    assert norm < 1e-6
    assert mean > 1e-3


def test_balance_of_frozen_parameters_changes_nothing():
    layer = nn.Linear(4, 3).requires_grad_(False)
    before = layer.weight.clone()
    nero.balance_(layer)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("fix_norm", [True, False])
def test_balance_after_step_keeps_the_constraints(make, fix_mean: bool, fix_norm: bool):
    model = network()
    optimiser = make(model.parameters(), lr=0.05)
    handle = nero.balance_after_step(optimiser, model, fix_mean=fix_mean, fix_norm=fix_norm)
    for _ in range(3):
        optimiser.zero_grad()
        model(torch.randn(8, 2, 4, 4)).square().mean().backward()
        optimiser.step()
        assert nero.is_balanced(model, fix_mean=fix_mean, fix_norm=fix_norm)
    assert nero.is_balanced(model) == (fix_mean and fix_norm)
    handle.remove()
    optimiser.step()
    assert not nero.is_balanced(model)


def test_balance_after_step_equals_step_then_balance():
    one, other = network(), network()
    held, free = (torch.optim.Adam(each.parameters()) for each in (one, other))
    nero.balance_after_step(held, one)
    nero.balance_(other)
    for _ in range(3):
        batch = torch.randn(8, 2, 4, 4)
        for model, optimiser in ((one, held), (other, free)):
            optimiser.zero_grad()
            model(batch).square().mean().backward()
            optimiser.step()
        nero.balance_(other)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


class Wrapper(torch.optim.Optimizer):
    """Holds an optimiser as Accelerate does, without what the base class sets up."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def test_balance_after_step_of_a_wrapped_optimiser():
    layer = nn.Linear(8, 4)
    wrapper = Wrapper(torch.optim.SGD(layer.parameters(), lr=0.1))
    nero.balance_after_step(wrapper, layer, at_once=False)
    layer(torch.randn(3, 8)).square().sum().backward()
    wrapper.step()
    assert nero.is_balanced(layer)


def test_balance_after_step_of_a_pretrained_model_warns():
    layer = nn.Linear(8, 4)
    layer.weight._is_hf_initialized = True  # as from_pretrained of transformers does
    optimiser = torch.optim.SGD(layer.parameters())
    nero.balance_after_step(optimiser, layer, fix_norm="initial", fix_mean=False)
    with pytest.warns(UserWarning, match=r"weight are pretrained.*fix_norm='initial', fix_mean=False"):
        nero.balance_after_step(optimiser, layer)
    nero.balance_after_step(optimiser, layer)  # it is balanced now


@pytest.mark.parametrize("is_frozen", [False, True])
def test_balance_after_step_does_not_warn_of_pretrained_weights_that_it_leaves(is_frozen: bool):
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model[0].requires_grad_(not is_frozen)
    model[0].weight._is_hf_initialized = True
    before = model[0].weight.detach().clone()
    nero.balance_after_step(torch.optim.SGD((model if is_frozen else model[1]).parameters()), model)
    assert torch.equal(model[0].weight, before)


def test_balance_after_step_not_at_once_waits():
    """The paper's baselines were not projected at initialisation."""
    layer = nn.Linear(6, 4)
    before = layer.weight.detach().clone()
    nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer, at_once=False)
    assert torch.equal(layer.weight, before)


def test_balance_after_step_without_gradient_is_unchanged():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    nero.balance_after_step(optimiser, model, at_once=False)
    before = model[0].weight.detach().clone()
    model[1](torch.randn(5, 3)).sum().backward()
    optimiser.step()
    assert torch.equal(model[0].weight, before)
    assert nero.is_balanced(model[1])


def test_balance_after_step_at_initial_norm():
    layer = nn.Linear(6, 4)
    with torch.no_grad():
        layer.weight[0] = 0
    norms = layer.weight.detach().norm(dim=1)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    nero.balance_after_step(optimiser, layer, fix_norm="initial")
    for scale, norm in ((0.01, None), (100, 1.0)):
        layer.weight.grad = scale * torch.ones(4, 6)
        optimiser.step()
        norms[0] = layer.weight[0].detach().norm() if norm is None else norm  # from zero: free up to one
        torch.testing.assert_close(layer.weight.norm(dim=1), norms)
    assert 0 < norms[0] <= 1


def step_all(model: nn.Module, *optimisers: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimiser in optimisers:
        optimiser.step()


def test_balance_after_step_of_two_optimisers_balances_own():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4), nn.Linear(4, 9))
    hidden = torch.optim.SGD(model[1].parameters(), lr=0.1)
    rest = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    nero.balance_after_step(hidden, model)
    assert [nero.is_balanced(layer) for layer in model] == [False, True, False]
    step_all(model, rest, hidden)
    assert [nero.is_balanced(layer) for layer in model] == [False, True, False]
    nero.balance_after_step(rest, model)
    assert nero.is_balanced(model)
    step_all(model, hidden, rest)
    assert nero.is_balanced(model)


def test_balance_after_step_of_a_part_leaves_the_rest_free():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4), nn.Linear(4, 9))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    nero.balance_after_step(optimiser, model[1])
    step_all(model, optimiser)
    assert [nero.is_balanced(layer) for layer in model] == [False, True, False]


def test_balance_after_step_balances_groups_added_later():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimiser = torch.optim.SGD(model[1].parameters(), lr=0.1)
    nero.balance_after_step(optimiser, model)
    optimiser.add_param_group({"params": list(model[0].parameters())})
    step_all(model, optimiser)
    assert nero.is_balanced(model)


@pytest.mark.parametrize("loads_first", [True, False], ids=["loads, then calls", "calls, then loads"])
@pytest.mark.parametrize("is_split", [False, True], ids=["one optimiser", "two optimisers"])
def test_balance_after_step_keeps_neurons_that_grew_in_an_earlier_run(loads_first: bool, is_split: bool):
    def start() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        nn.init.zeros_(model[2].weight)
        parts = [model[0], model[2]] if is_split else [model]
        return model, [torch.optim.Adam(part.parameters(), lr=0.01) for part in parts]

    def balance_all(model: nn.Module, optimisers: list[torch.optim.Optimizer]) -> None:
        for optimiser in optimisers:
            nero.balance_after_step(optimiser, model)

    model, optimisers = start()
    balance_all(model, optimisers)
    step_all(model, *optimisers)
    assert model[2].weight.norm(dim=1).max() < 0.5

    resumed, others = start()
    if not loads_first:
        balance_all(resumed, others)
    resumed.load_state_dict(model.state_dict())
    for optimiser, other in zip(optimisers, others, strict=True):
        other.load_state_dict(optimiser.state_dict())
    if loads_first:
        with pytest.warns(UserWarning, match="are shorter than one, and other layers are balanced"):
            balance_all(resumed, others)
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    for other in others:
        other.param_groups[0]["lr"] = 10
    step_all(resumed, *others)
    torch.testing.assert_close(resumed[2].weight.norm(dim=1), torch.ones(4))


def test_balance_after_step_of_another_model_raises():
    layer, other = nn.Linear(6, 4), nn.Linear(6, 4)
    with pytest.raises(ValueError, match="trains no parameter"):
        nero.balance_after_step(torch.optim.SGD(other.parameters()), layer)
    nero.balance_after_step(torch.optim.SGD([layer.bias]), layer)  # it has no neuron to balance
    assert not nero.is_balanced(layer)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
@pytest.mark.parametrize("shape", [(32, 48), (48, 32)], ids=str)
def test_muon_turns_balanced_rows_by_its_learning_rate(shape: tuple[int, int]):
    """The rows of an orthogonalised matrix have a norm of about one, as torch scales it."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    muon = torch.optim.Muon(layer.parameters(), lr=0.02, weight_decay=0)
    nero.balance_after_step(muon, layer)
    before = layer.weight.detach().clone()
    step_all(layer, muon)
    angles = (before * layer.weight.detach()).sum(1).clamp(-1, 1).acos()
    assert 0.7 < float(angles.square().mean().sqrt()) / 0.02 < 1.2


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, None, "adam"])
def test_balance_after_step_without_optimiser_raises(optimiser):
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        nero.balance_after_step(optimiser, nn.Linear(2, 2))


def test_balance_after_step_of_parameters_raises():
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got generator"):
        nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer.parameters())


def test_balance_after_step_unknown_fix_norm_raises():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="fix_norm must be"):
        nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer, fix_norm="x")


@pytest.mark.parametrize("call", [nero.balance_, nero.is_balanced])
@pytest.mark.parametrize("options", [{"fix_norm": "initial"}, {"fix_norm": None}, {"fix_mean": 1}], ids=str)
def test_constraint_not_bool_raises(call, options: dict):
    """``fix_norm="initial"`` is an option of the optimiser; here it would count as true and set norms to one."""
    layer = nn.Linear(8, 4)
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"must be True or False.*fix_norm=False"):
        call(layer, **options)
    assert torch.equal(layer.weight, before)


def test_complex_trainable_neurons_raise():
    with pytest.raises(TypeError, match=r"complex.*view_as_real"):
        nero.balance_(nn.Linear(3, 2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "call",
    [
        nero.balance_,
        nero.is_balanced,
        lambda model: nero.balance_after_step(torch.optim.SGD(model.parameters()), model),
    ],
)
def test_balance_on_meta_device_raises(call):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 3, device="meta"))
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=r"'1\.weight' is on the meta device: allocate it \(module\.to_empty\)"):
        call(model)
    assert torch.equal(model[0].weight, before)
    model[1].requires_grad_(False)  # what is not trained may be without
    call(model)
    model[1].to_empty(device="cpu")
    model[1].requires_grad_().reset_parameters()
    call(model)


@pytest.mark.parametrize("call", [nero.balance_, nero.is_balanced])
def test_balance_of_no_module_raises(call):
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got list"):
        call([torch.randn(3, 3)])


def test_centred_weight_norm_equals_eq_cwn():
    layer = nn.Linear(9, 4).double()
    raw = layer.weight.detach().clone()
    nero.centred_weight_norm(layer)
    centred = raw - raw.mean(1, keepdim=True)
    torch.testing.assert_close(layer.weight, centred / centred.norm(dim=1, keepdim=True))
    assert torch.equal(layer.parametrizations.weight.original, raw)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(5, 3),
        lambda: nn.Conv2d(2, 3, 2),
        lambda: nn.ConvTranspose2d(4, 6, 2, groups=2),
        lambda: nn.Embedding(4, 5),
    ],
    ids=["Linear", "Conv2d", "ConvTranspose2d", "Embedding"],
)
def test_centred_weight_norm_gradient_is_right(make):
    layer = make().double()
    nero.centred_weight_norm(layer)
    parametrization = layer.parametrizations.weight[0]
    raw = layer.parametrizations.weight.original.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(parametrization, raw)
    assert torch.autograd.gradcheck(lambda x: parametrization(x * 1e-8), raw, eps=1e-7, atol=1e-4)


def test_centred_weight_norm_ignores_the_raw_scale():
    outputs = []
    for sigma in (1.0, 100.0):
        torch.manual_seed(0)
        layer = nn.Linear(9, 4, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(4, 9) * sigma)
        nero.centred_weight_norm(layer)
        outputs.append(layer(torch.ones(2, 9) + torch.arange(9)))
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
        before = layer.weight.detach().clone()
        layer(torch.randn(3, 9)).square().sum().backward()
        optimiser.step()
        turned = torch.nn.functional.cosine_similarity(layer.weight, before).acos().mean()
        assert (turned > 0.05) == (sigma == 1.0), "Section 5.2: the step is coupled to the scale of the raw weights"
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_centred_weight_norm_of_halves_is_as_precise_as_balance(dtype: torch.dtype):
    layer = nn.Linear(4096, 3, dtype=dtype)
    balanced = nero.balance_(copy.deepcopy(layer)).weight
    nero.centred_weight_norm(layer)
    torch.testing.assert_close(layer.weight, balanced, rtol=torch.finfo(dtype).eps, atol=0)


def test_centred_weight_norm_of_constant_has_no_nan():
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, 0.3)
    nero.centred_weight_norm(layer)
    layer(torch.randn(3, 4)).sum().backward()
    assert layer.weight.isfinite().all()
    assert layer.parametrizations.weight.original.grad.isfinite().all()


def test_nero_trains_behind_centred_weight_norm():
    layer = nero.centred_weight_norm(nn.Linear(9, 4))
    assert nero.roles_of(layer)["parametrizations.weight.original"].fan_in_axes == (1,)


@pytest.mark.parametrize(("name", "message"), [("wait", "no parameter 'wait'"), ("bias", "is a bias")])
def test_centred_weight_norm_without_neurons_raises(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        nero.centred_weight_norm(nn.Linear(3, 2), name)
    with pytest.raises(ValueError, match="ReLU has no parameter 'weight' of its own; it has none"):
        nero.centred_weight_norm(nn.ReLU())


def test_projection_of_grouped_view_is_per_channel():
    weight = torch.randn(4, 3, 2, 2)
    role = nero.Role("neuron", (0, 2, 3), 2).on(weight.shape)
    view, axes = role.view(weight), role.axes
    balanced = project(view, axes).tensor
    for group in range(2):
        for channel in range(3):
            neuron = balanced[group, :, channel]
            assert abs(float(neuron.sum())) < 1e-5
            assert float(neuron.norm()) == pytest.approx(1, abs=1e-5)


def test_is_balanced_changes_no_buffers():
    model = torch.nn.utils.parametrizations.spectral_norm(nn.Embedding(10, 8))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    nero.is_balanced(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_row_of_zeros_is_not_a_neuron(kind):
    table = kind(10, 8, padding_idx=3)
    assert not nero.is_balanced(table)
    assert nero.is_balanced(nero.balance_(table))
    with torch.no_grad():
        table.weight[3] = 1.0
    assert not nero.is_balanced(table), "it is no padding of zeros any more"
    with torch.no_grad():
        table.weight[2:4] = 0.0
    assert not nero.is_balanced(table), "another row is at the origin"


@pytest.mark.parametrize(("shape", "axes"), [((20_000, 4), (0,)), ((4, 20_000), (1,))], ids=["columns", "rows"])
def test_step_of_long_neurons_stays_balanced(shape: tuple[int, ...], axes: tuple[int, ...]):
    for backend in backends_for(torch.device("cpu")):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(shape))
        optimiser = nero.Nero([{"params": [weight], "role": "neuron", "fan_in_axes": axes}], backend=backend)
        for _ in range(3):
            weight.grad = torch.randn(shape)
            optimiser.step()
            assert distance(weight.detach(), axes).max() <= rounding_error(torch.float32)


def angle(one: Tensor, other: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=1).clamp(-1, 1).acos()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(1, 6),
        lambda: nn.Conv2d(6, 6, 1, groups=6),
        lambda: nn.ParameterList([nn.Parameter(torch.ones(6, 1, 1))]),
    ],
    ids=["Linear(1, n)", "1x1 depthwise", "(C, 1, 1)"],
)
@pytest.mark.parametrize("from_module", [True, False], ids=["module", "parameters"])
def test_weight_with_fan_in_one_steps_as_a_gain(backend: str, make, from_module: bool):
    module = make()
    weight = next(module.parameters())
    start = weight.detach().clone()
    optimiser = nero.Nero(module if from_module else module.parameters(), backend=backend)
    assert torch.equal(weight, start), "gains are not projected"
    for _ in range(5):
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimiser.step()
    assert weight.isfinite().all()
    assert not torch.equal(weight, start)
    size = max(1.0, float(start.abs().mean()))
    assert (weight - start).abs().max() <= 5 * 3 * 0.01 * size, "steps are relative to one, or to a larger size"


def test_zero_neuron_waits_for_its_first_gradient(backend: str):
    """The first step of a zero neuron, as in a zero-initialised head, has the length of the angle."""
    head = nn.Linear(7, 4)
    nn.init.zeros_(head.weight)
    optimiser = nero.Nero(head, lr=0.02, backend=backend)
    head.weight.grad = torch.zeros(4, 7)
    optimiser.step()
    assert torch.equal(head.weight, torch.zeros(4, 7))
    optimiser = nero.Nero(head, lr=0.02, backend=backend)
    grad = torch.randn(4, 7)
    grad[1], grad[2] = 0.1, 0
    head.weight.grad = grad
    optimiser.step()
    assert torch.equal(head.weight[2], torch.zeros(7))
    moved = [0, 1, 3]
    wanted = -0.02 * grad[moved] / grad[moved].norm(dim=1, keepdim=True)
    torch.testing.assert_close(head.weight[moved], wanted, rtol=0, atol=1e-7)


def test_zero_padding_row_stays_zero_while_others_learn(backend: str):
    table = nn.Embedding(5, 8, padding_idx=2)
    optimiser = nero.Nero(table, backend=backend)
    for _ in range(4):
        optimiser.zero_grad()
        before = table.weight.detach().clone()
        (table(torch.arange(5)) * torch.randn(8)).sum().backward()
        optimiser.step()
        assert torch.equal(table.weight[2], torch.zeros(8))
        assert table.weight.isfinite().all()
        assert (angle(table.weight, before)[[0, 1, 3, 4]] > 1e-3).all()


def test_nonzero_padding_row_is_balanced_and_not_trained(backend: str):
    table = nn.Embedding.from_pretrained(3 * torch.randn(5, 8), freeze=False, padding_idx=2)
    optimiser = nero.Nero(table, backend=backend)
    assert nero.is_balanced(table)
    entered = table.weight[2].detach().clone()
    for _ in range(3):
        optimiser.zero_grad()
        (table(torch.arange(5)) * torch.randn(8)).sum().backward()
        optimiser.step()
    assert torch.equal(table.weight[2], entered)


@pytest.mark.parametrize("value", [1.0, 0.1, -3e20, 1e-20])
def test_constant_neuron_waits_for_its_first_gradient(backend: str, value: float):
    weight = nn.Parameter(torch.full((3, 9), value))
    optimiser = nero.Nero([weight], backend=backend)
    assert torch.equal(weight, torch.full((3, 9), value)), "a constant neuron has no projection"
    weight.grad = torch.randn(3, 9)
    optimiser.step()
    torch.testing.assert_close(weight, project(-weight.grad, (1,)).tensor, rtol=0, atol=1e-3)


def test_one_neuron_over_all_axes_is_balanced(backend: str):
    weight = nn.Parameter(torch.randn(5, 6))
    optimiser = nero.Nero([{"params": [weight], "fan_in_axes": (0, 1)}], backend=backend)
    for _ in range(3):
        weight.grad = torch.randn(5, 6)
        optimiser.step()
    assert optimiser.state[weight]["grad_norm"].shape == (1, 1)
    assert float(weight.detach().norm()) == pytest.approx(1, abs=1e-5)
