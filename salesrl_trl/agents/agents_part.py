"""Runs tools and episodes in training: starts and cancels their calls and reports them in the heartbeat.

An episode requests all its turns from the policy endpoint and yields one row, which holds its sequences.
"""

import copy
import importlib.util
from asyncio import run_coroutine_threadsafe
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING
from weakref import WeakSet

from salesrl_trl.agents import mcp_tools
from salesrl_trl.agents.chat_turns import AgentCalls, Ask, ChatForm, ForeignText, Message, Sequenced
from salesrl_trl.agents.environments import Environments
from salesrl_trl.agents.episodes import PLAYED, Episode, Playing, kept
from salesrl_trl.agents.partner import partner_tool
from salesrl_trl.agents.policy_endpoint import PolicyEndpoint
from salesrl_trl.agents.tool_turns import Episodes, ToolTurns, sampled_as_rollout
from salesrl_trl.agents.tools import ToolCalls, drain_traffic
from salesrl_trl.errors import ServiceError
from salesrl_trl.generation.sampler import Finished, Handle, Sampled
from salesrl_trl.generation.turns import Turn, refusal
from salesrl_trl.names import EPISODE_FIGURES, episode_figure
from salesrl_trl.rollout.rollout_scoring import CompletedBatch
from salesrl_trl.rollout.several_sequences import SEQUENCES
from salesrl_trl.service.event_loop import clocked
from salesrl_trl.types import Example
from salesrl_trl.wiring.part import Part, PartContext, lacking

if TYPE_CHECKING:
    from salesrl_trl.wiring.trl_generation import TRLEngine  # imports vLLM, which takes seconds


@dataclass(frozen=True, kw_only=True)
class Played:
    ends: Sequence[Sequenced]  # its sequences
    completion: list[Message]  # the first sequence's messages after its first prompt
    reward: dict[str, object]  # as stored in a row
    calls: int

    @cached_property
    def row(self) -> Sequenced:
        """The sequences in one row."""
        return reduce(Sequenced.followed_by, self.ends)


class AgentsPart(Part):
    name = "agents"

    def connect(self, run: PartContext) -> None:
        if run.reward_loop.reward.is_played and importlib.util.find_spec("openai") is None:
            raise lacking("agents", "a function with `@per_episode`", "openai")
        self._trl, self._loop = run.trl, run.reward_loop
        run.trl.agents = self
        self.foreign = ForeignText(run.trl.tokenizer, run.trl.chat_template)
        mcp_tools.neutralise(run.trl.functions, self.foreign)
        self._latest: ToolCalls | None = None
        self._under_way: WeakSet[ToolCalls | Playing] = WeakSet()
        self._endpoint: PolicyEndpoint | None = None  # created by the first episode
        self._tool_turns: ToolTurns | None = None
        self._has_environments = run.trl.tools == "an environment" and not run.pipeline.launcher.inside_trl
        self._environments: Environments | None = None  # TRL's own until the first batch

    def warm_up(self) -> Mapping[str, float | ServiceError]:
        """Ask a partner's service once, on the event loop of its replies."""
        partner = self._trl.partner
        if partner is None or not partner.transports:
            return {}

        async def asked() -> float | ServiceError:
            result = await clocked(partner.warm_up())
            await drain_traffic([partner_tool(partner)])  # keep it out of the first step's metrics
            return result if isinstance(result, ServiceError) else result[1]

        return {partner.name: run_coroutine_threadsafe(asked(), self._trl.tools_loop).result()}

    def converse(
        self, access: "TRLEngine", prompts: Sequence[object], finished: Finished, ahead: bool,
        rows: Sequence[Example] | None = None,
    ) -> Handle:  # fmt: skip
        """Start a conversation for each prompt; its turns may call tools. `rows`: of partners or environments."""
        if self._has_environments and self._environments is None:
            self._environments = Environments(access, self.foreign)
        self._tool_turns = self._tool_turns or ToolTurns(access, self.foreign, self._trl.partner, self._environments)
        reward, has_state = self._loop.reward, self._trl.tools == "an environment"
        # a replay answers from the record, except for environments: their methods change state
        replay = reward if reward.is_replay and not has_state else None
        calls = self._latest = ToolCalls((tool.__name__ for tool in self._tool_turns.functions), replay)
        calls.stopped = self._loop.stopped
        self._under_way.add(calls)
        return self._tool_turns.start(prompts, finished, ahead, calls, rows)

    def play(self, access: "TRLEngine", rows: Sequence[Example], finished: Finished, ahead: bool) -> Handle:
        """Start an episode for each row on the reward's event loop, or one with a partner or an environment."""
        if self._trl.partner is not None or self._has_environments:
            return self.converse(access, [row.get("prompt") for row in rows], finished, ahead, rows)
        if self._endpoint is None:  # before the threads that share it start
            self._endpoint, self._access = PolicyEndpoint(), access
            self._form = ChatForm.of(access.thread_tokenizer, self.foreign, access.chat_template, **access.form)
        playing = Playing(self._loop.stopped)
        self._under_way.add(playing)
        prompts = [row["prompt"] for row in rows]
        encoded = access.encode(prompts)

        def talk(place: int, first: Turn, ask: Ask) -> Played:
            return self._played(place, rows[place], encoded.ids[place], ask, playing)

        def report(place: int, played: Played) -> None:
            failed = refusal(played.row.versions)
            finished(place, played.row.ids, played.completion, failed, columns={PLAYED: played.reward})

        batch = Episodes(len(rows), access.loop, talk, playing, report)
        return access.begin(batch, encoded, lambda: self._sampled(prompts, batch.results()), ahead)

    def _played(self, place: int, row: Example, prompt_ids: list[int], ask: Ask, playing: Playing) -> Played:
        episode, calls = self._loop.reward, AgentCalls(self._form, ask)
        assert isinstance(episode, Episode) and self._endpoint is not None
        with self._endpoint.open(calls) as key:
            future = self._loop.call(episode.play, self._endpoint.address, key, copy.deepcopy(row))
            reward = playing.reward(episode, future, calls)
        if calls.is_full:
            reward = episode.named_full(reward)
        if calls.error is not None:
            raise calls.error
        if ends := calls.ends():
            completion = ends[0].messages[ends[0].prompt_messages :]
        else:  # each row needs at least one token; this one is masked
            completion = [{"role": "assistant", "content": ""}]
            none = Sequenced(
                messages=completion, prompt_ids=prompt_ids, ids=[self._form.tokenizer.eos_token_id], mask=[0],
                logprobs=[0.0] if self._access.has_logprobs else None,
            )  # fmt: skip
            ends = [none]
            if reward.value is not None:
                reward = episode.without_number("no_turn", "did not request a turn from the policy")
        return Played(ends=ends, completion=completion, reward=kept(reward), calls=len(calls.answered))

    def _sampled(self, prompts: Sequence[object], played: Sequence[Played]) -> Sampled:
        """Pass finished episodes through TRL's `_generate`, and add their metrics."""
        trained, completions = [each.row for each in played], [each.completion for each in played]
        spans = [
            [[0 if end is each.ends[0] else len(end.prompt_ids), len(end.ids)] for end in each.ends] for each in played
        ]
        columns = {PLAYED: [each.reward for each in played], SEQUENCES: spans}
        sampled = sampled_as_rollout(self._access, prompts, trained, completions, columns)
        sizes = [[end.sampled for end in each.ends] for each in played]
        mine = {
            "calls": sum(each.calls for each in played), "rewritten": sum(len(size) > 1 for size in sizes),
            "untrained": sum(map(sum, sizes)) - sum(each.sampled for each in trained), "sampled": sum(map(sum, sizes)),
        }  # fmt: skip
        calls, rewritten, untrained, every = self._access.sums(mine).values()
        numbers = (calls, rewritten, untrained / max(every, 1.0))
        metrics = {episode_figure(name): [value] for name, value in zip(EPISODE_FIGURES, numbers, strict=True)}
        versions = [sequence.versions for sequence in trained]
        return replace(sampled, metrics={**sampled.metrics, **metrics}, versions=versions)

    def on_batch(self, batch: CompletedBatch) -> Mapping[str, float]:
        sampled, result = batch.rollout.sampled, batch.rollout.result
        if sampled is not None and sampled.seats and result is not None and self._environments is not None:
            self._environments.release(sampled.seats, result.rewards)
        return {}

    def cancel(self, reason: str) -> None:
        for calls in list(self._under_way):
            calls.cut_off(reason)

    def busy_with(self) -> str | None:
        if self._latest is not None and self._latest.under_way:
            return "the partner answers" if self._trl.partner else "the tools that completions call are running"
        reward = self._loop.reward
        return f"episodes of {reward.own_name} are under way" if reward.is_played else None

    def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        if self._tool_turns is not None:
            self._tool_turns.close([calls for calls in self._under_way if isinstance(calls, ToolCalls)])
        mcp_tools.close(self._trl.functions)
