"""The loop of the task that is a game: play, judge what was done, and learn from it, in rounds."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nero_lab import baselines
from nero_lab.data.arcade import Game
from nero_lab.loops.captured import Captured
from nero_lab.loops.film import gif
from nero_lab.loops.ppo import PPO, Batch, advantages, normalised, objective
from nero_lab.loops.training import Training, fill, load, on_cpu, products_in, refill
from nero_lab.protocol import Settings, Task

#: Steps of the episode that is shown in the end, which a policy may play for ever, and pictures of it.
LONGEST, PICTURES = 10_000, 2000
#: Episodes of each game that are played without chance in the end, and what their seeds have more than the run's.
EPISODES, AFAR = 4, 1000


class Agent(Training):
    """A network that learns to play by PPO, and where its games stand.

    A round is some steps in all games and some updates; each of these is a step of :meth:`advance`, which leaves as
    soon as the games have their actions, or the GPU its work. So runs that take turns play while others
    learn. Within a run, a GPU notes what was seen and done while the games go on, and nothing else runs beside them:
    what they show next depends on the choice, and that on the last update.

    All randomness of a round (which actions, which minibatches) is drawn at its start from a generator seeded by
    the run's seed and the round. On a GPU, choosing, noting, judging and learning are a CUDA graph each, on a
    stream of the run's own, and count for themselves where they are in the round.

    Args:
        task: what to train on what.
        settings: of this run.
        data: the game, which says on which device to learn.
        state: what :meth:`state` gave, to go on from there.
        ppo: how to play and learn.
    """

    def __init__(
        self, task: Task, settings: Settings, data: Game, state: dict[str, Any] | None = None, *, ppo: PPO | None = None
    ) -> None:
        self.ppo = PPO() if ppo is None else ppo
        self._turns = self.ppo.steps + self.ppo.updates
        super().__init__(task, settings, data.device, self.ppo.rounds * self._turns)
        self.game = data
        self.curve = {name: [] for name in ("reward", "episode_length", "policy_loss", "value_loss", "entropy")}
        self.arcade = data.play(self.ppo.games, settings.seed)
        self._begin(state)
        self._begun = self.played, time.perf_counter()

    @property
    def network(self) -> nn.Module:
        return self.model

    @property
    def played(self) -> int:
        """Steps made in all games."""
        rounds, turn = divmod(self.steps_done, self._turns)
        return self.ppo.games * (rounds * self.ppo.steps + min(turn, self.ppo.steps))

    def advance(self) -> None:
        """Make one step in all games, or one update; the last of an epoch waits for the device."""
        turn = self.step % self._turns
        with self._on_stream():
            if turn == 0:
                self._begin_round()
            if 0 < turn <= self.ppo.steps:
                self._receive()
            if turn < self.ppo.steps:
                self._choose()
                self.arcade.send(self._chosen())
            else:
                if turn == self.ppo.steps:
                    self._judge()
                self._learn()
            self.step += 1
            if self.step == self.steps_an_epoch:
                self._end_epoch()

    def so_far(self) -> dict[str, float]:
        return {name: value for name, value in self._recent().items() if value is not None}

    def pace(self) -> str:
        before, since = self._begun
        made = self.played - before  # none yet, where it goes on amid the updates of a round
        return f"{made / (time.perf_counter() - since):,.0f} steps a second" if made else ""

    def verdict(self) -> dict[str, Any]:
        """An episode of the trained agent's, as a film, what it gets without chance, and what all took."""
        generator = torch.Generator().manual_seed(self.settings.seed)

        @torch.no_grad()
        def choose(frames: Tensor) -> int:
            logits, _ = self.model(frames.to(self.device))
            noise = torch.empty(logits.shape).exponential_(generator=generator).log_()
            return int((logits.cpu() - noise).argmax())

        @torch.no_grad()
        def likeliest(frames: Tensor) -> Tensor:
            logits: Tensor = self.model(frames.to(self.device))[0]
            return logits.argmax(1).cpu()

        rate, apart = self.played / self.seconds, self.settings.seed + AFAR
        self.tell(f"plays {1 + EPISODES * self.ppo.games} episodes, to end with")
        with self._on_stream(), products_in(self.settings.precision):
            pictures, total, length = self.game.show(choose, self.settings.seed, LONGEST, PICTURES)
            greedy = self.game.score(likeliest, apart, self.ppo.games, EPISODES, EPISODES * LONGEST)
        self.files[".gif"] = gif(pictures)
        return {
            "environment_steps": self.played,
            "steps_per_second": round(rate),
            "shown_return": total,
            "shown_length": length,
            "greedy_return": sum(greedy) / len(greedy) if greedy else None,
            "greedy_episodes": len(greedy),
        }

    def state(self) -> dict[str, Any]:
        with self._on_stream():
            return {
                **super().state(),
                "totals": on_cpu(self.totals),
                "model": on_cpu(dict(self.model.state_dict())),
                "optimiser": on_cpu(self.optimiser.state_dict()),
                "arcade": self.arcade.state(),
                "round": on_cpu(self._round) if self.step % self._turns else {},
            }

    def go_on_from(self, state: dict[str, Any]) -> None:
        super().go_on_from(state)
        self.arcade.go_on_from(state["arcade"])
        self._take(self.arcade.frames, self._outcome)
        fill(self.model, state["model"])
        load(self.optimiser, state["optimiser"], self.lr)
        refill(self.totals, state, "totals")
        turn = self.step % self._turns
        if turn:
            self._begin_round()
            for name, values in self._round.items():
                refill(values, state["round"], name)
            self._clock.fill_(min(turn, self.ppo.steps))
            self._update.fill_(max(turn - self.ppo.steps, 0))

    def _build(self) -> None:
        contender = self.task.contenders[self.settings.optimiser]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            model = (contender.model or self.task.model)()  # on the CPU: the same weights for every device
        self.model: nn.Module = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.generator = torch.Generator(self.device)
        self.lr = torch.zeros((), device=self.device)
        self.optimiser = baselines.make(contender.optimiser, self.model, self.lr, **contender.options)
        baselines.prime(self.optimiser)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        steps, games, frames = self.ppo.steps, self.ppo.games, self.arcade.frames
        actions = self.model.get_parameter("actor.bias").numel()
        self._frames = zeros(*frames.shape, dtype=torch.uint8)
        self._outcome = zeros(2, games)  # rewards, and whether the episode was over
        self._choice, self._values = zeros(games, dtype=torch.int64), zeros(games)
        self._likelihoods = zeros(games)
        # what was seen and done in a round; outcomes are kept beside what was seen after them
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
        self._order = zeros(self.ppo.updates, self.ppo.gathered // self.ppo.minibatches, dtype=torch.int64)
        self._clock, self._update = zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64)
        self.totals = zeros(4, dtype=torch.float64)  # of the objective's parts, and how many updates
        pool = torch.cuda.graph_pool_handle() if self._stream is not None else None  # they never run at the same time
        self._choose, self._note, self._judge, self._learn = (
            Captured(self._precisely(work), changing, self._stream, pool=pool)
            for work, changing in (
                (self._choosing, list),
                (self._noting, lambda: [self._clock]),
                (self._judging, list),
                (self._learning, self._learned),
            )
        )
        if self._stream is not None:  # what crosses the bus lies where a GPU can fetch it by itself
            self._posts = {
                "frames": torch.empty(frames.shape, dtype=torch.uint8, pin_memory=True),
                "outcome": torch.empty(2, games, pin_memory=True),
                "choice": torch.empty(games, dtype=torch.int64, pin_memory=True),
            }
        self._take(self.arcade.frames, self._outcome)

    def _begin_round(self) -> None:
        number = self.steps_done // self._turns
        self.generator.manual_seed(self.settings.seed * 1_000_003 + number)
        self._noise.exponential_(generator=self.generator).log_().neg_()  # Gumbel's: the largest sum is a fair choice
        shuffled = torch.rand(self.ppo.passes, self.ppo.gathered, generator=self.generator, device=self.device)
        self._order.copy_(shuffled.argsort(1).view_as(self._order))
        self._clock.zero_()
        self._update.zero_()
        self.lr.fill_(self.settings.lr * self.task.schedule(number * self._turns, self.steps_an_epoch))

    def _receive(self) -> None:
        rewards, ends = self.arcade.receive()
        self._take(self.arcade.frames, torch.stack([rewards, ends.float()]))

    def _take(self, frames: Tensor, outcome: Tensor) -> None:
        """Bring what the games showed to the device, where the last post has arrived: a choice was made by it."""
        if self._stream is not None:
            # not by torch, whose threads would all take part and then spin beside the games
            self._posts["frames"].numpy()[...] = frames.numpy()
            frames, outcome = self._posts["frames"], self._posts["outcome"].copy_(outcome)
        self._frames.copy_(frames, non_blocking=True)
        self._outcome.copy_(outcome, non_blocking=True)

    def _chosen(self) -> Tensor:
        """The actions, on the host, which waits for them; what led to them is noted behind its back."""
        if self._stream is None:
            self._note()
            return self._choice.clone()
        choice = self._posts["choice"].copy_(self._choice, non_blocking=True)
        there = self._stream.record_event()
        self._note()
        there.synchronize()
        return choice

    @torch.no_grad()
    def _choosing(self) -> None:
        """Choose actions by what is seen."""
        logits, values = self.model(self._frames)
        every = torch.log_softmax(logits, 1)
        self._choice.copy_((every + self._noise.index_select(0, self._clock)[0]).argmax(1))
        self._likelihoods.copy_(every.gather(1, self._choice[:, None]).squeeze(1))
        self._values.copy_(values)

    @torch.no_grad()
    def _noting(self) -> None:
        """Keep what was seen, and what was made of it."""
        found = {
            "frames": self._frames,
            "outcomes": self._outcome,
            "actions": self._choice,
            "likelihoods": self._likelihoods,
            "values": self._values,
        }
        for name, value in found.items():
            self._round[name].index_copy_(0, self._clock, value[None])
        self._clock += 1

    @torch.no_grad()
    def _judging(self) -> None:
        """Find how good the actions were."""
        self._round["outcomes"][-1] = self._outcome
        self._round["values"][-1] = self.model(self._frames)[1]
        rewards, ends = self._round["outcomes"][1:].unbind(1)
        found = advantages(self.ppo, rewards, ends, self._round["values"])
        self._round["returns"].copy_(found + self._round["values"][:-1])
        self._round["advantages"].copy_(normalised(found))

    def _learning(self) -> None:
        """Update the weights by the next minibatch."""
        chosen = self._order.index_select(0, self._update)[0]
        names = ("frames", "actions", "likelihoods", "values", "returns", "advantages")
        frames, *rest = (self._round[name][: self.ppo.steps].flatten(0, 1)[chosen] for name in names)
        self.optimiser.zero_grad()
        logits, values = self.model(frames)
        loss, parts = objective(self.ppo, logits, values, Batch(*rest))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.ppo.longest_gradient, foreach=True)
        self.optimiser.step()
        with torch.no_grad():
            self.totals[:3] += parts
            self.totals[3] += 1
            self._update += 1

    def _learned(self) -> list[Tensor]:
        """All that an update changes."""
        kept = [value for state in self.optimiser.state.values() for value in state.values()]
        tensors = [value for value in kept if isinstance(value, Tensor)]
        return [*self.model.state_dict().values(), *tensors, self.totals, self._update]

    def _precisely(self, work: Callable[[], None]) -> Callable[[], None]:
        """The same, in the precision of this run."""

        def done() -> None:
            with products_in(self.settings.precision):
                work()

        return done

    def _end_epoch(self) -> None:
        *parts, updates = self.totals.tolist()
        found = dict(zip(("policy_loss", "value_loss", "entropy"), [part / updates for part in parts], strict=True))
        for name, value in {**self._recent(), **found}.items():
            self.curve[name].append(value if value is not None and math.isfinite(value) else None)
        self.totals.zero_()
        self.epoch, self.step = self.epoch + 1, 0

    def _recent(self) -> dict[str, float | None]:
        """What the last episodes were like, if there are any."""
        count = len(self.arcade.recent)
        sums = [sum(column) for column in zip(*self.arcade.recent, strict=True)] or [0, 0]
        return {
            name: total / count if count else None
            for name, total in zip(("reward", "episode_length"), sums, strict=True)
        }
