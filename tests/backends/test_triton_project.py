"""The projection kernel against :func:`nero.rule.project`."""

import copy
import math
import sys
from contextlib import nullcontext

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import nero
from nero import rule
from nero.backends import available
from nero.backends.triton import project
from nero.balance import balance_tensor_


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the kernels: a GPU, or the CPU if they are interpreted."""
    pytest.importorskip("triton")
    if INTERPRETED:
        monkeypatch.setattr(project, "triton_works", lambda _: True)
    return "cpu" if INTERPRETED else "cuda"


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


@pytest.mark.parametrize(("fix_mean", "fix_norm"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(12, 1), (12, 2), (12, 3), (12, 100), (9, 3, 2, 2), (1, 40)], ids=str)
def test_kernel_agrees_with_the_rule(shape: tuple[int, ...], fix_norm: bool, fix_mean: bool, device: str):
    tensor, axes = neurons(shape, device), tuple(range(1, len(shape)))
    if len(shape) == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    before, wanted = tensor.clone(), rule.project(tensor, axes, fix_mean=fix_mean, fix_norm=fix_norm).tensor
    version = tensor._version
    done = project.project_(tensor, axes, fix_mean=fix_mean, fix_norm=fix_norm)
    assert done
    assert tensor._version == version + 1
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


def test_kernel_applied_twice_keeps_the_bits(device: str):
    for shape in ((12, 3), (12, 100)):
        tensor = neurons(shape, device)
        for options in ({"fix_norm": True}, {"fix_norm": False}, {"fix_norm": True, "radius": 0.3}):
            project.project_(tensor, (1,), fix_mean=True, **options)
            once = tensor.clone()
            project.project_(tensor, (1,), fix_mean=True, **options)
            assert torch.equal(tensor.nan_to_num(), once.nan_to_num())


def test_kernel_with_radii_agrees_with_the_rule(device: str):
    tensor = neurons((12, 100), device)
    radii = torch.linspace(0.1, 5, 12, device=device)[:, None]
    wanted = rule.project(tensor, (1,), radius=radii).tensor
    assert project.project_(tensor, (1,), fix_mean=True, fix_norm=True, radius=radii)
    torch.testing.assert_close(tensor, wanted, rtol=0.02, atol=0.02, equal_nan=True)
    torch.testing.assert_close(tensor[9:], wanted[9:], rtol=1e-5, atol=1e-6)
    assert project.project_(tensor, (1,), fix_mean=True, fix_norm=True, radius=2.0)
    torch.testing.assert_close(tensor[8:].norm(dim=1), torch.full((4,), 2.0, device=device))


def test_kernel_keeps_gaps_between_neurons(device: str):
    held = torch.randn(6, 10, device=device)
    before = held.clone()
    assert project.project_(held[:, 2:7], (1,), fix_mean=True, fix_norm=True)
    assert torch.equal(held[:, :2], before[:, :2])
    assert torch.equal(held[:, 7:], before[:, 7:])
    torch.testing.assert_close(held[:, 2:7].sum(1), torch.zeros(6, device=device), rtol=0, atol=1e-6)
    torch.testing.assert_close(held[:, 2:7].norm(dim=1), torch.ones(6, device=device))


class Wrapped(Tensor):
    """A tensor subclass."""


@pytest.mark.parametrize("radius", [torch.tensor([2.0]), torch.tensor(2.0), torch.ones(4, 1).expand(4, 5)], ids=str)
def test_kernel_refuses_radii_of_another_shape(radius: Tensor, device: str):
    tensor = neurons((4, 5), device)
    assert not project.project_(tensor, (1,), fix_mean=True, fix_norm=True, radius=radius.to(device))


def test_kernel_is_not_used_under_transforms(device: str):
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
        (lambda **on: torch.ones(1, project.MAX_FAN_IN + 1, **on), (1,)),
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
def test_kernel_refuses_unsupported_tensors(make, axes: tuple[int, ...], device: str):
    assert not project.project_(make(device=device), axes, fix_mean=True, fix_norm=True)


def test_balance_of_a_model_uses_the_kernel(device: str, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(96, 5))
    model = copy.deepcopy(plain).to(device)
    nero.balance_(plain)
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    monkeypatch.setattr(
        "nero.balance._wide", lambda view: view if view.dim() == 5 else pytest.fail("the kernel was not used")
    )
    nero.balance_(model)  # the transposed convolution has a layout of its own
    assert len(layers) == 2
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-6)


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
def test_triton_works_without_triton_is_false(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    gpu = torch.device("cuda:0")
    assert not available.triton_works(torch.device("cpu"))
    assert available.triton_works(gpu)
    available.triton_works.cache_clear()
    monkeypatch.setitem(sys.modules, "nero.backends.triton.project_kernel", None)
    assert not available.triton_works(gpu)


@pytest.mark.usefixtures("_no_gpu_needed")
def test_triton_works_on_a_full_gpu_raises(monkeypatch: pytest.MonkeyPatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(torch.OutOfMemoryError):
        available.triton_works(torch.device("cuda:0"))
