"""Nero as a :class:`torch.optim.Optimizer`: groups, state, steps and checkpoints."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn

from nero import backends
from nero.auto.counter import DepthCounter, check_countable
from nero.checkpoint import start_missing_momentum, take_apart
from nero.groups import (
    OptionChanges,
    Part,
    check_params,
    checked_role,
    completed,
    param_groups,
    parts_of,
    role_in,
    warn_if_lost,
)
from nero.messages import explain_positional_options
from nero.options import (
    MISSING_IN_OLD_CHECKPOINTS,
    OPTIONS,
    Backend,
    FixNorm,
    OnNonfinite,
    Rounding,
    check_options,
    make_plain,
    own_options,
    warn_if_unpenalised,
)
from nero.parameters import check_gradients, check_trainable, replaced, warn_if_idle, warn_if_untrainable
from nero.pretrained import is_loaded_by_diffusers, warn_if_balanced, warn_if_redundant
from nero.process import is_traced
from nero.regrowth import Regrowth, add_missing_radii
from nero.role import Role
from nero.roles import check_unflattened
from nero.sharding import is_sharded, local_of, sharding_of, totals
from nero.state import UnseenState, groups_of, initial_state, read_again

Params: TypeAlias = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Loss = TypeVar("Loss")


class Nero(UnseenState):
    r"""The neuronal rotator, of "Learning by Turning: Neural Architecture Aware Optimisation".

    Every neuron, a weight vector :math:`w` with gradient :math:`g`, takes the step

    .. math::
        \bar g^2 &\leftarrow \beta \bar g^2 + (1 - \beta) \|g\|^2 \\
        w &\leftarrow w - \eta \, \|w\| \, \frac{g}{\sqrt{\bar g^2 / (1 - \beta^t)}} \\
        w &\leftarrow w - \operatorname{mean}(w), \qquad w \leftarrow w / \|w\|

    and every gain or bias the same without the last line, relative to its scale :math:`\sigma`.
    The state is one number per neuron. Neurons are balanced when they enter the optimiser, so build it before you
    evaluate or copy the model. Neurons that are balanced already, as in a loaded model, keep their bits.

    Args:
        params: a module: its layers determine the role of each parameter. Or, as for any optimiser of torch,
            parameters, named parameters or groups: their shapes determine it.
        lr: η, the angle in radians through which a neuron turns in a step: a float, or a tensor of one element, which
            lets ``torch.compile`` and CUDA graphs change it. Each group has its own copy of a tensor, ``group["lr"]``.
            ``"auto"`` stands for ``lr=0.1, depth="auto", longest_step=3``, a smaller angle for a deeper module.
        beta: β, the share of the running average that a step keeps.
        momentum: μ, the share that an average m of gradients keeps in a step. The step goes along m instead of g, and
            ḡ averages the norm of what the step goes along. m takes as much memory as the parameters.
        nesterov: go along μ m + (1 - μ) g, as Nesterov's momentum does. By default True.
        longest_step: the longest step, as a multiple of the angle ``lr / depth``. The paper has no bound, which is
            ``math.inf``: a gradient far above its running average then turns a neuron by up to 32 times the angle.
            By default 3 with ``lr="auto"``, else ``math.inf``.
        fix_mean: hold every neuron to zero mean. By default True, or False if ``pretrained``.
        fix_norm: hold every neuron to unit norm, or with ``"initial"`` to the norm it enters with. A neuron that enters
            as zero is held to a norm of at most one. By default True, or ``"initial"`` if ``pretrained``.
        scale: σ, what a step's size is relative to. By default a neuron's norm, and for gains and biases their mean
            absolute value before their first step, at least one for gains, and 0.01 for biases that are zero.
        gain_penalty: λ of the penalty λ/2 (γ - 1)² on every gain γ, added to the loss (Section 5.6). Shapes do not
            tell gains from biases: give the module, or the role.
        maximize: ascend instead of descend.
        on_nonfinite: ``"skip"`` leaves out a neuron, gain or bias whose gradient is NaN or infinite, and counts it in
            :attr:`skipped`; ``"raise"`` raises a ``FloatingPointError`` before anything changes, and has to wait for
            the gradients.
        rounding: of half-precision parameters: to ``"nearest"``, or ``"stochastic"``, so that steps too small for the
            dtype are kept on average. One process repeats by ``torch.manual_seed``; replicas of several draw alike.
        depth: divides the angle, so that ``lr`` is the change of the whole network. ``"auto"`` counts it
            (:func:`nero.depth_of`) when the module first runs with gradients, which must be before the first step;
            that run is done twice. Processes of DistributedDataParallel or shards agree on the greatest.
        backend: ``"eager"``, ``"foreach"``, ``"numba"`` (compiled for the CPU, from the extra ``cpu``),
            ``"triton"`` (kernels for CUDA), or ``"auto"`` for the fastest that works.
        pretrained: keep the weights that the model comes with, and only turn them: ``fix_norm="initial"`` and
            ``fix_mean=False``. ``False`` balances them. ``None`` does so too, with a warning if the model looks
            pretrained, or if parameters are unfrozen later.
        others: options of other optimisers at a value without effect, such as ``weight_decay=0``; they are dropped.

    Every option can be given for a group alone. A group can also have ``role`` (``"neuron"``, ``"gain"``, ``"bias"``,
    or ``None`` for the shape rule), ``fan_in_axes`` and ``fan_in_groups``, as :func:`nero.param_groups` sets them.

    Raises:
        ValueError, TypeError: for bad input; the message names the option or parameter, and the fix.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimiser = Nero(model, lr=0.01)
        >>> model(torch.randn(2, 8)).square().sum().backward()
        >>> optimiser.step()

    Reference:
        Liu, Bernstein, Meister and Yue, 2021, Algorithm 1.
    """

    # no defaults here: Lightning's wrapper inherits this class, and defaults would hide the optimiser's attributes
    _plan: backends.Plan | None
    _depth_counter: DepthCounter
    _regrowth: Regrowth
    _is_fresh: bool  # whether parameters have entered or were loaded since the last step
    _pretrained: bool | None
    _changes: OptionChanges
    _is_made: bool

    @explain_positional_options("nero.Nero")
    def __init__(
        self,
        params: Params,
        lr: float | Tensor | Literal["auto"] = 0.01,
        *,
        beta: float = 0.999,
        momentum: float = 0.0,
        nesterov: bool | None = None,
        longest_step: float | None = None,
        fix_mean: bool | None = None,
        fix_norm: FixNorm | None = None,
        scale: float | None = None,
        gain_penalty: float = 0.0,
        maximize: bool = False,
        on_nonfinite: OnNonfinite = "skip",
        rounding: Rounding = "nearest",
        depth: float | Literal["auto"] | None = None,
        backend: Backend = "auto",
        pretrained: bool | None = None,
        **others: Any,
    ) -> None:
        check_params(params)
        if of_groups := own_options(others, "nero.Nero"):
            raise TypeError(
                f"{min(of_groups)!r} is for groups: nero.Nero([{{'params': ..., {min(of_groups)!r}: ...}}])"
            )
        if not (pretrained is None or isinstance(pretrained, bool)):
            raise ValueError(f"pretrained must be True, False or None, got {pretrained!r}")
        is_auto = isinstance(lr, str) and lr == "auto"
        if is_auto:
            from nero.auto.depth import LONGEST_STEP, TRUST

            lr, longest_step = TRUST, LONGEST_STEP if longest_step is None else longest_step
        given = {
            "lr": lr,
            "beta": beta,
            "momentum": momentum,
            "nesterov": True if nesterov is None else nesterov,
            "longest_step": math.inf if longest_step is None else longest_step,
            "fix_mean": not pretrained if fix_mean is None else fix_mean,
            "fix_norm": ("initial" if pretrained else True) if fix_norm is None else fix_norm,
            "scale": scale,
            "gain_penalty": gain_penalty,
            "maximize": maximize,
            "on_nonfinite": on_nonfinite,
            "rounding": rounding,
            "depth": ("auto" if is_auto else 1.0) if depth is None else depth,
            "backend": backend,
        }
        defaults = {name: option.default for name, option in OPTIONS.items()} | given
        make_plain(defaults)
        if defaults["depth"] == "auto":
            if not isinstance(params, nn.Module):
                raise ValueError(
                    "lr='auto' and depth='auto' need the model itself, whose layers are counted when it runs: "
                    "nero.Nero(model, lr='auto'), or count_depth(model) of nero.Nero(groups, lr=0.1, longest_step=3)"
                )
            check_countable(params)
        check_options(defaults)
        self._pretrained, self._is_made = pretrained, False
        self._roles: dict[Tensor, Role] = {}
        self._reset()
        super().__init__(param_groups(params) if isinstance(params, nn.Module) else params, defaults)
        check_unflattened((part.name, part.parameter) for part in self.parts())
        warn_if_unpenalised(gain_penalty, (part.role.kind for part in self.parts() if part.group["gain_penalty"]))
        if nesterov and not any(group["momentum"] for group in self.param_groups):
            raise ValueError("nesterov=True needs momentum: give momentum=0.9, or leave nesterov out")
        check_trainable(part[:2] for part in self.parts() if part.parameter.requires_grad)
        warn_if_untrainable(part.parameter for part in self.parts())
        self._enter(list(self.parts()), is_pretrained=isinstance(params, nn.Module) and is_loaded_by_diffusers(params))
        self._is_made = True
        if defaults["depth"] == "auto" and isinstance(params, nn.Module):
            self.count_depth(params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. They are balanced at once, and count their own steps.

        Args:
            param_group: ``"params"``, with any options. A module as ``"params"`` makes one group per role.
        """
        groups = [param_group]
        if isinstance(param_group, dict) and isinstance(param_group.get("params"), nn.Module):
            options = {key: value for key, value in param_group.items() if key != "params"}
            groups = param_groups(param_group["params"], **options)
        count = len(self.param_groups)
        try:
            for group in groups:
                self._add(group)
            if not self._is_made:  # the constructor adds all groups before it balances any
                return
            added = [part for part in self.parts() if any(part.group is group for group in self.param_groups[count:])]
            check_unflattened((part.name, part.parameter) for part in self.parts())
            check_trainable(part[:2] for part in added if part.parameter.requires_grad)
        except BaseException:
            for group in self.param_groups[count:]:
                for parameter in group["params"]:
                    self._roles.pop(parameter, None)
            del self.param_groups[count:]
            raise
        if self.defaults["depth"] == "auto":
            for given, group in zip(groups, self.param_groups[count:], strict=True):
                if "depth" not in given and group["depth"] != "auto":
                    self._depth_counter.join(group)
        self._enter(added)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Turn every neuron and nudge every gain and bias that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = self._depth_counter.run(closure)
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling:
            if self._changes.check(self.param_groups, self._roles) and self._plan is not None:
                self._plan.retire()
            self._depth_counter.warn()
        self._depth_counter.check()
        if any(group["on_nonfinite"] == "raise" for group in self.param_groups):
            self._check_gradients()
        if is_compiling and not any(is_sharded(each) for group in self.param_groups for each in group["params"]):
            self._enter_late()
            backends.step_eagerly(groups_of(self.param_groups, self._state, self._role))
        elif (is_compiling or is_traced()) and (self._plan is None or self._plan.has_shards):
            torch.compiler.disable(self._step)()  # type: ignore[no-untyped-call] # a compiled step of shards is eager
        else:
            self._step()
        return loss

    def _step(self) -> None:
        """Step every parameter by its backend."""
        state = self._state if self._sight.is_seen else None  # None: nobody can have changed it
        if self._plan is None or not self._plan.covers(self.param_groups, state):
            self._enter_late()
            self._regrowth.end()
            if self._is_fresh:
                changed = read_again(self.parts(), self._state)
                if self._pretrained is None:
                    why = "new since nero.Nero balanced them (loaded, or clipped by max_norm)"
                    warn_if_balanced(changed, why, is_known=True, state=self._state)
                self._is_fresh = False
            groups = groups_of(self.param_groups, self._state, self._role)
            self._plan = backends.Plan(self.param_groups, self._state, groups, self._plan)
            if not self._plan.has_shards:
                warn_if_idle(part.parameter for part in self.parts())
        self._plan.step()

    @property
    def skipped(self) -> dict[str, int]:
        """The number of updates skipped for a non-finite gradient, by parameter, where any were.

        All processes that share a sharded parameter must read this, and get the same numbers.
        """
        parts = [part for part in self.parts() if "skipped" in self._state.get(part.parameter, {})]
        counts = {part.name: int(count) for part, count in zip(parts, self._skipped(parts), strict=True)}
        return {name: count for name, count in counts.items() if count}

    def _skipped(self, parts: Sequence[Part]) -> list[Tensor]:
        """Return the counts of skipped updates on all processes."""
        counts = [self._state[part.parameter]["skipped"] for part in parts]
        return totals(counts, [sharding_of(part.parameter, part.role) for part in parts])

    def parts(self) -> Iterator[Part]:
        """Yield every parameter with its name, role and group; equal names are numbered."""
        return parts_of(self.param_groups, self._roles)

    def _trained(self) -> list[Part]:
        """Return every parameter that the next step moves."""
        return [part for part in self.parts() if part.parameter.grad is not None and part.parameter.requires_grad]

    def count_depth(self, model: nn.Module) -> None:
        """Divide the angle by the depth of a model, counted when it next runs with gradients.

        ``depth="auto"`` does this for a module; call it for groups that were made by hand.

        Args:
            model: the groups that hold its parameters are changed.

        Raises:
            TypeError: if ``model`` is not a module.
            ValueError: if no group has a parameter of it, or if it is scripted.
        """
        self._depth_counter.watch(model)
        self.defaults["depth"] = "auto"  # also for groups that are added later

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for options in (self.defaults, *self.param_groups):
            for name in MISSING_IN_OLD_CHECKPOINTS:
                options.setdefault(name, OPTIONS[name].default)
        self._roles = {}  # a copy has other parameters, a loaded state other options
        self._pretrained, self._is_made = getattr(self, "_pretrained", None), True
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the options. All processes that share a sharded parameter must call this."""
        self._replace_swapped()
        packed: dict[str, Any] = super().state_dict()
        for group in packed["param_groups"]:
            make_plain(group)  # a schedule may have set its rate since the last step
        parts = [part for part in self.parts() if is_sharded(part.parameter) and self._has_entered(part.parameter)]
        counts = {id(part.parameter): count for part, count in zip(parts, self._skipped(parts), strict=True)}
        for index, parameter in enumerate([each for group in self.param_groups for each in group["params"]]):
            if id(parameter) in counts:
                packed["state"][index] = {**packed["state"][index], "skipped": counts[id(parameter)]}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`: all of it or, with an error, nothing.

        Statistics keep their precision whatever the parameters' dtype. The backend and the roles stay those of this
        optimiser. State that others have added is restored as it was saved.

        Raises:
            ValueError: if the checkpoint is of another model or optimiser, or lacks options.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}
        entered = set(filter(self._has_entered, self._state))  # others are not balanced yet

        def take_out(_: torch.optim.Optimizer, incoming: dict[str, Any]) -> dict[str, Any]:
            rest, own = take_apart(incoming, self.param_groups)
            loaded.update(own)
            return rest

        if not isinstance(state_dict, Mapping):
            raise ValueError(f"expected an optimiser's state_dict, got a {type(state_dict).__name__}")
        before = self.register_load_state_dict_pre_hook(take_out)
        after = self.register_load_state_dict_post_hook(lambda _: self._take_state(loaded, entered), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _take_state(self, loaded: dict[Tensor, dict[str, Any]], entered: Container[Tensor]) -> None:
        """Set the state. Undo the balancing of neurons that grew from zero, if the optimiser was made after loading."""
        add_missing_radii([part for part in self.parts() if part.parameter in entered], loaded)
        start_missing_momentum(list(self.parts()), loaded)
        self._state.update(loaded)
        self._sight.is_seen = False  # all of it is new
        self._regrowth.load(loaded)

    def _reset(self) -> None:
        """Validate options and plan anew at the next step; the depth counter and captured graphs go on."""
        self._plan = getattr(self, "_plan", None)
        self._regrowth = getattr(self, "_regrowth", None) or Regrowth()
        self._is_fresh = True
        self._depth_counter = getattr(self, "_depth_counter", None) or DepthCounter(self)
        self._changes = OptionChanges()

    def _check_gradients(self) -> None:
        """Raise for gradients that are not finite where on_nonfinite="raise"; check new parameters first."""
        replaced(self._state, self.param_groups)
        trained = [part for part in self._trained() if part.group["on_nonfinite"] == "raise"]
        check_trainable(part[:2] for part in trained if not self._has_entered(part.parameter))
        check_gradients(part[:2] for part in trained)

    def _replace_swapped(self) -> None:
        """Drop the state of parameters that are gone. If others took their place, initialise those.

        Accelerate does this: it shards a model and puts the sharded parameters into an optimiser made before.
        """
        if not (gone := replaced(self._state, self.param_groups)):
            return
        entering = [part for part in self.parts() if not self._has_entered(part.parameter)]
        check_trainable(part[:2] for part in entering if part.parameter.requires_grad)
        for parameter in gone:
            del self._state[parameter]
            self._roles.pop(parameter, None)
        self._enter(entering)

    def _role(self, group: dict[str, Any], parameter: Tensor) -> Role:
        if parameter not in self._roles:  # a copy, or a framework replaced the parameter
            self._roles[parameter] = role_in(group, parameter)
        return self._roles[parameter]

    def _add(self, given: dict[str, Any]) -> None:
        """Validate and add a group. Its parameters stay as they are."""
        group = completed(given, self.param_groups, self.defaults["lr"])
        if self.defaults["depth"] == "auto" and self.param_groups:
            group = {"depth": self.param_groups[0]["depth"], **group}
        super().add_param_group(group)
        group = self.param_groups[-1]
        check_options(group)
        roles = [checked_role(self.param_groups, group, index) for index in range(len(group["params"]))]
        self._roles.update(zip(group["params"], roles, strict=True))

    def _enter(self, parts: Sequence[Part], is_pretrained: bool = False) -> None:
        """Balance parameters and initialise their state."""
        parts = [part for part in parts if part.parameter.requires_grad]
        grown = self._regrowth.grown(parts)
        warn_if_redundant(parts)
        warn_if_lost(parts)
        if self._pretrained is None:
            warn_if_balanced((part for part in parts if part.parameter not in grown), is_known=is_pretrained)
        for part in parts:
            state = initial_state(part.parameter, part.role, part.group, grown.get(part.parameter))
            self._state[part.parameter].update(state)
        self._is_fresh = True

    def _enter_late(self) -> None:
        """Initialise parameters that were swapped or unfrozen. Validate all before changing any."""
        self._replace_swapped()
        late = [part for part in self._trained() if not self._has_entered(part.parameter)]
        check_trainable(part[:2] for part in late)
        for part in late:
            if not torch.compiler.is_compiling():  # a compiled step is the plain rule
                tensors = (local_of(tensor) for tensor in (part.parameter, part.parameter.grad) if tensor is not None)
                backends.check_backend(part.group["backend"], part.name, *tensors)
        if self._pretrained is None:
            warn_if_balanced(late, "new to nero.Nero (unfrozen, replaced, or without state)", is_known=True)
        for part in late:
            self._state[part.parameter].update(initial_state(part.parameter, part.role, part.group))
