"""The loop of a generative adversarial network: a generator and a discriminator that train each other."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero_lab import baselines
from nero_lab.data import Dataset, ImageDataset
from nero_lab.image_metrics import METRIC_BATCH, FrechetMetric, Gaussian, available_metrics
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.training import (
    Training,
    compile_in_place,
    copy_to_cpu,
    eager_if,
    load_network,
    load_optimiser,
    load_tensor,
    matmul_precision,
    state_tensors,
)
from nero_lab.models.biggan import GANPair
from nero_lab.protocol import SettingError, Settings, Task

#: Epochs between two evaluations of the generator.
EVALUATE_EVERY = 10
#: Images of each set that are evaluated: generated, training and test images.
EVALUATED_IMAGES = 10_000
#: Images of each class in a grid of samples.
SAMPLES_PER_CLASS = 10
CLASSES = 10
#: Metrics of every epoch; distances have values only when the generator is evaluated.
LOSSES = ("generator_loss", "discriminator_loss")


class Adversarial(Training):
    """Training of a generator and a discriminator.

    A step updates the discriminator on real images and as many generated ones of the same classes, then the generator;
    both by the hinge loss. Every tenth epoch and after the last, the distances of generated images from the training
    and the test set are measured, and a grid of samples from fixed noise is written. All randomness of an epoch comes
    from a generator that is seeded by the run's seed and the epoch. On a GPU, a step is a CUDA graph on a stream of the
    run's own.

    Args:
        task: the experiment; the options of a contender may hold further options for ``"generator"`` and
            ``"discriminator"``.
        settings: the settings of this run.
        data: images, on the device to train on.
        state: a state of :meth:`state` to resume from.
        metrics: makes the metrics of generated images, on a device.
    """

    def __init__(
        self,
        task: Task,
        settings: Settings,
        data: Dataset,
        state: dict[str, Any] | None = None,
        *,
        metrics: Callable[[torch.device], list[FrechetMetric]] = available_metrics,
    ) -> None:
        assert isinstance(data, ImageDataset)
        super().__init__(task, settings, data.device, math.ceil(data.examples / task.batch))
        self.data = replace(data, mean=(0.5,) * len(data.mean), std=(0.5,) * len(data.std))  # pixels in [-1, 1]
        self.metrics = metrics(self.device)
        self.curve = {name: [] for name in (*LOSSES, *self._distance_names())}
        self._real: dict[str, Gaussian] = {}
        self._start(state)

    @property
    def network(self) -> nn.Module:
        return self.pair

    def advance(self) -> None:
        """Update each network once; after the last step of an epoch, record losses and perhaps distances."""
        with self._on_stream():
            if self.step == 0:
                self._begin_epoch()
            self.lr.fill_(self.settings.lr * self.task.schedule(self.steps_done, self.steps_per_epoch))
            self._learn(*self._batches[self.step])
            self.step += 1
            if self.step == self.steps_per_epoch:
                self._end_epoch()

    def running_metrics(self) -> dict[str, float]:
        with self._on_stream():
            losses = (self.totals / max(1, min(self.step * self.task.batch, self.data.examples))).tolist()
        return dict(zip(LOSSES, losses, strict=True))

    def final_results(self) -> dict[str, Any]:
        return {"measured": {metric.key: metric.name for metric in self.metrics}}

    def state(self) -> dict[str, Any]:
        with self._on_stream():
            return {
                **super().state(),
                "totals": copy_to_cpu(self.totals),
                "random": self.random.get_state(),
                "pair": copy_to_cpu(dict(self.pair.state_dict())),
                "optimisers": {name: copy_to_cpu(each.state_dict()) for name, each in self.optimisers.items()},
            }

    def restore(self, state: dict[str, Any]) -> None:
        if differing := (set(state["curve"]) - set(LOSSES)) ^ set(self._distance_names()):
            raise SettingError(
                f"this run was started with other metrics, which differ in {', '.join(sorted(differing))}: "
                "set $NERO_INCEPTION as it was, or delete the checkpoint to start again"
            )
        super().restore(state)
        load_network(self.pair, state["pair"])
        for name, optimiser in self.optimisers.items():
            load_optimiser(optimiser, state["optimisers"][name])
        if self.step:
            self._begin_epoch()
            self.random.set_state(state["random"])
            load_tensor(self.totals, state, "totals")

    def _build(self) -> None:
        contender = self.task.contenders[self.settings.optimiser]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            pair = (contender.model or self.task.model)()  # on the CPU, so that weights do not depend on the device
            assert isinstance(pair, GANPair)
            self._fixed_noise = torch.randn(EVALUATED_IMAGES, pair.generator.noise).to(self.device)
        self._fixed_labels = (torch.arange(EVALUATED_IMAGES) % CLASSES).to(self.device)
        self.pair: GANPair = pair.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.random = torch.Generator(self.device)
        self.lr = torch.zeros((), device=self.device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.device)  # of LOSSES
        networks = dict(self.pair.named_children())
        self._is_compiled = self.task.is_compiled and self.device.type == "cuda"
        if self._is_compiled:
            torch.compiler.reset()  # spectral norm makes a class of each layer, so no code serves two runs
        shared = {key: value for key, value in contender.options.items() if key not in networks}
        self.optimisers = {}
        for name, network in networks.items():
            if self._is_compiled:
                compile_in_place(network)
            options = {**shared, **contender.options.get(name, {})}
            self.optimisers[name] = baselines.make(contender.optimiser, network, self.lr, **options)
            baselines.prime(self.optimisers[name])
        self._learn = CapturedStep(self._update, self._changing, self._stream, generator=self.random)

    def _changing(self) -> list[Tensor]:
        """Return all tensors that an update changes."""
        return [*self.pair.state_dict().values(), self.totals, *state_tensors(*self.optimisers.values())]

    def _begin_epoch(self) -> None:
        self.random.manual_seed(self._seed_of(self.epoch))
        self._batches = self.data.epoch(self.task.batch, self.random, self.task.augment)
        self.totals.zero_()
        self.pair.train()

    def _update(self, images: Tensor, labels: Tensor) -> None:
        rare = self._is_compiled and len(images) < self.task.batch
        with eager_if(rare), matmul_precision(self.settings.precision):
            discriminator_loss = self._update_discriminator(images, labels)
            generator_loss = self._update_generator(labels)
        with torch.no_grad():
            self.totals += len(images) * torch.stack([generator_loss, discriminator_loss])

    def _update_discriminator(self, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            generated = self.pair.generator(self._draw_noise(len(images)), labels)
        self.optimisers["discriminator"].zero_grad()
        scores = self.pair.discriminator(torch.cat([images, generated]), labels.repeat(2))
        real, fake = scores.chunk(2)
        loss: Tensor = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimisers["discriminator"].step()
        return loss

    def _update_generator(self, labels: Tensor) -> Tensor:
        generator, discriminator = self.pair.generator, self.pair.discriminator
        self.optimisers["generator"].zero_grad()
        loss: Tensor = -discriminator(generator(self._draw_noise(len(labels)), labels), labels).mean()
        loss.backward(inputs=list(generator.parameters()))  # type: ignore[no-untyped-call]
        self.optimisers["generator"].step()
        return loss

    def _draw_noise(self, count: int) -> Tensor:
        return torch.randn(count, self.pair.generator.noise, generator=self.random, device=self.device)

    def _end_epoch(self) -> None:
        self._batches = ()
        losses = (self.totals / self.data.examples).tolist()
        self.epoch, self.step = self.epoch + 1, 0
        due = self.epoch % EVALUATE_EVERY == 0 or self.is_finished
        distances = self._evaluate() if due else [math.nan] * len(self._distance_names())
        for values, number in zip(self.curve.values(), [*losses, *distances], strict=True):
            values.append(number if math.isfinite(number) else None)

    def _distance_names(self) -> list[str]:
        return [f"{part}_{metric.key}" for metric in self.metrics for part in ("train", "test")]

    def _evaluate(self) -> list[float]:
        """Write a grid of samples, and measure the distances of generated images; NaN if the generator diverged."""
        images = self._generate()
        pixels = images.nan_to_num(0.0).mul_(127.5).add_(127.5).round_().byte()  # NaN becomes grey
        self.files[f"-epoch{self.epoch:03}.png"] = encode_grid(pixels[: SAMPLES_PER_CLASS * CLASSES])
        if not images.isfinite().all():
            return [math.nan] * len(self._distance_names())
        distances = []
        with matmul_precision("float32"):
            for metric in self.metrics:
                generated = metric.gaussian(self._reported_batches("measures generated images", pixels))
                distances += [generated.distance(self._real_gaussian(metric, part)) for part in ("train", "test")]
        return distances

    def _real_gaussian(self, metric: FrechetMetric, part: str) -> Gaussian:
        """Return the Gaussian of real images, computed once."""
        name = f"{part}_{metric.key}"
        if name not in self._real:
            pixels = getattr(self.data, part).pixels[:EVALUATED_IMAGES]
            self._real[name] = metric.gaussian(self._reported_batches(f"measures {part} images", pixels))
        return self._real[name]

    @torch.no_grad()
    def _generate(self) -> Tensor:
        """Generate images from fixed noise, of all classes in turn."""
        self.pair.generator.eval()
        noise = self._reported_batches("generates images", self._fixed_noise)
        labels = torch.split(self._fixed_labels, METRIC_BATCH)
        with eager_if(self._is_compiled), matmul_precision(self.settings.precision):
            return torch.cat([self.pair.generator(*batch) for batch in zip(noise, labels, strict=True)])

    def _reported_batches(self, activity: str, rows: Tensor) -> Iterator[Tensor]:
        """Split rows into batches, and report the progress of the activity."""
        for start in range(0, len(rows), METRIC_BATCH):
            self.on_activity(activity, start / len(rows))
            yield rows[start : start + METRIC_BATCH]


def encode_grid(pixels: Tensor) -> bytes:
    """Encode images that cycle through the classes as a PNG, with one row per class."""
    from matplotlib.image import imsave

    _, channels, height, width = pixels.shape
    rows = pixels.view(-1, CLASSES, channels, height, width).permute(1, 3, 0, 4, 2)
    file = BytesIO()
    imsave(file, rows.reshape(CLASSES * height, -1, channels).cpu().numpy(), format="png")
    return file.getvalue()
