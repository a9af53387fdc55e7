"""Measurements leave a model exactly as it was."""

import pytest
import torch
from networks import perceptron, weights_of
from torch import Tensor, nn

import nero
from nero import theory


class BufferWriter(nn.Module):
    """A layer that writes to, replaces, fills and adds buffers in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("filled", None)
        self.register_buffer("wide", torch.ones(1).expand(5))  # expanded, so not writable

    def forward(self, inputs: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + 1
        self.filled = torch.ones(3)
        self.register_buffer("added", torch.ones(3))
        return self.layer(inputs)


MEASUREMENTS = [
    lambda model, x: theory.relative_change(model, lambda model: model(x).square().sum(), {"layer.weight": x[:1]}),
    lambda model, x: theory.preactivations(model, x),
    lambda model, x: theory.robustness(model, (x, (x[:, 0] > 0).long()), fix_mean=False, rotations=2, examples=1),
    lambda model, x: nero.depth_of(model, x),
]


@pytest.mark.parametrize("measure", MEASUREMENTS)
def test_buffers_written_replaced_or_added_are_restored(measure):
    model = BufferWriter()
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    before = dict(model.named_buffers())
    measure(model, torch.tensor([[1.0, 1.0], [-1.0, 0.0]]))
    after = dict(model.named_buffers())
    assert list(after) == list(before) == ["written", "replaced", "wide"]
    assert all(after[name] is buffer for name, buffer in before.items())
    assert (model.written, model.replaced, model.filled) == (0, 0, None)


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, x, _: theory.relative_change(model, lambda model: model(x).square().sum(), weights_of(model)),
        lambda model, x, y: theory.robustness(model, (x, y), rotations=2, examples=1),
        lambda model, x, _: theory.preactivations(model, x),
    ],
)
def test_pending_backward_is_not_disturbed(measure):
    torch.manual_seed(0)
    model = nero.balance_(perceptron(4, 5, 3))
    inputs = torch.randn(6, 4, dtype=torch.float64)
    outputs = model(inputs)
    measure(model, inputs, outputs.argmax(1))
    outputs.square().sum().backward()
    found = [each.grad for each in model.parameters()]
    wanted = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, list(wanted), rtol=1e-12, atol=1e-14)


class Float32Output(nn.Linear):
    """A linear layer that returns float32 under autocast."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).float()


def test_autocast_sees_the_overwritten_weights():
    torch.manual_seed(0)
    model = nero.balance_(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Float32Output(16, 3)))
    inputs = torch.randn(20, 8)

    def loss(model: nn.Module) -> Tensor:
        return model(inputs)[:, 0].square().mean()

    step = {"0.weight": 0.3 * model[0].weight.detach()}
    apart = theory.relative_change(model, loss, step).layers
    with torch.autocast("cpu", torch.bfloat16):
        labels = model(inputs).argmax(1)  # caches the cast weights
        together = theory.relative_change(model, loss, step).layers
        found = theory.robustness(model, (inputs, labels), rotations=4, examples=4)
        again = model(inputs).argmax(1)
    assert [row.change for row in together] == pytest.approx([row.change for row in apart], rel=0.1, abs=0.02)
    assert found.upper is not None
    assert found.upper < 0.5
    assert torch.equal(again, labels)


class SparseGraph(nn.Module):
    """A layer with a sparse buffer, which its forward pass may write to."""

    def __init__(self, edges: Tensor, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(2, 1, bias=False), writes
        self.register_buffer("edges", edges)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.writes:
            self.edges.mul_(0.5)
        return self.layer(inputs + (self.edges @ torch.ones(2, 1)).sum())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("layout", "writes"), [("to_sparse", False), ("to_sparse", True), ("to_sparse_csr", False)])
@pytest.mark.parametrize("measure", MEASUREMENTS)
def test_sparse_buffers_are_restored(measure, layout: str, writes: bool):
    model = SparseGraph(getattr(torch.eye(2), layout)(), writes)
    with torch.no_grad():
        model.layer.weight.copy_(torch.tensor([[1.0, 0.0]]))
    measure(model, torch.tensor([[9.0, 1.0], [-9.0, 0.0]]))
    assert torch.equal(model.edges.to_dense(), torch.eye(2))
    assert torch.equal(model.layer.weight, torch.tensor([[1.0, 0.0]]))
    assert model.training


class MergingLinear(nn.Linear):
    """A layer that merges weights in train() and eval()."""

    merged = False

    def train(self, mode: bool = True) -> "MergingLinear":
        if self.merged == mode:
            self.weight.data.mul_(2 if self.merged else 0.5)
            self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("mode", [True, False])
def test_modes_are_restored_without_calling_train(mode: bool):
    torch.manual_seed(0)
    model = nero.balance_(nn.Sequential(MergingLinear(4, 3, bias=False), nn.Dropout(0.9)).double()).train(mode)
    model[1].training = True  # another mode than the rest
    inputs, before = torch.randn(6, 4, dtype=torch.float64), weights_of(model)
    theory.robustness(model, (inputs, model[0](inputs).argmax(1)), rotations=8, examples=2)
    assert [each.training for each in model.modules()] == [mode, mode, True]
    assert model[0].merged is not mode
    assert torch.equal(model[0].weight, before["0.weight"])
