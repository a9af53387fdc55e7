"""Games: sessions, scores, and Pong against the bare emulator."""

import itertools
import queue
import random
import sys
import threading
import time
import weakref
from functools import cache, partial
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from lab.loop_cases import ACTIONS, ECHO, Echo, saved_and_loaded, shown_in

from nero_lab.data import DataError, arcade, load
from nero_lab.data.arcade import Game, GameSession


def test_session_records_ended_episodes_and_restarts():
    emulator = Echo(3)
    games = GameSession(emulator, 3, seed=1)
    totals, found = [0.0] * 3, []
    for step in range(40):
        shown = shown_in(games.frames)
        left = list(emulator.left)
        games.send((shown + (step % 2)) % ACTIONS)  # right in every other step
        rewards, ends = games.receive()
        assert rewards.tolist() == [1.0 - step % 2] * 3
        assert ends.tolist() == [each == 1 for each in left]
        for game in range(3):
            totals[game] += rewards[game].item()
            if ends[game]:
                found.append((totals[game], emulator.lengths[game][-2]))
                totals[game] = 0.0
                assert emulator.left[game] == emulator.lengths[game][-1]  # at its start
    assert list(games.recent) == found
    assert len(found) > 12
    assert not emulator.self_restarts


def test_session_failing_send_raises():
    games = GameSession(Echo(2), 2, seed=0)
    games._emulator.send = lambda _: 1 / 0
    with pytest.raises(DataError, match=r"ZeroDivisionError.*resume from the last checkpoint"):
        games.send(torch.tensor([0, 0]))


@pytest.mark.parametrize("missing", ["ale_py", "gymnasium"])
def test_pong_missing_package_is_named(missing, monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, _):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setitem(sys.modules, "ale_py.vector_env", Broken("ale_py.vector_env"))
    with pytest.raises(DataError, match=f"Pong needs {missing} .*: pip install '\\.\\[lab\\]'"):
        load("pong")


def test_score_counts_equal_episodes_per_game():
    """The right action earns one per step, so a return is the length of its episode."""
    games = []

    def emulator(count, colour):
        games.append(Echo(count, colour))
        return games[-1]

    game = Game("pong", emulator)
    found = game.score(shown_in, seed=7, games=3, episodes=4, max_steps=100)
    assert found == [length for each in games[0].lengths for length in each[:4]]
    assert any(len(each) > 5 for each in games[0].lengths)  # the last is unfinished; some games are faster
    short = game.score(shown_in, seed=7, games=3, episodes=4, max_steps=10)
    ends = [list(itertools.accumulate(each)) for each in games[1].lengths]
    assert short == [
        length
        for each, end in zip(games[1].lengths, ends, strict=True)
        for length, at in zip(each, end, strict=True)
        if at <= 10
    ]
    wrong = game.score(lambda frames: (shown_in(frames) + 1) % ACTIONS, seed=7, games=3, episodes=4, max_steps=100)
    assert wrong == [0.0] * 12


@pytest.fixture(scope="module")
def pong():
    return load("pong")


def test_pong_matches_the_paper(pong):
    made = pong.emulator(2, False)
    assert [str(action) for action in made.ale.get_action_set()] == [
        f"Action.{name}" for name in ("NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE")
    ]
    seeds, everyone = np.array([0, 1]), {"reset_mask": np.array([True, True])}
    frames, info = made.reset(seed=seeds, options=everyone)
    assert (frames.shape, frames.dtype) == ((2, 4, 84, 84), np.uint8)
    assert not frames[:, :3].any()  # no earlier frames
    assert frames[:, 3].any()
    started = info["episode_frame_number"]
    made.send(np.array([2, 3]))
    after, rewards, over, cut, info = made.recv()
    assert np.array_equal(after[:, 2], frames[:, 3])
    assert (info["episode_frame_number"] - started).tolist() == [4, 4]
    assert not np.stack([rewards, over, cut]).any()


@cache
def area_weights(pixels):
    """Return the matrix that averages a row of pixels into 84."""
    ends = itertools.pairwise(np.arange(85) * pixels / 84)
    return np.array([np.diff(np.clip(np.arange(pixels + 1), *pair)) for pair in ends]) * 84 / pixels


def shrink(grey):
    """Resize a screen to 84 x 84 by averaging areas."""
    return area_weights(210) @ grey @ area_weights(160).T


def test_pong_matches_bare_emulator(pong):
    """An action is held for four frames; an observation is the maximum of the last two, for the last four steps."""
    ale_py = pytest.importorskip("ale_py")
    console = ale_py.ALEInterface()
    console.setFloat("repeat_action_probability", 0.0)
    console.loadROM(ale_py.roms.get_rom_path("pong"))
    nothing, fire, *_ = buttons = console.getMinimalActionSet()
    made = pong.emulator(1, False)
    seen, info = made.reset(seed=np.array([5]), options={"reset_mask": np.array([True])})
    console.reset_game()
    console.act(fire)
    for _ in range(int(info["episode_frame_number"][0]) - 1):
        console.act(nothing)
    shown = [np.zeros((84, 84))] * 3 + [shrink(console.getScreenGrayscale())]
    choose, points = random.Random(0), 0
    for _ in range(200):
        np.testing.assert_allclose(seen[0], shown, atol=0.51)  # it rounds to bytes
        action = choose.randrange(6)
        made.send(np.array([action]))
        seen, rewards, over, *_ = made.recv()
        frames = [(console.act(buttons[action]), console.getScreenGrayscale()) for _ in range(4)]
        shown = [*shown[1:], shrink(np.maximum(frames[2][1], frames[3][1]))]
        assert rewards[0] == sum(reward for reward, _ in frames)
        points += abs(rewards[0])
        assert not over[0]
    assert points > 2


def test_pong_session_restored_equals_undisturbed(pong, monkeypatch):
    """Saves after the end of an episode, with an answer pending."""
    monkeypatch.setattr(arcade, "MAX_EPISODE_FRAMES", 400)
    generator = torch.Generator().manual_seed(0)
    games = pong.start(2, seed=3)
    while not games.recent or games.state()["lengths"][0] % 2:
        games.send(torch.randint(6, (2,), generator=generator))
        games.receive()
    assert max(games.state()["episodes"]) == 1
    assert games.recent[0][0] < 0  # a random player loses
    assert games.recent[0][1] <= 100  # steps of four frames
    last = torch.randint(6, (2,), generator=generator)
    games.send(last)
    again = pong.start(2, seed=3)
    again.restore(saved_and_loaded(games.state()))
    for _ in range(30):
        one, other = games.receive(), again.receive()
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
        assert torch.equal(games.frames, again.frames)
        actions = torch.randint(6, (2,), generator=generator)
        games.send(actions)
        again.send(actions)


def test_pong_needs_no_data_folder(tmp_path, monkeypatch):
    assert load("pong", tmp_path / "nowhere").name == "pong"
    monkeypatch.setenv("NERO_DATA", str(tmp_path / "nowhere"))
    assert load("pong").name == "pong"


def test_pong_emulator_that_cannot_start_is_explained(monkeypatch):
    import ale_py.vector_env

    def refused(*_, **__):
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(ale_py.vector_env, "AtariVectorEnv", refused)
    game = load("pong")
    with pytest.raises(DataError, match=r"cannot start Pong \(RuntimeError: Resource temporarily .*: reinstall it"):
        game.start(2, seed=0)


def test_serving_thread_holds_no_emulator():
    """The last reference must be the caller's: a destructor in a daemon thread crashes at exit."""
    calls, answers = queue.SimpleQueue(), queue.SimpleQueue()
    threading.Thread(target=arcade._serve, args=(calls, answers), daemon=True).start()
    games = Echo(1)
    alive = weakref.ref(games)
    for call in (games.frames, partial(games.reset, seed=None, options={})):  # the second fails
        calls.put(call)
        answers.get()
    del games, call
    for _ in range(200):
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None
    calls.put(None)


def test_session_after_a_pause_waits_longer(monkeypatch):
    """After SIGSTOP and SIGCONT the timeout is over, but the game had no time either."""
    asked = []

    class Late(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            asked.append(timeout)
            if timeout is not None and len(asked) == 1:
                raise queue.Empty
            return super().get(block, timeout)

    games = ECHO.start(2, seed=0)
    monkeypatch.setattr(games, "_answers", Late())
    games._answers.put("answer")
    assert games._receive() == "answer"
    assert asked == [arcade.ANSWER_TIMEOUT_S, arcade.ANSWER_TIMEOUT_S / 4]
