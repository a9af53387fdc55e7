"""Data and models for which robustness is undefined."""

import pytest
import torch
from theory_networks import limit_runs, solved_problem
from torch import Tensor, nn

import nero
from nero import theory


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda x, y: (x[:0], y[:0]), ValueError, "at least one, got 0 and 0"),
        (lambda x, y: (x[:3], y), ValueError, "as many inputs as labels, .*got 3 and 6"),
        (lambda x, _: x, TypeError, "a pair of tensors"),
        (lambda x, y: (x.sum(), y), TypeError, "inputs must have one example per row"),
        (lambda x, y: (x.double(), y), ValueError, r"fails on an example of torch\.float64 and shape \(1, 4\): "),
        (lambda x, y: (x[:, :3], y), ValueError, r"fails on an example of torch\.float32 and shape \(1, 3\): "),
        (lambda x, y: (x, y.tolist()), TypeError, "a pair of tensors"),
        (lambda x, y: (x, y.float()), TypeError, "labels must be integers"),
        (lambda x, y: (x, y + 2), ValueError, "labels must be from 0 to 2 for a model of 3 outputs"),
        (lambda x, y: (x, y - 1), ValueError, "labels must be from 0 to 2 for a model of 3 outputs"),
        (lambda x, y: (x, (y + 1) % 3), ValueError, "makes 6 errors on 6 examples, .*Definition 6.$"),
        (
            lambda x, y: (torch.cat([x, x[:1]]), torch.cat([y, (y[:1] + 1) % 3])),
            ValueError,
            "1 errors on 7 examples.*equal inputs have different labels",
        ),
    ],
)
def test_data_that_is_not_solved_raises(data, error, message):
    model, inputs, labels = solved_problem()
    with pytest.raises(error, match=message):
        theory.robustness(model, data(inputs, labels))


def test_tokens_are_accepted_as_examples():
    torch.manual_seed(0)
    model = nero.balance_(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
    tokens = torch.arange(5)
    labels = model(tokens).argmax(1)
    assert theory.robustness(model, (tokens, labels), rotations=2, examples=1).upper is not None
    with pytest.raises(ValueError, match=r"makes 5 errors on 5 examples, .*Definition 6.$"):
        theory.robustness(model, (tokens, 1 - labels))
    with pytest.raises(ValueError, match="equal inputs have different labels"):
        theory.robustness(model, (tokens[[0, 0]], torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=r"torch\.int64 and shape \(1,\): index out of range"):
        theory.robustness(model, (tokens + 5, labels))


def test_more_classes_than_outputs_raise():
    for labels in ([0, 1, 2], [0, 1, -1]):
        with pytest.raises(ValueError, match=r"model of one output, got .* an output for each class"):
            theory.robustness(nero.balance_(nn.Linear(4, 1)), (torch.randn(3, 4), torch.tensor(labels)))


def test_outputs_that_are_not_one_row_per_example_raise():
    with pytest.raises(TypeError, match="one row of outputs per example"):
        theory.robustness(nero.balance_(nn.Conv1d(2, 3, 2)), (torch.randn(4, 2, 5), torch.zeros(4).long()))


class SignedRoot(nn.Module):
    """A signed square root whose gradient is NaN, from the branch that is not taken."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.where(inputs > 0, inputs.sqrt(), -(-inputs).sqrt())


@pytest.mark.parametrize(("activation", "scale"), [(SignedRoot(), 1.0), (nn.ReLU(), 2e38)], ids=["root", "overflow"])
def test_margin_with_nonfinite_gradient_raises(activation: nn.Module, scale: float):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), activation, nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    data = torch.tensor([[scale, scale], [scale, -scale]]), torch.zeros(2).long()
    limit_runs(model)
    with pytest.raises(ValueError, match=r"gradient of '0\.weight', in the margin of example \d, .*NaN or infinite"):
        theory.robustness(model, data, fix_mean=False, rotations=4, examples=2, steps=2)


@pytest.mark.parametrize("closed", [torch.no_grad(), torch.inference_mode()], ids=["no_grad", "inference_mode"])
def test_model_that_runs_without_gradients_raises(closed):
    class Closed(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            with closed:
                return super().forward(inputs)

    model = nero.balance_(Closed(4, 3))
    inputs = torch.randn(6, 4)
    with pytest.raises(ValueError, match=r"have no gradient: .* without torch\.no_grad"):
        theory.robustness(model, (inputs, model(inputs).argmax(1)), rotations=4)


def test_neurons_off_centre_or_too_coarse_raise():
    _, inputs, labels = solved_problem()
    with pytest.raises(ValueError, match=r"means .* are not zero.*nero\.balance_.*fix_mean=False"):
        theory.robustness(nn.Linear(4, 3), (inputs, labels))
    with pytest.raises(TypeError, match=r"bfloat16, too coarse for angles: call model\.float\(\)"):
        theory.robustness(nn.Linear(4, 3).bfloat16(), (inputs, labels))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"bfloat16, too coarse .* autocast"):
        theory.robustness(nero.balance_(nn.Linear(4, 3)), (inputs, labels))
