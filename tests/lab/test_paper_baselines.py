"""The paper's baselines against their formulas as loops over plain lists of float64, and what a graph asks of them."""

import copy
import io
import math
import random
from functools import partial

import oracle
import pytest
import torch
from conftest import INTERPRETED
from torch import Tensor, nn

import nero
from nero.backends.triton import project as rows
from nero_lab import baselines
from nero_lab.baselines import Lamb, Madam, lamb, madam, make, prime
from nero_lab.baselines.batched import alike

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5}
#: Everyone but Nero, as it is made and as it is told by the oracle.
OTHERS = [
    ("sgd", {}),
    ("adam", {}),
    ("adam", {"beta1": 0.9}),
    ("lamb", {}),
    ("lamb", {"beta1": 0.9}),
    ("madam", {}),
]
others = pytest.mark.parametrize(("name", "options"), OTHERS, ids=lambda value: str(value) if value else "")


# -- the oracle --------------------------------------------------------------------------------


def length(vector: list[float]) -> float:
    return math.sqrt(sum(x * x for x in vector))


class Loops:
    """One tensor, flattened, under one optimiser; written from the formulas of shared/paper/settings.md."""

    def __init__(self, name: str, w: list[float], lr: float, beta1: float = 0.0) -> None:
        self.name, self.w, self.lr, self.beta1, self.t = name, w, lr, beta1, 0
        self.m, self.v = [0.0] * len(w), [0.0] * len(w)
        self.limit = 3 * math.sqrt(sum(x * x for x in w) / len(w))
        self.met: set[str] = set()  # the special cases that came up

    def step(self, g: list[float]) -> None:
        self.t += 1
        self.m = [self.beta1 * m + (1 - self.beta1) * x for m, x in zip(self.m, g, strict=True)]
        self.v = [0.999 * v + 0.001 * x * x for v, x in zip(self.v, g, strict=True)]
        getattr(self, f"step_{self.name}")(g)

    def step_sgd(self, g: list[float]) -> None:
        self.w = [w - self.lr * x for w, x in zip(self.w, g, strict=True)]

    def step_adam(self, _: list[float]) -> None:
        for i, (m, v) in enumerate(zip(self.m, self.v, strict=True)):
            m_hat, v_hat = m / (1 - self.beta1**self.t), v / (1 - 0.999**self.t)
            self.w[i] -= self.lr * m_hat / (math.sqrt(v_hat) + 1e-8)

    def step_lamb(self, _: list[float]) -> None:
        u = [m / (math.sqrt(v) + 1e-6) for m, v in zip(self.m, self.v, strict=True)]
        if length(self.w) > 10:
            self.met.add("norm over 10")
        trust = min(length(self.w), 10) / length(u) if length(self.w) and length(u) else 1.0
        self.met |= {"no trust"} if not (length(self.w) and length(u)) else set()
        self.w = [w - self.lr * trust * x for w, x in zip(self.w, u, strict=True)]

    def step_madam(self, g: list[float]) -> None:
        for i, (w, v, x) in enumerate(zip(self.w, self.v, g, strict=True)):
            n = x / math.sqrt(v / (1 - 0.999**self.t)) if v else 0.0
            if abs(n) > 10:
                self.met.add("clipped")
            n = max(-10.0, min(10.0, n))
            w *= math.exp(-self.lr * n * ((w > 0) - (w < 0)))
            if abs(w) > self.limit:
                self.met.add("held")
            self.w[i] = max(-self.limit, min(self.limit, w))

    def project(self, neurons: int) -> None:
        fan_in = len(self.w) // neurons
        rows = [self.w[i * fan_in : (i + 1) * fan_in] for i in range(neurons)]
        # a neuron at the origin has no direction, and stays
        self.w = [x for row in rows for x in (oracle.project(row) if any(row) else row)]


# -- the cases ---------------------------------------------------------------------------------


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Matrices, filters, vectors; one of norm over 10, one at zero, one that will get no gradient but zeros."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "matrix": nn.Linear(3, 4),
            "filters": nn.Conv2d(2, 3, 2),
            "large": nn.Linear(4, 5),
            "zero": nn.Linear(3, 3),
            "unmoved": nn.Linear(4, 3),
            "norm": nn.LayerNorm(3),
        }
    ).to(dtype)
    with torch.no_grad():
        model["large"].weight.copy_(20 * torch.randn(5, 4))
        model["zero"].weight.zero_()
        model["zero"].bias.zero_()
    return model


def give_gradients(model: nn.Module, step: int) -> dict[str, list[float] | None]:
    """Set gradients of many sizes, and return them as lists."""
    chance = random.Random(step)
    given: dict[str, list[float] | None] = {}
    for name, parameter in model.named_parameters():
        if (name, step) in (("matrix.weight", 2), ("norm.bias", 0)):
            parameter.grad = None
            given[name] = None
            continue
        still = name.startswith("unmoved")
        values = [0.0 if still else chance.gauss(0, 1) * 10 ** chance.uniform(-3, 1) for _ in range(parameter.numel())]
        if name == "filters.weight":
            values[step] = 0.0
        grad = torch.tensor(values, dtype=torch.float64).to(parameter.dtype).reshape(parameter.shape)
        parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)  # in the parameter's layout
        given[name] = grad.double().flatten().tolist()  # as rounded
    return given


def flat(parameter: Tensor) -> list[float]:
    return parameter.detach().double().flatten().tolist()


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("balanced", [False, True])
@others
def test_against_the_loops(name: str, options: dict, balanced: bool, dtype: torch.dtype):
    follow(network(dtype), name, options, balanced)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where Triton's kernels run here: on a GPU, or interpreted on the CPU."""
    pytest.importorskip("triton")
    if INTERPRETED:
        monkeypatch.setattr(rows, "works", lambda _: True)
        monkeypatch.setattr(madam, "kernels_work", lambda _: True)
        monkeypatch.setattr(lamb, "kernels_work", lambda _: True)
    return "cpu" if INTERPRETED else "cuda"


@pytest.mark.no_cover  # interpreted kernels take three times as long where they are traced, and those below are
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("name", "options"), [case for case in OTHERS if case[0] in ("lamb", "madam")], ids=str)
def test_kernels_against_the_loops(
    name: str, options: dict, balanced: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
):
    for module in (lamb, madam):
        monkeypatch.setattr(module, "BLOCK", 8)  # several programs a tensor
    monkeypatch.setattr(lamb, "PROGRAMS", 2)
    monkeypatch.setattr(lamb, "LARGE", 4)  # the others go the other way
    if name == "madam":
        monkeypatch.setattr(torch, "_foreach_sqrt", None)
    model = network().to(kernels, memory_format=torch.channels_last)
    assert not model["filters"].weight.is_contiguous()
    follow(model, name, options, balanced)


def test_large_tensors_take_the_kernels(kernels: str, monkeypatch: pytest.MonkeyPatch):
    weights = [nn.Parameter(torch.ones(size, device=kernels)) for size in (3, 5)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    monkeypatch.setattr(lamb, "LARGE", 4)
    monkeypatch.setattr(lamb, "PROGRAMS", 2)
    took = []
    kernel = lamb._by_kernels
    monkeypatch.setattr(lamb, "_by_kernels", lambda options, each: took.append(len(each)) or kernel(options, each))
    Lamb(weights, lr=0.1, betas=(0.0, 0.999)).step()
    assert took == [1]
    assert [flat(weight) for weight in weights] == [pytest.approx([0.9] * 3), pytest.approx([0.9] * 5)]
    Lamb(weights[1:], lr=0.1).step()  # with none left for the other way
    assert took == [1, 1]


def test_a_kernel_keeps_what_is_no_number(kernels: str):
    weight = nn.Parameter(torch.tensor([0.5, -0.5, 0.5], device=kernels))
    weight.grad = torch.tensor([math.nan, math.inf, 1.0], device=kernels)
    Madam([weight], lr=0.1).step()
    assert weight.isnan().tolist() == [True, True, False]


def test_what_lies_otherwise_goes_the_other_way(kernels: str, monkeypatch: pytest.MonkeyPatch):
    """A gradient in another order than its weights, one that is negated, and a weight with gaps."""
    monkeypatch.setattr(madam, "_launch", None)
    monkeypatch.setattr(lamb, "_by_kernels", None)
    monkeypatch.setattr(lamb, "LARGE", 1)
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
def test_what_is_alike(tensors, wanted: bool):
    assert alike(*tensors()) == wanted


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_torch_sees_that_weights_have_changed(make_one, kernels: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lamb, "LARGE", 1)
    monkeypatch.setattr(lamb, "PROGRAMS", 2)
    weight = nn.Parameter(torch.ones(3, device=kernels))
    weight.square().sum().backward()
    pending = weight.exp().sum()  # whose gradient needs the result, and (2 w).backward() the weight
    other = weight.square().sum()
    make_one([weight]).step()
    pending.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_the_state_of_another_model_is_refused(make_one):
    one, other = (make_one([nn.Parameter(torch.ones(size))]) for size in (8, 64))
    with pytest.raises(ValueError, match=r"shaped \(8,\), and its parameter \(64,\)"):
        other.load_state_dict(one.state_dict())


@pytest.mark.gpu
def test_madams_kernel_tells_the_smallest_gradients_from_none():
    weights = [nn.Parameter(torch.ones(4, device=device)) for device in ("cpu", "cuda")]
    for weight in weights:
        weight.grad = torch.tensor([1e-17, 3e-18, 1e-19, 1e-20], device=weight.device)
        Madam([weight], lr=0.1).step()
    torch.testing.assert_close(weights[1].cpu(), weights[0], rtol=1e-2, atol=0.0)


def follow(model: nn.Module, name: str, options: dict, balanced: bool) -> None:
    """Six steps beside those of the loops."""
    lr, dtype = 0.25 if name == "madam" else 0.02, next(model.parameters()).dtype
    before = [flat(parameter) for parameter in model.parameters()]
    optimiser = make(name, model, lr, **options, balanced=balanced)
    assert [flat(parameter) for parameter in model.parameters()] == before, "none is projected at initialisation"
    loops = {each: Loops(name, flat(parameter), lr, **options) for each, parameter in model.named_parameters()}
    roles = nero.roles_of(model)
    for step in range(6):
        grads = give_gradients(model, step)
        optimiser.step()
        for each, parameter in model.named_parameters():
            loop, g = loops[each], grads[each]
            if g is not None:
                loop.step(g)
                if balanced and roles[each].kind == "neuron":
                    loop.project(parameter.shape[0])
            assert flat(parameter) == pytest.approx(loop.w, rel=TOLERANCES[dtype], abs=TOLERANCES[dtype]), (each, step)
    met = set().union(*(loop.met for loop in loops.values()))
    assert met >= {"lamb": {"norm over 10", "no trust"}, "madam": {"held"}}.get(name, set())


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_madam_clips_what_comes_after_a_long_silence(dtype: torch.dtype):
    """A first gradient after t - 1 zeros is √t after normalisation: over 10 takes more than a hundred steps."""
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


def test_madams_own_options():
    weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    optimiser = Madam([weight], lr=1.0, beta=0.0, clip=0.5, p_scale=1.2)
    weight.grad = torch.tensor([3.0, 3.0], dtype=torch.float64)
    optimiser.step()
    assert flat(weight) == pytest.approx([math.exp(-0.5), -1.2])


def test_tensors_of_several_kinds_in_a_group():
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


# -- rates, state and checkpoints --------------------------------------------------------------


def run(optimiser: torch.optim.Optimizer, model: nn.Module, steps: range) -> list[Tensor]:
    for step in steps:
        give_gradients(model, step)
        optimiser.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("name", "options"), [*OTHERS, ("nero", {}), ("nero", {"fixed_scale": True})], ids=str)
def test_a_rate_can_be_a_tensor(name: str, options: dict, shape: tuple[int, ...]):
    lr = 2.0**-6  # as good in float32 as in float64
    models = network(), network()
    number, tensor = make(name, models[0], lr, **options), make(name, models[1], torch.full(shape, lr), **options)
    assert equal(run(number, models[0], range(3)), run(tensor, models[1], range(3)))
    for group in number.param_groups:
        group["lr"] = lr / 4
    for rate in {id(group["lr"]): group["lr"] for group in tensor.param_groups}.values():
        rate.div_(4)
    assert equal(run(number, models[0], range(3, 5)), run(tensor, models[1], range(3, 5)))
    number.param_groups[0]["lr"], tensor.param_groups[0]["lr"] = 0.0, torch.zeros(shape)
    assert equal(run(number, models[0], range(5, 6)), run(tensor, models[1], range(5, 6)))


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_a_rate_in_double_precision_serves_single(make_one):
    models = network(), network()
    rates = torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)
    assert equal(
        *(run(make_one(each.parameters(), lr=lr), each, range(3)) for each, lr in zip(models, rates, strict=True))
    )


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_the_state_is_there_from_the_start_and_stays_in_place(make_one):
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
def test_a_checkpoint_goes_on_bit_for_bit(name: str, options: dict, balanced: bool):
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


def test_madam_remembers_its_limit_over_a_checkpoint():
    weight = nn.Parameter(torch.ones(4))
    saved = Madam([weight]).state_dict()
    grown = nn.Parameter(torch.full((4,), 50.0))
    optimiser = Madam([grown])
    optimiser.load_state_dict(saved)
    grown.grad = torch.zeros(4)
    optimiser.step()
    assert flat(grown) == [3.0] * 4


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_a_checkpoint_is_not_written_into(make_one):
    models = network(), network()
    one, other = (make_one(each.parameters()) for each in models)
    run(one, models[0], range(2))
    other.load_state_dict(one.state_dict())
    before = copy.deepcopy(one.state_dict()["state"])
    run(other, models[1], range(2))
    for key, state in one.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(before[key][name])) for name in state)


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_a_copy_goes_on_by_itself(make_one):
    model = network()
    optimiser = make_one(model.parameters())
    run(optimiser, model, range(2))
    other, twin = copy.deepcopy((model, optimiser))
    assert equal(run(optimiser, model, range(2, 4)), run(twin, other, range(2, 4)))


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_a_closure_is_called_with_gradients_on(make_one):
    weight = nn.Parameter(torch.ones(3))
    optimiser = make_one([weight], lr=0.1)

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimiser.step(closure) == 3
    assert bool((weight < 1).all())


# -- before a graph ----------------------------------------------------------------------------


@pytest.mark.parametrize("balanced", [False, True])
@others
def test_primed_is_as_if_new(name: str, options: dict, balanced: bool):
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
        assert len(optimisers[1].state) == len(list(model.parameters())) - 2, "what is frozen has none"
    made = {id(value) for state in optimisers[1].state.values() for value in state.values()}
    model["norm"].requires_grad_(True)
    assert equal(*(run(optimiser, each, range(5)) for optimiser, each in zip(optimisers, models, strict=True)))
    assert made <= {id(value) for state in optimisers[1].state.values() for value in state.values()} or name == "sgd"
    assert nero.is_balanced(model) == (balanced and name != "madam")  # which multiplies: what is zero stays so


def test_prime_leaves_what_has_state():
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
def test_a_graph_captures_the_first_step(name: str, options: dict, balanced: bool):
    """And steps without waiting for the device, while the rate changes between replays."""
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
    for step in (1, 3, 4, 5):  # those at which nothing lacks a gradient
        give_gradients(models[0], step)
        plain.param_groups[0]["lr"] = 0.02 / step
        plain.step()
        lr.fill_(0.02 / step)
        for here, there in zip(models[0].parameters(), models[1].parameters(), strict=True):
            there.grad.copy_(here.grad)
        graph.replay()
    for here, there in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", [0.5, 1e9])
def test_sgd_shortens_the_gradient_of_all_weights_together(clip: float):
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
    with pytest.raises(ValueError, match="clip must be finite and positive"):
        make("sgd", models[0], 0.1, clip=0.0)


# -- by name -----------------------------------------------------------------------------------


def test_the_settings_are_the_papers():
    layer = nn.Linear(3, 2)
    adam, lamb, sgd, madam, ours = (make(name, layer, 0.1) for name in ("adam", "lamb", "sgd", "madam", "nero"))
    assert isinstance(ours, nero.Nero)
    assert (adam.defaults["betas"], adam.defaults["eps"], adam.defaults["weight_decay"]) == ((0.0, 0.999), 1e-8, 0)
    assert (lamb.defaults["betas"], lamb.defaults["eps"]) == ((0.0, 0.999), 1e-6)
    assert (sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0, 0)
    assert (madam.defaults["beta"], madam.defaults["clip"], madam.defaults["p_scale"]) == (0.999, 10, 3)
    assert (ours.defaults["beta"], ours.defaults["fix_mean"], ours.defaults["fix_norm"]) == (0.999, True, True)


def test_nero_by_name_is_nero():
    models = network(), network()
    with torch.no_grad():
        for each in models:
            each["norm"].weight.fill_(2)
    optimisers = make("nero", models[0], 0.02), nero.Nero(models[1], lr=0.02)
    assert equal(*(run(*both, range(4)) for both in zip(optimisers, models, strict=True)))


@pytest.mark.parametrize("fix_mean", [True, False])
@pytest.mark.parametrize("fix_norm", [True, False])
def test_a_fixed_scale_is_the_mean_norm_after_projection(fix_mean: bool, fix_norm: bool):
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


def test_with_both_constraints_a_fixed_scale_is_algorithm_1():
    models = network(torch.float64), network(torch.float64)
    for each in models:
        del each["zero"], each["unmoved"]  # at the origin, the two differ
    found = run(make("nero", models[0], 0.02, fixed_scale=True), models[0], range(6))
    wanted = run(make("nero", models[1], 0.02), models[1], range(6))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("who", "free"), [("read", {"0.weight"}), ("words", {"0.weight", "2.weight"})])
def test_words_can_be_free_of_the_bound(who: str, free: set[str]):
    """Those that are read, or all; neither biases nor a layer of another size. Who is free ends elsewhere."""

    def trained(**options) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)).double()
        optimiser = make("nero", model, 0.01, longest_step=2.0, **options)
        if options:
            bounds = {name: group["longest_step"] for group in optimiser.param_groups for name in group["param_names"]}
            assert set(bounds) == set(dict(model.named_parameters()))
            assert {name for name, bound in bounds.items() if bound == math.inf} == free
            assert set(bounds.values()) == {2.0, math.inf}
        for length in (*[1e-3] * 20, 1.0):  # so that the last is far above the average
            for parameter in model.parameters():
                parameter.grad = length * torch.randn_like(parameter)
            optimiser.step()
        return model

    found, wanted = trained(unbounded=who), trained()
    differ = {
        name for name, parameter in found.named_parameters() if not torch.equal(parameter, wanted.get_parameter(name))
    }
    assert differ == free


@pytest.mark.parametrize("who", ["read", "words"])
def test_words_that_are_read_and_said_by_one_table_are_free_once(who: str):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    model[2].weight = model[0].weight
    optimiser = make("nero", model, 0.01, longest_step=2.0, unbounded=who)
    bounds = {name: group["longest_step"] for group in optimiser.param_groups for name in group["param_names"]}
    assert bounds == {"0.weight": math.inf, "1.weight": 2.0, "1.bias": 2.0, "2.bias": 2.0}


@pytest.mark.parametrize("who", ["read", "words"])
def test_words_that_are_made_of_others_are_not_left_bounded_in_silence(who: str):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Embedding(7, 4)), nn.Linear(4, 7))
    with pytest.raises(ValueError, match=r"where they are parameters, and not made by a parametrization"):
        make("nero", model, 0.01, longest_step=2.0, unbounded=who)


def test_unknown_names():
    with pytest.raises(ValueError, match=r"called 'rmsprop': use one of nero, sgd, adam, lamb, madam"):
        make("rmsprop", nn.Linear(3, 2), 0.1)


@pytest.mark.parametrize("name", list(baselines.OPTIONS))
def test_unknown_options(name: str):
    known = ", ".join(baselines.OPTIONS[name])
    with pytest.raises(ValueError, match=rf"{name} has no option beta3: it has {known}"):
        make(name, nn.Linear(3, 2), 0.1, beta3=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nero", {"balanced": True}, "nero has no option balanced"),
        ("sgd", {"beta1": 0.9}, "sgd has no option beta1"),
        ("nero", {"fix_norm": "initial"}, "fix_norm must be True or False, but it is 'initial'"),
        ("nero", {"unbounded": "said"}, "unbounded must be 'read', 'words' or None, but it is 'said'"),
        ("nero", {"unbounded": "read"}, "no words in this model: it has no nn.Embedding"),
        ("adam", {"balanced": 1}, "balanced must be True or False, but it is 1"),
        ("adam", {"beta1": 1.0}, "beta"),
        ("lamb", {"beta1": 1.0}, r"betas\[0\] must be in \[0, 1\), like 0.999, but it is 1.0"),
    ],
)
def test_bad_options(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(name, nn.Linear(3, 2), 0.1, **options)


@pytest.mark.parametrize(
    ("make_one", "options", "message"),
    [
        *(
            (make_one, {"lr": lr}, "lr must be finite and not negative")
            for make_one in (Lamb, Madam)
            for lr in (-0.1, math.nan, math.inf, True, "0.1", None, torch.tensor(-1.0))
        ),
        (Lamb, {"lr": torch.ones(2)}, r"lr as a tensor must have one element, but it is shaped \(2,\)"),
        (Lamb, {"betas": 0.9}, r"betas must be two numbers, like \(0.9, 0.999\), but it is 0.9"),
        (Lamb, {"betas": (0.9,)}, "betas must be two numbers"),
        (Lamb, {"betas": (0.9, 1)}, r"betas\[1\] must be in \[0, 1\)"),
        (Lamb, {"eps": 0}, "eps must be finite and positive"),
        (Madam, {"beta": -0.1}, r"beta must be in \[0, 1\)"),
        (Madam, {"clip": 0}, "clip must be positive, like 10.0, but it is 0"),
        (Madam, {"p_scale": math.nan}, "p_scale must be positive"),
    ],
)
def test_bad_options_of_lamb_and_madam(make_one, options: dict, message: str):
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=message):
        make_one([weight], **options)
    optimiser = make_one([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=message):
        optimiser.add_param_group({"params": [weight], **options})
    assert len(optimiser.param_groups) == 1
    assert weight not in optimiser.state


# -- beside another's --------------------------------------------------------------------------


def test_lamb_is_pytorch_optimizers():
    library = pytest.importorskip("pytorch_optimizer")
    models = network(torch.float64), network(torch.float64)
    ours = Lamb(models[0].parameters(), lr=0.02, betas=(0.9, 0.999), eps=1e-6)
    # adam_debias is their name for no bias correction of the average of g
    theirs = library.Lamb(models[1].parameters(), lr=0.02, betas=(0.9, 0.999), eps=1e-6, adam_debias=True)
    found, wanted = (run(*both, range(6)) for both in zip((ours, theirs), models, strict=True))
    for one, other in zip(found, wanted, strict=True):
        # it adds eps to the norm of u, which is over one here: a millionth of a step
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
