"""lr="auto" where the whole model does not run by itself: in parts, in a closure, compiled, and under torch.func."""

import copy

import pytest
import torch
from networks import X, uniform_perceptron
from torch import nn

import nero
from nero.auto.depth import LONGEST_STEP, TRUST


class Trainee(nn.Module):
    """A module whose training_step runs its parts, and whose forward pass never runs, as with Lightning."""

    def __init__(self, **parts: nn.Module):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        for name, part in parts.items():
            self.add_module(name, part)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        for part in self.children():
            batch = part(batch).tanh()
        return (self.scale * batch).square().mean()


def two_parts() -> Trainee:
    return Trainee(encoder=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), decoder=nn.Linear(8, 8))


@pytest.mark.parametrize("compiled", [False, True])
def test_shell_that_never_runs_is_counted_by_its_network(compiled: bool):
    trainee = Trainee(network=nn.Sequential(uniform_perceptron(3)))
    if compiled:
        trainee.network.compile(backend="eager")
    call = trainee.network._compiled_call_impl
    optimiser = nero.Nero(trainee, lr="auto")
    trainee.training_step(X).backward()
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}
    assert not any(module._forward_pre_hooks for module in trainee.modules())
    assert trainee.network._compiled_call_impl is call


def test_closure_counts_the_parts_that_it_runs():
    """The depth is that of the loss. The closure runs once, and its backward pass does not count."""
    trainee, runs = two_parts(), []
    optimiser = nero.Nero(trainee, lr="auto")
    twin = copy.deepcopy(trainee)
    reference = nero.Nero(twin, lr=TRUST / 3, longest_step=LONGEST_STEP)

    def closure() -> torch.Tensor:
        runs.append(1)
        optimiser.zero_grad()
        loss = trainee.training_step(X)
        loss.backward()
        return loss

    loss = optimiser.step(closure)
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}
    assert len(runs) == 1
    expected = twin.training_step(X)
    expected.backward()
    reference.step()
    torch.testing.assert_close(loss, expected)
    for one, other in zip(trainee.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_closure_that_cannot_be_traced_raises_after_it():
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(_, value):
            return torch.tensor(2 * value.item())

        @staticmethod
        def backward(_, grad):
            return grad * 2

    trainee = two_parts()
    optimiser = nero.Nero(trainee, lr="auto")

    def closure() -> torch.Tensor:
        loss = Hidden.apply(trainee.training_step(X)) * 3
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="cannot be traced"):
        optimiser.step(closure)
    assert trainee.decoder.weight.grad is not None


def test_parts_run_without_closure_raise_and_name_the_model():
    trainee = two_parts()
    optimiser = nero.Nero(trainee, lr="auto")
    trainee.training_step(X).backward()
    with pytest.raises(RuntimeError, match=r"Trainee has not run with gradients.*training_step"):
        optimiser.step()


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["torch.compile", "torch.compile of a model without a length", "compile", "a part"])
def test_model_compiled_before_is_counted_uncompiled(how: str):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    backend, model = CompileCounter(), uniform_perceptron(3)
    if how in ("compile", "torch.compile of a model without a length"):
        model = Trainee(network=model)  # dynamo skips the forward pass of torch's own modules
        model.forward = model.training_step
    if how == "compile":
        model.compile(backend=backend)
    if how.startswith("torch.compile"):
        model = torch.compile(model, backend=backend)
    if how == "a part":
        model[0] = torch.compile(model[0], backend=backend)
    optimiser = nero.Nero(model, lr="auto")
    for _ in range(2):
        model(X).sum().backward()
        optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}
    assert backend.frame_count == 1


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["torch.compile", "compile"])
def test_model_compiled_after_raises_and_names_the_cause(how: str):
    torch._dynamo.reset()
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    if how == "compile":
        model.compile(backend="eager", fullgraph=True)
    compiled = model if how == "compile" else torch.compile(model, backend="eager", fullgraph=True)
    compiled(X).sum().backward()
    with pytest.raises(RuntimeError, match="ran compiled"):
        optimiser.step()
    if how == "torch.compile":
        model(X)  # as the error says
        optimiser.step()


@pytest.mark.parametrize("is_mapped", [False, True])
def test_model_under_torch_func_raises_then_counts(is_mapped: bool):
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    parameters = dict(model.named_parameters())
    loss = lambda given: torch.func.functional_call(model, given, (X,)).sum()  # noqa: E731
    if is_mapped:
        torch.vmap(model)(X).sum().backward()
    else:
        for name, grad in torch.func.grad(loss)(parameters).items():
            parameters[name].grad = grad
    with pytest.raises(RuntimeError, match=r"within torch\.func or torch\.vmap"):
        optimiser.step()
    model(X)  # as the error says
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}
