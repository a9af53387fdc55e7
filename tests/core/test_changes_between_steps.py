"""Changes by users between steps, without a call of ours: tensors, gradients, state and groups, on every backend."""

import copy
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor, nn

import nero

Change = Callable[[nn.Linear, nero.Nero], object]
TOLERANCE = 1e-5


def device_of(backend: str) -> str:
    return "cuda" if backend == "triton" and not INTERPRETED else "cpu"


def build(backend: str, momentum: float = 0.9) -> tuple[nn.Linear, nero.Nero]:
    torch.manual_seed(0)
    layer = nn.Linear(24, 16).to(device_of(backend))
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.02}]
    return layer, nero.Nero(groups, backend=backend, momentum=momentum)


def random(parameter: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator).to(parameter.device)


def step(layer: nn.Linear, optimiser: nero.Nero, seed: int, layout: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
    """Step with new gradients, then with the same tensors."""
    for parameter in layer.parameters():
        parameter.grad = layout(random(parameter, seed))
    for _ in range(2):
        optimiser.step()


def numbers(layer: nn.Linear, optimiser: nero.Nero) -> list[Tensor]:
    found = list(layer.parameters())
    for state in map(optimiser.state.get, layer.parameters()):
        assert state is not None
        found += [state[key] for key in sorted(state)]
    return [each.detach().cpu().clone() for each in found]


def check(backend: str, run: Callable[[str], list[Tensor]]) -> None:
    """Compare a run with the same run by the plain rule, which keeps nothing from step to step."""
    for found, wanted in zip(run(backend), run("eager"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def misaligned(tensor: Tensor) -> Tensor:
    bucket = torch.zeros(tensor.numel() + 1, device=tensor.device)
    return bucket[1:].view(tensor.shape).copy_(tensor)


def across(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.clone()


def with_gaps(tensor: Tensor) -> Tensor:
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], device=tensor.device)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


LAYOUTS = [Tensor.clone, misaligned, across, with_gaps]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_swapped_is_followed(backend: str, layout: Callable[[Tensor], Tensor]):
    def run(backend: str) -> list[Tensor]:
        layer, optimiser = build(backend)
        step(layer, optimiser, 1)
        for parameter in layer.parameters():
            parameter.data = layout(parameter.data)
        step(layer, optimiser, 2)
        return numbers(layer, optimiser)

    check(backend, run)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch casts every gradient to the parameter's dtype")
def test_dtype_changed_at_the_same_address_is_followed(backend: str):
    """A view of the old memory in half precision, with gradients of the old dtype."""

    def run(backend: str) -> list[Tensor]:
        layer, optimiser = build(backend)
        step(layer, optimiser, 1)
        bias, memory = layer.bias, layer.bias.data
        layer.zero_grad()
        bias.data = memory.view(torch.bfloat16)[: len(memory)].copy_(memory.clone())
        bias.grad_dtype = torch.float32
        behind = memory[len(memory) // 2 :].clone()
        step(layer, optimiser, 2)
        assert torch.equal(memory[len(memory) // 2 :], behind), "memory behind the parameter was written"
        return [layer.weight.detach().cpu().clone(), optimiser.state[bias]["grad_norm"].cpu().clone()]

    check(backend, run)


@pytest.mark.parametrize("layout", [*LAYOUTS, lambda grad: torch._neg_view(-grad)])
def test_gradient_in_another_layout_is_followed(backend: str, layout: Callable[[Tensor], Tensor]):
    def run(backend: str) -> list[Tensor]:
        layer, optimiser = build(backend)
        for seed, form in enumerate([Tensor.clone, layout, Tensor.clone, layout]):
            step(layer, optimiser, seed, form)
        return numbers(layer, optimiser)

    check(backend, run)


def drop_gradient(layer: nn.Linear, _: nero.Nero) -> None:
    layer.bias.grad = None


def freeze(layer: nn.Linear, _: nero.Nero) -> None:
    layer.weight.requires_grad_(False)


def swap_gradient_data(layer: nn.Linear, _: nero.Nero) -> None:
    assert layer.weight.grad is not None
    layer.weight.grad.data = random(layer.weight, 7)


def share_gradient(layer: nn.Linear, _: nero.Nero) -> None:
    layer.weight.grad = layer.weight.detach().clone()[:1].expand(16, 24)


def exchange_groups(_: nn.Linear, optimiser: nero.Nero) -> None:
    """Exchange the dicts of the groups."""
    optimiser.param_groups.reverse()


def move_to_group(layer: nn.Linear, optimiser: nero.Nero) -> None:
    optimiser.param_groups[0]["params"] = []
    optimiser.param_groups[1]["params"] = [layer.bias, layer.weight]


@pytest.mark.parametrize(
    "change", [drop_gradient, freeze, swap_gradient_data, share_gradient, exchange_groups, move_to_group]
)
def test_change_before_a_step_is_followed(backend: str, change: Change):
    def run(backend: str) -> list[Tensor]:
        layer, optimiser = build(backend)
        step(layer, optimiser, 1)
        change(layer, optimiser)
        optimiser.step()
        optimiser.step()
        layer.weight.requires_grad_()
        step(layer, optimiser, 2)
        return numbers(layer, optimiser)

    check(backend, run)


def replace_entries(layer: nn.Linear, optimiser: nero.Nero) -> None:
    for key, value in optimiser.state[layer.weight].items():
        optimiser.state[layer.weight][key] = value * 2


def swap_state_data(_: nn.Linear, optimiser: nero.Nero) -> None:
    for state in optimiser.state.values():
        for value in state.values():
            value.data = value.data * 2


def replace_dict(layer: nn.Linear, optimiser: nero.Nero) -> None:
    optimiser.state[layer.weight] = {key: value * 2 for key, value in optimiser.state[layer.weight].items()}


def replace_state(_: nn.Linear, optimiser: nero.Nero) -> None:
    changed = {parameter: {key: value * 2 for key, value in own.items()} for parameter, own in optimiser.state.items()}
    optimiser.state = defaultdict(dict, changed)


def delete_buffer(layer: nn.Linear, optimiser: nero.Nero) -> None:
    del optimiser.state[layer.bias]["momentum_buffer"]


def clear(layer: nn.Linear, optimiser: nero.Nero) -> None:
    optimiser.state[layer.weight].clear()


def load(_: nn.Linear, optimiser: nero.Nero) -> None:
    saved = copy.deepcopy(optimiser.state_dict())
    for state in saved["state"].values():
        state["grad_norm"] *= 2
    optimiser.load_state_dict(saved)


STATE_CHANGES = [replace_entries, swap_state_data, replace_dict, replace_state, delete_buffer, clear, load]


@pytest.mark.parametrize(
    ("change", "is_read"), [*((change, True) for change in STATE_CHANGES), (replace_entries, False), (load, False)]
)
def test_state_changed_is_followed(backend: str, change: Change, is_read: bool):
    def run(backend: str) -> list[Tensor]:
        layer, optimiser = build(backend)
        if is_read:
            assert len(optimiser.state) == 2
        for seed in (1, 2):
            step(layer, optimiser, seed)
            change(layer, optimiser)
        step(layer, optimiser, 3)
        return numbers(layer, optimiser)

    check(backend, run)


def test_state_held_since_before_a_step_is_followed(backend: str):
    """A dict of the state, a checkpoint, and a shallow copy of the optimiser share the state's tensors."""

    def run(backend: str) -> list[Tensor]:
        layer, optimiser = build(backend)
        held = optimiser.state[layer.weight]
        step(layer, optimiser, 1)
        held["grad_norm"] = held["grad_norm"] * 2
        step(layer, optimiser, 2)
        optimiser.load_state_dict(optimiser.state_dict())
        saved = optimiser.state_dict()
        step(layer, optimiser, 3)
        saved["state"][0]["grad_norm"].data = saved["state"][0]["grad_norm"] * 2
        step(layer, optimiser, 4)
        twin = copy.copy(optimiser)
        step(layer, twin, 5)
        optimiser.state[layer.weight]["grad_norm"] = optimiser.state[layer.weight]["grad_norm"] * 2
        step(layer, twin, 6)
        return numbers(layer, twin)

    check(backend, run)


def test_checks_of_the_state_begin_when_it_is_read():
    layer, optimiser = build("eager")
    step(layer, optimiser, 1)
    assert not optimiser.skipped
    assert not optimiser._sight.is_seen
    saved = optimiser.state_dict()
    assert optimiser._sight.is_seen
    optimiser.load_state_dict(saved)
    assert not optimiser._sight.is_seen, "a loaded state is a copy"
    assert copy.copy(optimiser)._sight.is_seen
    assert optimiser._sight.is_seen


@pytest.mark.gpu
@pytest.mark.parametrize("is_data", [False, True], ids=["entries", "data"])
def test_optimiser_moved_to_the_cpu_and_back_steps(is_data: bool):
    def move(layer: nn.Linear, optimiser: nero.Nero, device: str) -> None:
        for parameter in layer.parameters():
            parameter.grad = None
            parameter.data = parameter.data.to(device)
        for state in optimiser.state.values():
            for key, value in state.items():
                if is_data:
                    value.data = value.data.to(device)
                else:
                    state[key] = value.to(device)

    def run(devices: tuple[str, ...]) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(24, 16).to(devices[0])
        optimiser = nero.Nero(layer, momentum=0.9)
        for seed, device in enumerate(devices):
            move(layer, optimiser, device)
            step(layer, optimiser, seed)
        return numbers(layer, optimiser)

    for found, wanted in zip(run(("cuda", "cpu", "cuda")), run(("cpu",) * 3), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
