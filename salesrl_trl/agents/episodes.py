"""Episodes: a user's own agent that talks to the policy and returns its reward.

    @per_episode
    async def episode(client, row):  # `client` is an `openai.AsyncOpenAI` of the policy in training
        answer = await client.chat.completions.create(model="policy", messages=row["prompt"])
        return score(answer.choices[0].message.content, row["answer"])

    trainer = SalesGRPOTrainer(model, reward_funcs=[episode], ...)

An episode runs while its tokens are generated (`agents_part`); its reward travels in the row until scoring.
"""

import inspect
import json
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.generation.engine_loop import GivenUp
from salesrl_trl.reward.batch import NOTHING_SCORED, BatchReport, Sample
from salesrl_trl.reward.functions import Function, RewardFunction
from salesrl_trl.reward.scorer import DEADLINE_S, Per, RewardNames
from salesrl_trl.reward.stage_times import StageTimes
from salesrl_trl.service.event_loop import PerLoop
from salesrl_trl.types import Outcome, Reward, missing

if TYPE_CHECKING:
    import openai

    from salesrl_trl.agents.chat_turns import AgentCalls

PLAYED = "episode_reward"  # a row's column: the reward of its episode, as `kept` serialises it


def _client() -> "openai.AsyncOpenAI":
    import openai  # costs half a second, only needed for episodes

    http = openai.DefaultAsyncHttpxClient(trust_env=False, timeout=None)  # a turn may wait for a training step
    return openai.AsyncOpenAI(api_key="of the episode", http_client=http, timeout=None, max_retries=0)


class Episode(RewardFunction):
    is_played = True

    def __init__(self, function: Function, *, deadline_s: float = DEADLINE_S) -> None:
        if not inspect.iscoroutinefunction(function):
            raise ConfigError("an episode function is not async. Expected `async def episode(client, row)`.")
        super().__init__(function, Per.COMPLETION, deadline_s=deadline_s)
        self._clients: PerLoop[openai.AsyncOpenAI] = PerLoop(_client)  # each trainer has an event loop for rewards

    @property
    def names(self) -> RewardNames:
        names = super().names
        return RewardNames(functions=names.functions, places=names.places)

    async def play(self, address: str, key: str, row: Mapping[str, object]) -> Reward:
        """Play one episode against the endpoint. If the function raises, the episode is unscored."""
        client = self._clients.get().with_options(base_url=address, api_key=key)
        try:
            return self._reward(await self._returned({"client": client, "row": row}))
        except ServiceError as error:
            return self._failed(error)

    async def drain(self) -> BatchReport:
        return NOTHING_SCORED  # it uses none of our transports

    async def aclose(self) -> None:
        await super().aclose()
        if (client := self._clients.pop()) is not None:
            await client.close()

    def without_number(self, what: str, words: str) -> Reward:
        return self._unscored(f"{self.code}_{what}", f"{self.__name__} {words}")

    def named_full(self, reward: Reward) -> Reward:
        """Name the token limit as the reason if the episode failed at it."""
        failed_at_it = f"{reward.reason}".startswith((f"{self.code}_http_400", f"{self.code}_raised_"))
        return self.without_number("no_room", "requested a turn beyond the token limit") if failed_at_it else reward

    async def _scored(self, sample: Sample, stages: StageTimes) -> Reward:
        played = sample.row.get(PLAYED)
        if played is None:
            return self.without_number("not_played", "was not played: a completion alone cannot be scored")
        metrics = tuple((name, number) for name, number in played["metrics"])
        return Reward(**{**played, "outcome": Outcome(played["outcome"]), "metrics": metrics})


class Playing:
    def __init__(self, stopped: str | None) -> None:
        self.stopped = stopped  # reason code of the unscored episodes once they are cancelled
        self._out: set[Future[Reward]] = set()

    def cut_off(self, reason: str) -> None:
        """Cancel running and later episodes, which stay unscored for this reason. Thread-safe."""
        self.stopped = reason
        for future in list(self._out):
            future.cancel()

    def reward(self, episode: Episode, future: "Future[Reward]", calls: "AgentCalls") -> Reward:
        """Wait for an episode. It is cancelled after `deadline_s` without a request to the policy."""
        self._out.add(future)
        try:
            while self.stopped is None:
                try:
                    return future.result(max(episode.deadline_s - calls.idle_s, 0.01))
                except TimeoutError:
                    if calls.idle_s >= episode.deadline_s:
                        words = f"ran for {episode.deadline_s:g} s without requesting a turn"
                        return episode.without_number("timeout", words)
                except CancelledError:
                    if self.stopped is None:  # rewards are closed
                        raise GivenUp from None
            return missing(Outcome.INFRA, self.stopped)
        finally:
            future.cancel()
            self._out.discard(future)


def kept(reward: Reward) -> dict[str, object]:
    """A reward as plain Python values for a checkpoint."""
    parts = {name: getattr(reward, name) for name in ("outcome", "value", "reason", "columns", "metrics", "breach")}
    plain: dict[str, object] = json.loads(json.dumps({**parts, "components": dict(reward.components)}, default=float))
    return plain


def per_episode(function: Function | None = None, /, *, deadline_s: float = DEADLINE_S) -> Any:
    """Make an agent that talks to the policy and returns its reward a trainer's reward function.

    Args:
        function (`Callable`):
            `async def episode(client, row)`. `client` is an `openai.AsyncOpenAI` of the policy in training; `row` is
            the row of the dataset. Returns a number, `None` or a `Reward`.
        deadline_s (`float`, *optional*, defaults to `300.0`):
            Longest time in seconds that an episode may run without waiting for the policy.
    """
    if function is None:
        return lambda given: Episode(given, deadline_s=deadline_s)
    return Episode(function, deadline_s=deadline_s)
