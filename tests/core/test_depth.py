"""How deep a network is, and rates that fit it."""

import copy
import json
import math
import os
import pickle
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nero
from nero import theory
from nero.auto.depth import LONGEST_STEP, TRUST


def perceptron(layers=3, width=8):
    body = [each for _ in range(layers - 1) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 2))


class Block(nn.Module):
    """A way through some layers and one around them, with a norm behind or before, or without."""

    def __init__(self, layers, norm=None, width=8, alpha=1.0):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.before = NORMS[norm](width) if norm in NORMS else nn.Identity()
        self.behind = nn.LayerNorm(width) if norm == "behind" else nn.Identity()
        self.alpha = alpha

    def forward(self, inputs):
        return self.behind(torch.add(inputs, self.body(self.before(inputs)), alpha=self.alpha))


class ByHand(nn.Module):
    """A norm that no name tells."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, inputs):
        return self.gain * inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + 1e-6)


NORMS = {"before": nn.LayerNorm, "rms": nn.RMSNorm, "by hand": ByHand}


class Branches(nn.Module):
    """Two ways of different depth, side by side."""

    def __init__(self):
        super().__init__()
        self.short, self.long = nn.Linear(8, 8), perceptron(4)

    def forward(self, inputs):
        return torch.cat([self.short(inputs), self.long(inputs)], -1)


class Tied(nn.Module):
    """One table for what is read and what is written."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, words):
        return self.table(words) @ self.table.weight.T


def rms(*depths, shares=None):
    shares = shares or [1] * len(depths)
    return math.sqrt(sum(share * depth**2 for share, depth in zip(shares, depths, strict=True)) / sum(shares))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layers", [1, 2, 7, 50])
def test_layers_in_a_row_count_one_each(layers):
    assert nero.depth_of(perceptron(layers), X) == layers


def test_of_branches_the_deepest_counts():
    assert nero.depth_of(Branches(), X) == 4


@pytest.mark.parametrize("alpha", [1.0, 0.1, -2.0])
def test_a_sum_counts_each_branch_by_its_share(alpha):
    first, second, third = Block(2, alpha=alpha), Block(3, alpha=alpha), nn.Linear(8, 8)
    assert nero.depth_of(first, X) == 2  # what comes around it is the input
    both = nn.Sequential(first, second)
    hidden = first(X)
    shares = [each.square().mean().item() for each in (hidden, alpha * second.body(hidden))]
    assert nero.depth_of(both, X) == pytest.approx(rms(2, 5, shares=shares))
    assert nero.depth_of(nn.Sequential(*both, third), X) == pytest.approx(1 + rms(2, 5, shares=shares))


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e-24, torch.float32), (1e20, torch.float32), (1e36, torch.float32), (1e200, torch.float64)]
)
def test_shares_are_told_where_squares_leave_the_range(scale, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(Block(1), Block(1)).to(dtype)
    assert nero.depth_of(model, scale * X.to(dtype)) == pytest.approx(nero.depth_of(model, X.to(dtype)), rel=1e-5)


@pytest.mark.parametrize("by", [1e-6, 1e6, -3e38])
def test_what_no_layer_has_touched_does_not_count_in_a_sum(by):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron(3)

        def forward(self, inputs):
            return self.body(inputs) + by * torch.ones(2) - inputs[:, :2]

    assert nero.depth_of(Shifted(), X) == 3


def test_a_bias_by_hand_is_a_bias():
    class Layer(nn.Linear):
        def forward(self, inputs):
            return inputs @ self.weight.T + self.bias

    assert nero.depth_of(nn.Sequential(*(Layer(8, 8) for _ in range(10))), X) == 10


def test_norms_before_let_a_network_be_deeper_than_norms_behind():
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))

    def counted(norm, count):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(2, norm, width=64) for _ in range(count)))
        nero.balance_(model)
        return nero.depth_of(model, inputs)

    found = {norm: [counted(norm, count) for count in (4, 16, 64)] for norm in ("behind", *NORMS)}
    grown = {norm: [after - before for before, after in pairwise(each)] for norm, each in found.items()}
    assert grown["behind"] == pytest.approx([12, 48], rel=0.1)  # one a block: half of its layers
    for norm in NORMS:
        assert grown[norm] == pytest.approx([2 * math.log(4)] * 2, rel=0.2)  # with the logarithm of their count


def test_what_else_networks_are_made_of():
    images = torch.randn(2, 3, 8, 8)
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    convolutions(images)
    assert nero.depth_of(convolutions, images) == 2
    assert nero.depth_of(Tied(), torch.arange(4)) == 2
    normed = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), perceptron(2))
    assert nero.depth_of(normed, X) == 3
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0) for _ in range(3)]
    encoder = nn.Sequential(*layers)
    nero.balance_(encoder)
    found = nero.depth_of(encoder, X[None])
    assert 3 < found < 12  # of four layers in each: out of values, and two more
    assert nero.depth_of(encoder.eval(), X[None]) == pytest.approx(found)  # not as one operation


def test_counting_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(8), perceptron(2))
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    nero.depth_of(model, X)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="mat1"):
        nero.depth_of(model[1], torch.randn(2, 3))
    assert nero.depth_of(model, X) == 2


@pytest.mark.parametrize("trained", [False, True])
def test_counting_spends_no_inputs(trained):
    """Each is used up or written over by the run, and one of them comes from another model."""

    class Spending(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.seen = []

        def forward(self, batch, again, prompt, *, kept):
            self.seen.append((batch["x"].clone(), again is batch["x"], isinstance(prompt, nn.Parameter)))
            batch["x"].sub_(1).mul_(2)
            return self.layer(batch.pop("x")) + batch.pop("y") + kept.pop() + prompt

    model = Spending()
    optimiser = nero.Nero(model, lr="auto")
    given = nn.Linear(8, 8).requires_grad_(trained)(X)
    before = given.detach().clone()
    batch, kept = {"x": given, "y": X.clone()}, [X]
    model(batch, given, nn.Parameter(X), kept=kept).sum().backward()
    assert (batch, kept) == ({}, [])
    assert torch.equal(given, (before - 1) * 2)
    assert optimiser.param_groups[0]["depth"] == 1
    assert len(model.seen) == 2
    for seen in model.seen:
        assert torch.equal(seen[0], before)
        assert seen[1:] == (True, True)


def test_copies_of_inputs_are_to_each_other_and_carry_what_these_do():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, inputs, cache, slot):
            slot.copy_(self.first(inputs * inputs.factor))
            return self.second(cache)

    inputs, cache = X.clone(), torch.zeros_like(X)
    inputs.factor = 2.0
    assert nero.depth_of(Caching(), inputs, cache, cache[:]) == 2
    assert not cache.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_whose_activations_are_checkpointed_is_counted(reentrant):
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    inputs = X.clone().requires_grad_()  # which the older way needs
    checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
    optimiser.step()
    assert optimiser.param_groups[0]["depth"] == 3


def test_modules_may_share_their_hooks():
    model = perceptron(3)
    waiting = nero.Nero(model, lr="auto")

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = model, copy.copy(model)

        def forward(self, inputs):
            return self.one(inputs) + self.other(inputs)

    assert nero.depth_of(Both(), X) == pytest.approx(3)
    model(X)
    assert waiting.param_groups[0]["depth"] == 3


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="no trained layer was found"):
        nero.depth_of(nn.ReLU(), X)
    with pytest.raises(ValueError, match="no trained layer was found"):
        nero.depth_of(nn.BatchNorm1d(8), X)


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model, inputs = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.ones(2, 8)
    for each in (model, model[0]):
        with pytest.raises(ValueError, match=r"on the meta device, .*: give it memory \(module\.to_empty\) and values"):
            nero.depth_of(each, inputs)


def turned(model, optimiser):
    """The angle of the first step, of a neuron of the first layer."""
    first = model[0]
    before = first.weight.detach().clone()
    optimiser.zero_grad()
    model(X).square().sum().backward()
    optimiser.step()
    return torch.nn.functional.cosine_similarity(first.weight, before).clamp(max=1).acos().max().item()


@pytest.mark.parametrize("backend", ["eager", "foreach", "auto"])
@pytest.mark.parametrize("layers", [2, 10])
def test_an_automatic_rate_is_a_shared_one(backend, layers):
    torch.manual_seed(0)
    model = perceptron(layers, width=8).double()
    optimiser = nero.Nero(model, lr="auto", backend=backend)
    twin = copy.deepcopy(model)
    plain = nero.Nero(twin, lr=TRUST / layers, longest_step=LONGEST_STEP, backend=backend)
    for size in (*[1] * 11, 1e6):  # the last would be √12 times the angle, and is cut
        for network, each in ((model, optimiser), (twin, plain)):
            each.zero_grad()
            (size * network(X.double()).square().sum()).backward()
            each.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert {group["depth"] for group in optimiser.param_groups} == {layers}
    assert {group["lr"] for group in optimiser.param_groups} == {TRUST}


def test_an_automatic_rate_has_steps_of_three_times_itself_at_most_unless_told_otherwise():
    model = perceptron(3)
    assert LONGEST_STEP == 3
    for options, longest in (
        ({"lr": "auto"}, LONGEST_STEP),
        ({"lr": "auto", "depth": 7}, LONGEST_STEP),
        ({"lr": "auto", "longest_step": 5}, 5),
        ({"lr": "auto", "longest_step": math.inf}, math.inf),
        ({"lr": 0.1, "depth": "auto"}, math.inf),
        ({}, math.inf),
    ):
        assert {group["longest_step"] for group in nero.Nero(model, **options).param_groups} == {longest}, options


def test_a_rate_as_a_tensor_is_divided_too():
    torch.manual_seed(0)
    model = perceptron(4)
    assert turned(model, nero.Nero(model, lr=torch.tensor(0.04), depth=4)) == pytest.approx(0.01, rel=0.1)
    assert turned(model, nero.Nero(model, lr=0.04, depth=4.0, maximize=True)) == pytest.approx(0.01, rel=0.1)


def test_schedulers_change_an_automatic_rate():
    model = perceptron(4)
    optimiser = nero.Nero(model, lr="auto")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)
    first = turned(model, optimiser)
    assert first == pytest.approx(TRUST / 4, rel=0.1)
    scheduler.step()
    assert {group["lr"] for group in optimiser.param_groups} == {TRUST / 2}


def test_it_counts_once_and_is_gone():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    assert len(model._forward_pre_hooks) == 1
    with torch.no_grad():
        model(X)  # a look before training, which may be at another state of the model
    assert optimiser.param_groups[0]["depth"] == "auto"
    model(X)
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs
    model.append(nn.Linear(2, 2))
    optimiser.add_param_group({"params": model[-1].parameters()})
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}


def test_what_joins_the_model_before_it_runs_is_counted():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    model.append(nn.Linear(2, 2))
    optimiser.add_param_group({"params": model[-1]})
    model(X).sum().backward()
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {4.0}


def test_what_belongs_to_another_model_is_asked_for():
    model, other = perceptron(3), perceptron(2)
    optimiser = nero.Nero(model, lr="auto")
    optimiser.add_param_group({"params": other})
    (model(X).sum() + other(X).sum()).backward()
    with pytest.raises(
        RuntimeError, match=r"call optimiser\.count_depth\(model\) first, .* parameters of another model"
    ):
        optimiser.step()
    optimiser.count_depth(other)
    other(X)
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {3.0, 2.0}


@pytest.mark.parametrize("how", ["loaded", "copied", "set", "told"])
def test_what_is_added_has_the_depth_of_the_others(how):
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    if how == "told":
        optimiser = nero.Nero(nero.param_groups(model), lr=TRUST)
        optimiser.count_depth(model)
    if how == "set":
        for group in optimiser.param_groups:
            group["depth"] = 3.0
    model(X)
    if how == "copied":
        optimiser = copy.deepcopy(optimiser)
    if how == "loaded":
        saved = optimiser.state_dict()
        optimiser = nero.Nero(model, lr="auto")
        optimiser.load_state_dict(saved)
    optimiser.add_param_group({"params": nn.Linear(2, 2)})
    optimiser.add_param_group({"params": nn.Linear(2, 2).weight, "depth": 5.0})
    assert [group["depth"] for group in optimiser.param_groups] == [3.0] * (len(optimiser.param_groups) - 1) + [5.0]


def test_a_model_that_fails_is_counted_at_the_next_try():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    with pytest.raises(RuntimeError, match="mat1"):
        model(torch.randn(2, 3))
    model(X)
    assert optimiser.param_groups[0]["depth"] == 3


def test_no_step_is_made_in_the_dark():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    before = copy.deepcopy(model.state_dict())
    model[4](model[2:4](X)).sum().backward()  # parts of it, which tell nothing
    with pytest.raises(RuntimeError, match="run it as a whole"):
        optimiser.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_copies_and_checkpoints():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    assert nero.depth_of(pickle.loads(pickle.dumps(model)), X) == 3
    copied = copy.deepcopy(model)
    assert copied._forward_pre_hooks
    copied(X)
    assert not copied._forward_pre_hooks
    assert optimiser.param_groups[0]["depth"] == "auto"  # it is not this one's to count
    turned(model, optimiser)
    again = nero.Nero(copied, lr="auto")
    uncounted = copy.deepcopy(again.state_dict())
    again.load_state_dict(optimiser.state_dict())
    again.load_state_dict(uncounted)  # which says nothing of the depth
    assert {group["depth"] for group in again.param_groups} == {3.0}
    older = optimiser.state_dict()
    for group in older["param_groups"]:
        del group["depth"]
    again.load_state_dict(older)
    assert {group["depth"] for group in again.param_groups} == {1.0}


@pytest.mark.parametrize("depth", [0, -1, math.nan, math.inf, "deep", True])
def test_a_bad_depth_is_refused(depth):
    with pytest.raises(ValueError, match="depth must be finite and positive"):
        nero.Nero(perceptron(), depth=depth)


def test_parameters_alone_have_no_depth():
    for options in ({"lr": "auto"}, {"depth": "auto"}):
        with pytest.raises(ValueError, match="need the model itself"):
            nero.Nero(perceptron().parameters(), **options)
    with pytest.raises(ValueError, match="lr must be"):
        nero.Nero(perceptron(), lr="automatic")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_is_refused_before_anything_has_changed():
    model = torch.jit.script(perceptron(3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError,
        match=r"a scripted model .*: count it before, as in nero\.Nero\(model, .* depth=nero\.depth_of\(nero\.b",
    ):
        nero.Nero(model, lr="auto")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimiser = nero.Nero(model, lr=TRUST, depth=nero.depth_of(nero.balance_(model), X))
    with pytest.raises(ValueError, match="a scripted model"):
        optimiser.count_depth(model)
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_can_be_scripted_once_it_has_run():
    model = perceptron(3)
    nero.Nero(model, lr="auto")
    model(X)
    torch.testing.assert_close(torch.jit.script(model)(X), model(X))


def test_groups_made_by_hand_can_be_told_of_the_model():
    model = perceptron(3)
    optimiser = nero.Nero(nero.param_groups(model), lr=0.06)
    optimiser.count_depth(model)
    assert turned(model, optimiser) == pytest.approx(0.02, rel=0.1)
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}


def test_a_depth_counted_by_hand_as_errors_advise_is_the_one_that_auto_counts():
    """Of a network that adds branches, it hangs on the weights: they are to be balanced before."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3).eval()
    twin, inputs = copy.deepcopy(encoder), torch.randn(4, 5, 16)
    unbalanced = nero.depth_of(encoder, inputs)
    optimiser = nero.Nero(encoder, lr="auto")
    with pytest.raises(RuntimeError, match="not known yet") as told:
        optimiser.step()
    encoder(inputs)
    model = twin
    advised = eval(re.search(r"nero\.Nero\(.*?inputs\)\)", str(told.value)).group(), {**globals(), **locals()})
    for one, other in zip(optimiser.param_groups, advised.param_groups, strict=True):
        assert {key: one[key] for key in ("lr", "longest_step")} == {key: other[key] for key in ("lr", "longest_step")}
        assert one["depth"] == pytest.approx(other["depth"])
        assert one["depth"] > 1.2 * unbalanced


def test_the_optimiser_can_be_let_go():
    model = perceptron(3)
    nero.Nero(model, lr="auto")  # and nobody holds it
    model(X)
    assert not model._forward_pre_hooks


def test_what_nobody_asks_for_is_not_counted():
    """A run that goes on from a checkpoint is the run that it was, down to what it draws."""
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    for group in optimiser.param_groups:
        group["depth"] = 7.0
    runs = []
    model.register_forward_hook(lambda *_: runs.append(1))
    model(X)
    assert len(runs) == 1
    assert not model._forward_pre_hooks
    assert {group["depth"] for group in optimiser.param_groups} == {7.0}


def test_a_depth_that_is_given_stays():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto", depth=20)
    model(X)
    assert {(group["lr"], group["depth"]) for group in optimiser.param_groups} == {(TRUST, 20)}


#: One of two processes that train a network together: what it takes the depth for, and the weights that it ends with.
TOGETHER = """
import json, sys, torch, nero
from torch import distributed, nn

class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs, times):
        if not times:
            raise ValueError("no times at all")
        for _ in range(times):
            inputs = self.layer(inputs)
        return inputs

def refused(optimiser):
    try:
        optimiser.step()
    except RuntimeError as error:
        return str(error)

rank, file = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
told = []
for wrapped_first in (False, True):
    torch.manual_seed(0)
    model = Loop()
    if wrapped_first:
        together = nn.parallel.DistributedDataParallel(model)
        optimiser = nero.Nero(together, lr="auto")
    else:
        optimiser = nero.Nero(model, lr="auto")
        model(torch.randn(4, 8), 1 + rank)
        told.append(refused(optimiser))
        together = nn.parallel.DistributedDataParallel(model)
        if rank == 0:
            model(torch.randn(4, 8), 2)
        try:
            together(torch.randn(4, 8), 2 * rank)
        except ValueError:
            pass
        told.append(refused(optimiser))
    torch.manual_seed(rank)
    for times in (2 + 3 * rank, 1):
        optimiser.zero_grad()
        together(torch.randn(4, 8), times).square().mean().backward()
        optimiser.step()
    told += [optimiser.param_groups[0]["depth"], model.layer.weight.tolist()]
distributed.destroy_process_group()
print(json.dumps(told))
"""


def test_processes_that_train_together_take_one_depth(tmp_path):
    """The greatest; where one cannot count, none does, until all can; and none counts in a run of its own."""
    each = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(rank), str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        first, second = (json.loads(process.communicate(timeout=60)[0]) for process in each)
    finally:
        for process in each:
            process.kill()
    assert "not known yet (this is one of several processes" in first[0] == second[0]
    assert "not known yet (ValueError: no times at all)" in first[1]
    assert "not known yet (another process could not count it)" in second[1]
    assert first[2:] == second[2:]
    assert first[2::2] == [5.0, 5.0]


def test_only_what_is_trained_counts():
    model = perceptron(10)
    model[:-1].requires_grad_(False)
    assert nero.depth_of(model, X) == 1
    optimiser = nero.Nero(model[-1].parameters(), lr=0.01)
    model.requires_grad_(True)
    optimiser.count_depth(model)
    model(X)
    assert optimiser.param_groups[0]["depth"] == 1


@pytest.mark.parametrize("frozen_first", [True, False])
def test_neurons_that_were_not_counted_are_told_of_once(frozen_first):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    if frozen_first:
        model[:-1].requires_grad_(False)
    optimiser = nero.Nero(model, lr="auto")
    model[:-1].requires_grad_(False)
    turned(model, optimiser)
    for layer in model:
        layer.bias.requires_grad_(True)
    turned(model, optimiser)  # biases have no part in the depth
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"^0\.weight and 8 more .* call optimiser\.count_depth\(model\)") as caught:
        turned(model, optimiser)
    assert [each.filename for each in caught] == [__file__]
    turned(model, optimiser)
    optimiser.count_depth(model)
    turned(model, optimiser)
    assert {group["depth"] for group in optimiser.param_groups} == {10.0}


@pytest.mark.parametrize("how", ["unfrozen before", "counted again", "set", "given", "as a default"])
def test_neurons_whose_depth_is_known_are_not_told_of(how):
    model = perceptron(3)
    model[0].requires_grad_(False)
    optimiser = nero.Nero(model, lr="auto", depth=7.0 if how == "as a default" else None)
    if how != "unfrozen before":
        turned(model, optimiser)
    model[0].requires_grad_(True)
    if how == "counted again":
        optimiser.count_depth(model)
    if how == "set":
        for group in optimiser.param_groups:
            group["depth"] = 7.0
    if how == "given":
        model[0].requires_grad_(False)
        model.append(nn.Linear(2, 2))
        optimiser.add_param_group({"params": model[-1], "depth": 2.0})
    turned(model, optimiser)


def test_neurons_that_were_added_after_the_count_are_told_of():
    model = perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    turned(model, optimiser)
    model.append(nn.Linear(2, 2))
    optimiser.add_param_group({"params": model[-1]})
    with pytest.warns(UserWarning, match="^weight had no part in the depth"):
        turned(model, optimiser)
    optimiser.count_depth(model)
    turned(model, optimiser)
    assert {group["depth"] for group in optimiser.param_groups} == {4.0}


def test_two_may_ask_of_one_model():
    model = perceptron(3)
    optimisers = [nero.Nero(model, lr="auto") for _ in range(2)]
    optimisers[0].count_depth(model)
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs) or (inputs[0] + 1,))
    model(X)
    assert {group["depth"] for each in optimisers for group in each.param_groups} == {3.0}
    assert len(model._forward_pre_hooks) == 1
    assert all(torch.equal(inputs[0], X) for inputs in seen)  # not what a hook before has made of them


@pytest.mark.parametrize(
    "measure",
    [
        lambda model, data: theory.robustness(model, data, rotations=4, examples=2),
        lambda model, _: theory.relative_change(model, lambda it: it(X[:2]).sum(), {"0.weight": torch.ones(8, 8)}),
        lambda model, data: theory.preactivations(model, data[0]),
        lambda model, _: nero.depth_of(model, X[:2]),
    ],
    ids=["robustness", "relative_change", "preactivations", "depth_of"],
)
def test_a_measurement_is_not_the_first_run(measure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(2), nn.Linear(8, 3))
    optimiser = nero.Nero(model, lr="auto")
    wanted = nero.depth_of(copy.deepcopy(model), X)
    model.register_forward_pre_hook(lambda *_: None)
    with torch.no_grad():
        data = X, model(X).argmax(1)
    hooks = list(model._forward_pre_hooks)
    measure(model, data)
    assert list(model._forward_pre_hooks) == hooks, "nor do hooks change places"
    assert {group["depth"] for group in optimiser.param_groups} == {"auto"}
    model(X)
    assert {group["depth"] for group in optimiser.param_groups} == {wanted}


def test_an_empty_batch_tells_no_depth_and_the_next_is_counted():
    """Branches without examples have no shares."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(2))
    with pytest.raises(ValueError, match=r"the inputs are empty, .*: give some; or give a learning rate"):
        nero.depth_of(model, torch.randn(0, 8))
    optimiser = nero.Nero(model, lr="auto")
    model(torch.randn(0, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="the inputs are empty"):
        optimiser.step()
    inputs = torch.randn(4, 8)
    model(inputs).sum().backward()
    optimiser.step()
    assert optimiser.param_groups[0]["depth"] < 3


def test_a_backward_that_is_due_is_not_disturbed():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model.register_buffer("wide", torch.ones(1, 8).expand(4, 8))
    optimiser = nero.Nero(model, lr="auto")
    for mode in (True, False):
        optimiser.count_depth(model.train(mode))
        first = model[:2](X)
        (first.sum() + model(X).sum()).backward()
        optimiser.step()
        assert optimiser.param_groups[0]["depth"] == 2


@pytest.mark.parametrize(
    ("join", "shares"),
    [
        (lambda a, b: a + b, True),
        (lambda a, b: a - b, True),
        (torch.add, True),
        (lambda a, b: torch.stack([a, b]).sum(0), False),
        (lambda a, b: 2 * torch.lerp(a, b, 0.5), False),
        (lambda a, b: torch.addcmul(a, b, torch.ones(())), False),
        (lambda a, b: torch.addmm(a, b, torch.eye(2)), False),
        (lambda a, b: torch.baddbmm(a[None], b[None], torch.eye(2)[None])[0], False),
        (lambda a, b: torch.einsum("kij->ij", torch.stack([a, b])), False),
    ],
)
def test_which_sums_count_by_shares_is_as_the_page_says(join, shares):
    torch.manual_seed(0)
    depth = nero.depth_of(Odd(lambda self, inputs: join(self.head(inputs), self.body(inputs))), X)
    assert 1 < depth < 4 if shares else depth == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_batch_that_is_not_finite_tells_no_shares_and_the_next_may(bad):
    model = nn.Sequential(nn.Linear(8, 8), Block(2), Block(2))
    optimiser = nero.Nero(model, lr="auto")
    broken = X.clone()
    broken[0, 0] = bad
    with pytest.raises(ValueError, match=r"not a number, .*: run it on other inputs, or give a learning rate"):
        nero.depth_of(model, broken)
    model(broken)
    with pytest.raises(RuntimeError, match=r"not known yet \(ValueError: branches that are added hold values"):
        optimiser.step()
    model(X).sum().backward()
    optimiser.step()
    assert optimiser.param_groups[0]["depth"] == pytest.approx(nero.depth_of(model, X), rel=0.1)
    assert nero.depth_of(perceptron(4), broken) == 4  # where there are no shares to tell


def test_masks_may_be_infinite():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores, self.bias = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)

        def forward(self, inputs):
            mask = torch.arange(8) > 3
            return (self.bias(inputs).masked_fill(mask, -math.inf) + self.scores(inputs)).softmax(-1)

    assert nero.depth_of(Attending(), X) == 2


def test_buffers_that_are_replaced_are_put_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("runs", torch.zeros(()))
            self.register_buffer("made", None)

        def forward(self, inputs):
            self.runs = self.runs + 1
            self.made = torch.ones(3)
            return self.layer(inputs)

    model = Counting()
    assert nero.depth_of(model, X) == 1
    assert model.runs == 0
    assert model.made is None


def test_each_model_has_its_own_depth():
    short, long = perceptron(2), perceptron(7)
    optimiser = nero.Nero([*nero.param_groups(short), *nero.param_groups(long)], lr=0.1)
    for model in (short, long):
        optimiser.count_depth(model)
    long(X)
    short(X)
    depths = [group["depth"] for group in optimiser.param_groups]
    assert depths == [2.0] * (len(depths) // 2) + [7.0] * (len(depths) // 2)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not int"):
        optimiser.count_depth(3)
    with pytest.raises(ValueError, match="no parameter of this model"):
        optimiser.count_depth(perceptron(2))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, not int"):
        nero.depth_of(3, X)


class Outside(torch.autograd.Function):
    """What a kernel of somebody's own looks like: what it does is not seen."""

    @staticmethod
    def forward(_, inputs, make):
        out = make(inputs)
        out.numpy()[...] = 2 * inputs.detach().numpy()
        return out

    @staticmethod
    def backward(_, gradient):
        return 2 * gradient, None


class Odd(nn.Module):
    """Layers, and then something."""

    def __init__(self, something):
        super().__init__()
        self.body, self.something, self.head = perceptron(4, 2), something, nn.Linear(2, 2)

    def forward(self, inputs):
        return self.something(self, inputs[:, :2])


def filled(self, inputs):
    out = torch.zeros(4, 2)
    out[:, :1] = self.body(inputs)[:, :1]
    return self.head(out)


def kept(self, inputs):
    self.loss = self.head(self.body(inputs))


def again(self, inputs):
    if inputs.shape[0] > 1:
        return self.head(self(inputs[:1]))
    return self.body(inputs)


def cast(self, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        self.body(inputs)
        return self.head(self.body(inputs))


def asking(self, inputs):
    return self.head(self.body(inputs.clone().requires_grad_()))


def masked(self, inputs):
    """Where either of two is positive."""
    first = self.body(inputs)
    second = self.head(first)
    return second * ((first > 0) + (second > 0))


def made_up(self, _):
    return self.head(self.body(torch.randn(3, 2)))


@pytest.mark.parametrize(
    ("product", "depth"),
    [
        (lambda v, w, x: x @ v @ w, 2),
        (lambda v, w, x: x @ (v @ w), 1),  # the same, and may change as much
        (lambda v, w, x: (x @ v) * (x @ w), 1),
    ],
)
def test_products_count_as_their_deepest_factor(product, depth):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.forward = lambda inputs: product(model[0].weight, model[1].weight, inputs)
    assert nero.depth_of(model, torch.randn(4, 2)) == depth


@pytest.mark.parametrize("something", [filled, kept, again, cast, asking, masked, made_up])
def test_odd_ways_are_followed(something):
    assert nero.depth_of(Odd(something), X) == 5


def test_a_slope_that_a_model_asks_for_is_followed():
    def force(self, places):
        places = places.detach().requires_grad_()
        energy = self.head(self.head(2 * places).tanh()).sum()
        return energy, torch.autograd.grad(energy, places, create_graph=True)[0]

    assert nero.depth_of(Odd(force), X) == 2


def test_complex_branches_have_shares():
    def added(self, inputs):
        first = self.head(inputs)
        return torch.complex(torch.zeros(4, 2), 2 * first) + torch.complex(self.body(first), first)

    model = Odd(added)
    first = model.head(X[:, :2])
    shares = [each.square().sum().item() for each in (2 * first, torch.cat([model.body(first), first]))]
    assert nero.depth_of(model, X) == pytest.approx(rms(1, 5, shares=shares))


@pytest.mark.parametrize(
    "make",
    [lambda x: torch.from_numpy(x.detach().numpy().copy()), lambda x: torch.empty(x.shape), torch.empty_like,
     lambda x: x.new_empty(x.shape)],
)  # fmt: skip
def test_where_the_way_is_lost_a_step_says_so_and_a_run_does_not(make):
    model = Odd(lambda self, inputs: self.head(Outside.apply(self.body(inputs), make)))
    with pytest.raises(ValueError, match="cannot be followed"):
        nero.depth_of(model, X)
    optimiser = nero.Nero(model, lr="auto")
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match=r"not known yet \(ValueError: a tensor of shape .* cannot be followed"):
        optimiser.step()


def test_an_interrupted_count_leaves_nothing_behind():
    def stop(*_):
        raise KeyboardInterrupt

    model = Odd(stop)
    nero.Nero(model, lr="auto")
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    model.something = lambda self, inputs: self.body(inputs)
    assert nero.depth_of(model, X) == 4


def test_a_network_may_run_on_its_own_buffer():
    model = Odd(lambda self, _: self.head(self.body(self.places)))
    model.register_buffer("places", torch.randn(3, 2))
    assert nero.depth_of(model, X) == 5
