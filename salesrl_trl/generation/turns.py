"""A turn: the tokens that an engine sampled, their log-probs, and their versions.

A token's version is the number of optimizer steps behind the weights that sampled it. From 0.33, vLLM reports the
label that a push gave these weights (`WeightLabels`); otherwise all tokens count as of the launch (`Rollout.ages`).
"""

import copy
import math
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

UNKNOWN = -1
"""Version of a token sampled by weights that this run did not push."""
UNKNOWN_WEIGHTS = "unknown_weights"
"""Reason code of a completion with such a token. It is not trained on."""


class Turn(NamedTuple):
    ids: list[int]
    logprobs: list[float] | None  # the sampler's, for the sampled tokens; `None` if it returns none
    versions: list[int] | None = None  # of the sampled tokens; `None` if the engine reports none

    def cut(self, most: int) -> "Turn":
        """Its first tokens."""
        return Turn(self.ids[:most], self.logprobs and self.logprobs[:most], self.versions and self.versions[:most])


NO_TURN = Turn([], None)


def refusal(versions: Sequence[int] | None) -> str | None:
    """Why a completion is excluded from training, if it is. `versions`: of the policy's tokens."""
    return UNKNOWN_WEIGHTS if UNKNOWN in (versions or ()) else None


class WeightLabels:
    """Names this run's weights for vLLM. Other labels are unknown, e.g. of another run on the same server, or the
    default of a server that has restarted without this run's weights."""

    def __init__(self, run: str = "") -> None:
        self._run = run or secrets.token_hex(4)

    def label(self, step: int) -> str:
        return f"{self._run}-{step}"

    def versions(self, spans: Sequence[Any] | None, size: int) -> list[int]:
        """The versions of `size` tokens. `spans`: vLLM's `weight_versions`, as objects or from JSON."""
        versions = [UNKNOWN] * size
        for span in spans or ():
            given = span if isinstance(span, dict) else vars(span)
            (run, _, step), start, end = given["version"].rpartition("-"), given["start"], given["end"]
            if run == self._run and 0 <= start <= end <= size:
                versions[start:end] = [int(step)] * (end - start)
        return versions


class EngineLabels(WeightLabels):
    """Labels the weights of a colocated vLLM. With async scheduling, a push finds a batch in flight, sampled by the
    earlier weights. The next step returns it, so the label changes after that step."""

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self._engine, self._pending = engine, ""  # the label from the next step on
        self._is_behind = engine.vllm_config.scheduler_config.async_scheduling

    def pushed(self, step: int) -> None:
        """The engine has the weights after `step` optimizer steps."""
        self._pending = self.label(step)
        if not self._is_behind:
            self.stepped()

    def stepped(self) -> None:
        """The engine has made a step. Labels that others set since then stay."""
        if self._pending:
            self._engine.set_weight_version(self._pending)
            self._pending = ""


class ServerLabels(WeightLabels):
    """Labels a server's weights. `client`: TRL's; it discards the labels that a response has."""

    def __init__(self, client: Any, run: str) -> None:
        super().__init__(run)
        self._client = client

    def pushed(self, step: int) -> None:
        """The server has the weights after `step` optimizer steps. Called while no request is in flight."""
        self._client._post(f"{self._client.base_url}/update_weight_version", json={"new_version": self.label(step)})

    def generate(self, **request: Any) -> dict[str, Any]:
        """TRL's `generate` for one completion, with its `versions`. Thread-safe."""
        client, choices = copy.copy(self._client), []

        def post(url: str, json: dict[str, object]) -> dict[str, Any]:
            asked = {"return_weight_versions": True} if url.endswith("/v1/completions") else {}  # else always returned
            response: dict[str, Any] = self._client._post(url, json={**json, **asked})
            choices.extend(response["choices"])
            return response

        client._post = post
        answer: dict[str, Any] = type(client).generate(client, **request)
        [choice] = choices
        return {**answer, "versions": self.versions(choice.get("weight_versions"), len(choice["token_ids"]))}


def turn_of(output: Any, labels: WeightLabels | None = None) -> Turn:
    """The turn in a vLLM output. NaN becomes `None` as in TRL, whose `extract_logprobs` is ten times slower."""
    sampled = output.outputs[0]
    ids, flat, logprobs = list(sampled.token_ids), sampled.logprobs, None
    if flat is not None:
        logprobs = [flat.logprobs[start] for start in flat.start_indices]
        logprobs = [None if math.isnan(each) else each for each in logprobs]
    versions = None if labels is None else labels.versions(sampled.weight_versions, len(ids))
    return Turn(ids, logprobs, versions)
