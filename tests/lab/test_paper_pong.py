"""The task that is a game: what PPO reckons, what becomes of episodes that end, and runs that are broken off."""

import itertools
import math
import queue
import random
import re
import signal
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from io import BytesIO, StringIO
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from nero_lab import baselines, cli
from nero_lab.data import DataError, arcade, load
from nero_lab.data.arcade import Arcade, Game
from nero_lab.loops import agent as looping
from nero_lab.loops import film, ppo
from nero_lab.loops.agent import Agent
from nero_lab.loops.captured import Captured
from nero_lab.loops.ppo import PPO, Batch
from nero_lab.models.actor_critic import ActorCritic
from nero_lab.progress import Display
from nero_lab.protocol import SettingError
from nero_lab.store import Store
from nero_lab.sweep import train
from nero_lab.tasks import TASKS

SIDE, ACTIONS = 36, 3
SMALL = PPO(games=2, steps=12, passes=2, minibatches=3, rounds=1)


class Echo:
    """Games that show an action, and reward whoever does it.

    They last 3 to 8 steps. As in the emulator, an episode follows from the seed and how many there were since.
    """

    def __init__(self, games, colour=False):
        self.seeds, self.colour = [random.Random() for _ in range(games)], colour
        self.random = list(self.seeds)
        self.left, self.shown = [0] * games, [0] * games
        self.began_by_themselves, self.lengths = 0, [[] for _ in range(games)]

    def begin(self, game):
        self.random[game] = random.Random(self.seeds[game].random())
        self.left[game] = self.random[game].randint(3, 8)
        self.lengths[game].append(self.left[game])
        self.shown[game] = self.random[game].randrange(ACTIONS)

    def frames(self):
        found = np.zeros((len(self.shown), 4, SIDE, SIDE), np.uint8)
        for frames, action in zip(found, self.shown, strict=True):
            frames[:, :, action * SIDE // ACTIONS :][:, :, : SIDE // ACTIONS] = 255
        return np.repeat(found[:, :1, :, :, None], 3, axis=4) if self.colour else found

    def reset(self, *, seed, options):
        for game, number in zip(np.flatnonzero(options["reset_mask"]), seed, strict=True):
            if number >= 0:
                self.seeds[game].seed(int(number))
            self.begin(game)
        return self.frames(), {}

    def send(self, actions):
        self.actions = actions.copy()

    def recv(self):
        rewards, over = np.zeros(len(self.left), np.int32), np.zeros(len(self.left), bool)
        for game, action in enumerate(self.actions):
            if not self.left[game]:
                self.began_by_themselves += 1
                self.begin(game)
                continue
            rewards[game] = action == self.shown[game]
            self.left[game] -= 1
            over[game] = not self.left[game]
            self.shown[game] = self.random[game].randrange(ACTIONS)
        return self.frames(), rewards, over, np.zeros_like(over), {}


def shown_in(frames):
    """The action that a game shows, by which of the frame's stripes is bright."""
    return frames[..., 0, 0, :].int().argmax(-1) * ACTIONS // SIDE


ECHO = Game("pong", Echo)
TINY = replace(
    TASKS["pong"],
    model=partial(ActorCritic, ACTIONS, width=1 / 16, side=SIDE),
    loop=partial(Agent, ppo=SMALL),
)


class Watch:
    """Who looks on and says nothing."""

    def __getattr__(self, _):
        return lambda *_: None


def played(task, settings, data, state=None, until=math.inf):
    training = task.loop(task, settings, data, state)
    while not training.finished and training.steps_done < until:
        training.advance()
    return training


def kept(state):
    """What a checkpoint gives back."""
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one, other):
    return one.curve == other.curve and all(
        torch.equal(value, other.model.state_dict()[name]) for name, value in one.model.state_dict().items()
    )


def test_advantages_are_the_sums_of_discounted_surprises():
    torch.manual_seed(0)
    rewards, ends = torch.randn(20, 3, dtype=torch.float64), (torch.rand(20, 3) < 0.2).double()
    values = torch.randn(21, 3, dtype=torch.float64)
    found = ppo.advantages(PPO(discount=0.9, trace=0.8), rewards, ends, values)
    for game in range(3):
        for step in range(20):
            total, weight = 0.0, 1.0
            for later in range(step, 20):
                over = ends[later, game].item() == 1
                after = 0.0 if over else 0.9 * values[later + 1, game].item()
                total += weight * (rewards[later, game].item() + after - values[later, game].item())
                if over:
                    break
                weight *= 0.9 * 0.8
            assert found[step, game].item() == pytest.approx(total, rel=1e-12)


def test_the_objective_is_the_one_of_the_book():
    torch.manual_seed(0)
    logits, values = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    actions = torch.randint(4, (30,))
    old = torch.log_softmax(logits, 1).gather(1, actions[:, None])[:, 0] + 0.2 * torch.randn(30, dtype=torch.float64)
    before, returns, gained = (torch.randn(30, dtype=torch.float64) for _ in range(3))
    batch = Batch(actions, old, before, returns, gained)
    rules = PPO(clip=0.1, entropy=0.03, value=0.7)
    total, parts = ppo.objective(rules, logits, values, batch)
    policy = value = entropy = 0.0
    for step in range(30):
        odds = [math.exp(each) for each in logits[step].tolist()]
        chances = [each / sum(odds) for each in odds]
        ratio = chances[actions[step]] / math.exp(old[step].item())
        worth = gained[step].item()
        policy -= min(worth * ratio, worth * min(max(ratio, 0.9), 1.1)) / 30
        was, now, wanted = before[step].item(), values[step].item(), returns[step].item()
        near = was + min(max(now - was, -0.1), 0.1)
        value += max((now - wanted) ** 2, (near - wanted) ** 2) / 2 / 30
        entropy -= sum(chance * math.log(chance) for chance in chances) / 30
    assert parts.tolist() == pytest.approx([policy, value, entropy], rel=1e-9)
    assert total.item() == pytest.approx(policy + 0.7 * value - 0.03 * entropy, rel=1e-9)


def test_the_network_starts_orthogonal_and_sees_shares_of_white():
    torch.manual_seed(0)
    model = ActorCritic()
    assert [tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 4] == [
        (32, 4, 8, 8),
        (64, 32, 4, 4),
        (32, 64, 3, 3),
    ]
    assert sum(parameter.numel() for parameter in model.parameters()) == 866_439
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
            continue
        rows = parameter.detach().flatten(1)
        gain = {"actor.weight": 0.01, "critic.weight": 1.0}.get(name, math.sqrt(2))
        torch.testing.assert_close(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-5, rtol=0)
    frames = torch.randint(256, (5, 4, 84, 84), dtype=torch.uint8)
    logits, values = model(frames)
    hidden = model.body(frames.float() / 255)
    assert logits.shape == (5, 6)
    torch.testing.assert_close(logits, model.actor(hidden))
    torch.testing.assert_close(values, model.critic(hidden)[:, 0])


def test_an_episode_that_ends_is_noted_and_another_begins():
    emulator = Echo(3)
    games = Arcade(emulator, 3, seed=1)
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
                assert emulator.left[game] == emulator.lengths[game][-1]  # it stands at a start
    assert list(games.recent) == found
    assert len(found) > 12
    assert not emulator.began_by_themselves


def test_outcomes_lie_beside_what_led_to_them():
    """Of each step the reward and the end, before and after an episode's."""
    training = played(TINY, TINY.settings("nero"), ECHO, until=SMALL.steps + 1)
    shown = shown_in(training._round["frames"])
    rewards, ends = training._round["outcomes"][1:].unbind(1)
    assert torch.equal(rewards, (training._round["actions"] == shown).float())
    twin = Echo(SMALL.games)
    games = Arcade(twin, SMALL.games, seed=0)
    for step in range(SMALL.steps):
        assert torch.equal(shown_in(games.frames), shown[step])
        games.send(training._round["actions"][step])
        assert torch.equal(games.receive()[1], ends[step] == 1)
    assert ends.sum() >= 2
    with torch.no_grad():
        reckoned = ppo.advantages(SMALL, rewards, ends, training._round["values"])
    torch.testing.assert_close(training._round["advantages"], ppo.normalised(reckoned))
    torch.testing.assert_close(training._round["returns"], reckoned + training._round["values"][:-1])


def test_every_step_is_learned_from_once_a_pass():
    training = played(TINY, TINY.settings("nero"), ECHO, until=1)
    for order in training._order.view(SMALL.passes, -1):
        assert sorted(order.tolist()) == list(range(SMALL.gathered))
    assert not torch.equal(training._order[0], training._order[SMALL.minibatches])


def test_advantages_are_normalised_within_a_round():
    training = played(TINY, TINY.settings("nero"), ECHO, until=SMALL.steps + 1)
    found = training._round["advantages"]
    assert found.mean().item() == pytest.approx(0, abs=1e-6)
    assert found.std().item() == pytest.approx(1, abs=1e-3)


def test_the_rate_falls_to_zero():
    task = TASKS["pong"]
    rates = [task.schedule(step * 144, 80 * 144) for step in range(task.epochs * 80)]
    assert rates[0] == 1
    assert rates[-1] == pytest.approx(1 / len(rates))
    assert np.diff(rates) == pytest.approx(-1 / len(rates))
    training = played(TINY, TINY.settings("adam", lr=0.5), ECHO, until=19)
    assert training.lr.item() == pytest.approx(0.5 * (1 - 1 / task.epochs))  # in the second round, and epoch


@pytest.mark.parametrize("contender", TINY.contenders)
def test_every_contender_learns(contender, tmp_path):
    settings = TINY.settings(contender, epochs=1)
    training = TINY.loop(TINY, settings, ECHO, None)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    while not training.finished:
        training.advance()
    assert any(not torch.equal(value, before[name]) for name, value in training.model.state_dict().items())
    record = Store(tmp_path).finish(training)
    assert set(record["curve"]) == {"reward", "episode_length", "policy_loss", "value_loss", "entropy"}
    assert record["environment_steps"] == SMALL.rounds * SMALL.gathered
    assert 3 <= record["curve"]["episode_length"][0] <= 8
    assert 0 < record["curve"]["entropy"][0] <= math.log(ACTIONS)


def test_the_gradient_is_shortened(monkeypatch):
    task = replace(TINY, loop=partial(Agent, ppo=replace(SMALL, longest_gradient=1e-3, value=1e3)))
    training = task.loop(task, task.settings("sgd", lr=1.0), ECHO, None)
    lengths = []
    step = training.optimiser.step

    def look():
        gradients = [parameter.grad.flatten() for parameter in training.model.parameters()]
        lengths.append(torch.cat(gradients).norm().item())
        step()

    monkeypatch.setattr(training.optimiser, "step", look)
    for _ in range(SMALL.steps + 2):
        training.advance()
    assert lengths == pytest.approx([1e-3, 1e-3], rel=1e-3)


@pytest.mark.parametrize("contender", ["nero", "adam"])
def test_wherever_a_run_is_broken_off_it_goes_on_as_if_it_were_not(contender, monkeypatch):
    """In the middle of play, before the first update, between two, and between rounds."""
    monkeypatch.setattr(arcade, "SEEDED", 2)
    settings = TINY.settings(contender, epochs=2)
    whole = played(TINY, settings, ECHO)
    for cut in (1, 7, 12, 13, 18, 25):
        broken = played(TINY, settings, ECHO, until=cut)
        state = kept(broken.state())
        resumed = played(TINY, settings, ECHO, state)
        assert same(resumed, whole), cut
        assert resumed.resumed == 1
        assert resumed.arcade.state()["episodes"] == whole.arcade.state()["episodes"]
        assert list(resumed.arcade.recent) == list(whole.arcade.recent)


def test_a_run_that_is_looked_at_is_not_disturbed():
    settings = TINY.settings("nero", epochs=1)
    whole, seen = played(TINY, settings, ECHO), TINY.loop(TINY, settings, ECHO, None)
    while not seen.finished:
        seen.advance()
        seen.state()
        seen.so_far()
    assert same(seen, whole)


def test_interrupted_runs_side_by_side_end_as_alone(tmp_path):
    runs = [TINY.settings("nero", seed=seed, epochs=2) for seed in (0, 1)]
    alone = train(TINY, runs, ECHO, Store(tmp_path / "alone"), Watch())
    watch, store = Watch(), Store(tmp_path / "beside")
    watch.stepped = lambda training: training.steps_done == 9 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, runs, ECHO, store, watch, side_by_side=2)
    beside = train(TINY, runs, ECHO, store, Watch(), side_by_side=2)
    for one, other in zip(alone, beside, strict=True):
        assert one["curve"] == other["curve"]
        assert one["shown_return"] == other["shown_return"]
        assert other["resumed"] == 1


def test_a_run_that_goes_on_amid_its_updates_has_no_pace_yet(tmp_path, monkeypatch):
    monkeypatch.setattr("nero_lab.progress.LOG_EVERY_S", 0.0)
    monkeypatch.setattr("nero_lab.progress.REFRESH_EVERY_S", 0.0)
    settings, told = TINY.settings("nero", epochs=1), StringIO()
    training = TINY.loop(TINY, settings, ECHO, None)
    while training.played < training.ppo.gathered:
        training.advance()
    training.arcade.recent.clear()  # as in a long game
    training = TINY.loop(TINY, settings, ECHO, training.state())
    with Display(Console(file=told, width=200), tmp_path, training.device) as shown:
        shown.begun(training)
        training.advance()
        shown.stepped(training)
    line = told.getvalue().splitlines()[-1]
    assert re.fullmatch(r"nero-lr0.01-seed0-epochs1: epoch 0, \d+%, \d+ s, \d+ s left", line), line


class Breaking(Echo):
    """Games of which one breaks off at a step, or sleeps for ever."""

    at, asleep, now = 15, False, 0

    def recv(self):
        self.now += 1
        if self.now == self.at:
            if self.asleep:
                threading.Event().wait()
            raise RuntimeError("the cartridge melted")
        return super().recv()


@pytest.mark.parametrize(("asleep", "told"), [(False, "the cartridge melted"), (True, "has not answered for 0.3 s")])
def test_games_that_break_off_are_told_of_and_the_run_goes_on_later(asleep, told, tmp_path, monkeypatch):
    monkeypatch.setattr(arcade, "PATIENCE", 0.3)
    monkeypatch.setattr(Breaking, "asleep", asleep)
    settings, store = TINY.settings("nero", epochs=2), Store(tmp_path)
    watch = Watch()
    watch.stepped = lambda training: training.steps_done == 15 and store.save(training)
    with pytest.raises(DataError, match=f"{told}.*run the same command again"):
        train(TINY, [settings], Game("pong", Breaking), store, watch)
    (record,) = train(TINY, [settings], ECHO, store, Watch())
    assert record["resumed"] == 1
    (whole,) = train(TINY, [settings], ECHO, Store(tmp_path / "whole"), Watch())
    assert record["curve"] == whole["curve"]


def test_actions_that_are_refused_are_told_of():
    games = Arcade(Echo(2), 2, seed=0)
    games._emulator.send = lambda _: 1 / 0
    with pytest.raises(DataError, match=r"ZeroDivisionError.*goes on from the last checkpoint"):
        games.send(torch.tensor([0, 0]))


def test_games_that_do_not_come_to_where_they_were_are_refused():
    state = played(TINY, TINY.settings("nero"), ECHO, until=5).state()
    state["arcade"]["frames"] += 1
    with pytest.raises(DataError, match=r"another version of ale-py.*delete the checkpoint"):
        TINY.loop(TINY, TINY.settings("nero"), ECHO, state)


@pytest.mark.parametrize("missing", ["ale_py", "gymnasium"])
def test_what_is_not_installed_is_named(missing, monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, _):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setitem(sys.modules, "ale_py.vector_env", Broken("ale_py.vector_env"))
    with pytest.raises(DataError, match=f"Pong needs {missing} .*: pip install 'nero-optim\\[paper\\]'"):
        load("pong")


def test_steps_that_cannot_be_shared_out_are_refused():
    with pytest.raises(SettingError, match="1000 steps cannot be parted into 3 minibatches"):
        PPO(games=8, steps=125, minibatches=3)


def test_adam_is_made_with_the_tasks_epsilon():
    task = TASKS["pong"]
    options = task.contenders["adam"].options
    made = baselines.make("adam", torch.nn.Linear(2, 2), 0.1, **options)
    assert made.param_groups[0]["eps"] == 1e-5
    assert baselines.make("adam", torch.nn.Linear(2, 2), 0.1).param_groups[0]["eps"] == 1e-8
    with pytest.raises(ValueError, match="eps must be finite and positive"):
        baselines.make("adam", torch.nn.Linear(2, 2), 0.1, eps=0.0)


def test_a_score_is_of_as_many_episodes_of_every_game():
    """Who does what is shown gets a reward a step, so the score is the mean length of the first episodes."""
    games = []

    def emulator(count, colour):
        games.append(Echo(count, colour))
        return games[-1]

    game = Game("pong", emulator)
    found = game.score(shown_in, seed=7, games=3, episodes=4, longest=100)
    assert found == [length for each in games[0].lengths for length in each[:4]]
    assert any(len(each) > 5 for each in games[0].lengths)  # the one that is begun not counted: some are quicker
    short = game.score(shown_in, seed=7, games=3, episodes=4, longest=10)
    ends = [list(itertools.accumulate(each)) for each in games[1].lengths]
    assert short == [
        length
        for each, end in zip(games[1].lengths, ends, strict=True)
        for length, at in zip(each, end, strict=True)
        if at <= 10
    ]
    wrong = game.score(lambda frames: (shown_in(frames) + 1) % ACTIONS, seed=7, games=3, episodes=4, longest=100)
    assert wrong == [0.0] * 12


def test_an_agent_is_scored_without_chance(tmp_path):
    """One that sees which action is right, and does it hardly more often than others, is scored by that one alone."""
    training = played(TINY, TINY.settings("sgd", epochs=1), ECHO)
    training.model.forward = lambda frames: (0.01 * torch.eye(ACTIONS)[shown_in(frames)], None)
    record = Store(tmp_path).finish(training)
    assert record["greedy_episodes"] == SMALL.games * looping.EPISODES
    assert 3 <= record["greedy_return"] <= 8  # as long as episodes are
    assert record["shown_return"] < record["shown_length"]


def test_what_an_agent_plays_in_the_end_is_told_first(monkeypatch):
    """On a CPU that takes minutes, in which no step is made."""
    training, told = Agent(TINY, TINY.settings("adam"), ECHO, ppo=SMALL), []
    training.tell = told.append
    monkeypatch.setattr(Game, "score", lambda *_: told.append("played") or [1.0])
    training.verdict()
    assert told == ["plays 9 episodes, to end with", "played"]


def test_a_film_is_not_too_large(monkeypatch):
    pictures = [torch.randint(256, (40, 30, 3), dtype=torch.uint8) for _ in range(40)]
    with Image.open(BytesIO(film.gif(pictures))) as whole:
        assert (whole.n_frames, whole.size, whole.info["duration"]) == (40, (30, 40), 70)
    monkeypatch.setattr(film, "LARGEST", 30_000)
    content = film.gif(pictures)
    assert len(content) <= 30_000
    with Image.open(BytesIO(content)) as cut:
        assert 1 < cut.n_frames < 40


@pytest.fixture(scope="module")
def pong():
    return load("pong")


SHORT = replace(
    TASKS["pong"],
    model=partial(ActorCritic, width=1 / 16),
    loop=partial(Agent, ppo=PPO(games=2, steps=30, passes=1, minibatches=2, rounds=2)),
)


def test_pong_is_as_the_paper_played_it(pong):
    made = pong.emulator(2, False)
    assert [str(action) for action in made.ale.get_action_set()] == [
        f"Action.{name}" for name in ("NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE")
    ]
    seeds, everyone = np.array([0, 1]), {"reset_mask": np.array([True, True])}
    frames, info = made.reset(seed=seeds, options=everyone)
    assert (frames.shape, frames.dtype) == ((2, 4, 84, 84), np.uint8)
    assert not frames[:, :3].any()  # nothing was seen before
    assert frames[:, 3].any()
    started = info["episode_frame_number"]
    made.send(np.array([2, 3]))
    after, rewards, over, cut, info = made.recv()
    assert np.array_equal(after[:, 2], frames[:, 3])
    assert (info["episode_frame_number"] - started).tolist() == [4, 4]
    assert not np.stack([rewards, over, cut]).any()


def shrunk(grey):
    """A screen in 84 pixels of side, each the mean of what it covers."""

    def covering(pixels):
        ends = itertools.pairwise(np.arange(85) * pixels / 84)
        return np.array([np.diff(np.clip(np.arange(pixels + 1), *pair)) for pair in ends]) * 84 / pixels

    return covering(210) @ grey @ covering(160).T


def test_the_games_are_those_of_the_bare_emulator(pong):
    """An action is held for four frames, and the brighter pixels of the last two are seen, of the last four steps."""
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
    shown = [np.zeros((84, 84))] * 3 + [shrunk(console.getScreenGrayscale())]
    choose, points = random.Random(0), 0
    for _ in range(200):
        np.testing.assert_allclose(seen[0], shown, atol=0.51)  # which are rounded there
        action = choose.randrange(6)
        made.send(np.array([action]))
        seen, rewards, over, *_ = made.recv()
        frames = [(console.act(buttons[action]), console.getScreenGrayscale()) for _ in range(4)]
        shown = [*shown[1:], shrunk(np.maximum(frames[2][1], frames[3][1]))]
        assert rewards[0] == sum(reward for reward, _ in frames)
        points += abs(rewards[0])
        assert not over[0]
    assert points > 2


def test_pong_can_be_left_and_taken_up_again(pong):
    """Beyond the end of an episode, and with an answer to come."""
    generator = torch.Generator().manual_seed(0)
    games = pong.play(2, seed=3)
    while not games.recent or games.state()["lengths"][0] % 2:
        games.send(torch.randint(6, (2,), generator=generator))
        games.receive()
    assert max(games.state()["episodes"]) == 1
    assert games.recent[0][0] <= -10  # at random, one loses
    last = torch.randint(6, (2,), generator=generator)
    games.send(last)
    again = pong.play(2, seed=3)
    again.go_on_from(kept(games.state()))
    for _ in range(30):
        one, other = games.receive(), again.receive()
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
        assert torch.equal(games.frames, again.frames)
        actions = torch.randint(6, (2,), generator=generator)
        games.send(actions)
        again.send(actions)


def test_nero_runs_pong_and_goes_on(pong, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "pong", SHORT)
    monkeypatch.setattr(looping, "LONGEST", 40)
    monkeypatch.setattr("nero_lab.progress.LOG_EVERY_S", 0.0)
    monkeypatch.setattr("nero_lab.progress.REFRESH_EVERY_S", 0.0)
    told = StringIO()
    monkeypatch.setattr(cli, "console", Console(file=told, width=200, markup=False, highlight=False))
    arguments = f"nero run pong --epochs 2 --device cpu --out {tmp_path / 'whole'}"
    monkeypatch.setattr(sys, "argv", arguments.split())
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code, end.value.code
    assert "steps a second" in told.getvalue()
    settings = SHORT.settings("nero", epochs=2)
    whole = Store(tmp_path / "whole").record(SHORT, settings)
    assert whole["environment_steps"] == 240
    assert whole["steps_per_second"] > 0
    assert whole["shown_length"] == 40
    assert (whole["greedy_return"], whole["greedy_episodes"]) == (None, 0)  # no episode is over so soon
    with Image.open(tmp_path / "whole/pong/nero-lr0.01-seed0-epochs2.gif") as shown:
        assert shown.size == (160, 210)
        assert shown.n_frames > 5
    store = Store(tmp_path / "broken")
    store.save(played(SHORT, settings, pong, until=80))
    resumed = played(SHORT, settings, pong, store.begin(SHORT, settings, pong.device))
    assert store.finish(resumed)["curve"] == whole["curve"]


def test_a_game_needs_no_folder_of_data(tmp_path, monkeypatch):
    assert load("pong", tmp_path / "nowhere").name == "pong"
    monkeypatch.setenv("NERO_DATA", str(tmp_path / "nowhere"))
    assert load("pong").name == "pong"


def test_an_emulator_that_cannot_start_is_told_in_a_line(monkeypatch):
    import ale_py.vector_env

    def refused(*_, **__):
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(ale_py.vector_env, "AtariVectorEnv", refused)
    game = load("pong")
    with pytest.raises(DataError, match=r"cannot start Pong \(RuntimeError: Resource temporarily .*: install it anew"):
        game.play(2, seed=0)


def test_whoever_waits_for_orders_holds_no_game():
    """An emulator that is let go must end in the thread that lets it go, since others may end before it does."""
    orders, answers = queue.SimpleQueue(), queue.SimpleQueue()
    threading.Thread(target=arcade._serve, args=(orders, answers), daemon=True).start()
    games = Echo(1)
    kept = weakref.ref(games)
    for order in (games.frames, partial(games.reset, seed=None, options={})):  # the second fails
        orders.put(order)
        answers.get()
    del games, order
    for _ in range(200):
        if kept() is None:
            break
        time.sleep(0.01)
    assert kept() is None
    orders.put(None)


def test_whoever_was_stopped_waits_a_little_longer(monkeypatch):
    """A process that the user stopped finds its time up when it goes on, and the game has had none either."""
    asked = []

    class Late(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            asked.append(timeout)
            if timeout is not None and len(asked) == 1:
                raise queue.Empty
            return super().get(block, timeout)

    games = ECHO.play(2, seed=0)
    monkeypatch.setattr(games, "_answers", Late())
    games._answers.put("answer")
    assert games._answer() == "answer"
    assert asked == [arcade.PATIENCE, arcade.PATIENCE / 4]


@pytest.mark.gpu
@pytest.mark.parametrize("contender", TINY.contenders)
def test_captured_rounds_are_the_rounds(contender, monkeypatch):
    flags = partial(torch.backends.cudnn.flags, deterministic=True)
    monkeypatch.setattr(torch.backends.cudnn, "flags", lambda **asked: flags(**{**asked, "benchmark": False}))
    settings, data = TINY.settings(contender, epochs=1), ECHO.to("cuda")
    captured = played(TINY, settings, data)
    assert all(len(work.graphs) == 1 for work in (captured._choose, captured._note, captured._judge, captured._learn))
    monkeypatch.setattr(Captured, "__call__", lambda self: self.function())
    plain = played(TINY, settings, data)
    for name, values in plain.curve.items():
        assert captured.curve[name] == pytest.approx(values, rel=1e-3, abs=1e-3)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("contender", ["nero", "adam"])
def test_on_a_gpu_games_go_on_and_share_it(contender, tmp_path):
    data = ECHO.to("cuda")
    runs = [TINY.settings(contender, seed=seed, epochs=1) for seed in (0, 1)]
    alone = train(TINY, runs, data, Store(tmp_path / "alone"), Watch())
    watch, store = Watch(), Store(tmp_path / "beside")
    watch.stepped = lambda training: training.steps_done == 9 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(TINY, runs, data, store, watch, side_by_side=2)
    beside = train(TINY, runs, data, store, Watch(), side_by_side=2)
    for one, other in zip(alone, beside, strict=True):
        assert one["curve"]["value_loss"] == pytest.approx(other["curve"]["value_loss"], rel=1e-2)
