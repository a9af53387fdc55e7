"""The constraint set, for models, for other optimisers, and as a reparameterisation."""

import copy
import math
import sys
from contextlib import nullcontext

import pytest
import torch
from conftest import INTERPRETED
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import nero
from nero.backends.triton import project as rows
from nero.balance import balance_tensor_
from nero.rule import project


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(96, 5)
    )


def deviations(weight: Tensor) -> tuple[float, float]:
    """How far rows are from zero mean and from unit norm, computed apart from the library."""
    rows = weight.detach().double().flatten(1)
    return float(rows.mean(1).abs().max()), float((rows.square().sum(1).sqrt() - 1).abs().max())


def test_balance_and_is_balanced():
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
def test_each_constraint_can_be_switched(fix_mean: bool, fix_norm: bool):
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
def test_is_balanced_knows_the_rounding_of_a_dtype(dtype: torch.dtype):
    layer = nero.balance_(nn.Linear(300, 7).to(dtype))
    assert nero.is_balanced(layer)
    with torch.no_grad():
        layer.weight[3] *= 1.05
    assert not nero.is_balanced(layer)
    assert nero.is_balanced(layer, tolerance=0.1)


def test_what_cannot_be_balanced_stays():
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
def test_neurons_without_a_projection_count_by_the_definition(value, fix_mean, fix_norm, balanced):
    layer = nero.balance_(nn.Linear(8, 3), fix_mean=fix_mean, fix_norm=fix_norm)
    with torch.no_grad():
        layer.weight[1] = value
    assert nero.is_balanced(layer, fix_mean=fix_mean, fix_norm=fix_norm) == balanced


def test_is_balanced_measures_to_the_nearest_balanced_neuron():
    layer = nn.Linear(8, 3)
    nn.init.constant_(layer.weight, 0.5)  # of norm √2: √3 from each that is balanced
    assert not nero.is_balanced(layer, tolerance=1.73)
    assert nero.is_balanced(layer, tolerance=1.74)


@pytest.mark.parametrize("model", [nn.ReLU(), nn.LayerNorm(3), nn.Linear(4, 3).requires_grad_(False)])
def test_is_balanced_wants_neurons(model):
    with pytest.raises(ValueError, match=r"has no neurons to train; nero\.describe"):
        nero.is_balanced(model)


def test_fan_in_two_is_held_to_the_norm_alone():
    layer = nero.balance_(nn.Linear(2, 5))
    mean, norm = deviations(layer.weight)
    assert norm < 1e-6
    assert mean > 1e-3


def test_frozen_parameters_stay():
    layer = nn.Linear(4, 3).requires_grad_(False)
    before = layer.weight.clone()
    nero.balance_(layer)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("fix_norm", [True, False])
def test_balance_after_step(make, fix_mean: bool, fix_norm: bool):
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


def test_balance_after_step_is_the_step_and_then_the_projection():
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


def test_balance_after_step_from_the_first_step_on():
    """The paper's baselines were not projected at initialisation."""
    layer = nn.Linear(6, 4)
    before = layer.weight.detach().clone()
    nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer, at_once=False)
    assert torch.equal(layer.weight, before)


def test_balance_after_step_leaves_alone_what_has_no_gradient():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    nero.balance_after_step(optimiser, model, at_once=False)
    before = model[0].weight.detach().clone()
    model[1](torch.randn(5, 3)).sum().backward()
    optimiser.step()
    assert torch.equal(model[0].weight, before)
    assert nero.is_balanced(model[1])


def test_balance_after_step_at_the_initial_norm():
    layer = nn.Linear(6, 4)
    with torch.no_grad():
        layer.weight[0] = 0
    norms = layer.weight.detach().norm(dim=1)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    nero.balance_after_step(optimiser, layer, fix_norm="initial")
    layer(torch.randn(5, 6)).square().sum().backward()
    optimiser.step()
    norms[0] = 0.01  # what comes with nothing gets the paper's scale for zero
    torch.testing.assert_close(layer.weight.norm(dim=1), norms)


@pytest.mark.parametrize("optimiser", [torch.optim.SGD, None, "adam"])
def test_balance_after_step_wants_an_optimiser(optimiser):
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        nero.balance_after_step(optimiser, nn.Linear(2, 2))


def test_balance_after_step_wants_a_known_constraint():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="fix_norm must be"):
        nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer, fix_norm="x")


@pytest.mark.parametrize("call", [nero.balance_, nero.is_balanced])
@pytest.mark.parametrize("options", [{"fix_norm": "initial"}, {"fix_norm": None}, {"fix_mean": "no"}], ids=str)
def test_constraints_are_on_or_off(call, options: dict):
    """What holds norms to their start elsewhere would be taken for true, and set them to one."""
    layer = nn.Linear(8, 4)
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"must be True or False.*fix_norm=False"):
        call(layer, **options)
    assert torch.equal(layer.weight, before)


def test_complex_neurons_are_refused():
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
def test_balance_wants_values(call):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 3, device="meta"))
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match=r"'1\.weight' is on the meta device: give it memory \(module\.to_empty\)"):
        call(model)
    assert torch.equal(model[0].weight, before)
    model[1].requires_grad_(False)  # what is not trained may be without
    call(model)
    model[1].to_empty(device="cpu")
    model[1].requires_grad_().reset_parameters()
    call(model)


@pytest.mark.parametrize("call", [nero.balance_, nero.is_balanced])
def test_balance_wants_a_module(call):
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not list"):
        call([torch.randn(3, 3)])


# -- the rival ---------------------------------------------------------------------------------


def test_centred_weight_norm_is_the_papers_equation():
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
def test_centred_weight_norm_has_the_right_gradient(make):
    layer = make().double()
    nero.centred_weight_norm(layer)
    parametrization = layer.parametrizations.weight[0]
    raw = layer.parametrizations.weight.original.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(parametrization, raw)
    assert torch.autograd.gradcheck(lambda x: parametrization(x * 1e-8), raw, eps=1e-7, atol=1e-4)


def test_centred_weight_norm_trains_and_does_not_see_the_raw_scale():
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


def test_centred_weight_norm_of_a_constant_neuron_has_no_nan():
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, 0.3)
    nero.centred_weight_norm(layer)
    layer(torch.randn(3, 4)).sum().backward()
    assert layer.weight.isfinite().all()
    assert layer.parametrizations.weight.original.grad.isfinite().all()


def test_nero_trains_behind_the_rival():
    layer = nero.centred_weight_norm(nn.Linear(9, 4))
    assert nero.roles_of(layer)["parametrizations.weight.original"].fan_in_axes == (1,)


@pytest.mark.parametrize(("name", "message"), [("wait", "no parameter 'wait'"), ("bias", "is a bias")])
def test_centred_weight_norm_wants_neurons(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        nero.centred_weight_norm(nn.Linear(3, 2), name)


def test_projection_of_grouped_views_is_per_output_channel():
    weight = torch.randn(4, 3, 2, 2)
    role = nero.Role("neuron", (0, 2, 3), 2).on(weight.shape)
    view, axes = role.view(weight), role.axes
    balanced = project(view, axes).tensor
    for group in range(2):
        for channel in range(3):
            neuron = balanced[group, :, channel]
            assert abs(float(neuron.sum())) < 1e-5
            assert float(neuron.norm()) == pytest.approx(1, abs=1e-5)


# -- the kernel --------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where Triton's kernels run here: on a GPU, or interpreted on the CPU."""
    pytest.importorskip("triton")
    if INTERPRETED:
        monkeypatch.setattr(rows, "works", lambda _: True)
    return "cpu" if INTERPRETED else "cuda"


def neurons(shape: tuple[int, ...], device: str) -> Tensor:
    """Ordinary ones, and some of every other kind."""
    torch.manual_seed(0)
    tensor = torch.randn(shape) * torch.logspace(-3, 3, shape[0]).reshape(-1, *[1] * (len(shape) - 1)) + 0.5
    odd = (0.0, 0.3, math.nan, math.inf, 1e-41, 3e38, -1e30)
    for neuron, value in zip(tensor, odd, strict=False):
        neuron.fill_(value) if abs(value) < 1 else neuron.view(-1)[-1:].fill_(value)
    if shape[0] > len(odd) + 1:  # nearly constant: what is left of the first is rounding, of the second a direction
        for neuron, part in zip(tensor[len(odd) :], (1e-7, 1e-5), strict=False):
            neuron.copy_(1 + part * torch.randn(neuron.shape))
    return tensor.to(device)


@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("fix_norm", [True, False])
@pytest.mark.parametrize("shape", [(12, 1), (12, 2), (12, 3), (12, 100), (9, 3, 2, 2), (1, 40)], ids=str)
def test_the_kernel_projects(shape: tuple[int, ...], fix_norm: bool, fix_mean: bool, device: str):
    tensor, axes = neurons(shape, device), tuple(range(1, len(shape)))
    if len(shape) == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    before, wanted = tensor.clone(), project(tensor, axes, fix_mean=fix_mean, fix_norm=fix_norm).tensor
    version = tensor._version
    done = rows.project_(tensor, axes, fix_mean=fix_mean, fix_norm=fix_norm)
    assert done == (fix_mean or fix_norm)
    assert tensor._version == version + done
    # a neuron is as exact as its largest entry, and a nearly constant one less so
    size = wanted.flatten(1).abs().amax(1).nan_to_num(1, 1).clamp(1e-38).reshape(-1, *[1] * (len(shape) - 1))
    exact = torch.ones(shape[0], dtype=torch.bool, device=device)
    exact[8:9] = False
    torch.testing.assert_close((tensor / size)[exact], (wanted / size)[exact], rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(tensor / size, wanted / size, rtol=0.1, atol=0.1, equal_nan=True)
    assert torch.equal((tensor != before).flatten(1).any(1), (wanted != before).flatten(1).any(1))


def test_the_kernel_projects_to_radii(device: str):
    tensor = neurons((12, 100), device)
    radii = torch.linspace(0.1, 5, 12, device=device)[:, None]
    wanted = project(tensor, (1,), radius=radii).tensor
    assert rows.project_(tensor, (1,), fix_mean=True, fix_norm=True, radius=radii)
    torch.testing.assert_close(tensor, wanted, rtol=0.02, atol=0.02, equal_nan=True)
    torch.testing.assert_close(tensor[9:], wanted[9:], rtol=1e-5, atol=1e-6)
    assert rows.project_(tensor, (1,), fix_mean=True, fix_norm=True, radius=2.0)
    torch.testing.assert_close(tensor[8:].norm(dim=1), torch.full((4,), 2.0, device=device))


def test_the_kernel_leaves_what_lies_between_neurons(device: str):
    held = torch.randn(6, 10, device=device)
    before = held.clone()
    assert rows.project_(held[:, 2:7], (1,), fix_mean=True, fix_norm=True)
    assert torch.equal(held[:, :2], before[:, :2])
    assert torch.equal(held[:, 7:], before[:, 7:])
    assert max(deviations(held[:, 2:7].cpu())) < 1e-6


class Wrapped(Tensor):
    """Another kind of tensor."""


@pytest.mark.parametrize("radius", [torch.tensor([2.0]), torch.tensor(2.0), torch.ones(4, 1).expand(4, 5)], ids=str)
def test_the_kernel_refuses_radii_that_are_not_one_a_neuron(radius: Tensor, device: str):
    tensor = neurons((4, 5), device)
    assert not rows.project_(tensor, (1,), fix_mean=True, fix_norm=True, radius=radius.to(device))


def test_the_kernel_keeps_out_of_transforms(device: str):
    role = nero.roles_of(nn.Linear(5, 4))["weight"]
    tensor = torch.randn(3, 4, 5, device=device)

    def balanced(weight: Tensor) -> Tensor:
        return balance_tensor_(weight.clone(), role)

    plain = torch.stack([balanced(each) for each in tensor])
    torch.testing.assert_close(torch.vmap(balanced)(tensor), plain)
    graph = make_fx(balanced)(tensor[0])
    torch.testing.assert_close(graph(tensor[1]), plain[1])
    with torch.inference_mode():
        made = torch.randn(4, 5, device=device)
    with pytest.raises(RuntimeError, match="inference"):
        balance_tensor_(made, role)


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (lambda **on: torch.ones(4, 5, **on).T, (1,)),
        (lambda **on: torch.ones(3, 4, 5, **on), (1,)),
        (lambda **on: torch.ones(4, 10, **on)[:, ::2], (1,)),
        (lambda **on: torch.ones(2, 3, 8, **on).transpose(0, 1)[:, :, :4], (2,)),
        (lambda **on: torch.ones(1, 5, **on).expand(4, 5), (1,)),
        (lambda **on: torch.ones(4, 5, dtype=torch.float64, **on), (1,)),
        (lambda **on: torch.ones(4, 5, dtype=torch.bfloat16, **on), (1,)),
        (lambda **on: torch.ones(1, rows.LONGEST + 1, **on), (1,)),
        (lambda **on: torch.ones(0, 5, **on), (1,)),
        (lambda **on: torch._neg_view(torch.ones(4, 5, **on)), (1,)),
        (lambda **on: Wrapped(torch.ones(4, 5, **on)), (1,)),
    ],
    ids=[
        "transposed",
        "inner",
        "gaps",
        "two strides",
        "expanded",
        "float64",
        "bfloat16",
        "long",
        "none",
        "neg",
        "kind",
    ],
)
def test_the_kernel_refuses_what_it_cannot_do(make, axes: tuple[int, ...], device: str):
    assert not rows.project_(make(device=device), axes, fix_mean=True, fix_norm=True)


def test_models_are_balanced_by_it(device: str, monkeypatch: pytest.MonkeyPatch):
    model, plain = network().to(device), nero.balance_(network())
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    monkeypatch.setattr("nero.balance._wide", lambda view: view if view.dim() == 5 else pytest.fail("the other way"))
    nero.balance_(model)  # the transposed convolution lies otherwise
    assert len(layers) == 2
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch):
    """A probe on a GPU that is none."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    rows.works.cache_clear()
    yield
    rows.works.cache_clear()


@pytest.mark.skipif(not INTERPRETED, reason="a real GPU's kernels do not run on the CPU")
@pytest.mark.usefixtures("_no_gpu_needed")
def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    gpu = torch.device("cuda:0")
    assert not rows.works(torch.device("cpu"))
    assert rows.works(gpu)
    rows.works.cache_clear()
    monkeypatch.setitem(sys.modules, "nero.backends.triton.project_kernel", None)
    monkeypatch.delattr(nero, "rows_kernel", raising=False)
    assert not rows.works(gpu)


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_full_gpu_says_nothing_of_triton(monkeypatch: pytest.MonkeyPatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        rows.works(torch.device("cuda:0"))


def test_asking_changes_no_buffers():
    model = torch.nn.utils.parametrizations.spectral_norm(nn.Embedding(10, 8))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    nero.is_balanced(model)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_padding_is_no_neuron(kind):
    table = kind(10, 8, padding_idx=3)
    assert not nero.is_balanced(table)
    assert nero.is_balanced(nero.balance_(table))
    with torch.no_grad():
        table.weight[3] = 1.0
    assert not nero.is_balanced(table), "it is no padding of zeros any more"
    with torch.no_grad():
        table.weight[2:4] = 0.0
    assert not nero.is_balanced(table), "another row is at the origin"
