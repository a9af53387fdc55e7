"""The projection, by kernels and by operations of torch, against :func:`nero.rule.project`."""

import math
import sys
from contextlib import nullcontext

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import nero
from nero import backends, rule
from nero.backends import available
from nero.backends.job import Neurons
from nero.backends.projection import Projector
from nero.backends.triton import project
from nero.backends.triton.tables import Launch
from nero.balance import balance_tensor_


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the kernels: a GPU, or the CPU if they are interpreted."""
    pytest.importorskip("triton")
    if INTERPRETED:
        monkeypatch.setattr(project, "triton_works", lambda _: True)
    return "cpu" if INTERPRETED else "cuda"


def project_(tensor: Tensor, axes: tuple[int, ...], radius: rule.Number = 1.0, fix_mean=True, fix_norm=True) -> bool:
    """Project one tensor by the kernels; return whether they support it."""
    return bool(project.Kernels(fix_mean=fix_mean, fix_norm=fix_norm)([Neurons(tensor, axes, radius)], [True]))


def project_without_kernels_(tensor: Tensor, axes: tuple[int, ...], radius: rule.Number = 1.0, **constraints) -> bool:
    """Project one tensor by operations of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(project, "triton_works", lambda _: False)
        backends.projector(**{"fix_mean": True, "fix_norm": True} | constraints)([Neurons(tensor, axes, radius)])
    return True


by_path = pytest.mark.parametrize("project_", [project_, project_without_kernels_], ids=["kernels", "torch"])


def neurons(shape: tuple[int, ...], device: str) -> Tensor:
    """Return ordinary neurons, and some of every other kind."""
    torch.manual_seed(0)
    tensor = torch.randn(shape) * torch.logspace(-3, 3, shape[0]).reshape(-1, *[1] * (len(shape) - 1)) + 0.5
    odd = (0.0, 0.3, math.nan, math.inf, 1e-41, 3e38, -1e30)
    for neuron, value in zip(tensor, odd, strict=False):
        neuron.fill_(value) if abs(value) < 1 else neuron.view(-1)[-1:].fill_(value)
    if shape[0] > len(odd) + 1:  # nearly constant: the first is rounding error, the second has a direction
        for neuron, part in zip(tensor[len(odd) :], (1e-7, 1e-5), strict=False):
            neuron.copy_(1 + part * torch.randn(neuron.shape))
    return tensor.to(device)


@by_path
@pytest.mark.parametrize(("fix_mean", "fix_norm"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(12, 1), (12, 2), (12, 3), (12, 100), (9, 3, 2, 2), (1, 40)], ids=str)
def test_projection_agrees_with_the_rule(shape, fix_norm: bool, fix_mean: bool, project_, device: str):
    tensor, axes = neurons(shape, device), tuple(range(1, len(shape)))
    if len(shape) == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    before, wanted = tensor.clone(), rule.project(tensor, axes, fix_mean=fix_mean, fix_norm=fix_norm).tensor
    version = tensor._version
    done = project_(tensor, axes, fix_mean=fix_mean, fix_norm=fix_norm)
    assert done
    assert tensor._version > version
    # a neuron is as exact as its largest element, and a nearly constant one less so
    size = wanted.flatten(1).abs().amax(1).nan_to_num(1, 1).clamp(1e-38).reshape(-1, *[1] * (len(shape) - 1))
    exact = torch.ones(shape[0], dtype=torch.bool, device=device)
    exact[8:9] = False
    torch.testing.assert_close((tensor / size)[exact], (wanted / size)[exact], rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(tensor / size, wanted / size, rtol=0.1, atol=0.1, equal_nan=True)
    size = 1.0 if fix_norm else rule.norm(before, axes)
    off = rule.distance(before, axes, fix_mean=fix_mean, fix_norm=fix_norm) > rule.rounding_error(torch.float32) * size
    moved, has_projection = ((each != before).flatten(1).any(1) for each in (tensor, wanted))
    assert torch.equal(moved, has_projection & (off.flatten() | before.flatten(1).isnan().any(1)))


@by_path
def test_projection_applied_twice_keeps_the_bits(project_, device: str):
    for shape in ((12, 3), (12, 100)):
        tensor = neurons(shape, device)
        for options in ({"fix_norm": True}, {"fix_norm": False}, {"fix_norm": True, "radius": 0.3}):
            project_(tensor, (1,), **options)
            once = tensor.clone()
            project_(tensor, (1,), **options)
            assert torch.equal(tensor.nan_to_num(), once.nan_to_num())


@by_path
def test_projection_with_radii_agrees_with_the_rule(project_, device: str):
    tensor = neurons((12, 100), device)
    radii = torch.linspace(0.1, 5, 12, device=device)[:, None]
    wanted = rule.project(tensor, (1,), radius=radii).tensor
    assert project_(tensor, (1,), radii)
    torch.testing.assert_close(tensor, wanted, rtol=0.02, atol=0.02, equal_nan=True)
    torch.testing.assert_close(tensor[9:], wanted[9:], rtol=1e-5, atol=1e-6)
    assert project_(tensor, (1,), 2.0)
    torch.testing.assert_close(tensor[8:].norm(dim=1), torch.full((4,), 2.0, device=device))


@by_path
def test_projection_to_huge_radii_stays_finite(project_, device: str):
    """From subnormal numbers, and from huge ones that are nearly constant: a factor for both would overflow."""
    tiny = torch.tensor([[1.0, -1, 2, -2]]) * 1e-44
    nearly_constant = torch.tensor([[1.0, 1, 1 - 2**-12, 1 + 2**-12]]) * 1e35
    weight = torch.cat([tiny, nearly_constant, torch.tensor([[3.0, 1, -2, 5]])]).to(device)
    radius = torch.tensor([[1e33], [1e37], [1e30]], device=device)
    wanted = rule.project(weight, (1,), radius=radius).tensor
    assert wanted.isfinite().all()
    assert project_(weight, (1,), radius)
    torch.testing.assert_close(weight / radius, wanted / radius, rtol=0, atol=1e-3)  # 4,096 times the rounding error


@by_path
def test_projection_under_another_default_device(project_, device: str):
    weight = torch.randn(4, 9, device=device)
    wanted = rule.project(weight, (1,)).tensor
    with torch.device("meta"):
        assert project_(weight, (1,))
    torch.testing.assert_close(weight, wanted)


@by_path
def test_projection_keeps_gaps_between_neurons(project_, device: str):
    held = torch.randn(6, 10, device=device)
    before = held.clone()
    assert project_(held[:, 2:7], (1,))
    assert torch.equal(held[:, :2], before[:, :2])
    assert torch.equal(held[:, 7:], before[:, 7:])
    torch.testing.assert_close(held[:, 2:7].sum(1), torch.zeros(6, device=device), rtol=0, atol=1e-6)
    torch.testing.assert_close(held[:, 2:7].norm(dim=1), torch.ones(6, device=device))


class Wrapped(Tensor):
    """A tensor subclass."""


@pytest.mark.parametrize("radius", [torch.tensor([2.0]), torch.tensor(2.0), torch.ones(4, 1).expand(4, 5)], ids=str)
def test_kernel_refuses_radii_of_another_shape(radius: Tensor, device: str):
    tensor = neurons((4, 5), device)
    assert not project_(tensor, (1,), radius.to(device))


def test_kernel_is_not_used_under_transforms(device: str):
    role = nero.roles_of(nn.Linear(5, 4))["weight"]
    tensor = torch.randn(3, 4, 5, device=device)

    def balanced(weight: Tensor) -> Tensor:
        return balance_tensor_(weight.clone(), role)

    plain = torch.stack([balanced(each) for each in tensor])
    torch.testing.assert_close(torch.vmap(balanced)(tensor), plain)
    torch.testing.assert_close(balanced(Wrapped(tensor[0])).as_subclass(Tensor), plain[0])
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
        (lambda **on: torch.ones(1, 5, **on).expand(4, 5), (1,)),
        (lambda **on: torch.ones(4, 5, dtype=torch.float64, **on), (1,)),
        (lambda **on: torch.ones(1, project.MAX_FAN_IN + 1, **on), (1,)),
        (lambda **on: torch.ones(0, 5, **on), (1,)),
        (lambda **on: torch._neg_view(torch.ones(4, 5, **on)), (1,)),
    ],
    ids=[
        "transposed",
        "inner",
        "gaps",
        "expanded",
        "float64",
        "long",
        "none",
        "neg",
    ],
)
def test_kernel_refuses_unsupported_tensors(make, axes: tuple[int, ...], device: str):
    assert not project_(make(device=device), axes)


def network(device: str) -> nn.Sequential:
    """Return a network of several dtypes and fan-ins. Its transposed convolution is not for the kernels."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.Linear(96, 5), nn.Embedding(7, 16), nn.Linear(3, 2), nn.Linear(1500, 3)]
    halves = [nn.Linear(40, 5, dtype=torch.bfloat16), nn.Linear(40, 5, dtype=torch.float16)]
    return nn.Sequential(*layers, *halves, nn.ConvTranspose2d(4, 6, 3, groups=2)).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "axes"), [((40, 5000), (1,)), ((1200, 150), (0,)), ((6, 7, 3), (1, 2)), ((9, 2), (1,)), ((4, 3, 5), (0,))]
)
@pytest.mark.parametrize("constraints", [{}, {"fix_mean": False}, {"fix_norm": False}, {"radius": True}], ids=str)
def test_ordinary_neurons_on_a_cpu_do_not_need_the_rule(
    shape, axes: tuple[int, ...], constraints: dict, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    tensor = torch.randn(shape, dtype=dtype)
    tensor -= 0.9 * tensor.mean(axes, keepdim=True)
    options = dict(constraints)
    if "radius" in options:  # a third started at zero; of these, some are short
        radius = torch.rand_like(tensor.sum(axes, keepdim=True)) + 0.5
        radius.view(-1)[::3] *= -1
        tensor.mul_(torch.where(radius.expand(shape) < -1, 0.01, 1.0))
        options["radius"] = radius
    wanted = rule.project(tensor, axes, **options).tensor
    monkeypatch.setattr(Projector, "_by_rule", lambda *_: pytest.fail("the rule was used"))
    monkeypatch.setattr("nero.backends.projection.PIECE_ELEMENTS", 1 << 15)
    project_without_kernels_(tensor, axes, **options)
    torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)
    once = tensor.clone()
    project_without_kernels_(tensor, axes, **options)
    assert torch.equal(tensor, once)


def test_small_tensors_on_a_cpu_are_projected_together(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)), nn.Conv2d(4, 3, 2), nn.Linear(8, 3))
    projected, project_one = [], Projector._project
    monkeypatch.setattr(
        Projector,
        "_project",
        lambda self, each: (projected.append(each.tensor.shape), project_one(self, each)),
    )
    nero.balance_(model)
    assert projected == [(323, 16), (3, 8)]
    assert nero.is_balanced(model)


def test_too_many_neurons_for_indices_are_left_to_torch(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(project, "MAX_COUNT", 4)
    assert project_(torch.randn(4, 8, device=device), (1,))
    assert not project_(torch.randn(5, 8, device=device), (1,))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of programs of each launch so far."""
    counted, call = [], Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self, *args: (counted.append(self.programs), call(self, *args)))
    return counted


@pytest.mark.parametrize("fix_norm", [True, "initial"])
def test_model_is_balanced_in_a_few_launches(fix_norm, device: str, launches: list[int]):
    plain, model = network("cpu"), network(device)
    with torch.no_grad():
        for each in (plain, model):
            each[0].weight[0] = 0  # held to a norm of at most one
    balanced = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(project, "triton_works", lambda _: False)
        nero.balance_after_step(balanced[0], plain, fix_norm=fix_norm)
    nero.balance_after_step(balanced[1], model, fix_norm=fix_norm)
    assert len(launches) == 4, "one for each dtype, and one for the longest neurons"
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(project, "triton_works", lambda _: False)
        balanced[0].step()
    balanced[1].step()
    assert len(launches) == 8
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        close = {"rtol": 1e-5, "atol": 1e-6} if one.dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-3}
        torch.testing.assert_close(one.cpu(), other, **close)


def test_parameters_without_gradient_are_not_projected(device: str, launches: list[int]):
    model = network(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    nero.balance_after_step(optimiser, model, at_once=False)
    version = model[1].weight._version
    for layer in (model[1], model[4]):
        before = {name: each.detach().clone() for name, each in model.state_dict().items()}
        optimiser.zero_grad()
        layer.weight.grad = torch.randn_like(layer.weight)
        optimiser.step()
        assert nero.is_balanced(layer)
        changed = [name for name, each in model.state_dict().items() if not torch.equal(each, before[name])]
        assert len(changed) == 1
    assert model[1].weight._version > version
    assert len(launches) == 8, "tensors without gradients are in the launches, and their programs end at once"


def test_parameter_that_moves_is_followed(device: str):
    layer = nn.Linear(9, 4).to(device)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    nero.balance_after_step(optimiser, layer)
    for move in (lambda old: old.clone(), lambda old: torch.randn(3, 9, device=old.device), lambda old: old.half()):
        layer.weight.data = move(layer.weight.data)
        layer.weight.grad = torch.randn_like(layer.weight)
        optimiser.step()
        assert nero.is_balanced(layer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernel_in_half_precision_agrees_with_the_rule(dtype: torch.dtype, device: str):
    tensor = neurons((12, 100), device)[7:].to(dtype)
    wide = tensor.float()
    wanted = rule.project(wide, (1,)).tensor.to(dtype)
    assert project_(tensor, (1,))
    torch.testing.assert_close(tensor[2:], wanted[2:], rtol=torch.finfo(dtype).eps, atol=1e-4)
    once = tensor.clone()
    project_(tensor, (1,))
    assert torch.equal(tensor, once)
    beyond = torch.zeros(1, 40, dtype=dtype, device=device)
    beyond[0, :2] = torch.tensor([1.0, -1.0])
    project_(beyond, (1,), 1e5)  # an element of 7e4 is too large for float16
    assert beyond.isfinite().all()


def test_kernel_follows_neurons_of_two_strides(device: str):
    tensor = torch.randn(2, 3, 8, device=device).transpose(0, 1)[:, :, :4]
    wanted = rule.project(tensor.clone(), (2,)).tensor
    assert project_(tensor, (2,))
    torch.testing.assert_close(tensor, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("has_tables", [True, False])
def test_balanced_step_replays_in_a_graph(has_tables: bool):
    models = [network("cuda") for _ in range(2)]
    optimisers = [torch.optim.Adam(each.parameters(), lr=0.1, capturable=True) for each in models]
    grads = {each: torch.ones_like(each).cumsum(-1) for model in models for each in model.parameters()}
    for each, grad in grads.items():
        each.grad = grad
    for number, (model, optimiser) in enumerate(zip(models, optimisers, strict=True)):
        optimiser.step()  # Adam makes its state here
        nero.balance_(model)
        nero.balance_after_step(optimiser, model, at_once=has_tables or number == 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimisers[0].step()
    for model, optimiser in zip(models, optimisers, strict=True):
        model[0].weight.grad = None  # needs another table, which must not replace that of the graph
        optimiser.step()
        model[0].weight.grad = grads[model[0].weight]
    for _ in range(2):
        graph.replay()
        optimisers[1].step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        close = {"rtol": 1e-5, "atol": 1e-5} if one.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
        torch.testing.assert_close(one, other, **close)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_balance_after_step_does_not_synchronise():
    model = network("cuda")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    nero.balance_after_step(optimiser, model, fix_norm="initial")
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    optimiser.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        model[0].weight.grad = None
        optimiser.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch):
    """Let the probe of a GPU run on the CPU."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))  # noqa: ARG005
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    available.triton_works.cache_clear()
    yield
    available.triton_works.cache_clear()


@pytest.mark.skipif(not INTERPRETED, reason="kernels for a GPU do not run on the CPU")
@pytest.mark.usefixtures("_no_gpu_needed")
def test_triton_works_without_triton_is_false_and_warns(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    gpu = torch.device("cuda:0")
    assert not available.triton_works(torch.device("cpu"))
    assert available.triton_works(gpu)
    available.triton_works.cache_clear()
    monkeypatch.setitem(sys.modules, "nero.backends.triton.project_kernel", None)
    with pytest.warns(UserWarning, match=r"Triton does not run on cuda:0 \(ModuleNotFoundError.*install triton"):
        assert not available.triton_works(gpu)
    assert not available.triton_works(gpu)  # it warns once


@pytest.mark.usefixtures("_no_gpu_needed")
def test_triton_works_on_a_full_gpu_raises(monkeypatch: pytest.MonkeyPatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        available.triton_works(torch.device("cuda:0"))
