"""lr="auto": the count at the first forward pass, the steps after it, and DistributedDataParallel."""

import copy
import math
import pickle
import re
from pathlib import Path

import pytest
import torch
from networks import Block, X, turn_of_first_layer, uniform_perceptron
from torch import nn
from torch.utils.checkpoint import checkpoint

import nero
from nero import theory
from nero.auto.depth import LONGEST_STEP, TRUST


@pytest.mark.parametrize("backend", ["eager", "foreach", "auto"])
@pytest.mark.parametrize("layers", [2, 10])
def test_auto_lr_equals_trust_divided_by_depth(backend, layers):
    torch.manual_seed(0)
    model = uniform_perceptron(layers, width=8).double()
    optimiser = nero.Nero(model, lr="auto", backend=backend)
    twin = copy.deepcopy(model)
    plain = nero.Nero(twin, lr=TRUST / layers, longest_step=LONGEST_STEP, backend=backend)
    for size in (*[1] * 11, 1e6):  # the last would be √12 times the angle, and is bounded
        for network, each in ((model, optimiser), (twin, plain)):
            each.zero_grad()
            (size * network(X.double()).square().sum()).backward()
            each.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert {group["depth"] for group in optimiser.param_groups} == {layers}
    assert {group["lr"] for group in optimiser.param_groups} == {TRUST}


def test_auto_lr_sets_longest_step_unless_given():
    model = uniform_perceptron(3)
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


def test_tensor_lr_is_divided_by_depth():
    torch.manual_seed(0)
    model = uniform_perceptron(4)
    assert turn_of_first_layer(model, nero.Nero(model, lr=torch.tensor(0.04), depth=4)) == pytest.approx(0.01, rel=0.1)
    assert turn_of_first_layer(model, nero.Nero(model, lr=0.04, depth=4.0, maximize=True)) == pytest.approx(
        0.01, rel=0.1
    )


def test_scheduler_changes_auto_lr():
    model = uniform_perceptron(4)
    optimiser = nero.Nero(model, lr="auto")
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)
    first = turn_of_first_layer(model, optimiser)
    assert first == pytest.approx(TRUST / 4, rel=0.1)
    scheduler.step()
    assert {group["lr"] for group in optimiser.param_groups} == {TRUST / 2}


@pytest.mark.parametrize("trained", [False, True])
def test_count_does_not_consume_inputs(trained):
    """The forward pass consumes or overwrites every input, and one comes from another model."""

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


@pytest.mark.parametrize("reentrant", [False, True])
def test_model_with_activation_checkpointing_is_counted(reentrant):
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    inputs = X.clone().requires_grad_()  # needed by the reentrant version
    checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
    optimiser.step()
    assert optimiser.param_groups[0]["depth"] == 3


def test_hook_counts_once_and_removes_itself():
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    assert len(model._forward_pre_hooks) == 1
    with torch.no_grad():
        model(X)  # not a training step
    assert optimiser.param_groups[0]["depth"] == "auto"
    model(X)
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs
    model.append(nn.Linear(2, 2))
    optimiser.add_param_group({"params": model[-1].parameters()})
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}


def test_layer_added_before_first_run_is_counted():
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    model.append(nn.Linear(2, 2))
    optimiser.add_param_group({"params": model[-1]})
    model(X).sum().backward()
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {4.0}


def test_group_of_another_model_needs_its_own_count():
    model, other = uniform_perceptron(3), uniform_perceptron(2)
    optimiser = nero.Nero(model, lr="auto")
    optimiser.add_param_group({"params": other})
    (model(X).sum() + other(X).sum()).backward()
    with pytest.raises(RuntimeError, match=r"call optimiser\.count_depth\(model\) .* parameters of another model"):
        optimiser.step()
    optimiser.count_depth(other)
    other(X)
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {3.0, 2.0}


@pytest.mark.parametrize("how", ["loaded", "copied", "set", "count_depth"])
def test_added_group_takes_the_depth_of_the_others(how):
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    if how == "count_depth":
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


def test_failed_run_is_counted_at_the_next_run():
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    with pytest.raises(RuntimeError, match="mat1"):
        model(torch.randn(2, 3))
    model(X)
    assert optimiser.param_groups[0]["depth"] == 3


def test_step_before_the_count_raises():
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    before = copy.deepcopy(model.state_dict())
    model[4](model[2:4](X)).sum().backward()  # parts of the model are not counted
    with pytest.raises(RuntimeError, match="run the whole model"):
        optimiser.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_copies_and_checkpoints_keep_the_depth():
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    assert nero.depth_of(pickle.loads(pickle.dumps(model)), X) == 3
    copied = copy.deepcopy(model)
    assert copied._forward_pre_hooks
    copied(X)
    assert not copied._forward_pre_hooks
    assert optimiser.param_groups[0]["depth"] == "auto"  # a copy counts nothing
    turn_of_first_layer(model, optimiser)
    resumed = nero.Nero(copied, lr="auto")
    uncounted = copy.deepcopy(resumed.state_dict())
    resumed.load_state_dict(optimiser.state_dict())
    resumed.load_state_dict(uncounted)  # saved before its count
    assert {group["depth"] for group in resumed.param_groups} == {3.0}
    older = optimiser.state_dict()
    for group in older["param_groups"]:
        del group["depth"]
    resumed.load_state_dict(older)
    assert {group["depth"] for group in resumed.param_groups} == {1.0}


@pytest.mark.parametrize("depth", [0, -1, math.nan, math.inf, "deep", True])
def test_bad_depth_raises(depth):
    with pytest.raises(ValueError, match=r"depth must be (a number, )?finite and positive"):
        nero.Nero(uniform_perceptron(), depth=depth)


def test_auto_lr_without_the_model_raises():
    for options in ({"lr": "auto"}, {"depth": "auto"}):
        with pytest.raises(ValueError, match="need the model itself"):
            nero.Nero(uniform_perceptron().parameters(), **options)
    with pytest.raises(ValueError, match="lr must be"):
        nero.Nero(uniform_perceptron(), lr="automatic")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_model_raises_before_any_change():
    model = torch.jit.script(uniform_perceptron(3))
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


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_model_can_be_scripted_after_the_count():
    model = uniform_perceptron(3)
    nero.Nero(model, lr="auto")
    model(X)
    torch.testing.assert_close(torch.jit.script(model)(X), model(X))


def test_count_depth_serves_groups_made_by_hand():
    model = uniform_perceptron(3)
    optimiser = nero.Nero(nero.param_groups(model), lr=0.06)
    optimiser.count_depth(model)
    assert turn_of_first_layer(model, optimiser) == pytest.approx(0.02, rel=0.1)
    assert {group["depth"] for group in optimiser.param_groups} == {3.0}


def test_module_that_is_gone_before_the_count_is_named():
    actor, critic = nn.Linear(8, 2), nn.Linear(8, 1)
    optimiser = nero.Nero(nn.ModuleList([actor, critic]), lr="auto")
    with pytest.raises(RuntimeError, match=r"the module that the optimiser was made with is gone"):
        optimiser.step()


def test_list_of_blocks_is_counted_by_the_whole_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    blocks = nn.ModuleList(model[1])
    optimiser = nero.Nero(blocks, lr="auto")
    model(torch.randn(4, 8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"ModuleList has no forward pass: call optimiser.count_depth\(model\)"):
        optimiser.step()
    optimiser.count_depth(model)
    model(torch.randn(4, 8)).sum().backward()
    optimiser.step()
    assert optimiser.param_groups[0]["depth"] == 2


def test_depth_counted_as_the_error_advises_equals_auto():
    """The depth of a network that adds branches depends on the weights, so they must be balanced first."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3).eval()
    twin, inputs = copy.deepcopy(encoder), torch.randn(4, 5, 16)
    unbalanced = nero.depth_of(encoder, inputs)
    optimiser = nero.Nero(encoder, lr="auto")
    with pytest.raises(RuntimeError, match="not known yet") as caught:
        optimiser.step()
    encoder(inputs)
    advice = re.search(r"nero\.Nero\(.*\)$", str(caught.value))[0]
    advised = eval(advice, {"nero": nero, "model": twin, "inputs": inputs})
    for one, other in zip(optimiser.param_groups, advised.param_groups, strict=True):
        assert {key: one[key] for key in ("lr", "longest_step")} == {key: other[key] for key in ("lr", "longest_step")}
        assert one["depth"] == pytest.approx(other["depth"])
        assert one["depth"] > 1.2 * unbalanced


def test_hook_of_a_deleted_optimiser_removes_itself():
    model = uniform_perceptron(3)
    nero.Nero(model, lr="auto")  # not referenced
    model(X)
    assert not model._forward_pre_hooks


def test_depth_already_set_is_not_counted():
    """A resumed run makes no extra forward pass, and so draws the same random numbers."""
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    for group in optimiser.param_groups:
        group["depth"] = 7.0
    runs = []
    model.register_forward_hook(lambda *_: runs.append(1))
    model(X)
    assert len(runs) == 1
    assert not model._forward_pre_hooks
    assert {group["depth"] for group in optimiser.param_groups} == {7.0}


def test_given_depth_is_kept():
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto", depth=20)
    model(X)
    assert {(group["lr"], group["depth"]) for group in optimiser.param_groups} == {(TRUST, 20)}


@pytest.mark.parametrize("frozen_first", [True, False])
def test_unfrozen_uncounted_neurons_warn_once(frozen_first):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    if frozen_first:
        model[:-1].requires_grad_(False)
    optimiser = nero.Nero(model, lr="auto", pretrained=False)
    model[:-1].requires_grad_(False)
    turn_of_first_layer(model, optimiser)
    for layer in model:
        layer.bias.requires_grad_(True)
    turn_of_first_layer(model, optimiser)  # biases do not count
    model.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"^0\.weight and 8 more .* call optimiser\.count_depth\(model\)") as caught:
        turn_of_first_layer(model, optimiser)
    assert [Path(each.filename).stem for each in caught] == ["networks"], "the caller of step()"
    turn_of_first_layer(model, optimiser)
    optimiser.count_depth(model)
    turn_of_first_layer(model, optimiser)
    assert {group["depth"] for group in optimiser.param_groups} == {10.0}


@pytest.mark.parametrize("how", ["unfrozen before", "counted again", "set", "given", "as a default"])
def test_neurons_of_known_depth_do_not_warn(how):
    model = uniform_perceptron(3)
    model[0].requires_grad_(False)
    optimiser = nero.Nero(model, lr="auto", depth=7.0 if how == "as a default" else None, pretrained=False)
    if how != "unfrozen before":
        turn_of_first_layer(model, optimiser)
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
    turn_of_first_layer(model, optimiser)


def test_neurons_added_after_the_count_warn():
    model = uniform_perceptron(3)
    optimiser = nero.Nero(model, lr="auto")
    turn_of_first_layer(model, optimiser)
    model.append(nn.Linear(2, 2))
    optimiser.add_param_group({"params": model[-1]})
    with pytest.warns(UserWarning, match="^weight had no part in the depth"):
        turn_of_first_layer(model, optimiser)
    optimiser.count_depth(model)
    turn_of_first_layer(model, optimiser)
    assert {group["depth"] for group in optimiser.param_groups} == {4.0}


def test_two_optimisers_count_one_model():
    model = uniform_perceptron(3)
    optimisers = [nero.Nero(model, lr="auto") for _ in range(2)]
    optimisers[0].count_depth(model)
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs) or (inputs[0] + 1,))
    model(X)
    assert {group["depth"] for each in optimisers for group in each.param_groups} == {3.0}
    assert len(model._forward_pre_hooks) == 1
    assert all(torch.equal(inputs[0], X) for inputs in seen)  # the count sees the inputs before other hooks change them


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
def test_measurement_is_not_the_first_run(measure):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(2), nn.Linear(8, 3))
    optimiser = nero.Nero(model, lr="auto")
    wanted = nero.depth_of(copy.deepcopy(model), X)
    model.register_forward_pre_hook(lambda *_: None)
    with torch.no_grad():
        data = X, model(X).argmax(1)
    hooks = list(model._forward_pre_hooks)
    measure(model, data)
    assert list(model._forward_pre_hooks) == hooks, "hooks keep their order"
    assert {group["depth"] for group in optimiser.param_groups} == {"auto"}
    model(X)
    assert {group["depth"] for group in optimiser.param_groups} == {wanted}


def test_empty_batch_is_not_counted_but_the_next_is():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Block(2))
    with pytest.raises(ValueError, match=r"the inputs are empty, .*: give a batch, or give lr"):
        nero.depth_of(model, torch.randn(0, 8))
    optimiser = nero.Nero(model, lr="auto")
    model(torch.randn(0, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="the inputs are empty"):
        optimiser.step()
    inputs = torch.randn(4, 8)
    model(inputs).sum().backward()
    optimiser.step()
    assert optimiser.param_groups[0]["depth"] < 3


def test_count_does_not_disturb_pending_backward():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model.register_buffer("wide", torch.ones(1, 8).expand(4, 8))
    optimiser = nero.Nero(model, lr="auto")
    for mode in (True, False):
        optimiser.count_depth(model.train(mode))
        first = model[:2](X)
        (first.sum() + model(X).sum()).backward()
        optimiser.step()
        assert optimiser.param_groups[0]["depth"] == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_batch_is_not_counted_but_the_next_is(bad):
    model = nn.Sequential(nn.Linear(8, 8), Block(2), Block(2))
    optimiser = nero.Nero(model, lr="auto")
    broken = X.clone()
    broken[0, 0] = bad
    with pytest.raises(ValueError, match=r"hold NaN, .*: run other inputs, or give lr"):
        nero.depth_of(model, broken)
    model(broken)
    with pytest.raises(RuntimeError, match=r"not known yet \(ValueError: added branches hold NaN"):
        optimiser.step()
    model(X).sum().backward()
    optimiser.step()
    assert optimiser.param_groups[0]["depth"] == pytest.approx(nero.depth_of(model, X), rel=0.1)
    assert nero.depth_of(uniform_perceptron(4), broken) == 4  # no branches, so no shares


def test_each_model_has_its_own_depth():
    short, long = uniform_perceptron(2), uniform_perceptron(7)
    optimiser = nero.Nero([*nero.param_groups(short), *nero.param_groups(long)], lr=0.1)
    for model in (short, long):
        optimiser.count_depth(model)
    long(X)
    short(X)
    depths = [group["depth"] for group in optimiser.param_groups]
    assert depths == [2.0] * (len(depths) // 2) + [7.0] * (len(depths) // 2)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, (got|not) int"):
        optimiser.count_depth(3)
    with pytest.raises(ValueError, match="no parameter of this model"):
        optimiser.count_depth(uniform_perceptron(2))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, (got|not) int"):
        nero.depth_of(3, X)
