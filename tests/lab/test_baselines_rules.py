"""Baselines against their formulas, by torch's operations and by Triton's kernels."""

import math
from functools import partial

import pytest
import torch
from interpreter import INTERPRETED
from lab.baseline_cases import OTHERS, TOLERANCES, Loops, flat, follow, network, others, run
from torch import nn

from nero.backends.triton import project
from nero_lab.baselines import Lamb, Madam, lamb, madam
from nero_lab.baselines.batched import alike


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("balanced", [False, True])
@others
def test_optimiser_six_steps_follows_formula(name: str, options: dict, balanced: bool, dtype: torch.dtype):
    follow(network(dtype), name, options, balanced)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device on which Triton's kernels run: a GPU, or the CPU by Triton's interpreter."""
    pytest.importorskip("triton")
    if INTERPRETED:
        monkeypatch.setattr(project, "triton_works", lambda _: True)
        monkeypatch.setattr(madam, "kernels_work", lambda _: True)
        monkeypatch.setattr(lamb, "kernels_work", lambda _: True)
    return "cpu" if INTERPRETED else "cuda"


@pytest.mark.no_cover  # tracing makes interpreted kernels three times as slow; other tests cover them
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("name", "options"), [case for case in OTHERS if case[0] in ("lamb", "madam")], ids=str)
def test_kernel_six_steps_follows_formula(
    name: str, options: dict, balanced: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
):
    for module in (lamb, madam):
        monkeypatch.setattr(module, "BLOCK", 8)  # several programs a tensor
    monkeypatch.setattr(lamb, "PROGRAMS", 2)
    monkeypatch.setattr(lamb, "MIN_KERNEL_ELEMENTS", 4)  # smaller tensors take the plain step
    if name == "madam":
        monkeypatch.setattr(torch, "_foreach_sqrt", None)
    model = network().to(kernels, memory_format=torch.channels_last)
    assert not model["filters"].weight.is_contiguous()
    follow(model, name, options, balanced)


def test_lamb_large_tensor_takes_kernels(kernels: str, monkeypatch: pytest.MonkeyPatch):
    weights = [nn.Parameter(torch.ones(size, device=kernels)) for size in (3, 5)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    monkeypatch.setattr(lamb, "MIN_KERNEL_ELEMENTS", 4)
    monkeypatch.setattr(lamb, "PROGRAMS", 2)
    took = []
    kernel = lamb._step_by_kernels
    monkeypatch.setattr(lamb, "_step_by_kernels", lambda options, each: took.append(len(each)) or kernel(options, each))
    Lamb(weights, lr=0.1, betas=(0.0, 0.999)).step()
    assert took == [1]
    assert [flat(weight) for weight in weights] == [pytest.approx([0.9] * 3), pytest.approx([0.9] * 5)]
    Lamb(weights[1:], lr=0.1).step()  # no tensor is left for the plain step
    assert took == [1, 1]


def test_madam_kernel_nan_gradient_gives_nan(kernels: str):
    weight = nn.Parameter(torch.tensor([0.5, -0.5, 0.5], device=kernels))
    weight.grad = torch.tensor([math.nan, math.inf, 1.0], device=kernels)
    Madam([weight], lr=0.1).step()
    assert weight.isnan().tolist() == [True, True, False]


def test_kernel_unlike_layouts_take_plain_step(kernels: str, monkeypatch: pytest.MonkeyPatch):
    """A transposed gradient, a negated view, and a weight with gaps."""
    monkeypatch.setattr(madam, "_launch", None)
    monkeypatch.setattr(lamb, "_step_by_kernels", None)
    monkeypatch.setattr(lamb, "MIN_KERNEL_ELEMENTS", 1)
    plain, gaps = torch.ones(2, 3, device=kernels), torch.ones(3, 4, device=kernels)[:, :2]
    transposed = torch.ones(3, 2, device=kernels).T
    negated = torch._neg_view(-torch.ones(2, 3, device=kernels))
    for weight, grad in ((plain, transposed), (plain, negated), (gaps, torch.ones(3, 2, device=kernels))):
        for make_one, after in ((Madam, math.exp(-0.1)), (partial(Lamb, betas=(0.0, 0.999)), 0.9)):
            parameter = nn.Parameter(weight.clone() if weight is plain else torch.ones(3, 4, device=kernels)[:, :2])
            parameter.grad = grad
            make_one([parameter], lr=0.1).step()
            assert flat(parameter) == pytest.approx([after] * weight.numel())


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        (lambda: [torch.zeros(4, 8), torch.zeros(4, 8)], True),
        (lambda: [torch.zeros(4, 8).T, torch.zeros(4, 8).T], True),
        (lambda: [torch.zeros(1, 8), torch.zeros(1, 8)], True),
        (lambda: [torch.zeros(4, 8), torch.zeros(2, 8)], False),
        (lambda: [torch.zeros(8), torch.zeros(64)], False),
        (lambda: [torch.zeros(9).as_strided((2, 2), (3, 0))] * 2, False),
        (lambda: [torch.zeros(9).as_strided((3, 3), (2, 2))] * 2, False),
        (lambda: [torch.zeros(2, 0)] * 2, False),
        (lambda: [torch.zeros(4), torch.zeros(4, dtype=torch.float64)], False),
        (lambda: [torch.empty(2**31, device="meta")] * 2, False),
    ],
)
def test_alike_layouts_are_recognised(tensors, wanted: bool):
    assert alike(*tensors()) == wanted


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_kernel_step_bumps_version_of_weights(make_one, kernels: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lamb, "MIN_KERNEL_ELEMENTS", 1)
    monkeypatch.setattr(lamb, "PROGRAMS", 2)
    weight = nn.Parameter(torch.ones(3, device=kernels))
    weight.square().sum().backward()
    pending = weight.exp().sum()  # its gradient needs its result; that of the square needs the weight
    other = weight.square().sum()
    make_one([weight]).step()
    pending.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.gpu
def test_madam_kernel_denormal_squares_still_step():
    weights = [nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "cuda")]
    for weight in weights:
        weight.grad = torch.tensor([1e-17, 3e-18, 1e-19, 1e-20], device=weight.device)
        Madam([weight], lr=0.1).step()
    torch.testing.assert_close(weights[1].cpu(), weights[0], rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_madam_gradient_after_many_zeros_is_clipped(dtype: torch.dtype):
    """A first gradient after t - 1 zeros is normalised to √t, which exceeds 10 after a hundred steps."""
    weight = nn.Parameter(torch.tensor([0.5, -0.25, 0.0, -1.0], dtype=dtype))
    optimiser, loop = Madam([weight], lr=0.02), Loops("madam", flat(weight), 0.02)
    for step in range(130):
        g = [1.0, -2.0, 1.0, 0.0] if step == 125 else [0.0] * 4
        weight.grad = torch.tensor(g, dtype=dtype)
        optimiser.step()
        loop.step(g)
    assert "clipped" in loop.met
    assert flat(weight) == pytest.approx(loop.w, rel=TOLERANCES[dtype])
    assert flat(weight)[2:] == [0, -1]


def test_madam_options_set_clip_and_limit():
    weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    optimiser = Madam([weight], lr=1.0, beta=0.0, clip=0.5, p_scale=1.2)
    weight.grad = torch.tensor([3.0, 3.0], dtype=torch.float64)
    optimiser.step()
    assert flat(weight) == pytest.approx([math.exp(-0.5), -1.2])


def test_group_of_mixed_dtypes_and_shapes_steps():
    for make_one in (Lamb, Madam):
        mixed = [nn.Parameter(torch.full((2, 3), 0.5, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
        mixed += [nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 4))]
        optimiser = make_one(mixed, lr=0.1)
        for parameter in mixed:
            parameter.grad = torch.ones_like(parameter)
        optimiser.step()
        for parameter in mixed[:2]:
            assert bool((parameter < 0.5).all())
        assert flat(mixed[0]) == pytest.approx(flat(mixed[1]))
        assert {optimiser.state[parameter]["exp_avg_sq"].dtype for parameter in mixed} == {torch.float32, torch.float64}


def test_lamb_matches_pytorch_optimizer():
    library = pytest.importorskip("pytorch_optimizer")
    models = network(torch.float64), network(torch.float64)
    ours = Lamb(models[0].parameters(), lr=0.02, betas=(0.9, 0.999), eps=1e-6)
    # adam_debias=True: no bias correction of the average of g
    theirs = library.Lamb(models[1].parameters(), lr=0.02, betas=(0.9, 0.999), eps=1e-6, adam_debias=True)
    found, wanted = (run(*both, range(6)) for both in zip((ours, theirs), models, strict=True))
    for one, other in zip(found, wanted, strict=True):
        # the library adds eps to the norm of u, a millionth of a step here
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
