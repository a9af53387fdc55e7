"""Nero as a :class:`torch.optim.Optimizer`: groups, state and checkpoints; nothing numeric."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn

from nero import backends
from nero.backends import Backend, Job, Settings
from nero.backends.triton import Line, Rate, Sweep, form_of, why_not, works
from nero.balance import SCALE_AT_ORIGIN, FixNorm, balance_tensor_, initial_radius, statistics_dtype
from nero.checks import check_backend, check_counts, check_lr, check_options, check_parameter, check_trained
from nero.counting import Counting
from nero.roles import Role, param_groups
from nero.rounding import Rounding
from nero.state import Part, checked_state, name_of, role_in, told
from nero.whole import real

Params: TypeAlias = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
OnNonfinite: TypeAlias = Literal["skip", "raise"]

_PARAMS = itemgetter("params")
#: All options but the learning rate, which may change at each step.
_OPTIONS = itemgetter(
    "beta",
    "longest_step",
    "fix_mean",
    "fix_norm",
    "scale",
    "gain_penalty",
    "maximize",
    "on_nonfinite",
    "rounding",
    "backend",
    "depth",
    "role",
    "fan_in_axes",
    "fan_in_groups",
)


class Nero(Counting):
    r"""The neuronal rotator, of "Learning by Turning: Neural Architecture Aware Optimisation".

    Every neuron, a weight vector :math:`w` with gradient :math:`g`, makes the step

    .. math::
        \bar g^2 &\leftarrow \beta \bar g^2 + (1 - \beta) \|g\|^2 \\
        w &\leftarrow w - \eta \, \|w\| \, g \big/ \sqrt{\bar g^2 / (1 - \beta^t)} \\
        w &\leftarrow w - \operatorname{mean}(w), \qquad w \leftarrow w / \|w\|

    and every gain or bias the same without the last line, relative to its scale :math:`\sigma`.
    The state is one number a neuron. Neurons are balanced when they enter the optimiser, so make
    it before you evaluate or copy the model.

    Args:
        params: a module, whose layers then say which parameter is what; or, as for any optimiser
            of torch, parameters, named parameters or groups, whose shapes then do.
        lr: η, the angle in radians through which a neuron turns in a step; a number, or a tensor
            of one element (then ``torch.compile`` does not recompile when it changes), which all groups then have in
            common, as torch has it. ``"auto"`` is short for ``lr=0.1, depth="auto", longest_step=3``: an angle that
            is smaller the deeper the module is.
        beta: β, how much of the running average is kept in a step.
        longest_step: how many times the angle, ``lr`` over ``depth``, a step may be, 3 say. By default 3 with
            ``lr="auto"``, and else, as in the paper, ``math.inf``: as many times as the gradient is larger than its
            running average, which with β = 0.999 may be 32.
        fix_mean: hold every neuron to zero mean.
        fix_norm: hold every neuron to unit norm, or with ``"initial"`` to the norm it came with.
        scale: what a step's size is relative to. By default a neuron's norm, and for gains and
            biases the mean size that they came with, or 0.01 where that is zero.
        gain_penalty: λ of the penalty λ/2 (γ - 1)², added to the loss, that pulls every gain γ towards one (Section
            5.6). From shapes alone a norm layer's gain passes for a bias: give the module, or the role.
        maximize: go up the gradient instead of down.
        on_nonfinite: what to do about a neuron, gain or bias whose gradient is infinite or not a
            number: ``"skip"`` lets it sit out that step and counts it in :attr:`skipped`;
            ``"raise"`` stops with a ``FloatingPointError`` before anything has changed, at the
            price of waiting for the gradients.
        rounding: how half-precision parameters are rounded: to ``"nearest"``, or ``"stochastic"``, up or down by
            chance, so that steps too small for the dtype are made now and then instead of never
            (reproducible from ``torch.manual_seed``).
        depth: what the angle is divided by, so that ``lr`` is what a step changes the whole network by; 1, which is the
            default, leaves it an angle. With ``"auto"`` it is counted (:func:`nero.depth_of`) when the module first
            runs with gradients, which it then does twice, and which has to be before the first step. Processes of
            DistributedDataParallel take the greatest of their counts; to others that share gradients, give one number.
        backend: ``"eager"``, ``"foreach"``, ``"numba"`` (compiled for the CPU; it needs the extra ``cpu``),
            ``"triton"`` (kernels for CUDA), or ``"auto"`` for the fastest that serves.

    Every option can be given for a group alone. A group can also carry ``role`` (``"neuron"``,
    ``"gain"``, ``"bias"``, or ``None`` for the shape rule), ``fan_in_axes`` and ``fan_in_groups``,
    as :func:`nero.param_groups` does.

    Raises:
        ValueError, TypeError: bad input, naming the option or parameter and what to do.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimiser = Nero(model, lr=0.01)
        >>> model(torch.randn(2, 8)).square().sum().backward()
        >>> optimiser.step()

    Reference:
        Liu, Bernstein, Meister and Yue, 2021, Algorithm 1.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | Literal["auto"] = 0.01,
        beta: float = 0.999,
        *,
        longest_step: float | None = None,
        fix_mean: bool = True,
        fix_norm: FixNorm = True,
        scale: float | None = None,
        gain_penalty: float = 0.0,
        maximize: bool = False,
        on_nonfinite: OnNonfinite = "skip",
        rounding: Rounding = "nearest",
        depth: float | Literal["auto"] | None = None,
        backend: Backend = "auto",
    ) -> None:
        by_itself = isinstance(lr, str) and lr == "auto"
        depth = ("auto" if by_itself else 1.0) if depth is None else depth
        if by_itself:
            from nero.depth import LONGEST_STEP, TRUST  # which most training does not need

            lr, longest_step = TRUST, LONGEST_STEP if longest_step is None else longest_step
        if depth == "auto":
            if not isinstance(params, nn.Module):
                raise ValueError(
                    "lr='auto' and depth='auto' need the model itself, whose layers are counted when it runs: "
                    "nero.Nero(model, lr='auto'), or count_depth(model) of nero.Nero(groups, lr=0.1, longest_step=3)"
                )
            check_counts(params)
        defaults: dict[str, Any] = {
            "lr": lr,
            "beta": beta,
            "longest_step": math.inf if longest_step is None else longest_step,
            "fix_mean": fix_mean,
            "fix_norm": fix_norm,
            "scale": scale,
            "gain_penalty": gain_penalty,
            "maximize": maximize,
            "on_nonfinite": on_nonfinite,
            "rounding": rounding,
            "backend": backend,
            "depth": depth,
            "role": None,
            "fan_in_axes": None,
            "fan_in_groups": 1,
        }
        check_options(defaults)
        self._roles: dict[Tensor, Role] = {}
        self._waiting: list[dict[str, Any]] | None = []
        self._forget()
        super().__init__(param_groups(params) if isinstance(params, nn.Module) else params, defaults)
        self._let_in()
        if depth == "auto" and isinstance(params, nn.Module):
            self.count_depth(params)
        if gain_penalty and all(role.kind != "gain" for role in self._roles.values()):
            warnings.warn(
                f"gain_penalty={gain_penalty} pulls nothing: none of the parameters is known to be a gain. Give the "
                "model itself, nero.Nero(model), or groups with role='gain'",
                stacklevel=2,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, which are balanced at once and count their own steps from here.

        Args:
            param_group: ``"params"``, with any options of their own. A module as ``"params"``
                gives a group for each role in it.
        """
        if isinstance(param_group, dict) and isinstance(param_group.get("params"), nn.Module):
            options = {key: value for key, value in param_group.items() if key != "params"}
            self._add_all(param_groups(param_group["params"], **options))
        else:
            self._add_all([param_group])

    def _add_all(self, groups: list[dict[str, Any]]) -> None:
        """Add all of the groups, or with an error none; only then are their parameters changed."""
        count, alone = len(self.param_groups), self._waiting is None
        self._waiting = self._waiting or []
        try:
            for given in groups:
                super().add_param_group(self._like_the_others(given))
                group = self.param_groups[-1]
                check_options(group)
                roles = [self._checked_role(group, index) for index in range(len(group["params"]))]
                self._roles.update(zip(group["params"], roles, strict=True))
                self._waiting.append(group)
                if "depth" not in given:
                    self._leave_uncounted(group)
        except BaseException:
            del self.param_groups[count:]
            self._waiting = None if alone else self._waiting
            raise
        if alone:
            self._let_in()

    def _let_in(self) -> None:
        for group in self._waiting or []:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._take_in(parameter, self._roles[parameter], group)
        self._waiting = None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Turn every neuron and nudge every gain and bias that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._check_options()
            self._warn_of_uncounted()
        self._raise_if_waiting()
        for group in self.param_groups:
            if group["on_nonfinite"] == "raise":
                self._raise_if_nonfinite(group)
        left = [group["params"] for group in self.param_groups] if compiling else self._sweep()
        # all jobs before the first step: one that cannot be done is met there
        jobs = [self._jobs(group, parameters) for group, parameters in zip(self.param_groups, left, strict=True)]
        for group, own in zip(self.param_groups, jobs, strict=True):
            if own:
                backends.step(group["backend"], own, _settings(group))
        return loss

    @property
    def skipped(self) -> dict[str, int]:
        """How many updates sat out because a gradient was not finite, by parameter, where any did."""
        counts = {
            part.name: int(self.state[part.parameter]["skipped"])
            for part in self.parts()
            if "skipped" in self.state.get(part.parameter, {})
        }
        return {name: count for name, count in counts.items() if count}

    def parts(self) -> Iterator[Part]:
        """Every parameter with its name, role and group, in the order of the groups.

        Where two have one name, as of modules that were added one by one, they are numbered.
        """
        seen: set[str] = set()
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                own = name = name_of(self.param_groups, group, index)
                count = 1
                while name in seen:
                    count += 1
                    name = f"{own} ({count})"
                seen.add(name)
                role = self._roles.get(parameter) or role_in(group, parameter)
                yield Part(name, parameter, role, group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for options in (self.defaults, *self.param_groups):
            options.setdefault("longest_step", math.inf)  # which came later than the rest
        self._roles = {}  # after a copy, of other parameters; after a load, from other options
        self._waiting = None
        self._forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave; either all of it or, with an error, nothing.

        Statistics keep their precision whatever the parameters' dtype. The backend, and how roles were told, stay
        as this optimiser was made. What others have put among the state comes back as it was saved.

        Raises:
            ValueError: if the checkpoint is of another model or optimiser, or lacks options.
        """
        loaded: dict[Tensor, dict[str, Any]] = {}

        # torch casts state to the parameter's dtype, so it is handed none of a parameter, between its own hooks
        def withhold(_: torch.optim.Optimizer, incoming: dict[str, Any]) -> dict[str, Any]:
            loaded.update(checked_state(incoming, self.param_groups, set(self.defaults)))
            groups = [
                {
                    **saved,
                    **{key: own[key] for key in ("backend", "role", "fan_in_axes", "fan_in_groups")},
                    "depth": own["depth"]  # if it was counted already, that is kept
                    if saved.get("depth") == "auto" and own["depth"] != 1
                    else saved.get("depth", 1.0),
                }
                for saved, own in zip(incoming["param_groups"], self.param_groups, strict=True)
            ]
            ours = {key for saved in incoming["param_groups"] for key in saved["params"]}
            notes = {key: value for key, value in incoming["state"].items() if key not in ours}
            return {**incoming, "state": notes, "param_groups": groups}

        if not isinstance(state_dict, Mapping):
            raise ValueError(f"not an optimiser's state_dict, but a {type(state_dict).__name__}")
        before = self.register_load_state_dict_pre_hook(withhold)
        after = self.register_load_state_dict_post_hook(lambda _: self.state.update(loaded), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _forget(self) -> None:
        """Plan anew at the next step."""
        self._retire()
        self._left: list[list[Tensor]] = []
        self._options: list[tuple[Any, ...]] = []
        self._planned: tuple[list[int], list[Tensor], list[Any]] | None = None

    def _retire(self) -> None:
        """Let the sweeps go, but for those whose tables a graph still uses."""
        self._captured: list[Sweep] = getattr(self, "_captured", [])
        self._captured += [sweep for sweep in getattr(self, "_sweeps", []) if sweep.captured]
        self._sweeps: list[Sweep] = []

    def _jobs(self, group: dict[str, Any], parameters: Iterable[Tensor]) -> list[Job]:
        return [
            self._job(group, parameter, parameter.grad)
            for parameter in parameters
            if parameter.grad is not None and parameter.requires_grad and parameter.numel()
        ]

    def _job(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> Job:
        if not self.state.get(parameter):
            self._take_in_late()
        role, state = self._role(group, parameter), self.state[parameter]
        dtype = statistics_dtype(parameter.dtype)
        if state["grad_norm"].dtype != dtype:  # the parameter was cast since
            state.update({key: state[key].to(dtype) for key in ("grad_norm", "scale", "radius") if key in state})
        if group["fix_norm"] == "initial" and role.kind == "neuron" and "radius" not in state:
            state["radius"] = initial_radius(parameter, role)
        if role.fan_in_groups > 1:
            grad = role.view(grad.to_dense() if grad.is_sparse else grad)
        pull = -group["gain_penalty"] if group["maximize"] else group["gain_penalty"]
        return Job(role.view(parameter), grad, state, role.axes, pull if role.kind == "gain" else 0.0)

    def _role(self, group: dict[str, Any], parameter: Tensor) -> Role:
        if parameter not in self._roles:  # a copy, or a framework's stand-in for what was added
            self._roles[parameter] = role_in(group, parameter)
        return self._roles[parameter]

    def _sweep(self) -> list[list[Tensor]]:
        """Let Triton's kernels step what they can. What is left for the other backends, by group."""
        if not self._is_as_planned():
            self._plan()
        found = [sweep.look() for sweep in self._sweeps]
        if any(addresses is None for addresses in found):
            self._plan()
            found = [sweep.look() for sweep in self._sweeps]
        rates = [
            Rate(group["lr"], (-1.0 if group["maximize"] else 1.0) / float(group["depth"]))
            for group in self.param_groups
        ]
        for sweep, addresses in zip(self._sweeps, found, strict=True):
            assert addresses is not None
            sweep.launch(addresses, rates)
        return self._left

    def _check_options(self) -> None:
        """Check what anyone can have set since the groups were made."""
        options = list(map(_OPTIONS, self.param_groups))
        if options != self._options:
            for group in self.param_groups:
                check_options(group, wait=False)
                self._check_roles(group)
            self._options, self._planned = options, None
        for group in self.param_groups:
            check_lr(group["lr"], wait=False)

    def _check_roles(self, group: dict[str, Any]) -> None:
        """Raise if a group says something else of a parameter than when it was added: its state is of what it was."""
        for index, parameter in enumerate(group["params"]):
            known = self._roles.get(parameter)
            if known is not None and role_in(group, parameter) != known:
                raise ValueError(
                    f"{name_of(self.param_groups, group, index)} was added as {told(known)}, and its group now says "
                    f"{told(role_in(group, parameter))}: roles are told once, so make another optimiser for it"
                )

    def _is_as_planned(self) -> bool:
        """Whether groups and states hold what they held when it was planned, and nothing that was left could join."""
        if self._planned is None:
            return False
        counts, parameters, entries = self._planned
        return (
            list(map(len, map(_PARAMS, self.param_groups))) == counts
            and len(self.state) == len(entries)
            and all(map(is_, chain.from_iterable(map(_PARAMS, self.param_groups)), parameters))
            and all(map(is_, self.state.values(), entries))
            and not any(
                self._line(number, group, parameter) is not None
                for number, (group, left) in enumerate(zip(self.param_groups, self._left, strict=True))
                for parameter in left
            )
        )

    def _plan(self) -> None:
        """Deal the parameters out to sweeps, one for each device, and to the other backends."""
        lines: dict[torch.device, list[Line]] = {}
        self._left = []
        for number, group in enumerate(self.param_groups):
            rest = []
            for parameter in group["params"]:
                line = self._line(number, group, parameter)
                if line is None:
                    rest.append(parameter)
                else:
                    lines.setdefault(parameter.device, []).append(line)
            self._left.append(rest)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and lines:
            raise RuntimeError("take a step with these parameters before capturing one in a graph, as torch asks")
        self._retire()
        self._sweeps = [Sweep(each) for each in lines.values()]
        parameters = list(chain.from_iterable(map(_PARAMS, self.param_groups)))
        self._planned = (list(map(len, map(_PARAMS, self.param_groups))), parameters, list(self.state.values()))

    def _line(self, number: int, group: dict[str, Any], parameter: Tensor) -> Line | None:
        """A parameter's place in a sweep, if it can have one."""
        by_name = group["backend"] == "triton"
        by_itself = group["backend"] == "auto" and parameter.is_cuda and backends.has("triton")
        by_itself = by_itself and works(parameter.device)
        if not (by_name or by_itself) or not parameter.numel():
            return None
        grad = parameter.grad if parameter.requires_grad else None
        if grad is None and not self.state.get(parameter):
            return None  # frozen, so far
        seen = [parameter] if grad is None else [parameter, grad]
        if any(map(why_not, seen)):
            if by_name and parameter.requires_grad:
                index = next(i for i, each in enumerate(group["params"]) if each is parameter)
                check_backend("triton", name_of(self.param_groups, group, index), *seen)
            return None
        job = self._job(group, parameter, parameter if grad is None else grad)
        return None if form_of(job) is None else Line(parameter, job, _settings(group), number)

    def _checked_role(self, group: dict[str, Any], index: int) -> Role:
        """A parameter's role, if Nero can train it in that."""
        name, parameter = name_of(self.param_groups, group, index), group["params"][index]
        check_parameter(name, parameter)
        check_backend(group["backend"], name, *([parameter] if parameter.requires_grad else []))
        try:
            return role_in(group, parameter)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _take_in_late(self) -> None:
        """Take in what was frozen when it was added and has its first gradient; all of it is looked at first."""
        late = [
            (parameter, group, name_of(self.param_groups, group, index))
            for group in self.param_groups
            for index, parameter in enumerate(group["params"])
            if parameter.grad is not None and parameter.requires_grad and not self.state.get(parameter)
        ]
        for parameter, group, name in late:
            check_trained(name, parameter)
            if not torch.compiler.is_compiling():  # who compiles takes the plain rule
                check_backend(group["backend"], name, parameter, parameter.grad)
        for parameter, group, _ in late:
            self._take_in(parameter, self._role(group, parameter), group)

    @torch.inference_mode(False)  # whose tensors nobody could change outside of it
    @torch.no_grad()
    def _take_in(self, parameter: Tensor, role: Role, group: dict[str, Any]) -> dict[str, Tensor]:
        """Balance a parameter that enters and give it its state."""
        dtype = statistics_dtype(parameter.dtype)
        state: dict[str, Tensor] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        # from the parameter itself, so that a sharded one has its state sharded alike
        one_a_neuron = role.view(parameter).sum(role.axes, keepdim=True, dtype=dtype) if role.axes else parameter
        state["grad_norm"] = torch.zeros_like(one_a_neuron, dtype=dtype, memory_format=torch.contiguous_format)
        state["skipped"] = torch.zeros((), dtype=torch.int64, device=parameter.device)
        if role.kind == "neuron":
            radius: float | Tensor = 1.0
            if group["fix_norm"] == "initial" and parameter.numel():
                radius = state["radius"] = initial_radius(parameter, role)
            fix_norm = bool(group["fix_norm"])
            balance_tensor_(parameter, role, fix_mean=group["fix_mean"], fix_norm=fix_norm, radius=radius)
        else:
            size = parameter.to(dtype).abs().mean()
            state["scale"] = torch.where(size > 0, size, SCALE_AT_ORIGIN)
        return state

    def _raise_if_nonfinite(self, group: dict[str, Any]) -> None:
        for index, parameter in enumerate(group["params"]):
            grad = parameter.grad
            if grad is None or not parameter.requires_grad:
                continue
            if not self.state.get(parameter):
                check_trained(name_of(self.param_groups, group, index), parameter)
            values = grad.coalesce().values() if grad.is_sparse else grad
            if not bool(values.isfinite().all()):
                name = name_of(self.param_groups, group, index)
                raise FloatingPointError(
                    f"the gradient of {name} is not finite; nothing was changed. Look for the cause, or let such "
                    "neurons sit out a step with on_nonfinite='skip'"
                )

    def _like_the_others(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group that is added, with names where the others have them, as torch wants it, and with their depth."""
        if isinstance(group, dict) and "params" not in group:
            raise ValueError(f"a parameter group needs 'params', but this one has only {sorted(group)}")
        if not isinstance(group, dict) or isinstance(group["params"], set) or not self.param_groups:
            return group  # torch has something to say to the first two
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        named = [isinstance(each, tuple) for each in params]
        if "param_names" not in self.param_groups[0]:
            params = [each[1] if isinstance(each, tuple) else each for each in params]
        elif not any(named) and "param_names" not in group:
            params = [(f"group{len(self.param_groups)}.{index}", each) for index, each in enumerate(params)]
        return {**self._depth_of_the_others(), **group, "params": params}


def _settings(group: dict[str, Any]) -> Settings:
    lr = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else float(group["lr"])
    lr = lr if group["depth"] == 1 else lr / float(group["depth"])
    return Settings(
        -lr if group["maximize"] else lr,
        group["beta"],
        group["fix_mean"],
        group["fix_norm"],
        group["scale"],
        group["rounding"],
        real(group["longest_step"]),
    )
