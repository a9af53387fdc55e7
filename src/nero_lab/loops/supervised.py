"""The loop of all supervised tasks."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero_lab import baselines, distributed
from nero_lab.data import Dataset
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.training import (
    Training,
    autocast,
    compile_in_place,
    copy_to_cpu,
    count_bytes,
    eager_if,
    load_network,
    load_optimiser,
    load_tensor,
    matmul_precision,
    state_tensors,
)
from nero_lab.models.dropout import Dropout
from nero_lab.protocol import Contender, SettingError, Settings, Task

#: Steps of the next epoch that are queued before the host waits for the last epoch's metrics, to keep a GPU busy.
READ_DELAY_STEPS = {"cuda": 8, "cpu": 0}


class Supervised(Training):
    """Training of one network on labelled examples.

    All randomness of an epoch (order, augmentation, dropout) comes from a generator that is seeded by the run's seed
    and the epoch, so a checkpoint is small. On a GPU, a step is a CUDA graph on a stream of the run's own; runs that
    take turns at :meth:`advance` share the GPU. Optimisers of :data:`nero_lab.baselines.EAGER` step outside the graph.

    Several processes (:mod:`nero_lab.distributed`) make every step together, each on its share of the batch, as
    replicas (DistributedDataParallel) or with the network split over them (FSDP2). Batch norm sees one share only; its
    running averages are those of the first process. The processes verify that they start from the same state.

    The steps of several processes are not captured. torch can capture DistributedDataParallel, after eleven warm-up
    steps per shape and without NCCL's watch for dead processes. Then one that dies leaves the others waiting, and
    shares of different sizes would need captures that all processes make at the same step. FSDP2 cannot be captured.
    A step of ResNet-50 keeps a GPU busy anyway, and its reductions now run during the backward pass.

    Args:
        task: the experiment.
        settings: the settings of this run.
        data: the task's data set, on the device to train on.
        state: a state of :meth:`state` to resume from.
    """

    def __init__(self, task: Task, settings: Settings, data: Dataset, state: dict[str, Any] | None = None) -> None:
        super().__init__(task, settings, data.device, _count_steps(task, data.examples))
        self.data = data
        self._parts = ("train", *data.parts)
        self.curve = {f"{part}_{metric}": [] for part in self._parts for metric in ("loss", "accuracy")}
        self._batches: Sequence[tuple[Tensor, ...]] = ()
        self._read_delay = min(READ_DELAY_STEPS.get(self.device.type, 0), self.steps_per_epoch - 1)
        self._pending: Tensor | None = None
        if state is not None and (before := state.get("processes", 1)) != distributed.world_size():
            raise SettingError(
                f"{task.run_name(settings)} was started by {before} processes, "
                f"got {distributed.world_size()}: start {before} again, or delete its checkpoint to start anew"
            )
        self._start(state)
        if distributed.world_size() > 1 and not distributed.all_equal((settings, self.epoch, self.step, self._digest)):
            raise SettingError(
                f"the processes differ in state; this one is at epoch {self.epoch}, step {self.step} of "
                f"{task.run_name(settings)}: start all by the same command, with the same --out and --data"
            )

    @property
    def network(self) -> nn.Module:
        return self.model

    def advance(self) -> None:
        """Make one step; after the last of an epoch, evaluate. Metrics are read a few steps later."""
        self.is_mid_step = False
        with self._on_stream():
            if self.step < self.steps_per_epoch:  # else the run was saved because an evaluation failed
                self._make_step()
            if self.step == self.steps_per_epoch:
                self._end_epoch()
        if self.step == self._read_delay or self.is_finished:
            self._read_metrics()

    def throughput_note(self) -> str:
        if (rate := getattr(self.data, "rate", None)) is None:
            return ""
        trained = self.epoch * self.data.examples / self.seconds / distributed.world_size()
        text = f"trains on {trained:,.0f} images a second, start included; {rate:,.0f} can be loaded"
        return text + distributed.per_process()

    def final_results(self) -> dict[str, Any]:
        if self.task.verdict is None:
            return {}
        self.model.eval()
        with self._on_stream(), self._in_precision():
            return self.task.verdict(self.model, self.data)

    def sizes(self) -> dict[str, int]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"parameters": parameters, "state_bytes": count_bytes(dict(self.optimiser.state))}

    def running_metrics(self) -> dict[str, float]:
        with self._on_stream():
            loss, correct, count = self.totals.tolist()
        return {"train_loss": loss / max(count, 1), "train_accuracy": correct / max(count, 1)}

    def state(self) -> dict[str, Any]:
        self._read_metrics()
        with self._on_stream():
            return {
                **super().state(),
                "processes": distributed.world_size(),
                "totals": copy_to_cpu(self.totals),
                "generator": self.generator.get_state(),
                "model": copy_to_cpu(dict(self.model.state_dict())),
                "optimiser": copy_to_cpu(self.optimiser.state_dict()),
            }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        load_network(self.model, state["model"])
        self._digest = _digest(state["model"][name] for name, _ in self.model.named_parameters())
        load_optimiser(self.optimiser, state["optimiser"])
        if self.step:
            self._begin_epoch()
            self.generator.set_state(state["generator"])
            load_tensor(self.totals, state, "totals")

    def _build(self) -> None:
        contender = self.task.contenders[self.settings.optimiser]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            make = contender.model or self.task.model
            model = make(**self.data.sizes)  # on the CPU, so that weights do not depend on the device
        self._digest = _digest(model.parameters())
        # tensor cores run convolutions fastest in channels-last layout; other weights do not have four axes. FSDP2
        # takes no such weights, but follows the layout of the images
        layout = torch.contiguous_format if distributed.is_sharded() else torch.channels_last
        self.model: nn.Module = model.to(self.device, memory_format=layout)  # type: ignore[call-overload]
        self._forward = distributed.join(self.model, self.device)
        self.generator = torch.Generator(self.device)
        for module in self.model.modules():
            if isinstance(module, Dropout):
                module.generator = self.generator
        self._is_compiled = self.task.is_compiled and self.device.type == "cuda"
        self._measure = _compile(self.model) if self._is_compiled else _measure
        self.optimiser = self._make_optimiser(contender)
        self._is_eager = contender.optimiser in baselines.EAGER
        if not self._is_eager:
            baselines.prime(self.optimiser)
        self.totals = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, correct, count
        stream = self._stream if distributed.world_size() == 1 else None
        captured = self._find_gradients if self._is_eager else self._update
        self._learn = CapturedStep(captured, self._changing, stream, generator=self.generator)

    def _make_optimiser(self, contender: Contender) -> torch.optim.Optimizer:
        rate = torch.zeros((), device=self.device)
        return baselines.make(contender.optimiser, self.model, rate, **contender.options)

    def _make_step(self) -> None:
        if self.step == 0:
            self._begin_epoch()
        rate = self.settings.lr * self.task.schedule(self.steps_done, self.steps_per_epoch)
        baselines.set_rate(self.optimiser, rate)
        batch = self._batches[self.step]
        self.is_mid_step = True
        gradients = self._learn(*batch)
        if self._is_eager:
            self._step_along(gradients)
        self.step += 1
        self.is_mid_step = False

    def _begin_epoch(self) -> None:
        self.generator.manual_seed(self._seed_of(self.epoch))
        self._batches = self.data.epoch(self.task.batch, self.generator, self.task.augment)
        self.totals.zero_()
        self.model.train()

    def _update(self, *batch: Tensor) -> None:
        self._find_gradients(*batch)
        with matmul_precision(self.settings.precision):
            self.optimiser.step()

    def _find_gradients(self, *batch: Tensor) -> list[Tensor | None]:
        *inputs, labels = batch
        rare = self._is_compiled and len(labels) < self.task.batch
        with eager_if(rare), matmul_precision(self.settings.precision):
            self.optimiser.zero_grad()
            with autocast(self.settings.precision, self.device):
                logits = self._forward(*inputs)
                loss, totals = self._measure(logits, labels, self.task.smoothing, self.task.is_loss_summed)
            self._share_of(loss, labels).backward()  # type: ignore[no-untyped-call]
            self.totals += distributed.all_sum(totals)
        return [parameter.grad for parameter in self.model.parameters()]

    def _step_along(self, gradients: list[Tensor | None]) -> None:
        """Step by gradients that a CUDA graph has written; each of several graphs has its own tensors."""
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        with matmul_precision(self.settings.precision):
            self.optimiser.step()

    def _share_of(self, loss: Tensor, labels: Tensor) -> Tensor:
        """Weight this process's mean loss, so that the processes' mean is the mean over the whole batch."""
        if distributed.world_size() == 1:
            return loss
        whole = min(self.task.batch, self.data.examples - self.step * self.task.batch)
        return loss * (len(labels) * distributed.world_size() / whole)

    def _changing(self) -> list[Tensor]:
        """Return all tensors that an update changes."""
        return [*self.model.state_dict().values(), *state_tensors(self.optimiser), self.totals]

    def _end_epoch(self) -> None:
        self._batches = ()
        distributed.broadcast(list(self.model.buffers()))
        with distributed.gathered(self.model):
            parts = [distributed.all_sum(self._evaluate(part)) for part in self.data.parts]
        totals = torch.stack([self.totals, *parts])
        self._pending = torch.empty_like(totals, device="cpu", pin_memory=self._stream is not None)
        self._pending.copy_(totals, non_blocking=True)
        if self._stream is not None:
            self._copied = self._stream.record_event()
        self.epoch, self.step = self.epoch + 1, 0

    def _read_metrics(self) -> None:
        """Append the metrics of the last epoch to the curve, if they are pending; the only wait for the device."""
        if self._pending is None:
            return
        if self._stream is not None:
            self._copied.synchronize()
        for name, (loss, correct, count) in zip(self._parts, self._pending.tolist(), strict=True):
            self.curve[f"{name}_loss"].append(_finite_or_none(loss / count))
            self.curve[f"{name}_accuracy"].append(correct / count)
        self._pending = None

    @torch.no_grad()
    def _evaluate(self, part: str) -> Tensor:
        self.model.eval()
        totals = torch.zeros_like(self.totals)
        for *inputs, labels in self.data.batches(part):
            with self._in_precision():
                totals += self._measure(self.model(*inputs), labels)[1]
        return totals

    @contextmanager
    def _in_precision(self) -> Iterator[None]:
        with matmul_precision(self.settings.precision), autocast(self.settings.precision, self.device):
            yield


def _count_steps(task: Task, examples: int) -> int:
    """Return the steps of an epoch. Drop a last batch that would give a process fewer than two examples.

    Batch norm needs two examples.
    """
    if not task.is_distributable:
        return math.ceil(examples / task.batch)
    least = 2 * distributed.world_size()
    if (most := min(examples, task.batch)) < least:
        raise SettingError(
            f"each of {distributed.world_size()} processes needs two images of a batch, got a batch of {most}: "
            f"start {most // 2} or fewer"
        )
    return examples // task.batch + (examples % task.batch >= least)


def _digest(weights: Iterable[Tensor]) -> int:
    """Sum the bits of weights, as integers: equal on every machine."""
    return sum(int(weight.detach().view(torch.int32).sum()) for weight in weights)


def _cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Compute the cross-entropy over labels of any shape; labels of -100 are ignored."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def _measure(logits: Tensor, labels: Tensor, smoothing: float = 0.0, is_summed: bool = False) -> tuple[Tensor, Tensor]:
    """Return the loss to train on, and totals of the batch: plain loss, correct predictions and labels."""
    reduction = "sum" if is_summed else "mean"
    loss = _cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction)
    plain = _cross_entropy(logits.detach(), labels) if smoothing or is_summed else loss.detach()
    count = (labels >= 0).sum()
    correct = (logits.detach().argmax(-1) == labels).sum()
    return loss, torch.stack([plain.double() * count, correct.double(), count.double()])


def _compile(model: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile the blocks of a model in place, or the whole if it has no list of blocks. Return a compiled _measure.

    Blocks with the same code compile once for all layers and for all runs of a sweep, which the whole model would not.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in [block for module in lists for block in module] or [model]:
        compile_in_place(block)
    return torch.compile(_measure, dynamic=False)


def _finite_or_none(value: float) -> float | None:
    # JSON has neither NaN nor infinity
    return value if math.isfinite(value) else None
