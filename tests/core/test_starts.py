"""Neurons and gains that start at zero, and networks that start pretrained."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from training import fill_grads, train_on_noise

import nero
from nero import regrowth


class Adapted(nn.Module):
    """A frozen layer with LoRA's adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 3, bias=False), nn.Linear(3, 5, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def adapt(model: nn.Module, optimiser: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    """Train towards a linear function; return the losses."""
    generator, losses = torch.Generator().manual_seed(seed), []
    target = torch.linspace(-1, 1, 30).view(6, 5)
    for _ in range(steps):
        inputs = torch.randn(32, 6, generator=generator)
        optimiser.zero_grad()
        loss = (model(inputs.to(model.base.weight.dtype)).float() - inputs @ target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"pretrained": True}, {"fix_norm": False}], ids=str)
def test_zero_neurons_grow_by_the_angle_each_step(options: dict[str, bool]):
    torch.manual_seed(0)
    model = Adapted()
    optimiser = nero.Nero(model, lr=0.01, **options)
    sizes = []
    for _ in range(20):
        before = model.up.weight.detach().clone()
        adapt(model, optimiser, 1)
        moved = (model.up.weight.detach() - before).norm(dim=1)
        assert (moved > 0).all()
        assert moved.max() < 0.015, "about the angle, relative to one"
        sizes.append(model.up.weight.norm(dim=1).mean().item())
    assert 0 < sizes[0] < 0.0101
    assert sizes[0] < sizes[5] < sizes[19] < 0.3


def test_growing_neuron_stops_at_norm_one_and_can_shrink():
    weight = nn.Parameter(torch.zeros(2, 4))
    optimiser = nero.Nero([weight], lr=0.1)
    pull = torch.tensor([[1.0, 1, 1, 2], [1, -1, 2, 0]])
    for _ in range(20):
        weight.grad = -pull
        optimiser.step()
    torch.testing.assert_close(weight.detach(), pull / pull.norm(dim=1, keepdim=True))
    weight.grad = pull.clone()
    optimiser.step()
    torch.testing.assert_close(weight.norm(dim=1).detach(), torch.full((2,), 0.9))


def test_loss_scale_does_not_change_how_zero_neurons_grow():
    found = []
    for factor in (1e-20, 1.0, 1e20):
        weight = nn.Parameter(torch.zeros(3, 8))
        optimiser = nero.Nero([weight])
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            weight.grad = factor * torch.randn(3, 8, generator=generator)
            optimiser.step()
        found.append(weight.detach())
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[1])


@pytest.mark.parametrize(
    ("order", "options", "dtype"),  # every pair of two is among them
    [
        ("model first", {}, torch.float32),
        ("model first", {"fix_norm": "initial"}, torch.bfloat16),
        ("optimiser first", {}, torch.bfloat16),
        ("optimiser first", {"fix_norm": "initial"}, torch.float32),
        ("model last", {}, torch.float32),
        ("model last", {"fix_norm": "initial"}, torch.bfloat16),
    ],
    ids=str,
)
def test_grown_neurons_resume_bit_for_bit(order: str, options: dict[str, object], dtype: torch.dtype, backend: str):
    torch.manual_seed(0)
    fresh = Adapted().to(dtype)
    model = copy.deepcopy(fresh)
    optimiser = nero.Nero(model, backend=backend, **options)
    adapt(model, optimiser, 5)
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
    adapt(model, optimiser, 3, seed=1)

    resumed = copy.deepcopy(fresh)
    if order == "model first":
        resumed.load_state_dict(saved[0])
    other = nero.Nero(resumed, backend=backend, **options)
    if order == "optimiser first":
        resumed.load_state_dict(saved[0])
    other.load_state_dict(other.state_dict())  # as Accelerate does
    other.load_state_dict(saved[1])
    if order == "model last":
        resumed.load_state_dict(saved[0])
    adapt(resumed, other, 3, seed=1)
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


def test_model_loaded_after_the_optimiser_was_made_stays_as_loaded():
    torch.manual_seed(0)
    model, states = Adapted(), []
    optimiser = nero.Nero(model)
    for _ in range(2):
        adapt(model, optimiser, 3)
        states.append(copy.deepcopy((model.state_dict(), optimiser.state_dict())))
    other = nero.Nero(model := copy.deepcopy(model))  # copies the neurons of the second state
    model.load_state_dict(states[0][0])
    other.load_state_dict(states[0][1])
    assert all(torch.equal(value, states[0][0][name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["loaded", "data", "copied", "restored", "resumed"])
def test_scale_of_gains_loaded_before_the_first_step(how: str):
    """A scale follows values that are loaded before the first step; that of a parameter which has made a step stays."""
    model, trained = nn.LayerNorm(6), nn.LayerNorm(6)
    nn.init.constant_(trained.weight, 3.0)
    saved = nero.Nero(trained)
    train_on_noise(trained, saved, 1)
    nn.init.constant_(trained.weight, 5.0)
    optimiser = nero.Nero(model)
    if how == "resumed":
        optimiser.load_state_dict(saved.state_dict())
    if how == "data":
        model.weight.data.fill_(5.0)
    else:
        model.load_state_dict(trained.state_dict())
    if how == "copied":
        model, optimiser = copy.deepcopy((model, optimiser))
    if how == "restored":
        optimiser.load_state_dict(optimiser.state_dict())
    train_on_noise(model, optimiser, 1)
    assert optimiser.state[model.weight]["scale"].item() == (3.0 if how == "resumed" else 5.0)


def test_fresh_network_is_not_copied(monkeypatch: pytest.MonkeyPatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    assert len(nero.Nero(copy.deepcopy(model))._regrowth._copies) == 2
    monkeypatch.setattr(regrowth, "MAX_COPIED_ELEMENTS", 20)
    assert [copy.elements for copy in nero.Nero(model)._regrowth._copies] == [None, None]


@pytest.mark.parametrize("is_loaded_again", [False, True])
def test_grown_neurons_that_were_not_copied_warn(is_loaded_again: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(regrowth, "MAX_COPIED_ELEMENTS", 0)
    head = nn.Linear(6, 4, bias=False)
    nn.init.zeros_(head.weight)
    optimiser = nero.Nero(head)
    for _ in range(3):
        optimiser.zero_grad()
        (head(torch.randn(2, 6)) - 1).square().sum().backward()
        optimiser.step()
    saved = copy.deepcopy((head.state_dict(), optimiser.state_dict()))
    resumed = nn.Linear(6, 4, bias=False)
    resumed.load_state_dict(saved[0])
    other = nero.Nero(resumed)
    other.load_state_dict(saved[1])
    if is_loaded_again:
        resumed.load_state_dict(saved[0])
        train_on_noise(resumed, other, 1)
        assert (resumed.weight.norm(dim=1) < 0.5).all()
    else:
        with pytest.warns(UserWarning, match=r"load the model's state_dict again, after the optimiser's"):
            train_on_noise(resumed, other, 1)


def test_new_optimiser_on_a_trained_model_keeps_grown_neurons():
    torch.manual_seed(0)
    model = Adapted()
    adapt(model, nero.Nero(model), 5)
    before = copy.deepcopy(model.state_dict())
    optimiser = nero.Nero(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.warns(UserWarning, match=r"neurons of up\.weight are shorter .*: if they are new, call nero\.balance_"):
        adapt(model, optimiser, 5)
    assert (model.up.weight.norm(dim=1) < 0.5).all(), "they go on growing"


@pytest.mark.parametrize("is_resumed", [True, False])
def test_neurons_balanced_in_bf16_keep_both_constraints_after_a_cast(is_resumed: bool):
    """A checkpoint without radii says that no neuron has grown from zero; casting leaves rounding errors of bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64, bias=False, dtype=torch.bfloat16), nn.Linear(64, 8, bias=False))
    optimiser = nero.Nero(model)
    model.float()
    if is_resumed:
        saved, model = (model.state_dict(), optimiser.state_dict()), copy.deepcopy(model)
        model.load_state_dict(saved[0])
        optimiser = nero.Nero(model)
        optimiser.load_state_dict(saved[1])
    else:
        optimiser.load_state_dict(optimiser.state_dict())
    train_on_noise(model, optimiser, 3)
    assert "radius" not in optimiser.state[model[0].weight]
    assert nero.is_balanced(model)


def test_radii_that_a_checkpoint_lacks_are_found_for_every_grown_neuron():
    """torch.distributed.checkpoint reads only what the new optimiser has; in bf16, wide neurons would look balanced."""
    model = nn.Sequential(nn.Linear(8, 1024, bias=False), nn.Linear(1024, 64, bias=False))
    nn.init.zeros_(model[1].weight)
    optimiser = nero.Nero(model, lr=0.05)
    model[0].weight.grad, model[1].weight.grad = torch.zeros(1024, 8), torch.randn(64, 1024)
    for _ in range(60):
        optimiser.step()
    saved = copy.deepcopy(optimiser.state_dict())
    for state in saved["state"].values():
        radius = state.pop("radius", None)
    assert (radius < 0).all()
    new = copy.deepcopy(model)
    other = nero.Nero(new.apply(lambda layer: isinstance(layer, nn.Linear) and layer.reset_parameters()))
    new.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    assert (other.state[new[1].weight]["radius"] < 0).all()


def test_new_head_of_a_trained_body_is_balanced_if_asked():
    body = nero.balance_(nn.Linear(6, 16))
    model = nn.Sequential(body, nn.Linear(16, 3))
    nero.balance_(model)
    train_on_noise(model, nero.Nero(model), 2)  # without a warning
    assert nero.is_balanced(model)


@pytest.mark.parametrize("order", ["model first", "optimiser first"])
def test_constant_neurons_resume_bit_for_bit(order: str):
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        nn.init.constant_(model[0].weight, 0.3)
        return model

    model = make()
    optimiser = nero.Nero(model)
    train_on_noise(model, optimiser, 5)
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
    resumed = make()
    other = nero.Nero(resumed)
    for each, state in [(resumed, saved[0]), (other, saved[1])][:: 1 if order == "model first" else -1]:
        each.load_state_dict(state)
    for own, trained in ((model, optimiser), (resumed, other)):
        train_on_noise(own, trained, 5, seed=1)
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


@pytest.mark.parametrize("how", ["loaded", "data", "copied", "frozen"])
def test_weights_loaded_before_the_first_step_keep_their_norms(how: str):
    torch.manual_seed(0)
    model, pretrained = nn.Linear(6, 4), nn.Linear(6, 4)
    pretrained.weight.data.mul_(3)
    optimiser = nero.Nero(model, pretrained=True)
    if how == "data":
        model.weight.data.copy_(pretrained.weight.data)
    else:
        model.load_state_dict(pretrained.state_dict())
    if how == "copied":
        model, optimiser = copy.deepcopy((model, optimiser))
    if how == "frozen":
        model.weight.requires_grad_(False)
        train_on_noise(model, optimiser, 1)
        model.weight.requires_grad_(True)
    train_on_noise(model, optimiser, 3)
    torch.testing.assert_close(model.weight.norm(dim=1), pretrained.weight.norm(dim=1))


def test_compiled_steps_before_a_plain_one_keep_the_state():
    model = nn.Linear(6, 4)
    optimiser = nero.Nero(model, pretrained=True, backend="eager")
    step = torch.compile(optimiser.step, backend="eager")
    model(torch.randn(3, 6)).sum().backward()
    for call in (step, step, optimiser.step):
        call()
    assert {float(state["step"]) for state in optimiser.state.values()} == {3}


def test_compiled_steps_before_a_plain_one_keep_the_scales():
    model = nn.LayerNorm(6)
    nn.init.constant_(model.weight, 3.0)
    optimiser = nero.Nero(model, lr=0.1)
    step = torch.compile(optimiser.step, backend="eager")
    model(torch.randn(4, 6)).square().sum().backward()
    for call in (step, optimiser.step):
        call()
    assert optimiser.state[model.weight]["scale"].item() == 3.0


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layer_without_inputs_trains_with_initial_norms():
    model = nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 2))
    optimiser = nero.Nero(model, pretrained=True)
    model(torch.randn(3, 0)).sum().backward()
    optimiser.step()
    assert optimiser.state[model[0].weight]["step"] == 0
    assert optimiser.state[model[1].weight]["step"] == 1


def test_parameter_appended_to_a_named_group_enters():
    model = nn.Linear(8, 4)
    optimiser = nero.Nero(model)
    added = nn.Parameter(nero.balance_(nn.Linear(8, 4)).weight.detach())
    optimiser.param_groups[0]["params"].append(added)
    added.grad, before = torch.randn_like(added), added.detach().clone()
    optimiser.step()
    assert not torch.equal(added, before)


def test_orthogonal_initialisation_is_not_taken_for_training():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 6), nn.Linear(6, 6))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    nero.Nero(model)
    assert nero.is_balanced(model)


@pytest.mark.parametrize("first", [False, True])
def test_norms_switched_to_initial_are_kept(first: bool):
    weight = nn.Parameter(3 * torch.randn(4, 8))
    with torch.no_grad():
        weight[0] = 0
    norms = [weight.detach().norm(dim=1)]
    optimiser = nero.Nero([weight], fix_norm="initial" if first else False, fix_mean=False)
    for fix_norm in (False, "initial"):
        optimiser.param_groups[0]["fix_norm"] = fix_norm
        weight.grad = torch.randn(4, 8)
        optimiser.step()
        norms.append(weight.detach().norm(dim=1))
    torch.testing.assert_close(norms[2][1:], norms[0 if first else 1][1:])


def test_radius_stays_the_same_tensor_when_parameters_join():
    """A captured graph holds its address."""
    layer = nn.Linear(6, 4)
    optimiser = nero.Nero(layer, pretrained=True)
    before = optimiser.state[layer.weight]["radius"]
    optimiser.add_param_group({"params": nn.Linear(4, 2)})
    fill_grads(layer, 0)
    optimiser.step()
    assert optimiser.state[layer.weight]["radius"] is before


def test_gain_near_zero_opens_and_bias_keeps_its_scale():
    norm = nn.LayerNorm(4)
    with torch.no_grad():
        norm.weight.fill_(1e-6)
    optimiser = nero.Nero(norm, lr=0.01)
    norm.weight.grad, norm.bias.grad = -torch.ones(4), -torch.ones(4)
    optimiser.step()
    torch.testing.assert_close(norm.weight.detach(), torch.full((4,), 0.010001))
    torch.testing.assert_close(norm.bias.detach(), torch.full((4,), 0.0001))


def test_pretrained_keeps_the_function_and_explicit_options_win():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 6)
    said = model(inputs).detach()
    optimiser = nero.Nero(model, pretrained=True)
    torch.testing.assert_close(model(inputs), said)
    assert {(group["fix_mean"], group["fix_norm"]) for group in optimiser.param_groups} == {(False, "initial")}
    optimiser = nero.Nero(model, pretrained=True, fix_mean=True, fix_norm=False)
    assert {(group["fix_mean"], group["fix_norm"]) for group in optimiser.param_groups} == {(True, False)}


def loaded_by_transformers() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].weight._is_hf_initialized = True
    return model


def loaded_adapter() -> nn.Module:
    return nn.ModuleDict({"lora_A": nn.Linear(6, 3, bias=False), "lora_B": nn.Linear(3, 5, bias=False)})


def copied_tokens() -> nn.Module:
    return nn.ParameterDict({"trainable_tokens_delta": torch.randn(2, 6)})


@pytest.mark.parametrize("make", [loaded_by_transformers, loaded_adapter, copied_tokens])
def test_model_that_looks_pretrained_warns_before_balancing(make: type[nn.Module]):
    with pytest.warns(UserWarning, match="pretrained=True") as found:
        nero.Nero(make())
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nero.Nero(make(), pretrained=False)
        nero.Nero(make(), pretrained=True)
        nero.Nero(nero.balance_(make()))
        nero.Nero(Adapted())


def test_warning_names_only_what_balancing_moves():
    adapted = nn.ModuleDict({"lora_B": nn.Linear(3, 5, bias=False), "modules_to_save": nn.Linear(3, 5, bias=False)})
    nn.init.zeros_(adapted["lora_B"].weight)
    with pytest.warns(UserWarning, match=r"the values of modules_to_save\.weight are pretrained"):
        nero.Nero(adapted)


def test_random_factors_of_adalora_are_not_taken_for_pretrained():
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(
            nn.Sequential(nn.Linear(6, 8)), peft.AdaLoraConfig(target_modules=["0"], total_step=10)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nero.Nero(model)
    trained = nn.ModuleDict({"lora_B": nn.Linear(3, 5, bias=False), "lora_E": nn.Linear(1, 3, bias=False)})
    with pytest.warns(UserWarning, match="lora_B"):
        nero.Nero(trained)


def test_adapter_of_an_embedding_grows_word_by_word():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Embedding(10, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["0"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimiser = nero.Nero(model, lr=0.1)
    model(torch.tensor([2, 7])).sum().backward()
    optimiser.step()
    factor = model.get_parameter("base_model.model.0.lora_embedding_A.default")
    lengths = torch.zeros(10).index_fill(0, torch.tensor([2, 7]), 0.1)
    torch.testing.assert_close(factor.detach().norm(dim=0), lengths)


def test_transformers_marks_what_it_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    nero.Nero(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="pretrained=True"):
        nero.Nero(transformers.LlamaForCausalLM.from_pretrained(tmp_path))


def test_unfreezing_warns_once_where_it_changes_the_function():
    model = nn.Sequential(nn.Linear(6, 8).requires_grad_(False), nn.Linear(8, 2))
    for choice in (False, True, None):
        network = copy.deepcopy(model)
        optimiser = nero.Nero(network, pretrained=choice)
        network[0].requires_grad_(True)
        fill_grads(network, 0)
        torch.optim.lr_scheduler.StepLR(optimiser, 1)  # wraps step()
        if choice is None:
            with pytest.warns(UserWarning, match="unfrozen.*pretrained=True") as found:
                optimiser.step()
            assert found[0].filename == __file__
        optimiser.step()


@pytest.mark.parametrize("choice", [None, True, False])
def test_weights_loaded_after_the_optimiser_warn_where_the_step_balances_them(choice: bool | None):
    model, trained = nn.Linear(6, 8), nn.Linear(6, 8)
    optimiser = nero.Nero(model, pretrained=choice)
    model.load_state_dict(trained.state_dict())
    fill_grads(model, 0)
    if choice is None:
        with pytest.warns(UserWarning, match="the values of weight are new since nero.Nero balanced them"):
            optimiser.step()
    optimiser.step()


@pytest.mark.parametrize("fix_norm", [True, False])
def test_weights_loaded_into_zero_neurons_warn_and_are_held_as_any(fix_norm: bool):
    table, head = nn.Embedding(10, 6, padding_idx=0), nn.Linear(6, 8, bias=False)
    nn.init.zeros_(head.weight)
    model = nn.Sequential(table, head)
    optimiser = nero.Nero(model, fix_norm=fix_norm)
    with torch.no_grad():
        head.weight.copy_(torch.arange(48).reshape(8, 6))
        table.weight[1:] = 3 * table.weight[1:] + 1
    fill_grads(model, 0)
    with pytest.warns(UserWarning, match="the values of 0.weight and 1 more are new since"):
        optimiser.step()
    usual = 1.0 if fix_norm else torch.inf
    assert optimiser.state[table.weight]["radius"].flatten().tolist() == [-1.0] + 9 * [usual]
    assert optimiser.state[head.weight]["radius"].flatten().tolist() == 8 * [usual]
    assert nero.is_balanced(head) == fix_norm


def test_short_rows_loaded_into_zero_neurons_are_silent_and_stay_short():
    layer = nn.Linear(6, 8)
    nn.init.zeros_(layer.weight)
    optimiser = nero.Nero(layer)
    with torch.no_grad():
        layer.weight.copy_(nero.balance_(nn.Linear(6, 8)).weight / 10)  # as LoRA's B after a few steps
    fill_grads(layer, 0)
    optimiser.step()
    assert bool((layer.weight.norm(dim=1) < 0.2).all())


def test_balanced_or_frozen_weights_loaded_after_the_optimiser_are_silent():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(6, 8))
    optimiser = nero.Nero(model)
    model[0].load_state_dict(nero.balance_(nn.Linear(6, 8)).state_dict())
    model[1].requires_grad_(False).load_state_dict(nn.Linear(6, 8).state_dict())
    fill_grads(model[0], 0)
    optimiser.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_max_norm_clips_are_silent_and_turn(dtype: torch.dtype):
    table = nn.Embedding(10, 64, padding_idx=0, max_norm=0.5, dtype=dtype)
    optimiser, rows = nero.Nero(table), torch.tensor([0, 3, 5])
    for _ in range(2):
        before = table(rows)[1:].detach().clone()
        table(rows).square().sum().backward()
        optimiser.step()
        assert not torch.equal(table(rows)[1:], before)


def test_state_read_again_in_inference_mode_works_outside():
    layer = nn.Linear(6, 8)
    optimiser = nero.Nero(layer)
    nn.init.zeros_(layer.weight)
    fill_grads(layer, 0)
    with torch.inference_mode():
        optimiser.step()
    optimiser.step()
    assert layer.weight.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"fix_norm": False, "fix_mean": False}, {"pretrained": True}], ids=str)
def test_weights_set_to_zero_after_the_optimiser_step_as_if_before(options: dict[str, Any]):
    def trained(is_first: bool) -> Tensor:
        layer = nn.Linear(6, 8)
        if is_first:
            nn.init.zeros_(layer.weight)
        optimiser = nero.Nero(layer, **options)
        nn.init.zeros_(layer.weight)
        for _ in range(3):
            fill_grads(layer, 0)
            optimiser.step()
        return layer.weight.detach()

    torch.testing.assert_close(trained(False), trained(True), rtol=0, atol=0)


def test_cleared_state_warns_before_it_stretches_grown_neurons():
    layer = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(layer.weight)
    optimiser = nero.Nero(layer)
    fill_grads(layer, 0)
    optimiser.step()
    optimiser.state.clear()
    with pytest.warns(UserWarning, match="the values of weight are new to nero.Nero"):
        optimiser.step()


def test_tensor_subclass_that_wraps_others_is_balanced():
    both = [torch.randn(4, 8), torch.randn(4, 8)]
    weight = nn.Parameter(TwoTensor(*both))
    nero.Nero([weight])
    for part, before in zip((weight.a, weight.b), both, strict=True):
        centred = before - before.mean(1, keepdim=True)
        torch.testing.assert_close(part, centred / centred.norm(dim=1, keepdim=True))
