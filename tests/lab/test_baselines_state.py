"""State, checkpoints and CUDA graphs of the baselines, and learning rates as tensors."""

import copy
import io

import pytest
import torch
from lab.baseline_cases import OTHERS, assert_close, equal, flat, give_gradients, network, others, run
from torch import Tensor, nn

import nero
from nero_lab.baselines import Lamb, Madam, make, prime


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_load_state_of_other_shape_raises(make_one):
    one, other = (make_one([nn.Parameter(torch.ones(size))]) for size in (8, 64))
    with pytest.raises(ValueError, match=r"of shape \(8,\) does not fit a parameter of shape \(64,\)"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("name", "options"), [*OTHERS, ("nero", {}), ("nero", {"fixed_scale": True})], ids=str)
def test_lr_tensor_steps_like_float(name: str, options: dict, shape: tuple[int, ...]):
    lr = 2.0**-6  # exact in float32
    models = network(), network()
    number, tensor = make(name, models[0], lr, **options), make(name, models[1], torch.full(shape, lr), **options)
    assert_close(run(tensor, models[1], range(3)), run(number, models[0], range(3)))
    for group in number.param_groups:
        group["lr"] = lr / 4
    for rate in {id(group["lr"]): group["lr"] for group in tensor.param_groups}.values():
        rate.div_(4)
    assert_close(run(tensor, models[1], range(3, 5)), run(number, models[0], range(3, 5)))
    number.param_groups[0]["lr"], tensor.param_groups[0]["lr"] = 0.0, torch.zeros(shape)
    assert_close(run(tensor, models[1], range(5, 6)), run(number, models[0], range(5, 6)))


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_lr_tensor_float64_steps_float32_weights(make_one):
    models = network(), network()
    rates = torch.tensor(0.25), torch.tensor(0.25, dtype=torch.float64)
    assert_close(
        *(run(make_one(each.parameters(), lr=lr), each, range(3)) for each, lr in zip(models, rates, strict=True))
    )


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_state_exists_before_first_step_and_stays(make_one):
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
def test_checkpoint_resumes_with_equal_bits(name: str, options: dict, balanced: bool):
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


def test_madam_checkpoint_restores_limit():
    weight = nn.Parameter(torch.ones(4))
    saved = Madam([weight]).state_dict()
    grown = nn.Parameter(torch.full((4,), 50.0))
    optimiser = Madam([grown])
    optimiser.load_state_dict(saved)
    grown.grad = torch.zeros(4)
    optimiser.step()
    assert flat(grown) == [3.0] * 4


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_load_state_dict_leaves_checkpoint_unchanged(make_one):
    models = network(), network()
    one, other = (make_one(each.parameters()) for each in models)
    run(one, models[0], range(2))
    other.load_state_dict(one.state_dict())
    before = copy.deepcopy(one.state_dict()["state"])
    run(other, models[1], range(2))
    for key, state in one.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(before[key][name])) for name in state)


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_deepcopy_steps_independently(make_one):
    model = network()
    optimiser = make_one(model.parameters())
    run(optimiser, model, range(2))
    other, twin = copy.deepcopy((model, optimiser))
    assert equal(run(optimiser, model, range(2, 4)), run(twin, other, range(2, 4)))


@pytest.mark.parametrize("make_one", [Lamb, Madam])
def test_closure_runs_with_grad_enabled(make_one):
    weight = nn.Parameter(torch.ones(3))
    optimiser = make_one([weight], lr=0.1)

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimiser.step(closure) == 3
    assert bool((weight < 1).all())


@pytest.mark.parametrize("balanced", [False, True])
@others
def test_prime_then_steps_equal_unprimed_steps(name: str, options: dict, balanced: bool):
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
        assert len(optimisers[1].state) == len(list(model.parameters())) - 2, "frozen parameters have no state"
    made = {id(value) for state in optimisers[1].state.values() for value in state.values()}
    model["norm"].requires_grad_(True)
    assert equal(*(run(optimiser, each, range(5)) for optimiser, each in zip(optimisers, models, strict=True)))
    assert made <= {id(value) for state in optimisers[1].state.values() for value in state.values()} or name == "sgd"
    assert nero.is_balanced(model) == (balanced and name != "madam")  # Madam multiplies: zeros stay zero


def test_prime_with_state_changes_nothing():
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
def test_cuda_graph_captures_first_step(name: str, options: dict, balanced: bool):
    """The captured step does not wait for the device, and the rate changes between replays."""
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
    for step in (1, 3, 4, 5):  # steps at which every parameter has a gradient
        give_gradients(models[0], step)
        plain.param_groups[0]["lr"] = 0.02 / step
        plain.step()
        lr.fill_(0.02 / step)
        for here, there in zip(models[0].parameters(), models[1].parameters(), strict=True):
            there.grad.copy_(here.grad)
        graph.replay()
    for here, there in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=1e-4, atol=1e-5)
