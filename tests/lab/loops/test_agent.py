"""The agent's loop: transitions, PPO, learning, resuming, final episodes, and their GIFs."""

import math
import re
import signal
import threading
from dataclasses import replace
from functools import partial
from io import BytesIO, StringIO

import numpy as np
import pytest
import torch

pytest.importorskip("typer")

from lab.helpers import run_command
from lab.loop_cases import ACTIONS, ECHO, SMALL_PPO, TINY_GAME, Echo, Watch, play, saved_and_loaded, shown_in
from PIL import Image
from rich.console import Console

from nero_lab import baselines
from nero_lab.data import DataError, arcade, load
from nero_lab.data.arcade import Game, GameSession
from nero_lab.loops import agent, ppo
from nero_lab.loops.agent import Agent
from nero_lab.loops.cuda_graph import CapturedStep
from nero_lab.loops.ppo import PPO, Batch
from nero_lab.models.actor_critic import ActorCritic
from nero_lab.progress import Display
from nero_lab.store import Store
from nero_lab.sweep import train
from nero_lab.tasks import TASKS


def same(one, other):
    return one.curve == other.curve and all(
        torch.equal(value, other.model.state_dict()[name]) for name, value in one.model.state_dict().items()
    )


def test_outcomes_align_with_their_actions():
    training = play(TINY_GAME, TINY_GAME.settings("nero"), ECHO, until=SMALL_PPO.steps + 1)
    shown = shown_in(training._round["frames"])
    rewards, ends = training._round["outcomes"][1:].unbind(1)
    assert torch.equal(rewards, (training._round["actions"] == shown).float())
    games = GameSession(Echo(SMALL_PPO.games), SMALL_PPO.games, seed=0)
    for step in range(SMALL_PPO.steps):
        assert torch.equal(shown_in(games.frames), shown[step])
        games.send(training._round["actions"][step])
        assert torch.equal(games.receive()[1], ends[step] == 1)
    assert ends.sum() >= 2
    with torch.no_grad():
        estimates = ppo.advantages(SMALL_PPO, rewards, ends, training._round["values"])
    torch.testing.assert_close(training._round["advantages"], ppo.normalise(estimates))
    torch.testing.assert_close(training._round["returns"], estimates + training._round["values"][:-1])


def test_minibatches_hold_every_step_once_per_pass():
    training = play(TINY_GAME, TINY_GAME.settings("nero"), ECHO, until=1)
    for order in training._order.view(SMALL_PPO.passes, -1):
        assert sorted(order.tolist()) == list(range(SMALL_PPO.round_steps))
    assert not torch.equal(training._order[0], training._order[SMALL_PPO.minibatches])


def test_advantages_are_normalised_per_round():
    training = play(TINY_GAME, TINY_GAME.settings("nero"), ECHO, until=SMALL_PPO.steps + 1)
    values = training._round["advantages"]
    assert values.mean().item() == pytest.approx(0, abs=1e-6)
    assert values.std().item() == pytest.approx(1, abs=1e-3)


def test_advantages_are_normalised_per_minibatch_if_asked(monkeypatch):
    task = replace(TINY_GAME, contenders=TASKS["pong-variants"].contenders)
    batches = []
    monkeypatch.setattr(agent, "objective", lambda *given: batches.append(given[-1]) or ppo.objective(*given))
    training = play(task, task.settings("minibatch-advantages"), ECHO, until=SMALL_PPO.steps + SMALL_PPO.minibatches)
    assert training._round["advantages"].std().item() != pytest.approx(1, abs=0.05)
    assert len(batches) == SMALL_PPO.minibatches
    for batch in batches:
        assert batch.advantages.mean().item() == pytest.approx(0, abs=1e-6)
        assert batch.advantages.std().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("contender", "ppo_changes", "nero_changes"),
    [
        ("minibatch-advantages", {"normalises_rounds": False}, {}),
        ("unclipped-value", {"is_value_clipped": False}, {}),
        ("value-not-halved", {"value": 1.0}, {}),
        ("unclipped-gradient", {"max_grad_norm": 1e9}, {}),
        ("no-entropy", {"entropy": 0.0}, {}),
        ("bounded", {}, {"longest_step": 3.0}),
        ("free", {}, {"fix_mean": False, "fix_norm": False}),
    ],
)
def test_pong_variant_changes_ppo_or_nero(contender, ppo_changes, nero_changes):
    task = replace(TASKS["pong-variants"], model=TINY_GAME.model)
    training = task.loop(task, task.settings(contender), ECHO, None)
    assert training.ppo == replace(PPO(rounds=80), **ppo_changes)
    plain = baselines.make("nero", TINY_GAME.model(), 0.01)
    for found, wanted in zip(training.optimiser.param_groups, plain.param_groups, strict=True):
        assert all(found[name] == {**wanted, **nero_changes}[name] for name in wanted if name not in ("params", "lr"))


def test_schedule_falls_linearly_to_zero():
    task = TASKS["pong"]
    rates = [task.schedule(step * 144, 80 * 144) for step in range(task.epochs * 80)]
    assert rates[0] == 1
    assert rates[-1] == pytest.approx(1 / len(rates))
    assert np.diff(rates) == pytest.approx(-1 / len(rates))
    training = play(TINY_GAME, TINY_GAME.settings("adam", lr=0.5), ECHO, until=19)
    assert training.lr.item() == pytest.approx(0.5 * (1 - 1 / task.epochs))  # in the second round and epoch


@pytest.mark.parametrize("contender", TINY_GAME.contenders)
def test_every_contender_learns(contender, tmp_path):
    settings = TINY_GAME.settings(contender, epochs=1)
    training = TINY_GAME.loop(TINY_GAME, settings, ECHO, None)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    while not training.is_finished:
        training.advance()
    assert any(not torch.equal(value, before[name]) for name, value in training.model.state_dict().items())
    record = Store(tmp_path).finish(training)
    assert set(record["curve"]) == {"reward", "episode_length", "policy_loss", "value_loss", "entropy"}
    assert record["environment_steps"] == SMALL_PPO.rounds * SMALL_PPO.round_steps
    assert 3 <= record["curve"]["episode_length"][0] <= 8
    assert 0 < record["curve"]["entropy"][0] <= math.log(ACTIONS)


def test_gradient_norm_is_clipped(monkeypatch):
    task = replace(TINY_GAME, loop=partial(Agent, ppo=replace(SMALL_PPO, max_grad_norm=1e-3, value=1e3)))
    training = task.loop(task, task.settings("sgd", lr=1.0), ECHO, None)
    norms = []
    step = training.optimiser.step

    def record_norm():
        gradients = [parameter.grad.flatten() for parameter in training.model.parameters()]
        norms.append(torch.cat(gradients).norm().item())
        step()

    monkeypatch.setattr(training.optimiser, "step", record_norm)
    for _ in range(SMALL_PPO.steps + 2):
        training.advance()
    assert norms == pytest.approx([1e-3, 1e-3], rel=1e-3)


@pytest.mark.parametrize("contender", ["nero", "adam"])
def test_resumed_agent_equals_undisturbed(contender, monkeypatch):
    """Cuts while playing, before the first update, between two, and between rounds."""
    monkeypatch.setattr(arcade, "EPISODES_PER_SEED", 2)
    settings = TINY_GAME.settings(contender, epochs=2)
    whole = play(TINY_GAME, settings, ECHO)
    for cut in (1, 7, 12, 13, 18, 25):
        state = saved_and_loaded(play(TINY_GAME, settings, ECHO, until=cut).state())
        resumed = play(TINY_GAME, settings, ECHO, state)
        assert same(resumed, whole), cut
        assert resumed.resumed == 1
        assert resumed.session.state()["episodes"] == whole.session.state()["episodes"]
        assert list(resumed.session.recent) == list(whole.session.recent)


def test_reading_the_state_does_not_disturb():
    settings = TINY_GAME.settings("nero", epochs=1)
    whole, seen = play(TINY_GAME, settings, ECHO), TINY_GAME.loop(TINY_GAME, settings, ECHO, None)
    while not seen.is_finished:
        seen.advance()
        seen.state()
        seen.running_metrics()
    assert same(seen, whole)


def test_interrupted_side_by_side_agents_end_as_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "GREEDY_EPISODES", 1)
    runs = [TINY_GAME.settings("nero", seed=seed, epochs=1) for seed in (0, 1)]
    alone = train(TINY_GAME, runs, ECHO, Store(tmp_path / "alone"), Watch())
    watch, store = Watch(), Store(tmp_path / "beside")
    watch.stepped = lambda training: training.steps_done == 9 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(TINY_GAME, runs, ECHO, store, watch, side_by_side=2)
    beside = train(TINY_GAME, runs, ECHO, store, Watch(), side_by_side=2)
    for one, other in zip(alone, beside, strict=True):
        for name, values in one["curve"].items():
            assert other["curve"][name] == pytest.approx(values, rel=1e-4), name
        assert one["shown_return"] == other["shown_return"]
        assert other["resumed"] == 1


def test_speed_is_empty_when_resumed_among_updates(tmp_path, monkeypatch):
    monkeypatch.setattr("nero_lab.progress.LOG_EVERY_S", 0.0)
    monkeypatch.setattr("nero_lab.progress.REFRESH_EVERY_S", 0.0)
    settings, output = TINY_GAME.settings("nero", epochs=1), StringIO()
    training = TINY_GAME.loop(TINY_GAME, settings, ECHO, None)
    while training.game_steps < training.ppo.round_steps:
        training.advance()
    training.session.recent.clear()  # as in a long game
    training = TINY_GAME.loop(TINY_GAME, settings, ECHO, training.state())
    with Display(Console(file=output, width=200), tmp_path, training.device) as shown:
        shown.begun(training)
        training.advance()
        shown.stepped(training)
    line = output.getvalue().splitlines()[-1]
    assert re.fullmatch(r"nero-lr0.01-seed0-epochs1: epoch 0 of 1, \d+%, \d+ s, \d+ s left", line), line


class FailingEcho(Echo):
    """Games that fail, or hang, at a step."""

    fails_at, hangs, step = 15, False, 0

    def recv(self):
        self.step += 1
        if self.step == self.fails_at:
            if self.hangs:
                threading.Event().wait()
            raise RuntimeError("the cartridge melted")
        return super().recv()


@pytest.mark.parametrize(("hangs", "message"), [(False, "the cartridge melted"), (True, "has not answered for 0.3 s")])
def test_failing_game_is_reported_and_run_resumes(hangs, message, tmp_path, monkeypatch):
    monkeypatch.setattr(arcade, "ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(FailingEcho, "hangs", hangs)
    settings, store = TINY_GAME.settings("nero", epochs=2), Store(tmp_path)
    watch = Watch()
    watch.stepped = lambda training: training.steps_done == 15 and store.save(training)
    with pytest.raises(DataError, match=f"{message}.*run the same command again"):
        train(TINY_GAME, [settings], Game("pong", FailingEcho), store, watch)
    (record,) = train(TINY_GAME, [settings], ECHO, store, Watch())
    assert record["resumed"] == 1
    (whole,) = train(TINY_GAME, [settings], ECHO, Store(tmp_path / "whole"), Watch())
    assert record["curve"] == whole["curve"]


def test_replay_that_ends_elsewhere_is_refused():
    state = play(TINY_GAME, TINY_GAME.settings("nero"), ECHO, until=5).state()
    state["arcade"]["frames"] += 1
    with pytest.raises(DataError, match=r"another version of ale-py.*delete the checkpoint"):
        TINY_GAME.loop(TINY_GAME, TINY_GAME.settings("nero"), ECHO, state)


def test_adam_takes_the_tasks_epsilon():
    task = TASKS["pong"]
    options = task.contenders["adam"].options
    made = baselines.make("adam", torch.nn.Linear(2, 2), 0.1, **options)
    assert made.param_groups[0]["eps"] == 1e-5
    assert baselines.make("adam", torch.nn.Linear(2, 2), 0.1).param_groups[0]["eps"] == 1e-8


def test_final_score_is_greedy(tmp_path):
    """A policy that barely prefers the right action scores as if it always took it."""
    training = play(TINY_GAME, TINY_GAME.settings("sgd", epochs=1), ECHO)
    training.model.forward = lambda frames: (0.01 * torch.eye(ACTIONS)[shown_in(frames)], None)
    record = Store(tmp_path).finish(training)
    assert record["greedy_episodes"] == SMALL_PPO.games * agent.GREEDY_EPISODES
    assert 3 <= record["greedy_return"] <= 8  # the lengths of episodes
    assert record["shown_return"] < record["shown_length"]


def test_final_episodes_are_announced(monkeypatch):
    training, events = Agent(TINY_GAME, TINY_GAME.settings("adam"), ECHO, ppo=SMALL_PPO), []
    training.on_activity = events.append
    monkeypatch.setattr(Game, "score", lambda *_: events.append("score") or [1.0])
    training.final_results()
    assert events == ["plays 9 final episodes", "score"]


SHORT = replace(
    TASKS["pong"],
    model=partial(ActorCritic, width=1 / 16),
    loop=partial(Agent, ppo=PPO(games=2, steps=10, passes=1, minibatches=2, rounds=2)),
)


def test_command_runs_pong_and_resume_is_equal(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "pong", SHORT)
    monkeypatch.setattr(agent, "MAX_EPISODE_STEPS", 20)
    monkeypatch.setattr(agent, "GREEDY_EPISODES", 1)
    monkeypatch.setattr("nero_lab.progress.LOG_EVERY_S", 0.0)
    monkeypatch.setattr("nero_lab.progress.REFRESH_EVERY_S", 0.0)
    arguments = ("run", "pong", "--epochs", 2, "--device", "cpu", "--out", tmp_path / "whole")
    code, printed = run_command(monkeypatch, *arguments)
    assert code == 0
    assert "steps a second" in printed
    settings = SHORT.settings("nero", epochs=2)
    whole = Store(tmp_path / "whole").record(SHORT, settings)
    assert whole["environment_steps"] == 80
    assert whole["steps_per_second"] > 0
    assert whole["shown_length"] == 20
    assert (whole["greedy_return"], whole["greedy_episodes"]) == (None, 0)  # no episode ends so soon
    with Image.open(tmp_path / "whole/pong/nero-lr0.01-seed0-epochs2.gif") as shown:
        assert shown.size == (160, 210)
        assert shown.n_frames > 5
    store, pong = Store(tmp_path / "broken"), load("pong")
    store.save(play(SHORT, settings, pong, until=17))  # while playing the second round
    resumed = play(SHORT, settings, pong, store.begin(SHORT, settings, pong.device))
    monkeypatch.setattr(Agent, "final_results", lambda _: {})  # slow, and covered above
    assert store.finish(resumed)["curve"] == whole["curve"]


@pytest.mark.gpu
@pytest.mark.parametrize("contender", TINY_GAME.contenders)
def test_captured_rounds_match_plain_ones(contender, monkeypatch):
    flags = partial(torch.backends.cudnn.flags, deterministic=True)
    monkeypatch.setattr(torch.backends.cudnn, "flags", lambda **asked: flags(**{**asked, "benchmark": False}))
    settings, data = TINY_GAME.settings(contender, epochs=1), ECHO.to("cuda")
    captured = play(TINY_GAME, settings, data)
    assert all(
        len(work.graphs) == 1 for work in (captured._choose, captured._record, captured._estimate, captured._learn)
    )
    monkeypatch.setattr(CapturedStep, "__call__", lambda self: self.function())
    plain = play(TINY_GAME, settings, data)
    for name, values in plain.curve.items():
        assert captured.curve[name] == pytest.approx(values, rel=1e-3, abs=1e-3)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(captured.model.state_dict()[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("contender", ["nero", "adam"])
def test_agents_on_a_gpu_resume_and_share_it(contender, tmp_path):
    data = ECHO.to("cuda")
    runs = [TINY_GAME.settings(contender, seed=seed, epochs=1) for seed in (0, 1)]
    alone = train(TINY_GAME, runs, data, Store(tmp_path / "alone"), Watch())
    watch, store = Watch(), Store(tmp_path / "beside")
    watch.stepped = lambda training: training.steps_done == 9 and signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(TINY_GAME, runs, data, store, watch, side_by_side=2)
    beside = train(TINY_GAME, runs, data, store, Watch(), side_by_side=2)
    for one, other in zip(alone, beside, strict=True):
        assert one["curve"]["value_loss"] == pytest.approx(other["curve"]["value_loss"], rel=1e-2)


def test_advantages_match_reference():
    torch.manual_seed(0)
    rewards, ends = torch.randn(20, 3, dtype=torch.float64), (torch.rand(20, 3) < 0.2).double()
    values = torch.randn(21, 3, dtype=torch.float64)
    found = ppo.advantages(PPO(discount=0.9, gae_lambda=0.8), rewards, ends, values)
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


@pytest.mark.parametrize("is_clipped", [True, False])
def test_objective_matches_reference(is_clipped):
    torch.manual_seed(0)
    logits, values = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    actions = torch.randint(4, (30,))
    old = torch.log_softmax(logits, 1).gather(1, actions[:, None])[:, 0] + 0.2 * torch.randn(30, dtype=torch.float64)
    before, returns, gained = (torch.randn(30, dtype=torch.float64) for _ in range(3))
    batch = Batch(actions, old, before, returns, gained)
    rules = PPO(clip=0.1, entropy=0.03, value=0.7, is_value_clipped=is_clipped)
    total, parts = ppo.objective(rules, logits, values, batch)
    policy = value = entropy = 0.0
    for step in range(30):
        exponentials = [math.exp(each) for each in logits[step].tolist()]
        probabilities = [each / sum(exponentials) for each in exponentials]
        ratio = probabilities[actions[step]] / math.exp(old[step].item())
        worth = gained[step].item()
        policy -= min(worth * ratio, worth * min(max(ratio, 0.9), 1.1)) / 30
        was, now, wanted = before[step].item(), values[step].item(), returns[step].item()
        near = was + min(max(now - was, -0.1), 0.1) if is_clipped else now
        value += max((now - wanted) ** 2, (near - wanted) ** 2) / 2 / 30
        entropy -= sum(p * math.log(p) for p in probabilities) / 30
    assert parts.tolist() == pytest.approx([policy, value, entropy], rel=1e-9)
    assert total.item() == pytest.approx(policy + 0.7 * value - 0.03 * entropy, rel=1e-9)


def test_encode_gif_shortens_to_the_limit(monkeypatch):
    pictures = [torch.randint(256, (20, 15, 3), dtype=torch.uint8) for _ in range(40)]
    with Image.open(BytesIO(agent.encode_gif(pictures))) as whole:
        assert (whole.n_frames, whole.size, whole.info["duration"]) == (40, (15, 20), 70)
    monkeypatch.setattr(agent, "MAX_FILM_BYTES", 10_000)
    content = agent.encode_gif(pictures)
    assert len(content) <= 10_000
    with Image.open(BytesIO(content)) as cut:
        assert 1 < cut.n_frames < 40
