"""Atari's Pong as the paper's agents play it: several games at a time, which can be saved and resumed.

The emulator is ale-py's, with its own preprocessing, as in ``PongNoFrameskip-v4`` with the usual wrappers. An action is
held for four frames. The pixelwise maximum of the last two is one observation, in grey and resized to 84 x 84; an agent
sees the last four. A game starts with the fire button and up to 28 frames of no action.
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

from nero.messages import how_to_install
from nero_lab.data.dataset import DataError
from nero_lab.data.folder import Folder

#: Seconds to wait for the emulator: a thread that died in it never answers.
ANSWER_TIMEOUT_S = 60.0
#: Episodes of a game per seed. Seeding takes as long as twenty unseeded resets.
EPISODES_PER_SEED = 100
#: Finished episodes that are averaged to judge an agent.
RECENT_EPISODES = 100
CPU = torch.device("cpu")
#: Emulator frames after which an episode is cut.
MAX_EPISODE_FRAMES = 108_000
RESUME_HINT = "run the same command again to resume from the last checkpoint"


class Emulator(Protocol):
    """Vector of games, such as ``ale_py.AtariVectorEnv``. Arrays are NumPy's."""

    def reset(self, *, seed: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Restart the games of ``options["reset_mask"]``, each with its seed; -1 keeps the generator's state."""

    def send(self, actions: Any) -> None:
        """Start one action in every game."""

    def recv(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Wait for the action; return observations, rewards, terminations, truncations and more."""


@dataclass(frozen=True)
class Game:
    """Game to learn.

    Attributes:
        name: name that tasks refer to.
        emulator: makes a number of games, in colour if the second argument is true.
        device: device that agents learn on.
    """

    name: str
    emulator: Callable[[int, bool], Emulator]
    device: torch.device = CPU

    def to(self, device: torch.device | str) -> "Game":
        """Return a copy for another device."""
        return replace(self, device=torch.device(device))

    def start(self, games: int, seed: int) -> "GameSession":
        """Start a number of games."""
        return GameSession(self.emulator(games, False), games, seed)

    def record_episode(
        self, choose: Callable[[Tensor], int], seed: int, max_steps: int, max_pictures: int
    ) -> tuple[list[Tensor], float, int]:
        """Play an episode.

        Args:
            choose: maps observations to an action.
            seed: seed of the game.
            max_steps: steps after which the episode is cut.
            max_pictures: number of pictures to keep.

        Returns:
            The first pictures in colour, as uint8 (height, width, 3); the episode's return and length.
        """
        seen, shown = (GameSession(self.emulator(1, colour), 1, seed) for colour in (False, True))
        pictures, total = [shown.frames[0, 0]], 0.0
        for step in range(max_steps):
            action = torch.tensor([choose(seen.frames)])
            for session in (seen, shown):
                session.send(action)
            shown.receive()
            rewards, ends = seen.receive()
            total += rewards[0].item()
            if ends[0]:
                return pictures, total, step + 1
            if len(pictures) < max_pictures:
                pictures.append(shown.frames[0, 0])
        return pictures, total, max_steps

    def score(
        self, choose: Callable[[Tensor], Tensor], seed: int, games: int, episodes: int, max_steps: int
    ) -> list[float]:
        """Play several episodes in each of several games.

        Args:
            choose: maps observations to actions.
            seed: seed of the games.
            games: number of games.
            episodes: episodes per game; equal for all games, because short episodes differ from long ones.
            max_steps: steps per game, after which all are cut.

        Returns:
            The return of every finished episode.
        """
        session = self.start(games, seed)
        totals = torch.zeros(games)
        returns: list[list[float]] = [[] for _ in range(games)]
        for _ in range(max_steps):
            session.send(choose(session.frames))
            rewards, ends = session.receive()
            totals += rewards
            for game in ends.nonzero().flatten().tolist():
                if len(returns[game]) < episodes:
                    returns[game].append(totals[game].item())
                totals[game] = 0
            if all(len(each) == episodes for each in returns):
                break
        return [total for each in returns for total in each]


class GameSession:
    """Games in progress; each restarts when its episode ends.

    An emulator cannot save all of its state, but it is deterministic. So a game's state is its seed, the number of
    episodes since, and the actions of the current episode, which are replayed.

    Args:
        emulator: the games, not yet started.
        games: number of games.
        seed: seed of all games.

    Attributes:
        frames: the observations, uint8 (games, 4, height, width).
        recent: return and length of each of the last episodes.

    Raises:
        DataError: in every method, if the emulator fails or does not answer.
    """

    def __init__(self, emulator: Emulator, games: int, seed: int) -> None:
        self._emulator, self._games, self._seed = emulator, games, seed
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # a call into the emulator can block for ever: make it in another thread
        threading.Thread(target=_serve, args=(self._calls, self._answers), daemon=True).start()
        weakref.finalize(self, self._calls.put, None)
        self._episodes = [0] * games
        self._actions = [bytearray() for _ in range(games)]
        self._returns, self._lengths = [0.0] * games, [0] * games
        self.recent: deque[tuple[float, int]] = deque(maxlen=RECENT_EPISODES)
        self._sent = False
        self.frames = torch.empty(0)
        self._reset(range(games), [self._seed_of(game) for game in range(games)])

    def send(self, actions: Tensor) -> None:
        """Start an action in every game, without waiting."""
        for log, action in zip(self._actions, actions.tolist(), strict=True):
            log.append(action)
        self._send(actions)
        self._sent = True

    def receive(self) -> tuple[Tensor, Tensor]:
        """Wait for the actions; return their rewards and whether they ended episodes. Ended games restart."""
        frames, rewards, terminated, truncated, _ = self._receive()
        self._sent = False
        self.frames = torch.from_numpy(frames)
        ends = torch.from_numpy(terminated | truncated)
        for game, reward in enumerate(rewards.tolist()):
            self._returns[game] += reward
            self._lengths[game] += 1
        if ended := [game for game, end in enumerate(ends.tolist()) if end]:
            self._restart(ended)
        return torch.from_numpy(rewards).float(), ends

    def state(self) -> dict[str, Any]:
        """Return all that :meth:`restore` needs, whether or not an answer is pending."""
        return {
            "episodes": list(self._episodes),
            "actions": [torch.tensor(list(log), dtype=torch.uint8) for log in self._actions],
            "sent": self._sent,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "recent": [list(episode) for episode in self.recent],
            "frames": self.frames.clone(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Return freshly started games to a saved state, by replaying the actions.

        Raises:
            ValueError: if the state is of another number of games.
            DataError: if the replay ends elsewhere.
        """
        for name in ("episodes", "actions", "returns", "lengths"):
            if (count := len(state[name])) != self._games:
                raise ValueError(f"{count} {name} for {self._games} games")
        self._episodes = list(state["episodes"])
        logs = [log.tolist() for log in state["actions"]]
        last = [log.pop() for log in logs] if state["sent"] else []
        self._replay(logs)
        if not torch.equal(self.frames, state["frames"]):
            raise DataError(
                "the games do not replay to the saved frames: the checkpoint is of another version of ale-py. "
                "Install that version, or delete the checkpoint to start this run again"
            )
        self._actions = [bytearray(log) for log in logs]
        self._returns, self._lengths = list(state["returns"]), list(state["lengths"])
        self.recent.extend((total, length) for total, length in state["recent"])
        if last:
            self.send(torch.tensor(last))

    def _replay(self, logs: list[list[int]]) -> None:
        """Bring every game to the end of its log. Games with shorter logs start later, so that all end together."""
        self._reset(range(self._games), [self._seed_of(game) for game in range(self._games)])
        longest = max(map(len, logs))
        for step in range(longest + 1):
            for game in range(self._games):
                if step == longest - len(logs[game]):
                    self._reset([game], [self._seed_of(game)])
                    for _ in range(self._episodes[game] % EPISODES_PER_SEED):
                        self._reset([game], [-1])
            if step < longest:
                offsets = [step - longest + len(log) for log in logs]
                self._send(torch.tensor([log[at] if at >= 0 else 0 for log, at in zip(logs, offsets, strict=True)]))
                self.frames = torch.from_numpy(self._receive()[0])

    def _restart(self, games: Sequence[int]) -> None:
        """Record the episodes that ended, and start the next ones."""
        for game in games:
            self.recent.append((self._returns[game], self._lengths[game]))
            self._returns[game], self._lengths[game] = 0.0, 0
            self._episodes[game] += 1
            self._actions[game].clear()
        seeded = [self._episodes[game] % EPISODES_PER_SEED == 0 for game in games]
        self._reset(games, [self._seed_of(game) if new else -1 for game, new in zip(games, seeded, strict=True)])

    def _seed_of(self, game: int) -> int:
        """Return the seed of a game's current block of episodes; blocks never share one."""
        return (self._seed * 1_000_003 + self._episodes[game] // EPISODES_PER_SEED * self._games + game) % 2**31

    def _reset(self, games: Sequence[int], seeds: Sequence[int]) -> None:
        mask = torch.zeros(self._games, dtype=torch.bool)
        mask[list(games)] = True
        seed, options = torch.tensor(seeds).numpy(), {"reset_mask": mask.numpy()}
        self._calls.put(partial(self._emulator.reset, seed=seed, options=options))
        self.frames = torch.from_numpy(self._receive()[0])

    def _send(self, actions: Tensor) -> None:
        try:
            self._emulator.send(actions.numpy())
        except Exception as error:
            raise DataError(f"a game failed ({type(error).__name__}: {error}): {RESUME_HINT}") from error
        self._calls.put(self._emulator.recv)

    def _receive(self) -> Any:
        try:
            answer = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            try:  # after SIGSTOP and SIGCONT the timeout is over at once, but the game had no time either
                answer = self._answers.get(timeout=ANSWER_TIMEOUT_S / 4)
            except queue.Empty:
                raise DataError(f"a game has not answered for {ANSWER_TIMEOUT_S:g} s: {RESUME_HINT}") from None
        if isinstance(answer, Exception):
            raise DataError(f"a game failed ({type(answer).__name__}: {answer}): {RESUME_HINT}") from answer
        return answer


def _serve(calls: "queue.SimpleQueue[Callable[[], Any] | None]", answers: "queue.SimpleQueue[Any]") -> None:
    """Make the calls one after the other and queue their results, until None arrives."""
    while (call := calls.get()) is not None:
        try:
            answers.put(call())
        except Exception as error:
            answers.put(error)
        del call  # it holds the emulator, whose destructor in this thread would crash a process that exits


def pong(_: Folder) -> Game:
    """Load Pong, whose ROM comes with ale-py."""
    try:
        import PIL  # noqa: F401 - writes the film at the end, when its absence would be noticed too late
        from ale_py.vector_env import AtariVectorEnv
    except ImportError as error:
        raise DataError(f"Pong needs {error.name} ({error}): {how_to_install('lab')}") from error
    raw: dict[str, Any] = {"grayscale": False, "stack_num": 1, "img_height": 210, "img_width": 160}

    def emulator(games: int, colour: bool) -> Emulator:
        try:
            env: Emulator = AtariVectorEnv(
                "pong",
                games,
                repeat_action_probability=0.0,  # as in -v4
                max_num_frames_per_episode=MAX_EPISODE_FRAMES,
                frameskip=4,
                noop_max=30,
                use_fire_reset=True,
                reward_clipping=True,  # no effect: a point in Pong is +1 or -1
                **(raw if colour else {}),
            )
        except Exception as error:
            raise DataError(
                f"ale-py cannot start Pong ({type(error).__name__}: {error}): reinstall it by "
                "pip install --force-reinstall ale-py, or free processes and memory, and run again"
            ) from error
        return env

    return Game("pong", emulator)
