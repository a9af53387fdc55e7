"""A saved and resumed run equals the undisturbed one, bit for bit on a CPU."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nero

LAYERS = {
    "linear": lambda: nn.Linear(40, 9),
    "wide linear": lambda: nn.Linear(600, 5),
    "conv": lambda: nn.Conv2d(6, 8, 3),
    "transposed conv": lambda: nn.ConvTranspose2d(6, 8, 3, groups=2),
    "embedding": lambda: nn.Embedding(30, 16, padding_idx=0),
}
ORDERS = ("load model, build, load optimiser", "build, load model, load optimiser", "build, load optimiser, load model")


def train(model: nn.Module, optimiser: nero.Nero, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimiser.step()


def resumed(make, order: str, saved: tuple[dict, dict], **options: object) -> tuple[nn.Module, nero.Nero]:
    """Load a checkpoint into a new model and optimiser."""
    torch.manual_seed(99)
    model, optimiser = make(), None
    for action in order.split(", "):
        if action == "build":
            optimiser = nero.Nero(model, **options)
        elif action == "load model":
            model.load_state_dict(saved[0])
        else:
            optimiser.load_state_dict(saved[1])
    return model, optimiser


def bits(model: nn.Module, optimiser: nero.Nero) -> list[Tensor]:
    state = [value for parameter in model.parameters() for value in optimiser.state[parameter].values()]
    return [*(parameter.detach() for parameter in model.parameters()), *state]


@pytest.mark.parametrize(("order", "fix_norm"), [*((order, True) for order in ORDERS), (ORDERS[0], "initial")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_resumed_run_equals_undisturbed(dtype: torch.dtype, order: str, fix_norm: bool | str, backend: str):
    def make() -> nn.Module:
        return nn.Sequential(*(make_layer() for make_layer in LAYERS.values())).to(dtype)

    torch.manual_seed(0)
    model = make()
    optimiser = nero.Nero(model, lr=0.02, fix_norm=fix_norm, backend=backend)
    train(model, optimiser, range(3))
    saved = copy.deepcopy((model.state_dict(), optimiser.state_dict()))
    train(model, optimiser, range(3, 6))
    other, resumed_optimiser = resumed(make, order, saved, lr=0.02, fix_norm=fix_norm, backend=backend)
    train(other, resumed_optimiser, range(3, 6))
    for found, wanted in zip(bits(other, resumed_optimiser), bits(model, optimiser), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rebuilt_optimiser_keeps_the_weights(dtype: torch.dtype, backend: str):
    torch.manual_seed(0)
    model = nn.Sequential(*(make() for make in LAYERS.values())).to(dtype)
    optimiser = nero.Nero(model, backend=backend)
    for steps in (range(1), range(1, 4)):
        train(model, optimiser, steps)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        nero.Nero(model, backend=backend)
        nero.balance_(model)
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_checkpoint_of_version_0_1_0_loads():
    saved = torch.load(Path(__file__).parents[1] / "data/checkpoint-0.1.0.pt", weights_only=True)

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2))

    model, optimiser = resumed(make, ORDERS[0], (saved["model"], saved["optimiser"]), lr=0.02, fix_norm="initial")
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimiser.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, saved["after"][name], rtol=1e-5, atol=1e-6)
