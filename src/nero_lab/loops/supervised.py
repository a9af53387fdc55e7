"""The loop that serves every supervised task: an epoch's data, a step, a look at the test set."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero_lab import baselines, distributed
from nero_lab.data import Dataset
from nero_lab.loops.captured import Captured
from nero_lab.loops.training import Training, fill, load, on_cpu, products_in, refill
from nero_lab.models.dropout import Dropout
from nero_lab.protocol import SettingError, Settings, Task

#: How many steps of the next epoch are under way when the last one's numbers are waited for, lest a GPU stand still.
LAG = {"cuda": 8, "cpu": 0}


class Supervised(Training):
    """A network, its optimiser and where they stand.

    All randomness of an epoch (order, augmentation, dropout) comes from a generator seeded by the run's seed and the
    epoch, so where a run stands is a few numbers. On a GPU the data is there already, and a step is a CUDA graph
    on a stream of the run's own: runs that take turns at :meth:`advance` keep the GPU busy side by side.
    Several processes (:mod:`nero_lab.distributed`) make every step together, each on its share of the batch, with the same
    gradient and so the same weights; batch norm sees the share alone, and its averages are the first process's.
    That all begin at the same place is checked.

    Args:
        task: what to train on what.
        settings: of this run.
        data: the task's data set, on the device to train on.
        state: what :meth:`state` gave, to go on from there.
    """

    def __init__(self, task: Task, settings: Settings, data: Dataset, state: dict[str, Any] | None = None) -> None:
        super().__init__(task, settings, data.device, _steps(task, data.examples))
        self.data = data
        self._parts = ("train", *data.parts)
        self.curve = {f"{part}_{what}": [] for part in self._parts for what in ("loss", "accuracy")}
        self._batches: Sequence[tuple[Tensor, ...]] = ()
        self._lag = min(LAG.get(self.device.type, 0), self.steps_an_epoch - 1)
        self._pending: Tensor | None = None
        self._begin(state)
        if distributed.world_size() > 1 and not distributed.all_equal(
            (settings, self.epoch, self.step, self._digest())
        ):
            raise SettingError(
                f"the processes do not all stand where this one does, at epoch {self.epoch}, step {self.step} of "
                f"{task.run_name(settings)}: start all by the same command, and let all see the same --out and --data"
            )

    @property
    def network(self) -> nn.Module:
        return self.model

    def advance(self) -> None:
        """Make one step; after the last of an epoch, look at what is not trained on, and in a while at the numbers."""
        self.mid_step = False
        with self._on_stream():
            if self.step < self.steps_an_epoch:  # or it was kept when the look failed
                self._step()
            if self.step == self.steps_an_epoch:
                self._end_epoch()
        if self.step == self._lag or self.finished:
            self._read()

    def remark(self) -> str:
        if (rate := getattr(self.data, "rate", None)) is None:
            return ""
        trained = self.epoch * self.data.examples / self.seconds / distributed.world_size()
        text = f"trains on {trained:,.0f} images a second, start included, and {rate:,.0f} can be made ready"
        return text + distributed.per_process()

    def verdict(self) -> dict[str, Any]:
        if self.task.verdict is None:
            return {}
        self.model.eval()
        with self._on_stream(), products_in(self.settings.precision):
            return self.task.verdict(self.model, self.data)

    def so_far(self) -> dict[str, float]:
        with self._on_stream():
            loss, correct, count = self.totals.tolist()
        return {"train_loss": loss / max(count, 1), "train_accuracy": correct / max(count, 1)}

    def state(self) -> dict[str, Any]:
        self._read()
        with self._on_stream():
            return {
                **super().state(),
                "processes": distributed.world_size(),
                "totals": on_cpu(self.totals),
                "generator": self.generator.get_state(),
                "model": on_cpu(dict(self.model.state_dict())),
                "optimiser": on_cpu(self.optimiser.state_dict()),
            }

    def _build(self) -> None:
        contender = self.task.contenders[self.settings.optimiser]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            make = contender.model or self.task.model
            model = make(**self.data.sizes)  # on the CPU: the same weights for every device
        # convolutions on a GPU's tensor cores want channels last; nothing else has four axes
        self.model: nn.Module = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.generator = torch.Generator(self.device)
        for module in self.model.modules():
            if isinstance(module, Dropout):
                module.generator = self.generator
        self.lr = torch.zeros((), device=self.device)
        self.optimiser = baselines.make(contender.optimiser, self.model, self.lr, **contender.options)
        baselines.prime(self.optimiser)
        self.totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        # with distributed, a thread of torch's looks after their messages during a capture, and may
        mode = "thread_local" if distributed.world_size() > 1 else "global"
        self._learn = Captured(self._update, self._changing, self._stream, generator=self.generator, mode=mode)

    def go_on_from(self, state: dict[str, Any]) -> None:
        if (before := state.get("processes", 1)) != distributed.world_size():
            raise SettingError(
                f"{self.task.run_name(self.settings)} was begun by {before} processes, and now there are "
                f"{distributed.world_size()}: start {before} again, or delete its checkpoint to begin anew"
            )
        super().go_on_from(state)
        fill(self.model, state["model"])
        load(self.optimiser, state["optimiser"], self.lr)
        if self.step:
            self._begin_epoch()
            self.generator.set_state(state["generator"])
            refill(self.totals, state, "totals")
            _, correct, count = self.totals.tolist()  # a loss may be anything, where a run has diverged
            if not 0 <= correct <= count < math.inf or not count:
                raise ValueError(f"totals are of {correct:g} right out of {count:g}")

    def _digest(self) -> int:
        """A sum of the weights that is the same on every machine: of their bits."""
        with self._on_stream():
            return sum(int(each.detach().view(torch.int32).sum()) for each in self.model.parameters())

    def _step(self) -> None:
        if self.step == 0:
            self._begin_epoch()
        self.lr.fill_(self.settings.lr * self.task.schedule(self.steps_done, self.steps_an_epoch))
        # a capture makes steps of its own, so that all processes must make theirs at a time: at the first step, and
        # at the last one of an epoch, where shares may be smaller, of some or of all
        last = distributed.world_size() > 1 and self.step + 1 == self.steps_an_epoch
        batch = self._batches[self.step]
        self.mid_step = True
        self._learn(*batch, kind=last)
        self.step += 1
        self.mid_step = False

    def _begin_epoch(self) -> None:
        self.generator.manual_seed(self.settings.seed * 1_000_003 + self.epoch)
        self._batches = self.data.epoch(self.task.batch, self.generator, self.task.augment)
        self.totals.zero_()
        self.model.train()

    def _update(self, *batch: Tensor) -> None:
        *inputs, labels = batch
        with products_in(self.settings.precision):
            self.optimiser.zero_grad()
            logits = self.model(*inputs)
            loss = self._objective(logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            plain = not (self.task.smoothing or self.task.summed)
            totals = _totals(logits.detach(), labels, loss.detach() if plain else None)
            if distributed.world_size() > 1:
                gradients = (parameter.grad for parameter in self.model.parameters())
                totals = distributed.average_gradients(
                    [gradient for gradient in gradients if gradient is not None], totals
                )
            self.optimiser.step()
            self.totals += totals

    def _objective(self, logits: Tensor, labels: Tensor) -> Tensor:
        reduction = "sum" if self.task.summed else "mean"
        return _cross_entropy(logits, labels, label_smoothing=self.task.smoothing, reduction=reduction)

    def _changing(self) -> list[Tensor]:
        """All that an update changes."""
        kept = [value for state in self.optimiser.state.values() for value in state.values()]
        tensors = [value for value in kept if isinstance(value, Tensor)]
        return [*self.model.state_dict().values(), *tensors, self.totals]

    def _end_epoch(self) -> None:
        self._batches = ()
        distributed.broadcast(list(self.model.buffers()))
        totals = torch.stack([self.totals, *(distributed.all_sum(self._look(part)) for part in self.data.parts)])
        self._pending = torch.empty_like(totals, device="cpu", pin_memory=self._stream is not None)
        self._pending.copy_(totals, non_blocking=True)
        if self._stream is not None:
            self._there = self._stream.record_event()
        self.epoch, self.step = self.epoch + 1, 0

    def _read(self) -> None:
        """Take up the numbers of an epoch that is over; the host waits here, if anywhere."""
        if self._pending is None:
            return
        if self._stream is not None:
            self._there.synchronize()
        for name, (loss, correct, count) in zip(self._parts, self._pending.tolist(), strict=True):
            self.curve[f"{name}_loss"].append(_finite(loss / count))
            self.curve[f"{name}_accuracy"].append(correct / count)
        self._pending = None

    @torch.no_grad()
    def _look(self, part: str) -> Tensor:
        self.model.eval()
        totals = torch.zeros_like(self.totals)
        for *inputs, labels in self.data.batches(part):
            with products_in(self.settings.precision):
                logits = self.model(*inputs)
            totals += _totals(logits, labels)
        return totals


def _steps(task: Task, examples: int) -> int:
    """How many an epoch has. A last batch is left out if some process had less than two of it, as batch norm needs."""
    if not task.several:
        return math.ceil(examples / task.batch)
    least = 2 * distributed.world_size()
    if (most := min(examples, task.batch)) < least:
        raise SettingError(
            f"a batch has {most} images for {distributed.world_size()} processes, which need two each: start {most // 2} or fewer"
        )
    return examples // task.batch + (examples % task.batch >= least)


def _cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Over labels of any shape; those of -100 count for nothing."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def _totals(logits: Tensor, labels: Tensor, loss: Tensor | None = None) -> Tensor:
    """The sum of the losses, whose mean may be known, how many are right, and how many there are."""
    count = (labels >= 0).sum()
    correct = (logits.argmax(-1) == labels).sum()
    loss = _cross_entropy(logits, labels) if loss is None else loss
    return torch.stack([loss.double() * count, correct.double(), count.double()])


def _finite(value: float) -> float | None:
    """The value, or None for what JSON has no word for."""
    return value if math.isfinite(value) else None
