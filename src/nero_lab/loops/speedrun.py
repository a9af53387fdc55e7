"""The loop of the CIFAR-10 speed-run: supervised training with the augmentation, rates and clock of Jordan (2024)."""

import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero_lab import baselines
from nero_lab.baselines import airbench
from nero_lab.data import ImageDataset
from nero_lab.data.augmentation import translate_and_flip
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.supervised import Supervised
from nero_lab.loops.training import copy_to_cpu, count_bytes, load_optimiser, load_tensor, state_tensors
from nero_lab.models.airbench import Airbench
from nero_lab.protocol import Contender

#: Training images that the whitening layer is computed from.
WHITENED_IMAGES = 5000
#: Epochs in which the bias of the whitening layer is trained; later steps are cheaper without its gradient.
WHITENING_EPOCHS = 3
#: Largest translation of a training image along each axis, in pixels.
MAX_SHIFT = 2
#: Triangular schedule of SGD: factors of the rate at the start and the end, and the place of the peak.
START, END, PEAK = 0.2, 0.07, 0.23
#: Lookahead of SGD: steps between two averages, and the weight of the slow weights at the end, which it nears as the
#: third power of the time.
LOOKAHEAD_STEPS, LOOKAHEAD_DECAY = 5, 0.95**5


class SpeedRun(Supervised):
    """Training of :class:`nero_lab.models.airbench.Airbench`.

    Each image is mirrored in every other epoch, from a random first (alternating flip), and moved by up to two pixels.
    Beside Muon and Nero, rates fall linearly to zero; SGD has a triangular schedule and Lookahead. The bias of the
    whitening layer is trained in the first three epochs.

    ``train_seconds`` of the record is the published measure: whitening, augmentation and steps, with neither the
    evaluations nor the capture of CUDA graphs. torch compiles the network once for all runs of a process, since
    compiled code belongs to the code of a forward pass and not to an instance.
    """

    model: Airbench
    data: ImageDataset

    def final_results(self) -> dict[str, Any]:
        return {**super().final_results(), "train_seconds": round(self._train_seconds, 4)}

    def sizes(self) -> dict[str, int]:
        found = super().sizes()
        return {**found, "state_bytes": found["state_bytes"] + count_bytes(state_tensors(*self._others))}

    def state(self) -> dict[str, Any]:
        self._stop_clock()
        return {
            **super().state(),
            "others": copy_to_cpu([other.state_dict() for other in self._others]),
            "slow": copy_to_cpu(self._slow),
            "train_seconds": self._train_seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        for other, saved in zip(self._others, state["others"], strict=True):
            load_optimiser(other, saved)
        for name, tensor in self._slow.items():
            load_tensor(tensor, state["slow"], name)
        self._train_seconds = float(state["train_seconds"])

    def _build(self) -> None:
        super()._build()
        self._learn_later = CapturedStep(self._update, self._changing, self._stream, generator=self.generator)
        self._slow = {name: value.clone() for name, value in self._fast().items()} if self._is_sgd else {}
        self._train_seconds, self._clock = 0.0, 0.0

    def _make_optimiser(self, contender: Contender) -> torch.optim.Optimizer:
        self._is_sgd = contender.optimiser == "sgd"
        optimisers = airbench.make(
            contender.optimiser, self.model, self.settings.lr, self.task.batch, contender.options
        )
        self._peaks = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = torch.zeros((), device=self.device)
            baselines.prime(optimiser)
        self._others = optimisers[1:]
        return optimisers[0]

    def _update(self, *batch: Tensor) -> None:
        for other in self._others:
            other.zero_grad()
        super()._update(*batch)
        for other in self._others:
            other.step()

    def _changing(self) -> list[Tensor]:
        return [*super()._changing(), *state_tensors(*self._others)]

    def _make_step(self) -> None:
        self._start_clock()
        if self.step == 0:
            self._begin_epoch()
        learn = self._set_phase(is_early=self.steps_done < WHITENING_EPOCHS * self.steps_per_epoch)
        self._set_rates()
        batch = self._batches[self.step]
        self.is_mid_step = True
        learn(*batch)
        self.step += 1
        if self._slow:
            self._look_ahead()
        self.is_mid_step = False

    def _begin_epoch(self) -> None:
        pixels, labels = self.data.train.pixels, self.data.train.labels
        if self.steps_done == 0:
            self.model.whiten(self.data.normalise(pixels[:WHITENED_IMAGES]))
            self._slow = {name: self._fast()[name].clone() for name in self._slow}
        self._batches = self._make_batches(pixels, labels)
        self.totals.zero_()
        self.model.train()

    def _make_batches(self, pixels: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Shuffle, move and mirror all images."""
        count = len(labels)
        place: Any = {"generator": self.generator, "device": self.device}
        self.generator.manual_seed(self._seed_of(self.task.epochs))  # which no epoch has: all share the first flips
        flips = torch.randint(2, (count,), **place) == self.epoch % 2
        self.generator.manual_seed(self._seed_of(self.epoch))
        order = torch.randperm(count, **place)
        shifts = torch.randint(-MAX_SHIFT, MAX_SHIFT + 1, (count, 2), **place)
        inputs = self.data.normalise(translate_and_flip(pixels[order], shifts, flips[order]))
        split = (torch.split(part, self.task.batch) for part in (inputs, labels[order]))
        return list(zip(*split, strict=True))

    def _set_phase(self, *, is_early: bool) -> CapturedStep:
        """Train or freeze the bias of the whitening layer. Return the step for it, with a CUDA graph of its own."""
        self.model.whitening.bias.requires_grad_(is_early)  # type: ignore[union-attr]
        return self._learn if is_early else self._learn_later

    def _set_rates(self) -> None:
        done = self.steps_done / (self.task.epochs * self.steps_per_epoch)
        groups = [group for optimiser in (self.optimiser, *self._others) for group in optimiser.param_groups]
        for group, peak in zip(groups, self._peaks, strict=True):
            has_whitening = any(parameter is self.model.whitening.bias for parameter in group["params"])
            end = WHITENING_EPOCHS / self.task.epochs if has_whitening else 1.0
            group["lr"].fill_(peak * (triangle(done) if self._is_sgd else max(0.0, 1 - done / end)))

    def _fast(self) -> dict[str, Tensor]:
        """Return the weights and running averages that Lookahead averages."""
        return {name: value for name, value in self.model.state_dict().items() if value.is_floating_point()}

    @torch.no_grad()
    def _look_ahead(self) -> None:
        """Every few steps, move the slow weights towards the network, and the network to them; end at the slow ones."""
        steps = self.steps_done
        if is_last := steps == self.settings.epochs * self.steps_per_epoch:
            decay = 1.0
        else:
            decay = LOOKAHEAD_DECAY * (steps / (self.task.epochs * self.steps_per_epoch)) ** 3
        if is_last or steps % LOOKAHEAD_STEPS == 0:
            slow, fast = list(self._slow.values()), list(self._fast().values())
            torch._foreach_lerp_(slow, fast, 1 - decay)
            torch._foreach_copy_(fast, slow)

    def _end_epoch(self) -> None:
        self._stop_clock()
        super()._end_epoch()

    def _start_clock(self) -> None:
        """Start the clock, unless it runs. Compile and capture everything before."""
        if self._clock:
            return
        if self._stream is not None:
            if not self._learn.graphs:
                self._capture()
            self._stream.synchronize()
        self._clock = time.perf_counter()

    def _stop_clock(self) -> None:
        if self._clock:
            if self._stream is not None:
                self._stream.synchronize()
            self._train_seconds += time.perf_counter() - self._clock
            self._clock = 0.0

    def _capture(self) -> None:
        """Capture the steps of both phases, on made-up images."""
        self.model.train()
        count, dtype = min(self.task.batch, self.data.examples), self.data.train.pixels.dtype
        shape = (count, *self.data.train.pixels.shape[1:])
        images = torch.randint(256, shape, generator=self.generator, device=self.device, dtype=dtype)
        inputs = self.data.normalise(images.contiguous(memory_format=torch.channels_last))
        for is_early in (True, False):
            self._set_phase(is_early=is_early).prepare(inputs, self.data.train.labels[:count])


def triangle(done: float) -> float:
    """Return the factor of SGD's rate when a part of the steps is done: up to one, then down, both linear."""
    return START + (1 - START) * done / PEAK if done < PEAK else 1 + (END - 1) * (done - PEAK) / (1 - PEAK)


def multi_crop_accuracy(network: nn.Module, data: ImageDataset) -> dict[str, float]:
    """Return the test accuracy of :func:`multi_crop`, as ``tta_accuracy``."""
    with torch.no_grad():
        correct = [(multi_crop(network, images).argmax(1) == labels).sum() for images, labels in data.batches("test")]
    return {"tta_accuracy": sum(map(int, correct)) / len(data.test.labels)}


def multi_crop(network: nn.Module, images: Tensor) -> Tensor:
    """Average the outputs for an image (half of the weight) and its translations by a pixel up-left and down-right.

    Each of the three is averaged with its mirror image. Translations reflect the image at its border.
    """
    padded = F.pad(images, (1, 1, 1, 1), "reflect")
    views = [(images, 1 / 2), (padded[..., :-2, :-2], 1 / 4), (padded[..., 2:, 2:], 1 / 4)]
    mirrored = [(each, weight / 2) for view, weight in views for each in (view, view.flip(3))]
    # one layout, so that a compiled network sees one kind of input
    outputs = [weight * network(view.contiguous(memory_format=torch.channels_last)) for view, weight in mirrored]
    return torch.stack(outputs).sum(0)
