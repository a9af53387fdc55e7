"""The torch.optim contract: whatever works with torch's optimisers works with Nero."""

import copy
import gc
import io
import math
import pickle
import re
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from conftest import few
from torch import Tensor, nn
from torch.optim import lr_scheduler

import nero
from nero import rule
from nero.backends import available

HERE = available(torch.device("cpu"))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)
    ).to(dtype)


def fill_grads(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def train(model: nn.Module, optimiser: torch.optim.Optimizer, steps: range) -> None:
    for seed in steps:
        fill_grads(model, seed)
        optimiser.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    a, b = one.state_dict()["state"], other.state_dict()["state"]
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].keys() == b[key].keys()
        for name in a[key]:
            assert a[key][name].dtype == b[key][name].dtype
            assert torch.equal(a[key][name], b[key][name])


# -- what the constructor takes --------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        lambda model: model,
        lambda model: model.parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.named_parameters(),
        lambda model: nero.param_groups(model),
        lambda model: [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[4:].parameters()}],
        lambda model: [{"params": model[0]}, {"params": model[4:], "lr": 0.5}],
        lambda model: [{"params": model[0].weight}],
    ],
    ids=["module", "generator", "list", "named", "groups", "own groups", "modules in groups", "one tensor"],
)
def test_takes_what_torch_takes_and_a_module(params):
    model = network()
    optimiser = nero.Nero(params(model))
    before = copy.deepcopy(model)
    train(model, optimiser, range(1))
    assert not torch.equal(model[0].weight, before[0].weight)
    torch.testing.assert_close(model[0].weight.flatten(1).sum(1), torch.zeros(4), atol=1e-6, rtol=0)


def test_module_parameters_and_names_take_the_same_steps_on_plain_layers():
    results = []
    for params in (lambda m: m, lambda m: m.parameters(), lambda m: m.named_parameters()):
        model = network()
        train(model, nero.Nero(params(model)), range(3))
        results.append(model)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_groups_have_options_of_their_own(backend: str):
    model = network()
    optimiser = nero.Nero(
        [{"params": [model[4].weight], "lr": 0.0}, {"params": [model[6].weight], "fix_norm": False, "lr": 0.1}],
        backend=backend,
    )
    entered = model[4].weight.detach().clone()
    train(model, optimiser, range(3))
    assert torch.equal(model[4].weight, entered)
    assert (model[6].weight.norm(dim=1) - 1).abs().max() > 1e-3


def test_add_param_group_after_a_thousand_steps(backend: str):
    model, late = nn.Linear(6, 5), nn.Linear(5, 4)
    optimiser = nero.Nero(model, backend=backend)
    train(model, optimiser, range(few(backend, 1000)))
    assert not nero.is_balanced(late)
    optimiser.add_param_group({"params": late.parameters(), "lr": 0.02})
    assert nero.is_balanced(late), "balanced at once"
    assert optimiser.state[late.weight]["step"] == 0
    alone = copy.deepcopy(late)
    separate = nero.Nero(alone.parameters(), lr=0.02, backend=backend)
    for seed in range(3):
        fill_grads(late, seed), fill_grads(alone, seed), fill_grads(model, seed)
        optimiser.step(), separate.step()
    assert optimiser.state[late.weight]["step"] == 3
    assert optimiser.state[model.weight]["step"] == few(backend, 1000) + 3
    torch.testing.assert_close(late.weight, alone.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(late.bias, alone.bias, rtol=0, atol=1e-6)


def test_add_param_group_takes_modules_and_mends_names():
    named, unnamed, extra = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    optimiser = nero.Nero(named)
    optimiser.add_param_group({"params": extra, "lr": 0.5})
    optimiser.add_param_group({"params": unnamed.parameters()})
    assert [group["lr"] for group in optimiser.param_groups] == [0.01, 0.01, 0.5, 0.5, 0.01]
    assert all("param_names" in group for group in optimiser.param_groups)
    plain = nero.Nero(nn.Linear(3, 2).parameters())
    plain.add_param_group({"params": nn.Linear(3, 2)})
    assert all("param_names" not in group for group in plain.param_groups)


# -- checkpoints, copies ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("saved_by", HERE)
@pytest.mark.parametrize("loaded_by", HERE)
def test_checkpoint_resumes_to_the_same_result(dtype: torch.dtype, saved_by: str, loaded_by: str):
    model = network(dtype)
    optimiser = nero.Nero(model, lr=0.02, beta=0.9, backend=saved_by)
    train(model, optimiser, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed = network(dtype)
    fresh = nero.Nero(resumed, backend=loaded_by)
    resumed.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["optimiser"])
    assert_same_state(optimiser, fresh)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(state["grad_norm"].dtype == wide for state in fresh.state.values())
    assert {group["backend"] for group in fresh.param_groups} == {loaded_by}
    assert {group["lr"] for group in fresh.param_groups} == {0.02}
    train(model, optimiser, range(4, 8))
    train(resumed, fresh, range(4, 8))
    if saved_by == loaded_by:
        assert_same(model, resumed)
        assert_same_state(optimiser, fresh)
    else:
        for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_a_checkpoint_of_shapes_alone_leaves_roles_as_they_were_told():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    told = nero.Nero(model)
    told.load_state_dict(nero.Nero(copy.deepcopy(model).parameters(), beta=0.9).state_dict())
    assert [(group["role"], group["fan_in_axes"], group["beta"]) for group in told.param_groups] == [
        ("neuron", (1,), 0.9)
    ]


def test_an_edited_optimiser_loads_its_own_checkpoint():
    model = network()
    optimiser = nero.Nero(model)
    for group in optimiser.param_groups:
        group["fix_norm"] = "initial"
    optimiser.load_state_dict(optimiser.state_dict())
    train(model, optimiser, range(2))
    assert nero.is_balanced(model)


def test_a_checkpoint_loads_after_a_logger_asked_for_the_state_of_frozen_layers():
    """Asking torch's dict of states for one that is not there puts an empty one into it, which is saved."""
    model = network()
    model[4].requires_grad_(False)
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    assert sum(not optimiser.state[each] for group in optimiser.param_groups for each in group["params"]) == 2
    loaded = nero.Nero(copy.deepcopy(model))
    loaded.load_state_dict(optimiser.state_dict())
    assert len(loaded.state) == len(optimiser.state) - 2


def test_notes_among_the_state_are_loaded_as_they_were_saved():
    model = network()
    optimiser = nero.Nero(model)
    optimiser.state["note"] = 3
    optimiser.state[model[0].weight] |= {"drift": torch.tensor([-1.0, -math.inf]), "who": "me"}
    loaded = nero.Nero(model)
    loaded.load_state_dict(optimiser.state_dict())
    assert loaded.state["note"] == 3
    own = loaded.state[model[0].weight]
    assert own["who"] == "me"
    assert own["drift"].tolist() == [-1.0, -math.inf]
    assert own["drift"] is not optimiser.state[model[0].weight]["drift"]
    train(model.double(), loaded, range(2))
    assert own["drift"].dtype == torch.float32


def test_loading_copies():
    model = network()
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    other = nero.Nero(network())
    other.load_state_dict(optimiser.state_dict())
    before = copy.deepcopy(other.state_dict())
    train(model, optimiser, range(2, 4))
    for key, state in other.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before["state"][key][name])


def test_load_state_dict_hooks_run():
    model = network()
    optimiser = nero.Nero(model)
    train(model, optimiser, range(2))
    seen = []
    other = nero.Nero(network())
    other.register_load_state_dict_pre_hook(lambda _, saved: seen.append(sorted(saved)))
    other.register_load_state_dict_post_hook(lambda each: seen.append(float(next(iter(each.state.values()))["step"])))
    other.load_state_dict(optimiser.state_dict())
    assert seen == [["param_groups", "state"], 2.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle(duplicate):
    model = network()
    optimiser = nero.Nero(model, fix_norm="initial")
    train(model, optimiser, range(3))
    twin, twin_optimiser = duplicate((model, optimiser))
    train(model, optimiser, range(3, 6))
    train(twin, twin_optimiser, range(3, 6))
    assert_same(model, twin)
    assert_same_state(optimiser, twin_optimiser)


def advice(to_whom: str) -> dict:
    """The options in README's row for who has that."""
    page = (Path(__file__).parents[2] / "README.md").read_text()
    (options,) = re.findall(rf"^\| {to_whom}[^|]*\|[^|]*?`(fix_norm[^`]*)`", page, re.MULTILINE)
    return eval(f"dict({options})")


def test_a_pretrained_network_stays_what_it_is():
    """With the options that README names, and only with both: means are taken away by the other."""
    inputs = torch.randn(16, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    trained = network().eval()
    with torch.no_grad():
        said = trained(inputs)
        for options, stays in ((advice("a pretrained"), True), ({"fix_norm": "initial"}, False), ({}, False)):
            model = copy.deepcopy(trained)
            nero.Nero(model, **options)
            assert torch.allclose(model(inputs), said, atol=1e-5) is stays


def test_an_adapter_grows_with_the_options_for_it():
    """LoRA's B, of zeros: it jumps to norm one, is held to 0.01, or grows step by step, as README says."""
    sizes: dict[object, list[float]] = {}
    for options in ({"fix_norm": True}, {"fix_norm": "initial"}, advice("adapters")):
        torch.manual_seed(0)
        base = nn.Linear(6, 5).requires_grad_(False)
        a, b = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.zeros(5, 3))
        optimiser = nero.Nero([a, b], **options)
        for _ in range(20):
            optimiser.zero_grad()
            inputs = torch.randn(32, 6)
            (base(inputs) + inputs @ a.T @ b.T - inputs @ torch.ones(6, 5)).square().mean().backward()
            optimiser.step()
            sizes.setdefault(options["fix_norm"], []).append(b.norm(dim=1).mean().item())
    assert sizes[True] == pytest.approx([1.0] * 20)
    assert sizes["initial"] == pytest.approx([0.01] * 20)
    assert 0 < sizes[False][0] <= 0.01 + 1e-6
    assert sizes[False][0] < sizes[False][9] < sizes[False][19]


def test_targets_of_a_size_are_reached_by_a_last_layer_that_is_free():
    """And sooner at variance one, as README says; errors are told as shares of the targets' variance."""
    found = []
    for size, options in ((100.0, {}), (100.0, advice("targets")), (1.0, {})):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        inputs = torch.randn(256, 10)
        targets = (inputs @ torch.randn(10, 1)).tanh()
        targets = size * (targets - targets.mean()) / targets.std()
        optimiser = nero.Nero([{"params": model[:-1].parameters()}, {"params": model[-1].parameters(), **options}])
        for _ in range(500):
            optimiser.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimiser.step()
        found.append(loss.item() / size**2)
    held, free, plain = found
    assert held > 0.4
    assert free < 0.15
    assert plain < 0.02


def test_nothing_outlives_the_optimiser(backend: str):
    model = network()
    optimiser = nero.Nero(model, backend=backend)
    train(model, optimiser, range(2))
    alive = [weakref.ref(model[4].weight), weakref.ref(optimiser.state[model[4].weight]["grad_norm"])]
    alive.append(weakref.ref(model[0].weight))
    del model, optimiser
    gc.collect()
    assert [each() is None for each in alive] == [True] * 3


# -- step ------------------------------------------------------------------------------------


def test_closure():
    model = network()
    optimiser = nero.Nero(model)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = model(torch.ones(4, 2, 4, 4)).square().mean()
        loss.backward()
        return loss

    losses = [optimiser.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    assert optimiser.step() is None


def test_maximize_is_the_mirror_image(backend: str):
    model, mirrored = network(), network()
    train(model, nero.Nero(model, maximize=True, backend=backend), range(3))
    optimiser = nero.Nero(mirrored, backend=backend)
    for seed in range(3):
        fill_grads(mirrored, seed)
        for parameter in mirrored.parameters():
            parameter.grad.neg_()
        optimiser.step()
    for a, b in zip(model.parameters(), mirrored.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_hooks():
    model = network()
    optimiser = nero.Nero(model)
    calls = []
    optimiser.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimiser.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimiser, range(1))
    assert calls == ["pre", "post"]


def test_frozen_unfrozen_and_without_gradient(backend: str):
    model = network()
    model[4].weight.requires_grad_(False)
    untouched = model[4].weight.detach().clone()
    optimiser = nero.Nero(model, backend=backend)
    assert torch.equal(model[4].weight, untouched), "frozen: not even projected"
    train(model, optimiser, range(2))
    assert torch.equal(model[4].weight, untouched)
    assert not optimiser.state.get(model[4].weight)

    model[4].weight.requires_grad_(True)
    model[4].weight.grad = None
    optimiser.step()
    assert torch.equal(model[4].weight, untouched), "no gradient: nothing happens"
    train(model, optimiser, range(2, 3))
    assert optimiser.state[model[4].weight]["step"] == 1, "taken in at its first gradient, as at construction"
    expected = nn.Linear(16, 8)
    expected.weight.data.copy_(untouched)
    alone = nero.Nero([expected.weight], backend=backend)
    expected.weight.grad = model[4].weight.grad.clone()
    alone.step()
    torch.testing.assert_close(model[4].weight, expected.weight, rtol=0, atol=1e-6)


def test_a_parameter_swapped_by_a_framework_is_taken_in(backend: str):
    layer = nn.Linear(6, 4)
    optimiser = nero.Nero(layer.parameters(), backend=backend)
    stand_in = nn.Parameter(torch.randn(4, 6) * 3)
    optimiser.param_groups[0]["params"][0] = stand_in
    stand_in.grad = torch.randn(4, 6)
    optimiser.step()
    torch.testing.assert_close(stand_in.norm(dim=1), torch.ones(4))
    assert optimiser.state[stand_in]["step"] == 1


def test_zero_size_and_scalars(backend: str):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in [(), (0,), (0, 5), (5, 0), (1,), (1, 1), (3, 4)]]
    optimiser = nero.Nero(parameters, backend=backend)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimiser.step()
    assert all(parameter.isfinite().all() for parameter in parameters)
    assert parameters[0] != 1
    roundtrip = nero.Nero(parameters, backend=backend)
    roundtrip.load_state_dict(optimiser.state_dict())
    assert_same_state(optimiser, roundtrip)


def test_a_gradient_of_another_layout_or_dtype(backend: str):
    """channels_last weights with contiguous gradients, and expanded gradients, as backward makes them."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=layout))
        optimiser = nero.Nero([weight], backend=backend)
        for _ in range(3):
            weight.grad = torch.randn(4, 3, 3, 3)
            optimiser.step()
        weight.grad = torch.randn(4, 1, 1, 1).expand(4, 3, 3, 3) * torch.linspace(1, 2, 3)
        optimiser.step()
        results.append(weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


def test_small_tensors_turned_together_keep_their_own_troubles(backend: str):
    """One of several tensors of one fan-in has a NaN, one a resting neuron, one a constant one."""
    results = []
    for each in ("eager", backend):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(4, 9)) for _ in range(4)]
        with torch.no_grad():
            weights[3][2] = 0.5
        optimiser = nero.Nero(weights, backend=each)
        for step in range(5):
            for weight in weights:
                weight.grad = torch.randn(4, 9)
            weights[0].grad[1, 1] = math.nan if step in (1, 3) else 1.0
            weights[1].grad[3] = 0
            weights[3].grad[2] *= step > 2
            optimiser.step()
        results.append([weight.detach() for weight in weights])
        assert optimiser.skipped == {"parameter 0 of group 0": 2}
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_weights_edited_between_steps_are_seen(backend: str):
    """The short path trusts what it balanced itself, and notices what others did."""
    results = []
    for each in ("eager", backend):
        torch.manual_seed(0)
        layer = nn.Linear(20, 6)
        optimiser = nero.Nero(layer, backend=each)
        for step in range(8):
            fill_grads(layer, step)
            with torch.no_grad():
                if step == 2:
                    layer.weight.mul_(5)
                if step == 4:
                    layer.weight[1] = 0.3
                if step == 5:
                    layer.weight.data = torch.randn(6, 20, generator=torch.Generator().manual_seed(9))
                if step == 3:
                    optimiser.param_groups[0]["fix_mean"] = False
                if step == 5:
                    optimiser.param_groups[0]["fix_mean"] = True
                if step == 7:
                    layer.weight.data = layer.weight.data.t().contiguous().t()
                if step == 6:
                    layer.weight.grad[1] = 0
                    layer.weight[1] = 0
            optimiser.step()
        results.append(layer.weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 6), (2, 6), (4, 6, 3)], ids=str)
def test_a_parameter_that_has_changed_its_shape_stops_the_step(backend: str, shape: tuple[int, ...]):
    """As where a table is given more rows by its ``.data``: compiled code must not write beyond the state's end."""
    weight = nn.Parameter(torch.randn(4, 6))
    optimiser = nero.Nero([weight], backend=backend)
    weight.grad = torch.randn(4, 6)
    optimiser.step()
    weight.data, weight.grad = torch.randn(shape), None
    weight.grad = torch.randn(shape)
    with pytest.raises(RuntimeError, match=r"size|shape"):
        optimiser.step()


def test_a_state_made_under_inference_mode_serves_outside(backend: str):
    """Made, unfrozen, loaded or stepped there by who evaluates; torch lets nobody change its tensors outside."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).requires_grad_(False))
    with torch.inference_mode():
        optimiser = nero.Nero(model, backend=backend, fix_norm="initial")
    model[1].requires_grad_()
    fill_grads(model, 0)
    with torch.inference_mode():
        optimiser.step()
        optimiser.load_state_dict(optimiser.state_dict())
    model(torch.randn(2, 4)).sum().backward()
    optimiser.step()
    assert [float(optimiser.state[each]["step"]) for each in model.parameters()] == [2.0] * 4


# -- learning rates --------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def test_the_table_of_schedulers_is_whole():
    known = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    } - {"LRScheduler"}
    assert known <= set(SCHEDULERS)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_schedulers_set_the_angle(make, tensor: bool):
    """Each step turns a neuron by the scheduled rate, measured on the weights."""
    weight = nn.Parameter(torch.randn(3, 50, dtype=torch.float64))
    lr = torch.tensor(0.01, dtype=torch.float64) if tensor else 0.01
    optimiser = nero.Nero([weight], lr=lr, beta=0.0)
    scheduler = make(optimiser)
    for step in range(7):
        before = weight.detach().clone()
        grad = torch.randn(3, 50, dtype=torch.float64)
        grad -= grad.mean(1, keepdim=True)
        grad -= (grad * before).sum(1, keepdim=True) * before
        weight.grad = grad
        rate = float(optimiser.param_groups[0]["lr"])
        optimiser.step()
        turned = (before * weight.detach()).sum(1).clamp(-1, 1).acos()
        torch.testing.assert_close(turned, torch.full((3,), math.atan(rate), dtype=torch.float64), rtol=1e-4, atol=1e-7)
        scheduler.step(*([1.0 + step] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def test_tensor_lr_is_the_float_lr(backend: str):
    one, other = network(), network()
    train(one, nero.Nero(one, lr=0.03, backend=backend), range(3))
    train(other, nero.Nero(other, lr=torch.tensor([0.03], dtype=torch.float64), backend=backend), range(3))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


def test_a_tensor_as_the_rate_is_one_for_all_groups_unless_each_is_given_its_own():
    """As torch has it; who multiplies it group by group, as a scheduler on a plateau does, wants one for each."""
    given = torch.tensor(0.01)
    optimiser = nero.Nero(network(), lr=given)
    assert len(optimiser.param_groups) == 4
    given.fill_(0.02)
    loaded = nero.Nero(network(), lr=given)
    loaded.load_state_dict(optimiser.state_dict())
    for each in (optimiser, loaded):
        assert [float(group["lr"]) for group in each.param_groups] == pytest.approx([0.02] * 4)
    for group in optimiser.param_groups:
        group["lr"] = group["lr"].clone()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimiser, factor=0.1, patience=0)
    for loss in (1.0, 2.0):
        scheduler.step(loss)
    for group in optimiser.param_groups:
        group["lr"] *= 0.5
    assert [float(group["lr"]) for group in optimiser.param_groups] == pytest.approx([0.001] * 4)
    assert float(given) == pytest.approx(0.02)


# -- the ecosystem ---------------------------------------------------------------------------


def test_grad_scaler():
    model, plain = network(), network()
    optimiser, reference = nero.Nero(model), nero.Nero(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    batch = torch.randn(4, 2, 4, 4)
    for step in range(4):
        optimiser.zero_grad(), reference.zero_grad()
        loss, reference_loss = model(batch).square().mean(), plain(batch).square().mean()
        if step == 2:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        if step != 2:  # the scaler leaves such a step out
            reference_loss.backward()
            reference.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert not optimiser.skipped


def test_clipping_changes_nothing_and_accumulation_adds_up():
    torch.manual_seed(1)
    batches = torch.randn(6, 4, 2, 4, 4)
    results = []
    for how in ("plain", "clipped", "accumulated"):
        model = network().eval().double()
        optimiser = nero.Nero(model)
        for one, two in batches.double().view(3, 2, 4, 2, 4, 4):
            optimiser.zero_grad()
            if how == "accumulated":
                model(one).square().sum().backward()
                model(two).square().sum().backward()
            else:
                model(torch.cat([one, two])).square().sum().backward()
            if how == "clipped":  # the same factor for all, at every step: nothing that Nero could see
                total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                nn.utils.clip_grad_norm_(model.parameters(), float(total) * 1e-3)
            optimiser.step()
        results.append(model)
    for a, b, c in zip(*(model.parameters() for model in results), strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=1e-10)
        assert b.isfinite().all()


@pytest.mark.parametrize("role", ["neuron", "gain"])
def test_sparse_gradients_are_the_dense_step(backend: str, role: str):
    torch.manual_seed(0)
    backend = "auto" if backend == "triton" else backend  # whose kernels take dense ones alone
    dense, sparse = nn.Embedding(10, 6, padding_idx=3), nn.Embedding(10, 6, padding_idx=3, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    optimisers = [nero.Nero([{"params": each.parameters(), "role": role}], backend=backend) for each in (dense, sparse)]
    for tokens in ([1, 2, 2, 3], [2, 5, 7], [1, 3], [9, 9, 9, 0]):
        before = sparse.weight.detach().clone()
        for table, optimiser in zip((dense, sparse), optimisers, strict=True):
            optimiser.zero_grad()
            (table(torch.tensor(tokens)) * torch.arange(6)).square().sum().backward()
            optimiser.step()
        rest = [row for row in range(10) if row not in tokens or row == 3]
        assert torch.equal(sparse.weight[rest], before[rest]), "rows without gradient are not touched"
    torch.testing.assert_close(sparse.weight, dense.weight, rtol=0, atol=1e-6)
    for name in ("step", "grad_norm", "skipped"):
        a, b = (o.state[t.weight][name] for o, t in zip(optimisers, (dense, sparse), strict=True))
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_sparse_gradients_of_pulled_gains_are_the_dense_step():
    tables = [nn.Embedding(6, 1, sparse=sparse) for sparse in (False, True)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimiser = nero.Nero(table, gain_penalty=1.0)
        for _ in range(3):
            optimiser.zero_grad()
            table(torch.tensor([1, 2])).sum().backward()
            optimiser.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


def test_sparse_gradients_across_neurons_are_made_dense():
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(10, 6, sparse=sparse)
        optimiser = nero.Nero([{"params": table.parameters(), "role": "neuron", "fan_in_axes": (0,)}])
        table(torch.tensor([1, 4])).square().sum().backward()
        optimiser.step()
        results.append(table.weight.detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant:UserWarning")
def test_sparse_gradient_that_is_not_finite():
    table = nn.Embedding(10, 6, sparse=True)
    optimiser = nero.Nero(table)
    before = table.weight.detach().clone()
    values = torch.ones(2, 6)
    values[0, 0] = math.nan
    values[1] = torch.arange(6)
    table.weight.grad = torch.sparse_coo_tensor(torch.tensor([[2, 5]]), values, (10, 6))
    optimiser.step()
    assert optimiser.skipped == {"weight": 1}
    assert torch.equal(table.weight[2], before[2])
    assert not torch.equal(table.weight[5], before[5])


def test_step_under_autocast_and_another_default_device():
    """Neither may reach into the arithmetic of the step."""
    results = []
    for odd in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 40))
        optimiser = nero.Nero([{"params": [weight], "fan_in_axes": (0,)}])
        for _ in range(3):
            weight.grad = torch.randn(64, 40)
            if odd:
                with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
                    optimiser.step()
            else:
                optimiser.step()
        results.append(weight.detach())
    assert torch.equal(*results)


@pytest.fixture
def mesh():
    """One process that is a whole device mesh."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("longest", [math.inf, 1.05])
def test_sharded_parameters_take_the_same_steps(backend: str, longest: float, mesh):
    """FSDP2 swaps the parameters for sharded ones; their state is sharded alike."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    plain = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    sharded = copy.deepcopy(plain)
    for module in sharded:
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    if backend == "triton":  # which wants plain memory
        with pytest.raises(ValueError, match=r"0\.weight is a DTensor"):
            nero.Nero(sharded, backend=backend)
        return
    optimisers = [nero.Nero(model, longest_step=longest, backend=backend) for model in (plain, sharded)]
    for seed in range(3):
        fill_grads(plain, seed)
        plain[2].weight.grad[0, 0] = math.nan if seed == 1 else 1.0
        for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
            b.grad = distribute_tensor(a.grad, mesh, [Shard(0)])
        for optimiser in optimisers:
            optimiser.step()
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(b.full_tensor(), a, rtol=0, atol=1e-6)
    assert isinstance(optimisers[1].state[sharded[0].weight]["grad_norm"], DTensor)
    assert optimisers[0].skipped == optimisers[1].skipped == {"2.weight": 1}


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("longest", [math.inf, 1.05])
def test_compiled_step_is_one_graph_and_does_not_recompile_for_lr(longest: float):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, plain = network(), network()
    optimiser = nero.Nero(model, lr=torch.tensor(0.01), longest_step=longest)
    reference = nero.Nero(plain, lr=0.01, longest_step=longest)
    counter = CompileCounter()
    step = torch.compile(lambda: optimiser.step(), backend=counter, fullgraph=True)
    for seed in range(5):
        fill_grads(model, seed), fill_grads(plain, seed)
        step()
        reference.step()
        for group, other in zip(optimiser.param_groups, reference.param_groups, strict=True):
            other["lr"] *= 0.5
            group["lr"].fill_(other["lr"])  # as a scheduler does
    assert counter.frame_count == 1
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_skipped_updates_of_parameters_with_one_name_are_told_apart(backend: str):
    layers = [nn.Linear(4, 3), nn.Linear(4, 2)]
    optimiser = nero.Nero(layers[0], backend=backend)
    optimiser.add_param_group({"params": layers[1]})
    for layer in layers:
        layer.weight.grad = torch.full_like(layer.weight, math.nan)
    optimiser.step()
    assert optimiser.skipped == {"weight": 3, "weight (2)": 2}


def test_repr_shows_the_options():
    assert "fan_in_axes: (1,)" in repr(nero.Nero(nn.Linear(2, 3)))


def test_state_may_be_read_and_written_on(backend: str):
    """A logger that asks for the state of a frozen layer, a note among it, a reset."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].requires_grad_(False)
    optimiser = nero.Nero(model, backend=backend)
    for step in range(4):
        fill_grads(model[0], step)
        optimiser.step()
        assert [optimiser.state[each].get("step") for each in model[1].parameters()] == [None, None]
        if step == 1:
            optimiser.state["note"] = 3
        if step == 2:
            for state in optimiser.state.values():
                if isinstance(state, dict):
                    state.clear()
    assert optimiser.state[model[0].weight]["step"] == 1


def test_a_parameter_that_changes_its_group_takes_that_groups_options(backend: str):
    gains = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimiser = nero.Nero([{"params": gains[:2], "lr": 0.1}, {"params": gains[2:], "lr": 0.0}], backend=backend)
    for _ in range(2):
        for gain in gains:
            gain.grad = torch.ones(3)
        optimiser.step()
        optimiser.param_groups[0]["params"], optimiser.param_groups[1]["params"] = gains[:1], gains[1:]
    assert [round(gain[0].item(), 5) for gain in gains] == [0.8, 0.9, 1.0]


@pytest.mark.parametrize("edit", [{"role": "gain", "fan_in_axes": None}, {"fan_in_axes": (0,)}], ids=str)
def test_a_role_that_is_told_anew_stops_the_step(backend: str, edit: dict):
    """It was not heeded, until a copy of the optimiser ended in an error of torch's."""
    layer = nn.Linear(6, 4)
    optimiser = nero.Nero(layer, backend=backend)
    optimiser.param_groups[0].update(edit)
    before = layer.weight.detach().clone()
    fill_grads(layer, 0)
    with pytest.raises(ValueError, match=r"weight was added as a neuron of fan-in axes \(1,\), and its group now says"):
        optimiser.step()
    assert torch.equal(layer.weight, before)
    optimiser.param_groups[0].update(role="neuron", fan_in_axes=(1,))
    optimiser.step()


def test_a_role_that_differs_in_its_groups_alone_is_told_with_them():
    optimiser = nero.Nero(nn.ConvTranspose2d(4, 6, 3, groups=2))
    optimiser.param_groups[0]["fan_in_groups"] = 1
    with pytest.raises(ValueError, match=r"axes \(0, 2, 3\) in 2 groups, and its group now says .*\(0, 2, 3\): roles"):
        optimiser.step()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_model_that_changes_its_dtype_after_the_optimiser_was_made(backend: str, dtypes: tuple[torch.dtype, ...]):
    if backend == "triton":  # for float32 state and parameters it is there; what else there is goes to others
        backend = "auto"
    results = []
    for each in ("eager", backend):
        torch.manual_seed(0)
        model = nn.Linear(30, 40).to(dtypes[0])
        optimiser = nero.Nero(model, backend=each)
        model.to(dtypes[1])
        for seed in range(3):
            fill_grads(model, seed)
            optimiser.step()
        results.append([optimiser.state[model.weight]["grad_norm"], model.weight.detach()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fix_norm", [True, "initial"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_statistics_follow_a_model_that_is_cast(backend: str, dtype: torch.dtype, fix_norm: bool | str):
    model = nn.Sequential(nn.Linear(8, 8))
    optimiser = nero.Nero(model, backend=backend, fix_norm=fix_norm)
    model.to(dtype)
    norms = model[0].weight.detach().norm(dim=1)
    fill_grads(model, 0)
    optimiser.step()
    wide = dtype == torch.float64
    for parameter in model.parameters():
        kept = {key: value.dtype for key, value in optimiser.state[parameter].items()}
        assert (kept.pop("step"), kept.pop("skipped")) == (torch.float32, torch.int64)
        assert set(kept.values()) == {torch.float64 if wide else torch.float32}
        assert torch.equal(parameter, parameter.float().to(dtype)) != wide
    if fix_norm is True:
        assert nero.is_balanced(model)
    torch.testing.assert_close(model[0].weight.detach().norm(dim=1), norms, rtol=1e-6 if wide else 1e-2, atol=0)


@pytest.mark.parametrize("beta", [0.9999, 0.9999999])
def test_a_memory_close_to_one(backend: str, beta: float):
    """1 - beta is as exact as beta is: the first step is as long as any."""
    gain, weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.eye(3, 8))
    optimiser = nero.Nero([gain, weight], beta=beta, backend=backend)
    entered = weight.detach().clone()
    gain.grad, weight.grad = torch.full((4,), 3.0), torch.arange(24.0).view(3, 8).square()
    optimiser.step()
    torch.testing.assert_close(gain.detach(), torch.full((4,), 0.99), rtol=1e-6, atol=0)
    wanted = rule_turn(entered, weight.grad, beta)
    torch.testing.assert_close(weight.detach(), wanted.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("longest", [3, math.inf])
def test_no_step_is_longer_than_the_longest(backend: str, longest: float):
    """However large a gradient comes after small ones; the first is as long as ever."""
    lr, count = 0.001, 20
    torch.manual_seed(0)
    weight, columns, gain = (nn.Parameter(each) for each in (torch.randn(4, 8), torch.randn(8, 4), torch.ones(4)))
    groups = [{"params": [weight, gain]}, {"params": [columns], "role": "neuron", "fan_in_axes": (0,)}]
    optimiser = nero.Nero(groups, lr=lr, longest_step=longest, backend=backend)
    for step in range(count + 1):
        before = [each.detach().clone() for each in (weight, columns, gain)]
        for each in (weight, columns, gain):
            each.grad = torch.randn(each.shape) * (1e9 if step == count else 1.0)
        optimiser.step()
        if step == 0:
            torch.testing.assert_close((gain.detach() - 1).abs(), torch.full((4,), lr), rtol=1e-4, atol=0)
    wanted = min(longest, math.sqrt((1 - 0.999 ** (count + 1)) / 0.001)) * lr  # the average is all of the last
    for each, start, axis in ((weight, before[0], 1), (columns, before[1], 0)):
        turned = torch.linalg.vector_norm(each.detach() - start, dim=axis).max()
        assert 0.7 * wanted < turned < 1.001 * wanted  # a part is along the neuron or its mean, and projected away
    change = gain.grad.sign() * (before[2] - gain.detach())
    torch.testing.assert_close(change, torch.full((4,), wanted), rtol=2e-3, atol=0)


@pytest.mark.parametrize("longest", [math.inf, 3])
def test_what_no_average_holds_does_not_move_bounded_or_not(backend: str, longest: float):
    """A gradient so small that its share in the average is zero."""
    gain, weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.eye(2, 4))
    optimiser = nero.Nero([gain, weight], longest_step=longest, backend=backend)
    before = [each.detach().clone() for each in (gain, weight)]
    for each in (gain, weight):
        each.grad = torch.full_like(each, 1e-44)
    weight.grad[:, 1] = 0
    optimiser.step()
    assert all(torch.equal(each, start) for each, start in zip((gain, weight), before, strict=True))


def test_an_optimiser_that_was_pickled_before_there_was_a_longest_step():
    optimiser = nero.Nero(nn.Linear(4, 3))
    for options in (optimiser.defaults, *optimiser.param_groups):
        del options["longest_step"]
    copied = pickle.loads(pickle.dumps(optimiser))
    copied.add_param_group({"params": nn.Linear(3, 2).weight})
    for parameter in (each for group in copied.param_groups for each in group["params"]):
        parameter.grad = torch.ones_like(parameter)
    copied.step()
    assert [group["longest_step"] for group in copied.param_groups] == [math.inf] * 3


def test_a_checkpoint_of_before_there_was_a_longest_step(backend: str):
    saved = nero.Nero(nn.Linear(4, 3), backend=backend).state_dict()
    for group in saved["param_groups"]:
        del group["longest_step"]
    optimiser = nero.Nero(nn.Linear(4, 3), longest_step=3, backend=backend)
    optimiser.load_state_dict(saved)
    assert [group["longest_step"] for group in optimiser.param_groups] == [math.inf] * 2


def rule_turn(weight: Tensor, grad: Tensor, beta: float) -> Tensor:
    zero = torch.zeros(len(weight), 1, dtype=torch.float64)
    return rule.turn(weight.double(), grad.double(), zero, 1, axes=(1,), lr=0.01, beta=beta).parameter


def test_numpys_numbers_as_a_rate(backend: str):
    gain = nn.Parameter(torch.ones(4))
    optimiser = nero.Nero([gain], lr=numpy.float64(0.5), backend=backend)
    gain.grad = torch.tensor([1.0, 2.0, math.nan, 0.0])
    optimiser.step()
    torch.testing.assert_close(gain.detach(), torch.tensor([0.5, 0.5, 1.0, 1.0]))
