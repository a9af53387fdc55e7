"""Atari's Pong as the paper's agents play it: several games at a time, which can be left and taken up again.

The emulator is ale-py's, with its own preprocessing: as in ``PongNoFrameskip-v4`` with the usual wrappers, an action is
held for four frames, of the last two of which the brighter pixels are seen, in grey and as 84 x 84; an agent sees the
last four such pictures. A game starts with the button pressed and up to 28 frames of nothing.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nero_lab.data.errors import DataError
from nero_lab.data.folder import Folder

#: Seconds to wait for an answer of the emulator: a thread that died in it never gives one.
PATIENCE = 60.0
#: A game is seeded at every so many of its episodes, which takes as long as twenty that follow from the last.
SEEDED = 100
#: Episodes that an agent is judged by.
RECENT = 100
CPU = torch.device("cpu")
#: What to do when a game breaks off.
GO_ON = "run the same command again, and it goes on from the last checkpoint"


class Emulator(Protocol):
    """What is asked of the games; ``ale_py.AtariVectorEnv`` is one. Arrays are numpy's."""

    def reset(self, *, seed: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Begin the games of ``options["reset_mask"]`` anew, seeded each by its own seed or, if that is -1, not."""

    def send(self, actions: Any) -> None:
        """Have an action done in every game."""

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """What is seen now, the rewards, which games are over, which were cut short, and more."""


@dataclass(frozen=True)
class Game:
    """A game to learn to play.

    Attributes:
        name: as tasks call it.
        emulator: makes so many games, in colour if asked for.
        device: where agents learn.
    """

    name: str
    emulator: Callable[[int, bool], Emulator]
    device: torch.device = CPU

    def to(self, device: torch.device | str) -> "Game":
        """The same for another device."""
        return replace(self, device=torch.device(device))

    def play(self, games: int, seed: int) -> "Arcade":
        """So many games at their start."""
        return Arcade(self.emulator(games, False), games, seed)

    def show(
        self, choose: Callable[[Tensor], int], seed: int, longest: int, most: int
    ) -> tuple[list[Tensor], float, int]:
        """Play an episode, of so many steps at most.

        Returns:
            the first pictures in colour, so many at most, as bytes (height, width, 3); the episode's return and length.
        """
        seen, shown = (Arcade(self.emulator(1, colour), 1, seed) for colour in (False, True))
        pictures, total = [shown.frames[0, 0]], 0.0
        for step in range(longest):
            action = torch.tensor([choose(seen.frames)])
            for arcade in (seen, shown):
                arcade.send(action)
            shown.receive()
            rewards, ends = seen.receive()
            total += rewards[0].item()
            if ends[0]:
                return pictures, total, step + 1
            if len(pictures) < most:
                pictures.append(shown.frames[0, 0])
        return pictures, total, longest

    def score(
        self, choose: Callable[[Tensor], Tensor], seed: int, games: int, episodes: int, longest: int
    ) -> list[float]:
        """Play so many episodes in each of some games, of so many steps at most in each game.

        Returns:
            the return of every episode that came to its end. Each game counts the same number of them, if there is
            time, since quick episodes are not like slow ones.
        """
        arcade = self.play(games, seed)
        totals = torch.zeros(games)
        found: list[list[float]] = [[] for _ in range(games)]
        for _ in range(longest):
            arcade.send(choose(arcade.frames))
            rewards, ends = arcade.receive()
            totals += rewards
            for game in ends.nonzero().flatten().tolist():
                if len(found[game]) < episodes:
                    found[game].append(totals[game].item())
                totals[game] = 0
            if all(len(each) == episodes for each in found):
                break
        return [total for each in found for total in each]


class Arcade:
    """Games under way, each of which begins again when it is over.

    Emulators cannot be asked for all of their state. But a game is the same again if the same is done in it: where
    it stands is its seed, how many episodes were played since, and the actions in the one that is under way.

    Args:
        emulator: the games, not yet begun.
        games: how many.
        seed: of all of them.

    Attributes:
        frames: what is seen, as bytes (games, 4, height, width).
        recent: return and length of each of the last episodes.

    Raises:
        DataError: in every method, if the emulator breaks off or does not answer.
    """

    def __init__(self, emulator: Emulator, games: int, seed: int) -> None:
        self._emulator, self._games, self._seed = emulator, games, seed
        self._orders: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # who waits within the emulator waits for ever: let it be somebody else
        threading.Thread(target=_serve, args=(self._orders, self._answers), daemon=True).start()
        weakref.finalize(self, self._orders.put, None)
        self._episodes = [0] * games
        self._actions = [bytearray() for _ in range(games)]
        self._returns, self._lengths = [0.0] * games, [0] * games
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT)
        self._sent = False
        self.frames = torch.empty(0)
        self._begin(range(games), [self._seed_of(game) for game in range(games)])

    def send(self, actions: Tensor) -> None:
        """Do an action in every game, and do not wait for it."""
        for log, action in zip(self._actions, actions.tolist(), strict=True):
            log.append(action)
        self._order(actions)
        self._sent = True

    def receive(self) -> tuple[Tensor, Tensor]:
        """The rewards of the actions, and which episodes ended by them; those games have begun again."""
        frames, rewards, over, cut, _ = self._answer()
        self._sent = False
        self.frames = torch.from_numpy(frames)
        ends = torch.from_numpy(over | cut)
        for game, reward in enumerate(rewards.tolist()):
            self._returns[game] += reward
            self._lengths[game] += 1
        if ended := [game for game, end in enumerate(ends.tolist()) if end]:
            for game in ended:
                self.recent.append((self._returns[game], self._lengths[game]))
                self._returns[game], self._lengths[game] = 0.0, 0
                self._episodes[game] += 1
                self._actions[game].clear()
            self._begin(ended, [-1 if self._episodes[game] % SEEDED else self._seed_of(game) for game in ended])
        return torch.from_numpy(rewards).float(), ends

    def state(self) -> dict[str, Any]:
        """All that is needed to stand here again, be there an answer to wait for or not."""
        return {
            "episodes": list(self._episodes),
            "actions": [torch.tensor(list(log), dtype=torch.uint8) for log in self._actions],
            "sent": self._sent,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "recent": [list(episode) for episode in self.recent],
            "frames": self.frames.clone(),
        }

    def go_on_from(self, state: dict[str, Any]) -> None:
        """Stand where :meth:`state` was called, with games that have just begun.

        Raises:
            ValueError: if that was with another number of games.
        """
        for name in ("episodes", "actions", "returns", "lengths"):
            if (found := len(state[name])) != self._games:
                raise ValueError(f"{found} {name} for {self._games} games")
        self._episodes = list(state["episodes"])
        logs = [log.tolist() for log in state["actions"]]
        last = [log.pop() for log in logs] if state["sent"] else []
        self._begin(range(self._games), [self._seed_of(game) for game in range(self._games)])
        longest = max(map(len, logs))
        for step in range(longest + 1):
            for game in range(self._games):  # those with less to do begin later, that all may stop together
                if step == longest - len(logs[game]):
                    self._begin([game], [self._seed_of(game)])
                    for _ in range(self._episodes[game] % SEEDED):
                        self._begin([game], [-1])
            if step < longest:
                begun = [step - longest + len(log) for log in logs]
                self._order(torch.tensor([log[at] if at >= 0 else 0 for log, at in zip(logs, begun, strict=True)]))
                self.frames = torch.from_numpy(self._answer()[0])
        if not torch.equal(self.frames, state["frames"]):
            raise DataError(
                "the games do not come to where the run was kept: its checkpoint is of another version of ale-py. "
                "Install that, or delete the checkpoint to begin this run again"
            )
        self._actions = [bytearray(log) for log in logs]
        self._returns, self._lengths = list(state["returns"]), list(state["lengths"])
        self.recent.extend((total, length) for total, length in state["recent"])
        if last:
            self.send(torch.tensor(last))

    def _seed_of(self, game: int) -> int:
        """Of the episodes that the game's is among; no two have the same."""
        return (self._seed * 1_000_003 + self._episodes[game] // SEEDED * self._games + game) % 2**31

    def _begin(self, games: Sequence[int], seeds: Sequence[int]) -> None:
        mask = torch.zeros(self._games, dtype=torch.bool)
        mask[list(games)] = True
        seed, options = torch.tensor(seeds).numpy(), {"reset_mask": mask.numpy()}
        self._orders.put(partial(self._emulator.reset, seed=seed, options=options))
        self.frames = torch.from_numpy(self._answer()[0])

    def _order(self, actions: Tensor) -> None:
        try:
            self._emulator.send(actions.numpy())
        except Exception as error:
            raise DataError(f"a game broke off ({type(error).__name__}: {error}): {GO_ON}") from error
        self._orders.put(self._emulator.recv)

    def _answer(self) -> Any:
        try:
            found = self._answers.get(timeout=PATIENCE)
        except queue.Empty:
            try:  # whoever was stopped and goes on finds the time up, and so does the game
                found = self._answers.get(timeout=PATIENCE / 4)
            except queue.Empty:
                raise DataError(f"a game has not answered for {PATIENCE:g} s: {GO_ON}") from None
        if isinstance(found, Exception):
            raise DataError(f"a game broke off ({type(found).__name__}: {found}): {GO_ON}") from found
        return found


def _serve(orders: "queue.SimpleQueue[Callable[[], Any] | None]", answers: "queue.SimpleQueue[Any]") -> None:
    """Do what is ordered, one after the other, until there is nobody to order any more."""
    while (order := orders.get()) is not None:
        try:
            answers.put(order())
        except Exception as error:
            answers.put(error)
        del order  # it holds the emulator, which must not end here: as Python ends, too, that would end the process


def pong(_: Folder) -> Game:
    """Pong, whose cartridge comes with ale-py."""
    try:
        import PIL  # noqa: F401 - for the film in the end, which is too late to miss it
        from ale_py.vector_env import AtariVectorEnv
    except ImportError as error:
        raise DataError(f"Pong needs {error.name} ({error}): pip install 'nero-optim[paper]'") from error
    raw: dict[str, Any] = {"grayscale": False, "stack_num": 1, "img_height": 210, "img_width": 160}

    def emulator(games: int, colour: bool) -> Emulator:
        try:
            made: Emulator = AtariVectorEnv(
                "pong",
                games,
                repeat_action_probability=0.0,  # as in -v4
                max_num_frames_per_episode=108_000,
                frameskip=4,
                noop_max=30,
                use_fire_reset=True,
                reward_clipping=True,  # which changes nothing: no point in Pong counts for more
                **(raw if colour else {}),
            )
        except Exception as error:
            raise DataError(
                f"ale-py cannot start Pong ({type(error).__name__}: {error}): install it anew, by "
                "pip install --force-reinstall 'nero-optim[paper]', or free processes and memory, and run again"
            ) from error
        return made

    return Game("pong", emulator)
