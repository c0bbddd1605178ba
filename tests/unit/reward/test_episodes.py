"""What the end of an episode means, and what episodes do not go with."""

import asyncio
import io
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import aiohttp
import openai
import pytest
import torch
from trl import GRPOConfig

from salesrl_trl import ConfigError, Reward, SalesGRPOTrainer, ServiceError, per_completion, per_episode
from salesrl_trl.agents.episodes import PLAYED, Playing, kept
from salesrl_trl.generation.engine_loop import GivenUp
from salesrl_trl.reward.batch import Sample
from salesrl_trl.reward.mixed import combined
from salesrl_trl.reward.remote import RemoteReward
from salesrl_trl.reward.reward_funcs import RewardFuncs
from salesrl_trl.reward.stage_times import StageTimes

ADDRESS = "http://127.0.0.1:9/v1"


async def played(ends):
    """The reward of an episode that ends so, as it comes to the trainer: by way of a row that was in a checkpoint."""

    @per_episode
    async def episode(client, row):
        assert isinstance(client, openai.AsyncOpenAI) and client.api_key == "a key"
        if isinstance(row["ends"], BaseException):
            raise row["ends"]
        return row["ends"]

    reward = await episode.play(ADDRESS, "a key", {"ends": ends})
    saved = io.BytesIO()
    torch.save(kept(reward), saved)
    saved.seek(0)
    row = {PLAYED: torch.load(saved, weights_only=True)}
    try:
        return await episode.score(Sample(row=row, completion="Hello."), StageTimes("episode"))
    finally:
        await episode.aclose()


BUSY = SimpleNamespace(status_code=503, headers={}, request=None)


@pytest.mark.parametrize(
    ("ends", "value", "reason"),
    [
        (0.5, 0.5, ""),
        (torch.tensor(2), 2.0, ""),
        (Reward.scored(0.7, style=0.25), 0.7, ""),
        (None, None, "not_applicable"),
        (Reward.missing("judge_busy"), None, "judge_busy"),
        ("0.5", None, "episode_no_number"),
        (float("nan"), None, "episode_not_finite"),
        (ServiceError("down", "judge_down"), None, "judge_down"),
        (openai.APITimeoutError(request=None), None, "episode_timeout"),
        (openai.InternalServerError("", response=BUSY, body=None), None, "episode_http_503"),
        (aiohttp.ServerDisconnectedError(), None, "episode_unavailable"),
        (KeyError("answer"), None, "episode_raised_KeyError"),
    ],
)
async def test_an_end_means_what_it_means_for_other_functions(ends, value, reason):
    reward = await played(ends)
    assert (reward.value, reward.reason) == (pytest.approx(value) if value is not None else None, reason)
    if isinstance(ends, Reward) and value is not None:
        assert reward.components == {"style": 0.25}
        assert reward.metrics == (("rewards/episode/style", 0.25),)


@per_episode
async def episode(client, row):
    return 1.0


@per_completion
async def other(completion):
    return 1.0


async def test_a_completion_that_no_episode_has_made_has_no_number():
    reward = await episode.score(Sample(row={}, completion="Hello."), StageTimes("episode"))
    assert (reward.value, reward.reason) == (None, "episode_not_played")


def test_what_an_episode_does_not_go_with_is_refused():
    refused = {
        "alone": lambda: RewardFuncs.of([episode, other], None, None),
        "combined with other rewards": lambda: RewardFuncs.of(episode, None, None, has_more=True),
        "reward_process": lambda: combined([episode], [1.0], RemoteReward),
        "SalesGRPOConfig": lambda: SalesGRPOTrainer(
            "policy", [episode], GRPOConfig("out", report_to="none", bf16=False)
        ),
        "not async": lambda: per_episode(lambda client, row: 1.0),
    }
    for words, call in refused.items():
        with pytest.raises(ConfigError, match=words):
            call()


def test_time_in_which_the_policy_is_asked_counts_for_no_deadline():
    late, future, began = per_episode(deadline_s=0.2)(episode._function), Future(), time.monotonic()

    class Calls:
        @property
        def idle_s(self):  # the policy is asked for 0.6 s
            return max(time.monotonic() - began - 0.6, 0.0)

    reward = Playing(None).reward(late, future, Calls())
    assert reward.reason == "episode_timeout" and future.cancelled()
    assert 0.75 < time.monotonic() - began < 5
    ended = Future()
    ended.set_result(reward)
    assert Playing(None).reward(late, ended, Calls()) is reward


def test_a_stop_ends_episodes_that_are_out_by_its_reason_and_begins_no_more():
    playing, out, later = Playing(None), Future(), Future()
    threading.Timer(0.2, playing.cut_off, ["stopped"]).start()
    for future in (out, later):
        reward = playing.reward(episode, future, SimpleNamespace(idle_s=0.0))
        assert (reward.value, reward.reason) == (None, "stopped")
        assert future.cancelled()
    closed = Future()
    closed.cancel()
    with pytest.raises(GivenUp):  # nobody will ask for its reward
        Playing(None).reward(episode, closed, SimpleNamespace(idle_s=0.0))


def test_a_function_plays_in_each_trainer_that_has_it():
    """One after the other, and in two at once: each has an endpoint and an event loop of its own."""
    seen = []

    @per_episode
    async def episode(client, row):
        seen.append((str(client.base_url), client.is_closed()))
        return 1.0

    async def run(port, other=None):
        await episode.play(f"http://127.0.0.1:{port}/v1", "a key", {})
        if other is not None:
            await asyncio.to_thread(asyncio.run, run(other))
            await episode.play(f"http://127.0.0.1:{port}/v1", "a key", {})
        await episode.aclose()

    asyncio.run(run(1))
    asyncio.run(run(2, other=3))
    assert seen == [(f"http://127.0.0.1:{port}/v1/", False) for port in (1, 2, 3, 2)]
