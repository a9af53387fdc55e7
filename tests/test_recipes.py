"""The recipes of docs/guide/recipes.md: every block runs, roles are kept, and runs resume bit for bit."""

import copy
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from networks import declare_operators_of_torchvision
from test_docs import RECIPES, blocks_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import nero

Names = dict[str, Any]
AUTO = {"lr": "auto"}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning",  # Lightning 2.6 with torch 2.13
    "ignore:The '.*_dataloader' does not have many workers",  # Lightning
    "ignore:'pin_memory' argument is set as true but no accelerator",  # transformers
)


def sections() -> dict[str, str]:
    """Return the text of each section of the page by its heading; "" is the text before the first."""
    head, *rest = re.split(r"^## ", RECIPES.read_text(), flags=re.MULTILINE)
    return {"": head, **{part.partition("\n")[0]: part for part in rest}}


@pytest.fixture
def run_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Names]:
    """Run the code of a section, after the code before the first, in an empty folder; return its names."""
    monkeypatch.chdir(tmp_path)

    def run(heading: str) -> Names:
        torch.manual_seed(0)
        names: Names = {"__name__": "page"}
        for text in (sections()[""], sections()[heading]):
            for block in blocks_of(text):
                line = RECIPES.read_text().partition(block.code)[0].count("\n")
                exec(compile("\n" * line + block.code, str(RECIPES), "exec"), names)
        return names

    return run


def are_equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def roles_in(optimiser: torch.optim.Optimizer) -> dict[torch.Tensor, tuple]:
    groups = optimiser.param_groups
    return {weight: (group["role"], group["fan_in_axes"]) for group in groups for weight in group["params"]}


def has_roles_of(model: nn.Module, optimiser: torch.optim.Optimizer) -> bool:
    """Return whether the groups of an optimiser have the roles that the layers of a model tell."""
    parameters, found = dict(model.named_parameters()), roles_in(optimiser)
    return all(found[parameters[name]] == (role.kind, role.fan_in_axes) for name, role in nero.roles_of(model).items())


def test_every_recipe_is_run_by_a_test():
    run = set(re.findall(r'run_section\("([^"]+)"\)', Path(__file__).read_text()))
    assert run == set(sections()) - {""}


def test_trainer_keeps_roles_and_resumes_exactly(run_section):
    names = run_section("transformers.Trainer")
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"rounding": "stochastic"}), (torch.float32, AUTO)):
        whole, resumed = (names["GPT2LMHeadModel"](names["config"]).to(dtype) for _ in range(2))
        nn.init.zeros_(whole.transformer.h[0].mlp.c_proj.weight)  # grows, and Trainer builds Nero on the loaded model
        first, second = (names["make_trainer"](model, use_cpu=True) for model in (whole, resumed))
        first.optimizer_cls_and_kwargs[1].update(options)
        second.optimizer_cls_and_kwargs[1].update(options)
        first.train()
        assert has_roles_of(whole, first.optimizer)
        assert ("neuron", (0,)) in roles_in(first.optimizer).values()  # a transposed layer
        second.train(resume_from_checkpoint="out/checkpoint-3")
        assert are_equal(whole, resumed)
        assert whole.dtype == dtype


def test_trainer_with_weight_decay_raises(run_section):
    names = run_section("transformers.Trainer")
    trainer = names["make_trainer"](names["GPT2LMHeadModel"](names["config"]), weight_decay=0.1)
    with pytest.raises(TypeError, match="weight_decay"):
        trainer.create_optimizer()


@pytest.mark.parametrize("lr", [0.01, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lightning_run_resumes_exactly(run_section, lr: float | str, dtype: torch.dtype):
    names = run_section("Lightning")
    dataset = torch.utils.data.TensorDataset(names["inputs"].to(dtype), names["targets"].to(dtype))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    start = names["make_network"]().to(dtype)
    whole, half, resumed = (names["Regression"](copy.deepcopy(start), lr=lr) for _ in range(3))
    fit(names, whole, loader, 4)
    fit(names, half, loader, 2).save_checkpoint("half.ckpt")
    trainer = fit(names, resumed, loader, 4, ckpt_path="half.ckpt", weights_only=True)
    assert are_equal(whole, resumed)
    assert not are_equal(half, resumed)
    assert has_roles_of(resumed, trainer.optimizers[0])


def fit(names: Names, module: nn.Module, loader: object, epochs: int, **options: object) -> Any:
    trainer = names["lightning"].Trainer(max_epochs=epochs, accelerator="cpu", **names["quiet"])
    trainer.fit(module, loader, **options)
    return trainer


def test_group_added_through_lightning_enters_at_once():
    lightning = pytest.importorskip("lightning")
    optimiser, layer = nero.Nero(nn.Linear(8, 4)), nn.Linear(4, 3)
    lightning.pytorch.core.optimizer.LightningOptimizer(optimiser).add_param_group({"params": layer})
    assert nero.is_balanced(layer)
    assert layer.weight in optimiser.state


def test_lightning_optimiser_is_watched(run_section):
    names = run_section("Lightning")
    module = names["Regression"](names["make_network"](), lr=0.01)
    watches = []
    module.on_train_start = lambda: watches.append(nero.watch(module.optimizers()))
    trainer = fit(names, module, names["loader"], 1)
    assert watches[0].optimiser is trainer.optimizers[0]
    assert watches[0].read()["network.0.weight"].turned.middle > 0


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"rounding": "stochastic"}), (torch.float32, AUTO)],
    ids=["float32", "bfloat16", "auto"],
)
def test_accelerate_run_resumes_exactly(run_section, dtype: torch.dtype, options: dict):
    names = run_section("Accelerate")
    assert has_roles_of(names["model"], names["optimiser"])
    assert isinstance(names["watched"].optimiser, nero.Nero)
    assert names["watched"].readings[0].step == 2  # four batches, accumulated in pairs
    start = names["make_network"]().to(dtype)
    batches = list(zip(names["inputs"].to(dtype).split(8), names["targets"].to(dtype).split(8), strict=True))

    def train(batches: list, load: str = "", save: str = "") -> nn.Module:
        accelerator = names["Accelerator"](cpu=True, gradient_accumulation_steps=2)
        model = copy.deepcopy(start)
        model, optimiser = accelerator.prepare(model, nero.Nero(model, **options))
        if load:
            accelerator.load_state(load)
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - y).square().mean())
                optimiser.step()
                optimiser.zero_grad()
        if save:
            accelerator.save_state(save)
        return model

    torch.manual_seed(1)
    whole = train(batches)
    torch.manual_seed(1)
    train(batches[:4], save="half")
    assert are_equal(whole, train(batches[4:], load="half"))


def test_timm_makes_nero_by_name_with_roles(run_section):
    declare_operators_of_torchvision()
    try:
        import timm.optim
    except (ImportError, RuntimeError) as error:  # torchvision raises the latter beside another torch than its own
        pytest.skip(f"timm cannot be imported: {error}")
    names = run_section("timm")
    model, optimiser = names["vision"], names["optimiser"]
    assert isinstance(optimiser, nero.Nero)
    assert has_roles_of(model, optimiser)
    assert {"neuron", "gain", "bias"} <= {kind for kind, _ in roles_in(optimiser).values()}
    nero.integrations.register_timm()  # again: changes nothing
    make = functools.partial(timm.optim.create_optimizer_v2, model)
    chosen = make("nero", param_group_fn=lambda model: nero.param_groups(model, {"head.weight": "gain"}))
    assert roles_in(chosen)[model.head.weight] == ("gain", ())
    with pytest.raises(TypeError, match="weight_decay"):
        make("nero", weight_decay=0.1)
    with pytest.raises(ValueError, match="layer_decay"):
        make("nero", layer_decay=0.75)
    assert type(make("sgd", lr=0.1)) is torch.optim.SGD


def test_peft_trains_adapters_alone_and_saves_them(run_section):
    names = run_section("PEFT")
    adapted, loaded, inputs = names["adapted"], names["loaded"], names["inputs"]
    trained = {name.split(".")[-3]: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert set(trained) == {"lora_A", "lora_B"}
    assert trained["lora_B"].any()
    with torch.no_grad():
        assert torch.equal(loaded(inputs), adapted(inputs))
        with adapted.disable_adapter():
            assert not torch.equal(loaded(inputs), adapted(inputs))
    untouched = loaded.unload().state_dict()  # a copy from before the adapters were trained
    assert untouched.keys() == adapted.unload().state_dict().keys()
    assert all(torch.equal(weight, untouched[name]) for name, weight in adapted.unload().state_dict().items())


def test_axolotl_plugin_gives_the_model_to_nero(run_section, monkeypatch: pytest.MonkeyPatch):
    from transformers import Trainer, TrainingArguments

    class BasePlugin:
        """The hook of axolotl 0.18.0, whose trainers are subclasses of transformers.Trainer."""

        def post_trainer_create(self, cfg: object, trainer: Trainer) -> None: ...

    install(monkeypatch, "axolotl.integrations.base", BasePlugin=BasePlugin)
    names = run_section("axolotl")
    trainer = Trainer(names["make_network"](), TrainingArguments("out", use_cpu=True))
    names["NeroPlugin"]().post_trainer_create(SimpleNamespace(learning_rate=0.02, weight_decay=0.0), trainer)
    optimiser = trainer.create_optimizer()
    assert has_roles_of(trainer.model, optimiser)
    assert {group["lr"] for group in optimiser.param_groups} == {0.02}


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    """Stand in for a module that is not installed, and for its packages."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:length]))
        vars(module).update(attributes if length == len(parts) else {})
        if length == len(parts) or module.__name__ not in sys.modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)


class OptimizersContainer(torch.optim.Optimizer):
    """A stand-in for torchtitan's: its signature, its hook ``_post_init``, and checkpoints by name of parameter."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Options of the container."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        raise NotImplementedError("makes AdamW")

    def _post_init(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:
        for optimiser in self.optimizers:
            optimiser.step()

    def state_dict(self) -> dict[str, object]:
        return {key: value for optimiser in self.optimizers for key, value in flat_state(optimiser).items()}

    def load_state_dict(self, flat: dict[str, Any]) -> None:
        for optimiser in self.optimizers:
            nested = optimiser.state_dict()
            for group in nested["param_groups"]:
                for number, name in zip(group["params"], group["param_names"], strict=True):
                    nested["state"][number] = {key: flat[f"state.{name}.{key}"] for key in nested["state"][number]}
                    group.update({key: flat[f"param_groups.{name}.{key}"] for key in group if "param" not in key})
            optimiser.load_state_dict(nested)


def flat_state(optimiser: torch.optim.Optimizer) -> dict[str, object]:
    nested, flat = optimiser.state_dict(), {}
    for group in nested["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            flat |= {f"state.{name}.{key}": value for key, value in nested["state"][number].items()}
            flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if "param" not in key}
    return flat


@pytest.mark.filterwarnings("ignore:torch.distributed is.*unavailable", "ignore:TypedStorage is deprecated")
def test_torchtitan_container_resumes_exactly(run_section, monkeypatch: pytest.MonkeyPatch):
    wrapper = "_checkpoint_wrapped_module"
    install(monkeypatch, "torchtitan.components.optimizer", OptimizersContainer=OptimizersContainer)
    install(
        monkeypatch,
        "torchtitan.components.checkpointer.utils",
        canonical_fqn=lambda name: ".".join(part for part in name.split(".") if part != wrapper),
    )
    names = run_section("torchtitan")

    def make() -> tuple[nn.Module, OptimizersContainer]:
        model = names["make_network"]()
        model[0] = checkpoint_wrapper(model[0])
        parts = [nn.ModuleDict({"first": model[:2]}), nn.ModuleDict({"second": model[2:]})]
        container = names["NeroContainer"](names["NeroContainer"].Config(lr=0.02), model_parts=parts)
        assert all(has_roles_of(*pair) for pair in zip(parts, container.optimizers, strict=True))
        return model, container

    def train(model: nn.Module, container: OptimizersContainer) -> None:
        for _ in range(3):
            (model(names["inputs"]) - names["targets"]).square().mean().backward()
            container.step()
            model.zero_grad()

    (whole, container), (resumed, loaded) = make(), make()
    train(whole, container)
    assert "state.first.0.weight.grad_norm" in container.state_dict()
    dcp.save({"model": whole.state_dict(), "optimizer": container.state_dict()}, checkpoint_id="dcp")
    states = {"model": resumed.state_dict(), "optimizer": loaded.state_dict()}
    dcp.load(states, checkpoint_id="dcp")
    resumed.load_state_dict(states["model"])
    loaded.load_state_dict(states["optimizer"])
    train(whole, container)
    train(resumed, loaded)
    assert are_equal(whole, resumed)


def test_optuna_finds_an_angle_and_prunes(run_section):
    study = run_section("Optuna")["study"]
    states = [trial.state.name for trial in study.trials]
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert 0.003 < study.best_params["lr"] < 0.3


def test_averaged_neurons_are_balanced_again(run_section, monkeypatch: pytest.MonkeyPatch):
    raw, balance = [], nero.balance_
    monkeypatch.setattr(nero, "balance_", lambda model: raw.append(copy.deepcopy(model)) or balance(model))
    names = run_section("EMA and SWA")
    for layer in (raw[0][0], raw[0][3]):
        assert layer.weight.mean(1).abs().max() < 1e-6
        assert layer.weight.norm(dim=1).max() < 0.9999
    assert not nero.is_balanced(raw[0])
    assert nero.is_balanced(names["evaluated"])
    x = torch.randn(1000, 8)
    with torch.no_grad():
        last, plain, balanced = (
            (model(x) - x[:, :1] * x[:, 1:2]).square().mean() for model in (names["model"], raw[0], names["evaluated"])
        )
    assert plain < 0.9 * last
    assert balanced < 0.9 * last


def test_compiled_model_and_step_keep_roles_and_names(run_section, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    names = run_section("torch.compile")
    plain = names["make_network"]()
    optimiser = nero.Nero(names["compiled"])
    assert has_roles_of(names["model"], optimiser)
    assert optimiser.param_groups[0]["param_names"][0] == "_orig_mod.0.weight"
    for saved, loaded in ((names["optimiser"], optimiser), (optimiser, nero.Nero(plain))):
        own = loaded.param_groups[0]["param_names"]
        loaded.load_state_dict(saved.state_dict())
        assert loaded.param_groups[0]["param_names"] == own
        assert [float(state["step"]) for state in loaded.state.values()] == [2.0] * 6
