"""A program of someone who runs ``mypy --strict``: mypy checks this file, and pytest runs it.

Every line with ``type: ignore`` must be an error, since mypy reports an ignore that it does not need.
"""

import pytest
import torch
from torch import Tensor

import nero
from nero import Nero, Role, describe


def make_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def test_typed_program_trains_in_torch() -> None:
    model = make_model()
    optimiser = Nero(model, lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, 10)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss: Tensor = model(torch.ones(4, 8)).square().mean()
        torch.autograd.backward(loss)
        return loss

    loss: Tensor = optimiser.step(closure)
    number: float = optimiser.step(lambda: closure().item())
    assert number < loss.item()
    optimiser.step()
    scheduler.step()
    optimiser.load_state_dict(optimiser.state_dict())
    for group in optimiser.param_groups:
        group["lr"] = 0.5 * group["lr"]
    watch: nero.Watch = nero.watch(optimiser)
    assert str(watch)


def test_typed_program_makes_groups_and_describes() -> None:
    model = make_model()
    roles: dict[str, Role] = nero.roles_of(model)
    groups = nero.param_groups(model, overrides={"0.weight": "neuron"})
    groups[0]["lr"] = 0.02
    Nero(groups, lr=0.01)
    Nero(model, lr="auto", fix_norm="initial")
    Nero(model.parameters())
    Nero(model.named_parameters(), lr=torch.tensor(0.01))
    Nero([{"params": model.parameters(), "lr": 0.1}])
    table: nero.Description = describe(model)
    assert all(name in str(table) for name in roles)
    depth: float = nero.depth_of(model, torch.ones(1, 8))
    assert depth == 2


def test_typed_program_balances_another_optimiser() -> None:
    model = make_model()
    adam = torch.optim.Adam(model.parameters())
    handle = nero.balance_after_step(adam, model)
    handle.remove()
    nero.balance_(model)
    balanced: bool = nero.is_balanced(model)
    assert balanced
    nero.centred_weight_norm(torch.nn.Linear(3, 3))
    assert nero.theory is not None  # found without an import of its own


def test_typed_program_trains_in_jax() -> None:
    pytest.importorskip("optax", reason="needs the extra jax")
    import jax.numpy as jnp

    import nero.jax

    params = nero.jax.balance({"kernel": jnp.eye(8, 4), "bias": jnp.zeros(4)})
    optimiser = nero.jax.nero(learning_rate=0.01)
    updates, _ = optimiser.update(params, optimiser.init(params), params)
    balanced: bool = nero.jax.is_balanced(params)
    assert balanced
    assert updates.keys() == params.keys()


def test_typed_program_with_wrong_types_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="lr must be"):
        Nero(model, lr=[0.01])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fix_norm must be"):
        Nero(model, fix_norm="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Nero(model, 0.01, 0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        nero.balance_after_step(model, model)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        _ = nero.nothing  # type: ignore[attr-defined]
    text: str = nero.is_balanced(model)  # type: ignore[assignment]
    loss: str = Nero(model).step(lambda: 1.0)  # type: ignore[assignment]
    assert not any(isinstance(each, str) for each in (text, loss))
