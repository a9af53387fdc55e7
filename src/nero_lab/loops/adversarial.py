"""The loop of two networks that train each other: one makes images, the other tells them from real ones."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nero_lab import baselines
from nero_lab.data import Dataset, Pictures
from nero_lab.image_metrics import LOOK, Judge, judges
from nero_lab.image_metrics.frechet import Gaussian
from nero_lab.loops.captured import Captured
from nero_lab.loops.training import Training, fill, load, on_cpu, products_in, refill
from nero_lab.models.biggan import Pair
from nero_lab.protocol import SettingError, Settings, Task

#: Epochs from one look at the generator to the next.
EVERY = 10
#: Images of each kind that are judged: generated ones, the first of the training set, and those of the test set.
JUDGED = 10_000
#: Images of each class in a grid of samples.
SAMPLES = 10
CLASSES = 10
#: What the curve has besides distances.
LOSSES = ("generator_loss", "discriminator_loss")


class Adversarial(Training):
    """A generator, a discriminator, their optimisers and where they stand.

    A step is one of the discriminator, on real images and as many generated ones of the same classes, and then one of
    the generator; both by the hinge loss. Every tenth epoch and after the last, generated images are judged by their
    distance from the training and the test set, and a grid of samples is left, of noise that stays the same. All
    randomness of an epoch comes from a generator seeded by the run's seed and the epoch. On a GPU a step is a CUDA
    graph on a stream of the run's own.

    Args:
        task: what to train on what; the options of its contenders may have some of their own for ``"generator"`` and
            ``"discriminator"``.
        settings: of this run.
        data: images, on the device to train on.
        state: what :meth:`state` gave, to go on from there.
        judges: makes those who judge, on a device.
    """

    def __init__(
        self,
        task: Task,
        settings: Settings,
        data: Dataset,
        state: dict[str, Any] | None = None,
        *,
        judges: Callable[[torch.device], list[Judge]] = judges,
    ) -> None:
        assert isinstance(data, Pictures)
        super().__init__(task, settings, data.device, math.ceil(data.examples / task.batch))
        self.data = replace(data, mean=(0.5,) * len(data.mean), std=(0.5,) * len(data.std))  # pixels in (-1, 1)
        self.judges = judges(self.device)
        self.curve = {name: [] for name in (*LOSSES, *self._distances())}
        self._real: dict[str, Gaussian] = {}
        self._begin(state)

    @property
    def network(self) -> nn.Module:
        return self.pair

    def advance(self) -> None:
        """Make a step of either network; after the last of an epoch, look at their losses and perhaps at images."""
        with self._on_stream():
            if self.step == 0:
                self._begin_epoch()
            self.lr.fill_(self.settings.lr * self.task.schedule(self.steps_done, self.steps_an_epoch))
            self._learn(*self._batches[self.step])
            self.step += 1
            if self.step == self.steps_an_epoch:
                self._end_epoch()

    def so_far(self) -> dict[str, float]:
        with self._on_stream():
            losses = (self.totals / max(1, min(self.step * self.task.batch, self.data.examples))).tolist()
        return dict(zip(LOSSES, losses, strict=True))

    def verdict(self) -> dict[str, Any]:
        return {"measured": {judge.short: judge.name for judge in self.judges}}

    def state(self) -> dict[str, Any]:
        with self._on_stream():
            return {
                **super().state(),
                "totals": on_cpu(self.totals),
                "random": self.random.get_state(),
                "pair": on_cpu(dict(self.pair.state_dict())),
                "optimisers": {name: on_cpu(each.state_dict()) for name, each in self.optimisers.items()},
            }

    def go_on_from(self, state: dict[str, Any]) -> None:
        if missing := (set(state["curve"]) - set(LOSSES)) ^ set(self._distances()):
            raise SettingError(
                f"this run was begun with other judges: {', '.join(sorted(missing))} is measured only before or only "
                "now; let $NERO_INCEPTION be as it was, or delete the checkpoint to begin again"
            )
        super().go_on_from(state)
        fill(self.pair, state["pair"])
        for name, optimiser in self.optimisers.items():
            load(optimiser, state["optimisers"][name], self.lr)
        if self.step:
            self._begin_epoch()
            self.random.set_state(state["random"])
            refill(self.totals, state, "totals")

    def _build(self) -> None:
        contender = self.task.contenders[self.settings.optimiser]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            pair = (contender.model or self.task.model)()  # on the CPU: the same weights for every device
            assert isinstance(pair, Pair)
            self._noise = torch.randn(JUDGED, pair.generator.noise).to(self.device)
        self._classes = (torch.arange(JUDGED) % CLASSES).to(self.device)
        self.pair: Pair = pair.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.random = torch.Generator(self.device)
        self.lr = torch.zeros((), device=self.device)
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.optimisers = {}
        for name, network in self.pair.named_children():
            own = {
                key: value for key, value in contender.options.items() if key not in dict(self.pair.named_children())
            }
            options = {**own, **contender.options.get(name, {})}
            self.optimisers[name] = baselines.make(contender.optimiser, network, self.lr, **options)
            baselines.prime(self.optimisers[name])
        self._learn = Captured(self._update, self._changing, self._stream, generator=self.random)

    def _changing(self) -> list[Tensor]:
        kept = [v for each in self.optimisers.values() for state in each.state.values() for v in state.values()]
        return [*self.pair.state_dict().values(), self.totals, *(each for each in kept if isinstance(each, Tensor))]

    def _begin_epoch(self) -> None:
        self.random.manual_seed(self.settings.seed * 1_000_003 + self.epoch)
        self._batches = self.data.epoch(self.task.batch, self.random, self.task.augment)
        self.totals.zero_()
        self.pair.train()

    def _update(self, images: Tensor, labels: Tensor) -> None:
        generator, discriminator = self.pair.generator, self.pair.discriminator
        with products_in(self.settings.precision):
            with torch.no_grad():
                made = generator(self._chance(len(images)), labels)
            self.optimisers["discriminator"].zero_grad()
            scores = discriminator(torch.cat([images, made]), labels.repeat(2))
            real, fake = scores.chunk(2)
            telling = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
            telling.backward()  # type: ignore[no-untyped-call]
            self.optimisers["discriminator"].step()

            self.optimisers["generator"].zero_grad()
            making = -discriminator(generator(self._chance(len(images)), labels), labels).mean()
            making.backward(inputs=list(generator.parameters()))  # the discriminator's are not asked for
            self.optimisers["generator"].step()
        with torch.no_grad():
            self.totals += len(images) * torch.stack([making, telling])

    def _chance(self, count: int) -> Tensor:
        """What as many images are made of."""
        return torch.randn(count, self.pair.generator.noise, generator=self.random, device=self.device)

    def _end_epoch(self) -> None:
        self._batches = ()
        losses = (self.totals / self.data.examples).tolist()
        self.epoch, self.step = self.epoch + 1, 0
        look = self.epoch % EVERY == 0 or self.finished
        numbers = [*losses, *(self._look() if look else [math.nan] * len(self._distances()))]
        for values, number in zip(self.curve.values(), numbers, strict=True):
            values.append(number if math.isfinite(number) else None)

    def _distances(self) -> list[str]:
        return [f"{part}_{judge.short}" for judge in self.judges for part in ("train", "test")]

    def _look(self) -> list[float]:
        """Leave a grid of samples, and tell the distances of generated images: none, if the generator has diverged."""
        made = self._made()
        # what is not a number is no image, and is drawn in grey
        pixels = made.nan_to_num(0.0).mul_(127.5).add_(127.5).round_().byte()
        self.files[f"-epoch{self.epoch:03}.png"] = grid(pixels[: SAMPLES * CLASSES])
        if not made.isfinite().all():
            return [math.nan] * len(self._distances())
        distances = []
        with products_in("float32"):
            for judge in self.judges:
                found = judge.gaussian(self._telling("looks at generated images", pixels))
                for part in ("train", "test"):
                    name = f"{part}_{judge.short}"
                    if name not in self._real:
                        real = getattr(self.data, part).pixels[:JUDGED]
                        self._real[name] = judge.gaussian(self._telling(f"looks at {part} images", real))
                    distances.append(found.distance(self._real[name]))
        return distances

    @torch.no_grad()
    def _made(self) -> Tensor:
        """Images of noise that is always the same, of all classes in turn."""
        self.pair.generator.eval()
        both = zip(self._telling("makes images to look at", self._noise), torch.split(self._classes, LOOK), strict=True)
        with products_in(self.settings.precision):
            return torch.cat([self.pair.generator(*each) for each in both])

    def _telling(self, what: str, rows: Tensor) -> Iterator[Tensor]:
        """Rows, some at a time, while it is told what is done with them and how far that is."""
        for start in range(0, len(rows), LOOK):
            self.tell(what, start / len(rows))
            yield rows[start : start + LOOK]


def grid(pixels: Tensor) -> bytes:
    """A PNG of images that come class by class in turn, a row for each class."""
    from matplotlib.image import imsave

    _, colours, height, width = pixels.shape
    rows = pixels.view(-1, CLASSES, colours, height, width).permute(1, 3, 0, 4, 2)
    picture = BytesIO()
    imsave(picture, rows.reshape(CLASSES * height, -1, colours).cpu().numpy(), format="png")
    return picture.getvalue()
