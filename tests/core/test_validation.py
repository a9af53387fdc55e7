"""Invalid options and untrainable parameters: errors that name them, what they got, and the fix."""

import copy
import gc
import inspect
import math
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import nero
from nero.messages import FOREIGN_OPTIONS
from nero.options import OF_GROUPS, OPTIONS, OTHER_KEYS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be finite and not negative"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": math.inf}, "lr must be"),
        ({"lr": "0.01"}, "lr must be a number.*'auto' for all groups, got '0.01'"),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr as a tensor must have one element"),
        ({"lr": torch.tensor(-1.0)}, "lr must be"),
        ({"beta": 1.0}, r"beta must be in \[0, 1\)"),
        ({"beta": -0.1}, "beta must be"),
        ({"beta": math.nan}, "beta must be"),
        ({"beta": (0.9, 0.99)}, "beta must be"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"momentum": -0.1}, "momentum must be"),
        ({"momentum": math.nan}, "momentum must be"),
        ({"momentum": "0.9"}, "momentum must be a number, in"),
        ({"momentum": 0.9, "nesterov": 1}, "nesterov must be one of"),
        ({"momentum": 0.9, "nesterov": "yes"}, "nesterov must be one of"),
        ({"scale": 10**400}, "scale must be finite and positive"),
        ({"longest_step": 0.5}, "longest_step must be at least 1, like 3, or math.inf, got 0.5"),
        ({"longest_step": math.nan}, "longest_step must be"),
        ({"longest_step": "3"}, "longest_step must be"),
        ({"scale": 0.0}, "scale must be"),
        ({"scale": math.inf}, "scale must be"),
        ({"gain_penalty": -1.0}, "gain_penalty must be"),
        ({"fix_mean": "yes"}, "fix_mean must be one of"),
        ({"fix_norm": "final"}, "fix_norm must be one of"),
        ({"maximize": 2}, "maximize must be one of"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
@pytest.mark.parametrize("where", ["constructor", "group", "added"])
def test_invalid_option_raises_and_adds_no_group(options: dict, message: str, where: str):
    layer, optimiser = nn.Linear(3, 2), nero.Nero(nn.Linear(3, 2))
    calls = {
        "constructor": lambda: nero.Nero(layer, **options),
        "group": lambda: nero.Nero([{"params": layer.parameters(), **options}]),
        "added": lambda: optimiser.add_param_group({"params": layer.parameters(), **options}),
    }
    with pytest.raises(ValueError, match=message):
        calls[where]()
    assert len(optimiser.param_groups) == 2, "nothing half-added"


def test_lr_auto_of_one_group_raises_and_names_remedy():
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"lr=0\.1, longest_step=3.*count_depth"):
        nero.Nero(nero.param_groups(layer, lr="auto"))
    optimiser = nero.Nero(nero.param_groups(layer, lr=0.1))
    optimiser.count_depth(layer)
    layer(torch.randn(4, 3)).square().mean().backward()
    optimiser.step()
    assert {group["depth"] for group in optimiser.param_groups} == {1.0}
    optimiser.param_groups[0]["lr"] = "auto"
    with pytest.raises(ValueError, match="lr='auto' is for all groups at once"):
        optimiser.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "weight"}, "role must be one of"),
        ({"role": "neuron", "fan_in_axes": (2,)}, r"parameter 0 of group 0.*fan_in_axes \(2,\) do not fit"),
        ({"role": "neuron", "fan_in_axes": ()}, "do not fit"),
        ({"role": "neuron", "fan_in_axes": (1, -1)}, "at most once"),
        ({"role": "bias", "fan_in_axes": (1,)}, r"a bias has no fan_in_axes, got \(1,\)"),
        ({"role": "neuron", "fan_in_axes": (0,), "fan_in_groups": 3}, "fan_in_groups=3 does not fit"),
        ({"fan_in_axes": (5,)}, "do not fit"),
        ({"fan_in_groups": 2}, "fan_in_groups=2 needs fan_in_axes"),
    ],
)
def test_invalid_role_of_group_raises(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        nero.Nero([{"params": [nn.Parameter(torch.randn(4, 3))], **options}])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", math.nan),
        ("lr", torch.tensor(-0.1)),
        ("lr", "fast"),
        ("beta", 1.5),
        ("momentum", 1),
        ("momentum", None),
        ("nesterov", None),
        ("longest_step", 0),
        ("backend", "x"),
        ("scale", -1.0),
        ("fix_norm", "intial"),
        ("on_nonfinite", "rais"),
    ],
)
def test_option_made_invalid_later_raises_before_the_step(option: str, value: object):
    layer = nn.Linear(3, 2)
    optimiser = nero.Nero(layer)
    optimiser.param_groups[1][option] = value
    layer(torch.randn(1, 3)).sum().backward()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=f"{option} must be"):
        optimiser.step()
    assert torch.equal(layer.weight, before["weight"])
    assert optimiser.state[layer.weight]["step"] == 0


@pytest.mark.parametrize("group", [{}, {"params": [("name",)]}, {"params": nn.Linear(2, 2).to(torch.float8_e4m3fn)}])
def test_group_that_fails_leaves_no_trace(group: dict):
    optimiser, late = nero.Nero(nn.Linear(3, 2)), nn.Linear(3, 2)
    with pytest.raises((ValueError, TypeError, IndexError)):
        optimiser.add_param_group(group)
    assert len(optimiser.param_groups) == 2
    optimiser.add_param_group({"params": late})
    assert nero.is_balanced(late)


def test_parameters_of_group_that_fails_are_freed():
    model = nn.Linear(3, 2)
    optimiser = nero.Nero(model, lr="auto")
    model(torch.ones(3))  # counts the depth, which groups that are added later share
    late = nn.Parameter(torch.randn(2, 3))
    reference = weakref.ref(late)
    with pytest.raises(ValueError, match=r"group2\.1 holds NaN"):
        optimiser.add_param_group({"params": [late, torch.full((2, 2), torch.nan, requires_grad=True)]})
    del late
    gc.collect()
    assert reference() is None


def test_error_leaves_all_parameters_unchanged():
    """Parameters before the bad one are not balanced either."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.ParameterList([torch.ones(2, dtype=torch.complex64)]))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match="complex"):
        nero.Nero(model)
    optimiser = nero.Nero(extra := nn.Linear(3, 2))
    with pytest.raises(TypeError, match="complex"):
        optimiser.add_param_group({"params": model})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(optimiser.param_groups) == 2
    optimiser.add_param_group({"params": model[:2]})
    assert nero.is_balanced(model[0])
    assert nero.is_balanced(extra)


@pytest.mark.parametrize(
    ("parameter", "kind", "message"),
    [
        (lambda: torch.randn(3, 2, dtype=torch.complex64), TypeError, "odd is complex.*view_as_real"),
        (lambda: torch.randn(3, 2, device="meta"), ValueError, "odd is on the meta device.*to_empty"),
        (lambda: torch.eye(3, 2).to_sparse(), TypeError, "odd is laid out as torch.sparse_coo.*dense"),
        (lambda: torch.tensor([[1.0, math.nan]]), ValueError, "odd holds NaN or infinite values: initialise"),
    ],
    ids=["complex", "meta", "sparse", "NaN"],
)
def test_untrainable_parameter_raises(parameter, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        nero.Nero([("good", nn.Parameter(torch.randn(3, 2))), ("odd", nn.Parameter(parameter()))])


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (lambda: torch.randn(3, 2, dtype=torch.complex64), "odd is complex.*view_as_real"),
        (lambda: torch.randn(3, 2).to(torch.float8_e4m3fn), "odd is torch.float8_e4m3fn.*bfloat16 or wider"),
        (lambda: torch.randn(3, 2, device="meta"), "odd is on the meta device.*to_empty"),
        (lambda: torch.full((3, 2), math.nan), "odd holds NaN or infinite values"),
    ],
    ids=["complex", "float8", "meta", "NaN"],
)
def test_untrainable_parameter_frozen_is_accepted(odd, message: str, backend: str):
    """As quantised weights are under LoRA. Unfreezing such a parameter raises at the next step."""
    model = nn.Linear(2, 3)
    model.register_parameter("odd", nn.Parameter(odd(), requires_grad=False))
    optimiser = nero.Nero(model, backend=backend)
    assert nero.is_balanced(nero.balance_(model))
    for fix_norm in (True, "initial"):
        nero.balance_after_step(torch.optim.SGD([model.weight]), model, fix_norm=fix_norm)
    before = model.weight.detach().clone()
    model.weight.grad = torch.randn(3, 2)
    optimiser.step()
    assert not torch.equal(model.weight, before)
    optimiser.load_state_dict(optimiser.state_dict())
    model.odd.requires_grad_()
    model.odd.grad = torch.zeros_like(model.odd)
    with pytest.raises((TypeError, ValueError), match=message if backend != "triton" else "odd (is|holds)"):
        optimiser.step()
    assert model.odd not in optimiser.state


@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(3, 4).to(torch.float8_e4m3fn), r"is torch.float8_e4m3fn: train it in"),
        (torch.full((3, 4), math.nan), "holds NaN or infinite values"),
    ],
    ids=["float8", "NaN"],
)
def test_untrainable_parameter_unfrozen_raises_before_step(values: Tensor, message: str, on_nonfinite: str):
    first, late = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4), requires_grad=False)
    odd = nn.Parameter(values.clone(), requires_grad=False)
    optimiser = nero.Nero([{"params": [first, late]}, {"params": [odd]}], on_nonfinite=on_nonfinite)
    before = [first.detach().clone(), late.detach().clone()]
    late.requires_grad_(), odd.requires_grad_()
    first.grad, late.grad, odd.grad = torch.randn(3, 4), torch.randn(3, 4), torch.zeros_like(odd)
    with pytest.raises((TypeError, ValueError), match=f"parameter 0 of group 1 {message}"):
        optimiser.step()
    assert torch.equal(first, before[0])
    assert torch.equal(late, before[1]), "not even balanced"


FLAT = r"cuts through neurons: shard with .*fully_shard"


def norm_between_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def flatten_groups(optimiser: nero.Nero) -> list[Tensor]:
    """Replace the parameters of each group by half of their elements in a row, as DeepSpeed's ZeRO-1 and ZeRO-2 do."""
    flat = []
    for group in optimiser.param_groups:
        row = torch.cat([parameter.detach().flatten() for parameter in group["params"]])
        group["params"] = [row[: len(row) // 2].clone().requires_grad_()]
        group["params"][0].grad = torch.zeros_like(group["params"][0])
        flat += group["params"]
    return flat


@pytest.mark.parametrize("call", [nero.Nero.step, nero.Nero.state_dict])
@pytest.mark.parametrize("on_nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("given", [lambda model: model, nn.Module.parameters], ids=["model", "parameters"])
def test_flat_parameters_in_the_groups_raise(
    given: Callable, on_nonfinite: str, call: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nero.parameters, "is_distributed", lambda: True)
    optimiser = nero.Nero(given(norm_between_layers()), on_nonfinite=on_nonfinite)
    flat = flatten_groups(optimiser)
    assert not optimiser.state[flat[0]]  # looking makes an entry
    before = [each.detach().clone() for each in flat]
    for _ in range(2):
        with pytest.raises(TypeError, match=FLAT):
            call(optimiser)
    assert all(map(torch.equal, flat, before))


def test_vectors_that_replace_vectors_enter():
    optimiser = nero.Nero([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))])
    flat = flatten_groups(optimiser)
    optimiser.step()
    assert optimiser.state[flat[0]]["step"] == 1


@pytest.mark.parametrize("was_frozen", [True, False])
def test_groups_of_matrices_can_be_removed(was_frozen: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nero.parameters, "is_distributed", lambda: True)
    model = norm_between_layers()
    vectors = [each for each in model.parameters() if each.dim() == 1]
    for each in vectors:
        each.requires_grad_(not was_frozen)
    optimiser = nero.Nero(model)
    optimiser.param_groups = [group for group in optimiser.param_groups if group["params"][0].dim() == 1]
    for each in vectors:
        each.requires_grad_().grad = torch.ones_like(each)
    before = [each.detach().clone() for each in vectors]
    optimiser.step()
    assert not any(map(torch.equal, vectors, before))


def test_layer_swapped_for_a_norm_is_trained():
    optimiser = nero.Nero(list(nn.Linear(6, 2).parameters()))
    norm = nn.LayerNorm(6)
    optimiser.param_groups[0]["params"] = list(norm.parameters())
    norm.weight.grad = torch.ones(6)
    optimiser.step()
    assert (norm.weight != 1).all()


@pytest.mark.parametrize("mark", [{"_is_flat_param": True}, {"_fsdp_flattened": True}, {"ds_tensor": None}])
@pytest.mark.parametrize("call", [nero.Nero, nero.balance_, nero.describe, lambda model: nero.Nero(model.parameters())])
def test_flattened_parameter_of_a_model_raises(call: Callable, mark: dict):
    model = norm_between_layers()
    model[2].weight.data = torch.empty(0)
    vars(model[2].weight).update(mark)
    with pytest.raises(TypeError, match=FLAT):
        call(model)


def test_whole_parameters_of_fsdp1_are_balanced():
    """As within summon_full_params, or without sharding."""
    model = norm_between_layers()
    for parameter in model.parameters():
        parameter._fsdp_flattened = True
    assert nero.is_balanced(nero.balance_(model))
    assert len(list(nero.Nero(model.parameters()).parts())) == 6


def test_gathered_parameter_of_zero_3_is_balanced():
    model = norm_between_layers()
    model[2].weight.ds_tensor = torch.zeros(6)
    assert nero.is_balanced(nero.balance_(model))


@torch.inference_mode()
def _made_for_inference() -> nn.Module:
    return nn.Linear(3, 2)


def test_parameter_created_in_inference_mode_raises():
    with pytest.raises(ValueError, match=r"weight was created under torch.inference_mode\(\).*outside"):
        nero.Nero(_made_for_inference())
    model = nn.Sequential(_made_for_inference(), nn.Linear(2, 3))
    with torch.inference_mode():
        model[0].requires_grad_(False)
    nero.Nero(model)


@pytest.mark.parametrize(
    "shared",
    [
        torch.randn(1, 6).expand(3, 6),
        torch.randn(12).as_strided((5, 4), (2, 1)),
        torch.randn(9).unfold(0, 3, 2),
        torch.zeros(3000).unfold(0, 1000, 1),
    ],
    ids=["expanded", "strided", "unfolded", "long"],
)
def test_parameter_sharing_its_memory_raises_before_a_change(shared: Tensor):
    weight = torch.randn(4, 8)
    before = weight.clone()
    with pytest.raises(ValueError, match="elements of parameter 1 of group 0 share memory"):
        nero.Nero([nn.Parameter(weight), nn.Parameter(shared)])
    assert torch.equal(weight, before)
    nero.Nero([nn.Parameter(weight), nn.Parameter(shared.clone())])  # the remedy


@pytest.mark.parametrize(("shape", "strides"), [((0, 5), (0, 0)), ((2, 3), (3, 2)), ((3, 1, 4), (8, 0, 2))])
def test_parameter_with_unusual_strides_is_accepted(shape: tuple[int, ...], strides: tuple[int, ...]):
    weight = nn.Parameter(torch.randn(24).as_strided(shape, strides))
    optimiser = nero.Nero([nn.Parameter(torch.randn(2, 3)), weight])
    weight.grad = torch.randn(shape)
    optimiser.step()
    if weight.numel():
        torch.testing.assert_close(weight.norm(dim=-1), torch.ones(shape[:-1]))


def test_lazy_parameter_raises():
    lazy = nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"'weight' has no shape yet.*run a batch"):
        nero.Nero(lazy)
    with pytest.raises(ValueError, match="has no shape yet"):
        nero.Nero(lazy.parameters())


@pytest.mark.parametrize("params", [[], iter([]), nn.ReLU()], ids=["list", "iterator", "module"])
def test_no_parameters_raises(params):
    with pytest.raises(ValueError, match="empty"):
        nero.Nero(params)


@pytest.mark.parametrize(
    "params", [torch.randn(3), [{"params": {torch.randn(3)}}], [3.0], None], ids=["tensor", "set", "float", "None"]
)
def test_params_of_wrong_type_raises(params):
    with pytest.raises(TypeError):
        nero.Nero(params)


def call_with(where: str, options: dict) -> nero.Nero:
    """Give options to the constructor, to a group or to param_groups."""
    layer = nn.Linear(3, 2)
    if where == "constructor":
        return nero.Nero(layer, **options)
    if where == "param_groups":
        return nero.Nero(nero.param_groups(layer, **options))
    if where == "group":
        return nero.Nero([{"params": layer.parameters(), **options}])
    optimiser = nero.Nero(nn.Linear(3, 2))
    optimiser.add_param_group({"params": layer if where == "added module" else layer.parameters(), **options})
    return optimiser


PLACES = ["constructor", "param_groups", "group", "added", "added module"]


@pytest.mark.parametrize("where", PLACES)
def test_foreign_option_that_asks_for_nothing_is_dropped(where: str):
    nothing = {"weight_decay": 0, "dampening": 0.0, "foreach": None, "fused": False, "capturable": False}
    nothing |= {"amsgrad": False, "differentiable": False, "decoupled_weight_decay": False}
    optimiser = call_with(where, nothing)
    assert not any(set(options) & set(nothing) for options in (optimiser.defaults, *optimiser.param_groups))
    assert call_with(where, {"weight_decay": torch.tensor(0.0)}).param_groups


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": 0.1}, "weight_decay=0.1 .*leave it out"),
        ({"betas": (0.9, 0.999)}, r"momentum=b1, beta=b2"),
        ({"eps": 1e-8}, "scale-free"),
        ({"dampening": 0.9}, "leave it out"),
        ({"foreach": True}, "backend='foreach'"),
        ({"capturable": True}, "CUDA graph"),
        ({"fix_nrom": False}, r"unknown option 'fix_nrom' of .*did you mean fix_norm\?"),
        ({"learning_rate": 0.1}, r"did you mean lr\?"),
        ({"ns_steps": 5}, "unknown option 'ns_steps' .* the options are lr, beta"),  # of Muon; not longest_step
        ({"rho": 0.9}, "unknown option 'rho' .* the options are lr, beta"),  # of Adadelta; not SAM's
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_foreign_or_unknown_option_raises_with_hint(options: dict, message: str, where: str):
    with pytest.raises(TypeError, match=message):
        call_with(where, options)


def test_option_without_a_name_raises_and_tells_the_names():
    """The third argument of SGD is momentum, the third of AdamW betas."""
    for value in (0.9, (0.9, 0.999)):
        with pytest.raises(TypeError, match=r"nero\.Nero got .*0\.9.* without a name: write beta=\.\.\., momentum="):
            nero.Nero(nn.Linear(3, 2), 0.01, value)
    with pytest.raises(TypeError) as error:
        nero.Nero(nn.Linear(3, 2), 0.01, list(range(10_000)))
    assert len(str(error.value)) < 200


def test_unknown_option_lists_what_each_place_accepts():
    listed = {}
    for where, name in (("constructor", "nero.Nero"), ("added module", "a parameter group")):
        with pytest.raises(TypeError) as error:
            call_with(where, {"use_muon": True})
        listed[where] = str(error.value).partition(f"of {name}; the options are ")[2].split(", ")
    signature = inspect.signature(nero.Nero).parameters
    assert listed == {"constructor": [*signature][1:-1], "added module": [*OPTIONS]}


def test_every_option_of_adamw_and_sgd_has_a_hint():
    """Groups taken over from these optimisers meet no unknown option."""
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        keys = set(kind([nn.Parameter(torch.ones(2))], lr=0.1).param_groups[0])
        assert keys <= set(OPTIONS) | OTHER_KEYS | set(FOREIGN_OPTIONS)


def test_keys_that_schedulers_write_are_allowed():
    layer = nn.Linear(3, 2)
    first = nero.Nero(layer)
    for make in (
        lambda: torch.optim.lr_scheduler.CyclicLR(first, 0.001, 0.1, cycle_momentum=False),
        lambda: torch.optim.lr_scheduler.OneCycleLR(first, 0.1, 10, cycle_momentum=False),
        lambda: torch.optim.swa_utils.SWALR(first, 0.05),
    ):
        make()
    groups = [{**group, "name": "layer", "lr_scale": 0.5} for group in first.param_groups]
    second = nero.Nero(groups)
    assert second.param_groups[0]["lr_scale"] == 0.5
    assert "swa_lr" in second.param_groups[0]


def test_role_given_to_the_constructor_raises():
    with pytest.raises(TypeError, match=r"'role' is for groups"):
        nero.Nero(nn.Linear(3, 2), role="neuron")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (3, "expected a module, parameters or a list of groups, got 3"),
        (nn.Linear, "Linear.*call it first"),
        (nn.Linear(3, 2).parameters, "call it first"),
        ({"params": []}, r"got a dict.*\[group\]"),
        ([{"params": [nn.Parameter(torch.ones(3))]}, 3.0], "group must be a dict"),
        (torch.ones(3, requires_grad=True), r"got a tensor.*\[tensor\]"),
        ([nn.Linear(3, 2), nn.Linear(2, 1)], r"got a list of modules.*nn\.ModuleList"),
        ([{"params": [nn.Linear(3, 2)]}], r"nn\.ModuleList"),
        ([("table", torch.arange(6))], r"table is a tensor of torch\.int64.*\.float\(\)"),
        ([torch.ones(3, dtype=torch.bool)], r"torch\.bool"),
    ],
    ids=["number", "class", "method", "dict", "group", "tensor", "modules", "group of modules", "integers", "bools"],
)
def test_params_of_wrong_kind_raises_with_remedy(params, message: str):
    with pytest.raises(TypeError, match=message):
        nero.Nero(params)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(3, 2).requires_grad_(False), lambda: [nn.Parameter(torch.ones(0, 3))]]
)
def test_nothing_to_train_warns_once_at_the_users_line(make):
    with pytest.warns(UserWarning, match="nothing to train.*requires_grad_") as caught:
        nero.Nero(make())
    assert [warning.filename for warning in caught] == [__file__]


def test_group_without_parameters_is_quiet():
    optimiser = nero.Nero([{"params": []}])  # warnings are errors here
    assert optimiser.param_groups[0]["params"] == []


def test_frozen_model_with_one_trainable_layer_is_quiet():
    model = nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1))
    model[0].register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))  # as quantised weights are
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nero.Nero(model)


@pytest.mark.parametrize("option", ["fix_norm", "fix_mean", "maximize"])
def test_switch_set_to_a_number_later_raises(option: str):
    """1 equals True, so only its identity tells."""
    layer = nn.Linear(3, 2)
    optimiser = nero.Nero(layer)
    layer(torch.randn(1, 3)).sum().backward()
    optimiser.step()
    optimiser.param_groups[0][option] = int(optimiser.param_groups[0][option])
    with pytest.raises(ValueError, match=f"{option} must be one of"):
        optimiser.step()


@pytest.mark.parametrize(("option", "value"), [("fix_mean", "yes"), ("fix_mean", 1), ("fix_norm", 1)])
def test_balance_after_step_with_bad_constraint_raises(option: str, value: object):
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=f"{option} must be one of"):
        nero.balance_after_step(torch.optim.SGD(layer.parameters()), layer, **{option: value})


def test_balance_after_step_before_sharding_raises(monkeypatch: pytest.MonkeyPatch):
    """As Accelerate replaces the parameters in the optimiser when it shards a model."""
    layer = nn.Linear(3, 2)
    shards = [nn.Parameter(torch.randn_like(each)) for each in layer.parameters()]
    monkeypatch.setattr(nero.after_step, "is_sharded", lambda tensor: any(tensor is each for each in shards))
    adam = torch.optim.Adam(layer.parameters())
    nero.balance_after_step(adam, layer)
    adam.step()
    adam.param_groups[0]["params"] = shards
    with pytest.raises(ValueError, match=r"were sharded.*call it after"):
        adam.step()
    layer.weight, layer.bias = shards
    nero.balance_after_step(adam, layer)
    adam.step()
    assert nero.is_balanced(layer)


def test_balance_after_step_lets_parameters_come_and_go():
    model, other = norm_between_layers(), norm_between_layers()
    sgd = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    nero.balance_after_step(sgd, model[0])
    del sgd.param_groups[0]
    sgd.step()
    sgd.param_groups.clear()
    sgd.add_param_group({"params": other.parameters()})
    nero.balance_after_step(sgd, other)
    sgd.step()
    assert nero.is_balanced(other)
    sgd.param_groups[0]["params"] = list(nn.Linear(3, 2).parameters())
    sgd.step()


def test_signature_lists_every_option():
    signature = inspect.signature(nero.Nero).parameters
    assert list(signature) == ["params", *(name for name in OPTIONS if name not in OF_GROUPS), "pretrained", "others"]
    assert nero.Nero(nn.Linear(3, 2)).defaults == {name: option.default for name, option in OPTIONS.items()}
    changed = {"lr": 0.5, "beta": 0.5, "longest_step": 2.0, "fix_mean": False, "fix_norm": "initial", "scale": 2.0}
    changed |= {"gain_penalty": 0.5, "maximize": True, "on_nonfinite": "raise", "rounding": "stochastic"}
    changed |= {"depth": 3.0, "backend": "eager", "momentum": 0.9, "nesterov": False}
    optimiser = nero.Nero(nn.BatchNorm1d(3), **changed)
    assert {name: optimiser.defaults[name] for name in OPTIONS if name not in OF_GROUPS} == changed


def test_backend_set_later_that_is_missing_raises_before_any_step(monkeypatch: pytest.MonkeyPatch):
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimiser = nero.Nero([{"params": layer.parameters()} for layer in layers])
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    monkeypatch.setattr("nero.backends.available.numba_works", lambda: False)
    optimiser.param_groups[1]["backend"] = "numba"
    with pytest.raises(ModuleNotFoundError, match="needs numba"):
        optimiser.step()
    assert all(torch.equal(one, other) for one, other in zip(layers.parameters(), before, strict=True))
