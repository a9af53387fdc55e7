"""The torch.optim contract: groups, steps, freezing, hooks and state."""

import copy
import gc
import io
import math
import weakref
from fractions import Fraction

import numpy
import pytest
import torch
from interpreter import few
from torch import Tensor, nn
from training import assert_same_state, fill_grads, network, train

import nero
from nero import rule


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
def test_constructor_accepts_module_parameters_and_groups(params):
    model = network()
    optimiser = nero.Nero(params(model))
    before = copy.deepcopy(model)
    train(model, optimiser, range(1))
    assert not torch.equal(model[0].weight, before[0].weight)
    torch.testing.assert_close(model[0].weight.flatten(1).sum(1), torch.zeros(4), atol=1e-6, rtol=0)


def test_module_and_parameters_take_the_same_steps():
    results = []
    for params in (lambda m: m, lambda m: m.parameters(), lambda m: m.named_parameters()):
        model = network()
        train(model, nero.Nero(params(model)), range(3))
        results.append(model)
    for other in results[1:]:  # grouped differently, so equal to rounding
        for a, b in zip(results[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_groups_have_their_own_options(backend: str):
    model = network()
    optimiser = nero.Nero(
        [{"params": [model[4].weight], "lr": 0.0}, {"params": [model[6].weight], "fix_norm": False, "lr": 0.1}],
        backend=backend,
    )
    entered = model[4].weight.detach().clone()
    train(model, optimiser, range(3))
    assert torch.equal(model[4].weight, entered)
    assert (model[6].weight.norm(dim=1) - 1).abs().max() > 1e-3


def test_add_param_group_late_starts_its_own_count(backend: str):
    model, late = nn.Linear(6, 5), nn.Linear(5, 4)
    optimiser = nero.Nero(model, backend=backend)
    train(model, optimiser, range(few(backend, 100)))
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
    assert optimiser.state[model.weight]["step"] == few(backend, 100) + 3
    torch.testing.assert_close(late.weight, alone.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(late.bias, alone.bias, rtol=0, atol=1e-6)


def test_add_param_group_accepts_modules_and_adds_names():
    named, unnamed, extra = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)
    optimiser = nero.Nero(named)
    optimiser.add_param_group({"params": extra, "lr": 0.5})
    optimiser.add_param_group({"params": unnamed.parameters()})
    optimiser.add_param_group({"params": []})
    assert [group["lr"] for group in optimiser.param_groups] == [0.01, 0.01, 0.5, 0.5, 0.01, 0.01]
    assert all("param_names" in group for group in optimiser.param_groups)
    plain = nero.Nero(nn.Linear(3, 2).parameters())
    plain.add_param_group({"params": nn.Linear(3, 2)})
    assert all("param_names" not in group for group in plain.param_groups)


def test_optimiser_deleted_frees_its_tensors(backend: str):
    model = network()
    optimiser = nero.Nero(model, backend=backend)
    train(model, optimiser, range(2))
    alive = [weakref.ref(model[4].weight), weakref.ref(optimiser.state[model[4].weight]["grad_norm"])]
    alive.append(weakref.ref(model[0].weight))
    del model, optimiser
    gc.collect()
    assert [each() is None for each in alive] == [True] * 3


def test_closure_returns_the_loss():
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


def test_maximize_mirrors_minimize(backend: str):
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


def test_step_hooks_run():
    model = network()
    optimiser = nero.Nero(model)
    calls = []
    optimiser.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimiser.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimiser, range(1))
    assert calls == ["pre", "post"]


def test_frozen_then_unfrozen_parameters_enter_late(backend: str):
    model = network()
    model[4].weight.requires_grad_(False)
    untouched = model[4].weight.detach().clone()
    optimiser = nero.Nero(model, backend=backend, pretrained=False)
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


def test_parameter_swapped_by_a_framework_enters(backend: str):
    layer = nn.Linear(6, 4)
    optimiser = nero.Nero(layer.parameters(), backend=backend, pretrained=False)
    stand_in = nn.Parameter(torch.randn(4, 6) * 3)
    optimiser.param_groups[0]["params"][0] = stand_in
    stand_in.grad = torch.randn(4, 6)
    optimiser.step()
    torch.testing.assert_close(stand_in.norm(dim=1), torch.ones(4))
    assert optimiser.state[stand_in]["step"] == 1


def test_parameters_that_are_swapped_are_all_checked_before_one_changes():
    optimiser = nero.Nero(nn.Linear(6, 4).parameters(), pretrained=False)
    new = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.full((4, 6), torch.nan))]
    optimiser.param_groups[0]["params"] = new
    for parameter in new:
        parameter.grad = torch.ones(4, 6)
    before = new[0].detach().clone()
    with pytest.raises(ValueError, match="NaN or infinite"):
        optimiser.step()
    assert torch.equal(new[0], before)


def test_empty_and_scalar_parameters_step(backend: str):
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


def test_gradient_of_another_layout_or_dtype_steps(backend: str):
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


def test_small_tensors_stepped_together_stay_independent(backend: str):
    """One of several tensors of equal fan-in has a NaN gradient, one a zero gradient, one a constant neuron."""
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


def test_weights_edited_between_steps_are_noticed(backend: str):
    """The fast path trusts weights that it balanced, and notices edits by others."""
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


@pytest.mark.parametrize("shape", [(40, 6), (2, 6), (1, 6), (4, 6, 3)], ids=str)
def test_parameter_of_changed_shape_raises(backend: str, shape: tuple[int, ...]):
    """Compiled code must not write beyond the end of the state, as after an embedding grows by its ``.data``."""
    weight = nn.Parameter(torch.randn(4, 6))
    optimiser = nero.Nero([weight], backend=backend)
    weight.grad = torch.randn(4, 6)
    optimiser.step()
    weight.data, weight.grad = torch.randn(shape), None
    weight.grad = torch.randn(shape)
    with pytest.raises(ValueError, match="make a new optimiser after resizing"):
        optimiser.step()


def test_state_made_in_inference_mode_works_outside(backend: str):
    """Tensors created in inference mode are read-only outside it, so state must not be created in it."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2).requires_grad_(False))
    with torch.inference_mode():
        optimiser = nero.Nero(model, backend=backend, pretrained=True)
    model[1].requires_grad_()
    fill_grads(model, 0)
    with torch.inference_mode():
        optimiser.step()
        optimiser.load_state_dict(optimiser.state_dict())
    model(torch.randn(2, 4)).sum().backward()
    optimiser.step()
    assert [float(optimiser.state[each]["step"]) for each in model.parameters()] == [2.0] * 4


def test_skipped_numbers_parameters_of_equal_names(backend: str):
    layers = [nn.Linear(4, 3), nn.Linear(4, 2)]
    optimiser = nero.Nero(layers[0], backend=backend)
    optimiser.add_param_group({"params": layers[1]})
    for layer in layers:
        layer.weight.grad = torch.full_like(layer.weight, math.nan)
    optimiser.step()
    assert optimiser.skipped == {"weight": 3, "weight (2)": 2}


def test_repr_shows_the_options():
    assert "fan_in_axes: (1,)" in repr(nero.Nero(nn.Linear(2, 3)))


def test_state_read_noted_and_cleared_by_users(backend: str):
    """A logger reads the state of a frozen layer, someone adds a note, someone clears the state."""
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


def test_parameter_moved_to_a_group_takes_its_options(backend: str):
    gains = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimiser = nero.Nero([{"params": gains[:2], "lr": 0.1}, {"params": gains[2:], "lr": 0.0}], backend=backend)
    for _ in range(2):
        for gain in gains:
            gain.grad = torch.ones(3)
        optimiser.step()
        optimiser.param_groups[0]["params"], optimiser.param_groups[1]["params"] = gains[:1], gains[1:]
    assert [round(gain[0].item(), 5) for gain in gains] == [0.8, 0.9, 1.0]


@pytest.mark.parametrize("edit", [{"role": "gain", "fan_in_axes": None}, {"fan_in_axes": (0,)}], ids=str)
def test_role_changed_in_a_group_raises(backend: str, edit: dict):
    """The state depends on the role, so a changed role would only fail later, in a copy of the optimiser."""
    layer = nn.Linear(6, 4)
    optimiser = nero.Nero(layer, backend=backend)
    optimiser.param_groups[0].update(edit)
    before = layer.weight.detach().clone()
    fill_grads(layer, 0)
    with pytest.raises(ValueError, match=r"weight was added as neurons along axes \(1,\), and its group now says"):
        optimiser.step()
    assert torch.equal(layer.weight, before)
    optimiser.param_groups[0].update(role="bias", fan_in_axes=(1,))  # a role that cannot be
    with pytest.raises(ValueError, match="make another optimiser to change a role"):
        optimiser.step()
    optimiser.param_groups[0].update(role="neuron", fan_in_axes=(1,))
    optimiser.step()


def test_fan_in_groups_changed_in_a_group_raises():
    optimiser = nero.Nero(nn.ConvTranspose2d(4, 6, 3, groups=2))
    optimiser.param_groups[0]["fan_in_groups"] = 1
    with pytest.raises(ValueError, match=r"axes \(0, 2, 3\) in 2 groups, and its group now says .*\(0, 2, 3\): make"):
        optimiser.step()


@pytest.mark.parametrize("is_set_later", [False, True])
def test_list_of_axes_changed_in_place_changes_nothing(is_set_later: bool):
    layer, axes = nn.Linear(3, 3, bias=False), [0]
    optimiser = nero.Nero([{"params": layer.parameters(), "fan_in_axes": (0,) if is_set_later else axes}])
    if is_set_later:
        optimiser.param_groups[0]["fan_in_axes"] = axes
        optimiser.step()
    axes[0] = 1
    layer.weight.grad = torch.randn(3, 3)
    copy.deepcopy(optimiser).step()  # a copy reads the roles from the groups again
    assert [part.role.axes for part in copy.deepcopy(optimiser).parts()] == [(0,)]
    assert optimiser.param_groups[0]["fan_in_axes"] == (0,)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_model_cast_after_build_still_trains(backend: str, dtypes: tuple[torch.dtype, ...]):
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
def test_statistics_follow_a_cast_model(backend: str, dtype: torch.dtype, fix_norm: bool | str):
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
def test_beta_close_to_one_is_exact(backend: str, beta: float):
    """1 - beta must not lose digits: the first step is as long as any."""
    gain, weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.eye(3, 8))
    optimiser = nero.Nero([gain, weight], beta=beta, backend=backend)
    entered = weight.detach().clone()
    gain.grad, weight.grad = torch.full((4,), 3.0), torch.arange(24.0).view(3, 8).square()
    optimiser.step()
    torch.testing.assert_close(gain.detach(), torch.full((4,), 0.99), rtol=1e-6, atol=0)
    wanted = rule_turn(entered, weight.grad, beta)
    torch.testing.assert_close(weight.detach(), wanted.float(), rtol=0, atol=1e-6)


@pytest.mark.no_cover  # many steps run the lines of one
@pytest.mark.parametrize("longest", [3, math.inf])
def test_no_step_is_longer_than_longest_step(backend: str, longest: float):
    """A large gradient after small ones is bounded; the first step is not affected."""
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
def test_gradient_below_the_average_range_is_unmoved(backend: str, longest: float):
    """The gradient is so small that its share in the average underflows to zero."""
    gain, weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.eye(2, 4))
    optimiser = nero.Nero([gain, weight], longest_step=longest, backend=backend)
    before = [each.detach().clone() for each in (gain, weight)]
    for each in (gain, weight):
        each.grad = torch.full_like(each, 1e-44)
    weight.grad[:, 1] = 0
    optimiser.step()
    assert all(torch.equal(each, start) for each, start in zip((gain, weight), before, strict=True))


def rule_turn(weight: Tensor, grad: Tensor, beta: float) -> Tensor:
    zero = torch.zeros(len(weight), 1, dtype=torch.float64)
    return rule.turn(weight.double(), grad.double(), zero, 1, axes=(1,), lr=0.01, beta=beta).parameter


def test_numpy_numbers_are_accepted_and_saved_as_pythons(backend: str):
    gain = nn.Parameter(torch.ones(4))
    optimiser = nero.Nero([gain], lr=numpy.float64(0.5), momentum=numpy.float32(0), backend=backend)
    gain.grad = torch.tensor([1.0, 2.0, math.nan, 0.0])
    optimiser.step()
    torch.testing.assert_close(gain.detach(), torch.tensor([0.5, 0.5, 1.0, 1.0]))
    optimiser.add_param_group({"params": [nn.Parameter(torch.ones(2))], "scale": numpy.float32(2)})
    file = io.BytesIO()
    torch.save(optimiser.state_dict(), file)
    file.seek(0)
    assert [group["lr"] for group in torch.load(file)["param_groups"]] == [0.5, 0.5]  # it reads no numpy number


def test_numbers_of_other_types_that_are_set_later_are_replaced_by_pythons(backend: str):
    models = [nn.Linear(4, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimisers = [nero.Nero(model, backend=backend) for model in models]
    for step, beta in enumerate((Fraction(9, 10), 0.9)):
        for model, optimiser, value in zip(models, optimisers, (beta, 0.9), strict=True):
            fill_grads(model, step)
            optimiser.param_groups[0]["beta"] = value
            optimiser.step()
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
    optimisers[0].param_groups[0]["lr"] = numpy.array(0.5)  # a schedule after the last step
    file = io.BytesIO()
    torch.save(optimisers[0].state_dict(), file)
    file.seek(0)
    assert torch.load(file)["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize("replace", ["all groups", "one group"])
def test_group_dict_replaced_between_steps_is_used(backend: str, replace: str):
    layer = nn.Linear(4, 2)
    optimiser = nero.Nero(layer, backend=backend)
    fill_grads(layer, 0)
    optimiser.step()
    if replace == "all groups":
        optimiser.param_groups = [dict(group, lr=0.0) for group in optimiser.param_groups]
    else:
        optimiser.param_groups[0] = dict(optimiser.param_groups[0], lr=0.0)
    before = layer.weight.detach().clone()
    fill_grads(layer, 1)
    optimiser.step()
    assert torch.equal(layer.weight, before)
