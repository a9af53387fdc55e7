"""Baselines: by name, against their formulas on every kind of kernel, their state and their CUDA graphs."""

import copy
import io
import math
from functools import partial

import oracle
import pytest
import torch
from interpreter import INTERPRETED
from lab.baseline_cases import (
    OTHERS,
    TOLERANCES,
    Loops,
    assert_close,
    equal,
    flat,
    follow,
    give_gradients,
    length,
    network,
    others,
    run,
)
from torch import Tensor, nn

import nero
from nero.backends.triton import project
from nero_lab.baselines import Lamb, Madam, lamb, madam, make, prime
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
@pytest.mark.parametrize(
    ("name", "options", "balanced"),
    [("lamb", {}, False), ("lamb", {"beta1": 0.9}, True), ("madam", {}, False), ("madam", {}, True)],
)
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


def test_madam_kernel_clips_turns_of_both_signs(kernels: str):
    weight = nn.Parameter(torch.ones(2, device=kernels))
    weight.grad = torch.tensor([3.0, -3.0], device=kernels)
    Madam([weight], lr=1.0, beta=0.0, clip=0.5).step()
    assert flat(weight) == pytest.approx([math.exp(-0.5), math.exp(0.5)])


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


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_sgd_clip_bounds_norm_of_whole_gradient(clip: float):
    models = network(torch.float64), network(torch.float64)
    plain, clipped = make("sgd", models[0], 0.1), make("sgd", models[1], 0.1, clip=clip)
    before = [flat(parameter) for parameter in models[0].parameters()]
    given, _ = (give_gradients(model, 1) for model in models)
    norm = length([x for values in given.values() for x in values or ()])
    share = min(1.0, clip / norm)
    plain.step()
    clipped.step()
    for was, whole, part in zip(before, models[0].parameters(), models[1].parameters(), strict=True):
        wanted = [x + share * (y - x) for x, y in zip(was, flat(whole), strict=True)]
        assert flat(part) == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def test_make_defaults_are_the_papers():
    layer = nn.Linear(3, 2)
    adam, lamb, sgd, madam, ours = (make(name, layer, 0.1) for name in ("adam", "lamb", "sgd", "madam", "nero"))
    assert isinstance(ours, nero.Nero)
    assert (adam.defaults["betas"], adam.defaults["eps"], adam.defaults["weight_decay"]) == ((0.0, 0.999), 1e-8, 0)
    assert (lamb.defaults["betas"], lamb.defaults["eps"]) == ((0.0, 0.999), 1e-6)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0, 0)
    assert (madam.defaults["beta"], madam.defaults["clip"], madam.defaults["p_scale"]) == (0.999, 10, 3)
    assert (ours.defaults["beta"], ours.defaults["fix_mean"], ours.defaults["fix_norm"]) == (0.999, True, True)


def test_make_nero_steps_like_nero():
    models = network(), network()
    with torch.no_grad():
        for each in models:
            each["norm"].weight.fill_(2)
    optimisers = make("nero", models[0], 0.02), nero.Nero(models[1], lr=0.02)
    assert_close(*(run(*both, range(4)) for both in zip(optimisers, models, strict=True)))


@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("fix_norm", [True, False])
def test_fixed_scale_is_mean_norm_after_projection(fix_mean: bool, fix_norm: bool):
    model = nn.Sequential(nn.Linear(5, 4), nn.Conv2d(2, 3, 2, bias=False), nn.Linear(4, 2)).double()
    nn.init.zeros_(model[2].weight)
    start = copy.deepcopy(model)
    optimiser = make("nero", model, 0.05, fix_mean=fix_mean, fix_norm=fix_norm, fixed_scale=True)
    scales = {
        name: group["scale"] for group in optimiser.param_groups for name in group["param_names"] if "weight" in name
    }
    assert {group["scale"] for group in optimiser.param_groups if group["role"] == "bias"} == {None}
    assert list(optimiser.state) == [each for group in optimiser.param_groups for each in group["params"]]
    neurons = {}
    for name in ("0.weight", "1.weight"):
        rows = [flat(row) for row in start.get_parameter(name)]
        neurons[name] = [oracle.project(row, fix_mean, fix_norm) for row in rows]
        assert scales[name] == pytest.approx(sum(map(length, neurons[name])) / len(rows))
        assert (scales[name] == 1) == fix_norm
    assert scales["2.weight"] == (1.0 if fix_norm else 0.01)

    squares = {name: [0.0] * len(rows) for name, rows in neurons.items()}
    for t in range(1, 5):
        for name, rows in neurons.items():
            grad = torch.randn(model.get_parameter(name).shape, dtype=torch.float64)
            model.get_parameter(name).grad = grad
            for i, (row, g) in enumerate(zip(rows, map(flat, grad), strict=True)):
                rows[i], squares[name][i] = oracle.turn(
                    row, g, squares[name][i], t, 0.05, 0.999, fix_mean, fix_norm, sigma=scales[name]
                )
        optimiser.step()
    for name, rows in neurons.items():
        assert flat(model.get_parameter(name)) == pytest.approx([x for row in rows for x in row], rel=1e-9)


def test_fixed_scale_with_constraints_is_algorithm_1():
    models = network(torch.float64), network(torch.float64)
    for each in models:
        del each["zero"], each["unmoved"]  # the two forms differ at the origin
    found = run(make("nero", models[0], 0.02, fixed_scale=True), models[0], range(6))
    wanted = run(make("nero", models[1], 0.02), models[1], range(6))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("name", "options"), [*OTHERS, ("nero", {}), ("nero", {"fixed_scale": True})], ids=str)
def test_lr_tensor_steps_like_float(name: str, options: dict, shape: tuple[int, ...]):
    lr = 2.0**-6  # exact in float32
    models = network(), network()
    number, tensor = make(name, models[0], lr, **options), make(name, models[1], torch.full(shape, lr), **options)
    assert_close(run(tensor, models[1], range(3)), run(number, models[0], range(3)))
    for group in number.param_groups:
        group["lr"] = lr / 4
    for rate in {id(group["lr"]): group["lr"] for group in tensor.param_groups}.values():
        rate.div_(4)
    assert_close(run(tensor, models[1], range(3, 5)), run(number, models[0], range(3, 5)))
    number.param_groups[0]["lr"], tensor.param_groups[0]["lr"] = 0.0, torch.zeros(shape)
    assert_close(run(tensor, models[1], range(5, 6)), run(number, models[0], range(5, 6)))


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_lr_tensor_float64_steps_float32_weights(make_one):
    models = network(), network()
    rates = torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)
    assert_close(
        *(run(make_one(each.parameters(), lr=lr), each, range(3)) for each, lr in zip(models, rates, strict=True))
    )


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_state_exists_before_first_step_and_stays(make_one):
    model = network()
    optimiser = make_one(model.parameters())
    optimiser.add_param_group({"params": [extra := nn.Parameter(torch.ones(3))], "lr": 0.5})
    assert set(optimiser.state) == {*model.parameters(), extra}
    tensors = [value for state in optimiser.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert not any(value.any() or value.requires_grad for value in tensors)
    extra.grad = torch.ones(3)
    run(optimiser, model, range(3))
    after = [value for state in optimiser.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    assert extra[0] < 0.9


@pytest.mark.parametrize("balanced", [False, True])
@others
def test_checkpoint_resumes_with_equal_bits(name: str, options: dict, balanced: bool):
    model = network()
    optimiser = make(name, model, 0.02, **options, balanced=balanced)
    run(optimiser, model, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    wanted = run(optimiser, model, range(3, 6))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = nn.ModuleDict(copy.deepcopy(dict(network().items())))
    resumed = make(name, other, 0.5, **options, balanced=balanced)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimiser"])
    assert resumed.param_groups[0]["lr"] == 0.02
    assert equal(run(resumed, other, range(3, 6)), wanted)


def test_madam_checkpoint_restores_limit():
    weight = nn.Parameter(torch.ones(4))
    saved = Madam([weight]).state_dict()
    grown = nn.Parameter(torch.full((4,), 50.0))
    optimiser = Madam([grown])
    optimiser.load_state_dict(saved)
    grown.grad = torch.zeros(4)
    optimiser.step()
    assert flat(grown) == [3.0] * 4


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_load_state_dict_leaves_checkpoint_unchanged(make_one):
    models = network(), network()
    one, other = (make_one(each.parameters()) for each in models)
    run(one, models[0], range(2))
    other.load_state_dict(one.state_dict())
    before = copy.deepcopy(one.state_dict()["state"])
    run(other, models[1], range(2))
    for key, state in one.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(before[key][name])) for name in state)


@pytest.mark.parametrize("balanced", [False, True])
@others
def test_prime_then_steps_equal_unprimed_steps(name: str, options: dict, balanced: bool):
    models = network(), network()
    optimisers = [make(name, each, 0.02, **options, balanced=balanced) for each in models]
    model = models[1]
    with torch.no_grad():
        for each in models:
            each["zero"].bias.neg_()  # -0.0
    model["matrix"].weight.grad = held = torch.ones(4, 3)
    model["norm"].requires_grad_(False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    prime(optimisers[1])
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.view(torch.int32), was.view(torch.int32)), "bit for bit"
        assert parameter.grad is (held if parameter is model["matrix"].weight else None)
    assert bool(held.all())
    if name == "adam":
        assert not any(value.any() for state in optimisers[1].state.values() for value in state.values())
        assert len(optimisers[1].state) == len(list(model.parameters())) - 2, "frozen parameters have no state"
    made = {id(value) for state in optimisers[1].state.values() for value in state.values()}
    model["norm"].requires_grad_(True)
    assert equal(*(run(optimiser, each, range(5)) for optimiser, each in zip(optimisers, models, strict=True)))
    assert made <= {id(value) for state in optimisers[1].state.values() for value in state.values()} or name == "sgd"
    del model["zero"]  # its neurons may be shorter than one
    assert nero.is_balanced(model) == balanced


def test_prime_with_state_changes_nothing():
    layer = nn.Linear(3, 2)
    optimiser = make("adam", layer, 0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    before = copy.deepcopy(optimiser.state_dict()["state"])
    prime(optimiser)
    assert torch.equal(optimiser.state_dict()["state"][0]["exp_avg_sq"], before[0]["exp_avg_sq"])
    assert optimiser.state_dict()["state"][0]["step"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("balanced", [False, True])
@others
def test_cuda_graph_captures_first_step(name: str, options: dict, balanced: bool):
    """The captured step does not wait for the device, and the rate changes between replays."""
    models = network(), network().cuda()
    lr = torch.tensor(0.02, device="cuda")
    plain = make(name, models[0], 0.02, **options, balanced=balanced)
    captured = make(name, models[1], lr, **options, balanced=balanced)
    prime(captured)
    for parameter in models[1].parameters():
        parameter.grad = torch.zeros_like(parameter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in (1, 3, 4, 5):  # steps at which every parameter has a gradient
        give_gradients(models[0], step)
        plain.param_groups[0]["lr"] = 0.02 / step
        plain.step()
        lr.fill_(0.02 / step)
        for here, there in zip(models[0].parameters(), models[1].parameters(), strict=True):
            there.grad.copy_(here.grad)
        graph.replay()
    for here, there in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=1e-4, atol=1e-5)
