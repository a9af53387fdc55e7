"""The loop of an agent that learns to play a game by PPO, in rounds of playing and learning."""

import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nero_lab import baselines
from nero_lab.data.arcade import Game
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.ppo import PPO, Batch, advantages, normalise, objective
from nero_lab.loops.training import (
    Training,
    copy_to_cpu,
    load_network,
    load_optimiser,
    load_tensor,
    matmul_precision,
    state_tensors,
)
from nero_lab.protocol import Settings, Task

#: Limits of the recorded episode: steps, since a policy may play for ever, and pictures.
MAX_EPISODE_STEPS, MAX_PICTURES = 10_000, 2000
#: Time per picture of the film in hundredths of a second: about four frames at 60 a second.
PICTURE_CENTISECONDS = 7
MAX_FILM_BYTES = 1_000_000
#: Greedy episodes per game at the end.
GREEDY_EPISODES = 4
#: Added to the run's seed for the greedy episodes.
GREEDY_SEED_OFFSET = 1000


class Agent(Training):
    """Training of a network that plays.

    A round is some steps in all games, then some updates. Each of these is one call of :meth:`advance`, which returns
    as soon as the games have their actions, or the GPU its work; so runs that take turns play while others learn.
    Within a run, a GPU only records transitions while the games run: their next frames depend on the actions, and these
    on the last update.

    All randomness of a round (actions, minibatches) is drawn at its start from a generator that is seeded by the run's
    seed and the round. On a GPU, choosing, recording, estimating and learning are one CUDA graph each, on a stream of
    the run's own; the graphs keep their position within the round in tensors.

    Args:
        task: the experiment; the options of a contender may hold its own hyperparameters under ``"ppo"``.
        settings: the settings of this run.
        data: the game, which names the device to learn on.
        state: a state of :meth:`state` to resume from.
        ppo: the task's hyperparameters.
    """

    def __init__(
        self, task: Task, settings: Settings, data: Game, state: dict[str, Any] | None = None, *, ppo: PPO | None = None
    ) -> None:
        self.ppo = replace(ppo or PPO(), **task.contenders[settings.optimiser].options.get("ppo", {}))
        self._round_calls = self.ppo.steps + self.ppo.round_updates
        super().__init__(task, settings, data.device, self.ppo.rounds * self._round_calls)
        self.game = data
        self.curve = {name: [] for name in ("reward", "episode_length", "policy_loss", "value_loss", "entropy")}
        self.session = data.start(self.ppo.games, settings.seed)
        self._start(state)
        self._speed_from = self.game_steps, time.perf_counter()

    @property
    def network(self) -> nn.Module:
        return self.model

    @property
    def game_steps(self) -> int:
        """Steps made in all games."""
        rounds, call = divmod(self.steps_done, self._round_calls)
        return self.ppo.games * (rounds * self.ppo.steps + min(call, self.ppo.steps))

    def advance(self) -> None:
        """Make one step in all games, or one update; the last of an epoch waits for the device."""
        call = self.step % self._round_calls
        with self._on_stream():
            if call == 0:
                self._begin_round()
            if 0 < call <= self.ppo.steps:
                self._receive()
            if call < self.ppo.steps:
                self._choose()
                self.session.send(self._fetch_actions())
            else:
                if call == self.ppo.steps:
                    self._estimate()
                self._learn()
            self.step += 1
            if self.step == self.steps_per_epoch:
                self._end_epoch()

    def running_metrics(self) -> dict[str, float]:
        return {name: value for name, value in self._recent_means().items() if value is not None}

    def speed(self) -> str:
        before, since = self._speed_from
        steps = self.game_steps - before  # zero after resuming among the updates of a round
        return f"{steps / (time.perf_counter() - since):,.0f} steps a second" if steps else ""

    def final_results(self) -> dict[str, Any]:
        """Record an episode of the trained agent as a GIF, score its greedy policy, and return the totals."""
        rate = self.game_steps / self.seconds
        last = [total for total, _ in self.session.recent][-10:]
        self.on_activity(f"plays {1 + GREEDY_EPISODES * self.ppo.games} final episodes")
        with self._on_stream(), matmul_precision(self.settings.precision):
            pictures, total, length = self.game.record_episode(
                self._sampling_policy(), self.settings.seed, MAX_EPISODE_STEPS, MAX_PICTURES
            )
            greedy = self.game.score(
                self._act_greedily,
                self.settings.seed + GREEDY_SEED_OFFSET,
                self.ppo.games,
                GREEDY_EPISODES,
                GREEDY_EPISODES * MAX_EPISODE_STEPS,
            )
        self.files[".gif"] = encode_gif(pictures)
        return {
            "environment_steps": self.game_steps,
            "steps_per_second": round(rate),
            "return_of_10": sum(last) / len(last) if last else None,
            "shown_return": total,
            "shown_length": length,
            "greedy_return": sum(greedy) / len(greedy) if greedy else None,
            "greedy_episodes": len(greedy),
        }

    def state(self) -> dict[str, Any]:
        with self._on_stream():
            return {
                **super().state(),
                "totals": copy_to_cpu(self.totals),
                "model": copy_to_cpu(dict(self.model.state_dict())),
                "optimiser": copy_to_cpu(self.optimiser.state_dict()),
                "arcade": self.session.state(),
                "round": copy_to_cpu(self._round) if self.step % self._round_calls else {},
            }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.session.restore(state["arcade"])
        self._upload(self.session.frames, self._outcome)
        load_network(self.model, state["model"])
        load_optimiser(self.optimiser, state["optimiser"])
        load_tensor(self.totals, state, "totals")
        call = self.step % self._round_calls
        if call:
            self._begin_round()
            for name, values in self._round.items():
                load_tensor(values, state["round"], name)
            self._step_index.fill_(min(call, self.ppo.steps))
            self._update_index.fill_(max(call - self.ppo.steps, 0))

    def _build(self) -> None:
        contender = self.task.contenders[self.settings.optimiser]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            model = (contender.model or self.task.model)()  # on the CPU, so that weights do not depend on the device
        self.model: nn.Module = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.generator = torch.Generator(self.device)
        self.lr = torch.zeros((), device=self.device)
        options = {name: value for name, value in contender.options.items() if name != "ppo"}
        self.optimiser = baselines.make(contender.optimiser, self.model, self.lr, **options)
        baselines.prime(self.optimiser)
        self._allocate()
        pool = torch.cuda.graph_pool_handle() if self._stream is not None else None  # the graphs never run together
        self._choose, self._record, self._estimate, self._learn = (
            CapturedStep(self._in_precision(work), changing, self._stream, pool=pool)
            for work, changing in (
                (self._choose_actions, list),
                (self._record_step, lambda: [self._step_index]),
                (self._estimate_advantages, list),
                (self._update, self._changing),
            )
        )
        self._upload(self.session.frames, self._outcome)

    def _allocate(self) -> None:
        """Allocate the tensors that the graphs read and write."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        steps, games, frames = self.ppo.steps, self.ppo.games, self.session.frames
        actions = self.model.get_parameter("actor.bias").numel()
        self._frames = zeros(*frames.shape, dtype=torch.uint8)
        self._outcome = zeros(2, games)  # rewards, and 1 where the episode ended
        self._actions, self._values = zeros(games, dtype=torch.int64), zeros(games)
        self._log_likelihoods = zeros(games)
        # transitions of a round; an outcome has the index of the frames after it
        self._round = {
            "frames": zeros(steps, *frames.shape, dtype=torch.uint8),
            "outcomes": zeros(steps + 1, 2, games),
            "actions": zeros(steps, games, dtype=torch.int64),
            "likelihoods": zeros(steps, games),
            "values": zeros(steps + 1, games),
            "returns": zeros(steps, games),
            "advantages": zeros(steps, games),
        }
        self._noise = zeros(steps, games, actions)
        self._order = zeros(self.ppo.round_updates, self.ppo.round_steps // self.ppo.minibatches, dtype=torch.int64)
        self._step_index, self._update_index = zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64)
        self.totals = zeros(4, dtype=torch.float64)  # policy loss, value loss, entropy, number of updates
        if self._stream is not None:  # pinned buffers, for copies that do not block the host
            self._pinned = {
                "frames": torch.empty(frames.shape, dtype=torch.uint8, pin_memory=True),
                "outcome": torch.empty(2, games, pin_memory=True),
                "actions": torch.empty(games, dtype=torch.int64, pin_memory=True),
            }

    def _begin_round(self) -> None:
        number = self.steps_done // self._round_calls
        self.generator.manual_seed(self._seed_of(number))
        self._noise.exponential_(generator=self.generator).log_().neg_()  # Gumbel noise: its argmax samples actions
        shuffled = torch.rand(self.ppo.passes, self.ppo.round_steps, generator=self.generator, device=self.device)
        self._order.copy_(shuffled.argsort(1).view_as(self._order))
        self._step_index.zero_()
        self._update_index.zero_()
        self.lr.fill_(self.settings.lr * self.task.schedule(number * self._round_calls, self.steps_per_epoch))

    def _receive(self) -> None:
        rewards, ends = self.session.receive()
        self._upload(self.session.frames, torch.stack([rewards, ends.float()]))

    def _upload(self, frames: Tensor, outcome: Tensor) -> None:
        """Copy frames and outcomes to the device. The last upload is complete, since actions were fetched after it."""
        if self._stream is not None:
            # by NumPy: torch's threads would spin beside the games
            self._pinned["frames"].numpy()[...] = frames.numpy()
            frames, outcome = self._pinned["frames"], self._pinned["outcome"].copy_(outcome)
        self._frames.copy_(frames, non_blocking=True)
        self._outcome.copy_(outcome, non_blocking=True)

    def _fetch_actions(self) -> Tensor:
        """Wait for the actions and return them on the host; record the transitions meanwhile."""
        if self._stream is None:
            self._record()
            return self._actions.clone()
        actions = self._pinned["actions"].copy_(self._actions, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # leaves this core to the games
        copied = self._stream.record_event(event)
        self._record()
        copied.synchronize()
        return actions

    @torch.no_grad()
    def _choose_actions(self) -> None:
        logits, values = self.model(self._frames)
        log_policy = torch.log_softmax(logits, 1)
        self._actions.copy_((log_policy + self._noise.index_select(0, self._step_index)[0]).argmax(1))
        self._log_likelihoods.copy_(log_policy.gather(1, self._actions[:, None]).squeeze(1))
        self._values.copy_(values)

    @torch.no_grad()
    def _record_step(self) -> None:
        values = {
            "frames": self._frames,
            "outcomes": self._outcome,
            "actions": self._actions,
            "likelihoods": self._log_likelihoods,
            "values": self._values,
        }
        for name, value in values.items():
            self._round[name].index_copy_(0, self._step_index, value[None])
        self._step_index += 1

    @torch.no_grad()
    def _estimate_advantages(self) -> None:
        self._round["outcomes"][-1] = self._outcome
        self._round["values"][-1] = self.model(self._frames)[1]
        rewards, ends = self._round["outcomes"][1:].unbind(1)
        estimates = advantages(self.ppo, rewards, ends, self._round["values"])
        self._round["returns"].copy_(estimates + self._round["values"][:-1])
        self._round["advantages"].copy_(normalise(estimates) if self.ppo.normalises_rounds else estimates)

    def _update(self) -> None:
        """Update the weights on the next minibatch."""
        chosen = self._order.index_select(0, self._update_index)[0]
        names = ("frames", "actions", "likelihoods", "values", "returns", "advantages")
        frames, *rest = (self._round[name][: self.ppo.steps].flatten(0, 1)[chosen] for name in names)
        self.optimiser.zero_grad()
        logits, values = self.model(frames)
        batch = Batch(*rest)
        if not self.ppo.normalises_rounds:
            batch = replace(batch, advantages=normalise(batch.advantages))
        loss, parts = objective(self.ppo, logits, values, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.ppo.max_grad_norm, foreach=True)
        self.optimiser.step()
        with torch.no_grad():
            self.totals[:3] += parts
            self.totals[3] += 1
            self._update_index += 1

    def _changing(self) -> list[Tensor]:
        """Return all tensors that an update changes."""
        return [*self.model.state_dict().values(), *state_tensors(self.optimiser), self.totals, self._update_index]

    def _in_precision(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            with matmul_precision(self.settings.precision):
                work()

        return run

    def _sampling_policy(self) -> Callable[[Tensor], int]:
        """Return a policy that samples actions, seeded by the run's seed."""
        generator = torch.Generator().manual_seed(self.settings.seed)

        @torch.no_grad()
        def choose(frames: Tensor) -> int:
            logits, _ = self.model(frames.to(self.device))
            noise = torch.empty(logits.shape).exponential_(generator=generator).log_()
            return int((logits.cpu() - noise).argmax())

        return choose

    @torch.no_grad()
    def _act_greedily(self, frames: Tensor) -> Tensor:
        logits: Tensor = self.model(frames.to(self.device))[0]
        return logits.argmax(1).cpu()

    def _end_epoch(self) -> None:
        *sums, updates = self.totals.tolist()
        losses = dict(zip(("policy_loss", "value_loss", "entropy"), [part / updates for part in sums], strict=True))
        for name, value in {**self._recent_means(), **losses}.items():
            self.curve[name].append(value if value is not None and math.isfinite(value) else None)
        self.totals.zero_()
        self.epoch, self.step = self.epoch + 1, 0

    def _recent_means(self) -> dict[str, float | None]:
        """Average return and length over the last episodes; None before the first ends."""
        count = len(self.session.recent)
        sums = [sum(column) for column in zip(*self.session.recent, strict=True)] or [0, 0]
        return {
            name: total / count if count else None
            for name, total in zip(("reward", "episode_length"), sums, strict=True)
        }


def encode_gif(pictures: Sequence[Tensor]) -> bytes:
    """Encode pictures, uint8 (height, width, 3), as an endless GIF; shorten it to at most :data:`MAX_FILM_BYTES`."""
    from PIL import Image

    images = [Image.fromarray(picture.numpy()) for picture in pictures]
    while True:
        file = io.BytesIO()
        duration_ms = 10 * PICTURE_CENTISECONDS
        images[0].save(file, "gif", save_all=True, append_images=images[1:], duration=duration_ms, loop=0)
        if file.tell() <= MAX_FILM_BYTES or len(images) == 1:
            return file.getvalue()
        images = images[: len(images) * 3 // 4]
