"""What tools and episodes do in a run: who begins their calls, who ends them, and what a heartbeat reports of them.

Tools with an `example` are called once before training. `wiring.trl_access` loads this module where completions may
call tools or an episode is given.
"""

import importlib.util
import math
from asyncio import run_coroutine_threadsafe
from collections.abc import Iterable, Sequence
from weakref import WeakSet

from accelerate.logging import get_logger

from salesrl_trl.agents.episodes import Episode, Playing
from salesrl_trl.agents.foreign_text import ForeignText
from salesrl_trl.agents.playing import EpisodeTurns
from salesrl_trl.agents.policy_endpoint import PolicyEndpoint
from salesrl_trl.agents.tool_turns import ToolTurns
from salesrl_trl.agents.tools import ToolCalls, tried
from salesrl_trl.checkpoint.keeper import agreed
from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.generation.sampler import Finished, Handle
from salesrl_trl.generation.turn_access import TurnAccess
from salesrl_trl.types import Example
from salesrl_trl.wiring.part import AGENTS, Part, PartContext, lacking

logger = get_logger(__name__)


class AgentsPart(Part):
    """The calls and episodes under way, and the endpoint at which episodes ask the policy."""

    name = AGENTS

    def connect(self, run: PartContext) -> None:
        if run.reward_loop.reward.is_played and importlib.util.find_spec("openai") is None:
            raise lacking("agents", "a function with `@per_episode`", "openai")
        self._trl, self._loop = run.trl, run.reward_loop
        self.foreign = ForeignText(run.trl.tokenizer, run.trl.chat_template)
        self._latest: ToolCalls | None = None
        self._under_way: WeakSet[ToolCalls | Playing] = WeakSet()
        self._endpoint: PolicyEndpoint | None = None  # once there was an episode
        self._tool_turns: ToolTurns | None = None
        self._episode_turns: EpisodeTurns | None = None

    def converse(self, access: TurnAccess, prompts: Sequence[object], finished: Finished, ahead: bool) -> Handle:
        """Begin a conversation with each prompt, whose turns may call tools."""
        self._tool_turns = self._tool_turns or ToolTurns(access, self.foreign)
        calls = self.begin_calls(tool.__name__ for tool in access.tools)
        return self._tool_turns.start(prompts, finished, ahead, calls)

    def play(self, access: TurnAccess, rows: Sequence[Example], finished: Finished, ahead: bool) -> Handle:
        """Begin an episode with each row. The endpoint is there before their threads, which share it."""
        if self._endpoint is None or self._episode_turns is None:
            episode = self._loop.reward
            assert isinstance(episode, Episode)
            self._endpoint = PolicyEndpoint()
            self._episode_turns = EpisodeTurns(access, episode, self._endpoint, self._loop)
        playing = Playing(self._loop.stopped)
        self._under_way.add(playing)
        return self._episode_turns.start(rows, finished, ahead, playing)

    def begin_calls(self, names: Iterable[str]) -> ToolCalls:
        """The calls of a batch of conversations. In a replay the record answers, but not for an environment, whose
        methods change its state."""
        reward, has_state = self._loop.reward, self._trl.tools == "an environment"
        calls = ToolCalls(names, reward.recorded_call if reward.is_replay and not has_state else None)
        calls.stopped = self._loop.stopped
        self._latest = calls
        self._under_way.add(calls)
        return calls

    def begin(self, resumed: str | None, run_id: str) -> None:
        if self._trl.tools == "tools" and resumed is None:
            agreed(self._try_tools)

    def _try_tools(self) -> None:
        """Call tools once, on the main process. Raises `ConfigError` for one that fails."""
        if not self._trl.accelerator.is_main_process or self._loop.reward.is_replay:
            return
        ended_by_name = run_coroutine_threadsafe(tried(self._trl.functions), self._trl.tools_loop()).result()
        for name, ended in ended_by_name.items():
            if isinstance(ended, ServiceError):
                raise ConfigError(
                    f"the tool `{name}` failed with its `example` ({ended.code}): conversations that call it would be "
                    "left out. Expected an answer. Mend the service or the example, and launch again."
                )
            if math.isnan(ended):
                logger.info(f"off: a call of the tool `{name}` before training, because its `@tool` has no `example`")
            else:
                logger.info(f"[WarmUp] tool_{name}: {ended:.2f} s")

    def cancel(self, reason: str) -> None:
        for calls in list(self._under_way):
            calls.cut_off(reason)

    def busy_with(self) -> str | None:
        if self._latest is not None and self._latest.under_way:
            return "the tools that completions call are running"
        reward = self._loop.reward
        return f"episodes of {reward.own_name} are under way" if reward.is_played else None

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
