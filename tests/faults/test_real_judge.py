"""A real model as the judge: vLLM's own server with a tiny model on the CPU, held to the verdict's schema."""

import asyncio
import time

import pytest
from support.loopback import Services, action, build_reward, row
from support.vllm_server import serve
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from salesrl_trl.types import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
VERDICTS = 64


@pytest.fixture(scope="module")
def tiny_judge(policy_path, tmp_path_factory):
    """A model of random weights with room for a judge's prompt, and the small policy's tokenizer."""
    path = tmp_path_factory.mktemp("judge") / "model"
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    config = AutoConfig.from_pretrained(policy_path, max_position_embeddings=4096)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.model_max_length = 4096
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def vllm_server(tiny_judge, tmp_path_factory):
    """Its address with `/v1`."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    with serve(tiny_judge, log, "--served-model-name", "tiny", "--max-model-len", "4096") as url:
        yield f"{url}/v1"


def test_a_model_of_random_opinions_gives_64_valid_verdicts_when_held_to_the_schema(
    httpserver, vllm_server, tiny_judge
):
    services = Services(httpserver)
    # Random weights end no text and no number by themselves: what ends one is made likely where the schema allows it.
    vocabulary = AutoTokenizer.from_pretrained(tiny_judge).get_vocab()
    ends = {str(token): 30 for text, token in vocabulary.items() if text in ('"', ",", "}", '"}')}
    provider = {"name": "judge", "base_url": vllm_server, "model": "tiny", "response_format": "json_schema"}
    reward = build_reward(
        services.url,
        [row()],
        attempts=2,
        timeout_s=120.0,
        deadline_s=240.0,
        providers=[{**provider, "temperature": 1.0, "max_completion_tokens": 300, "extra_body": {"logit_bias": ends}}],
        limits={"initial_concurrency": 16, "max_concurrency": 16, "hedge_fraction": 0.0},
    )

    async def once():
        started = time.perf_counter()
        completions = [action(query=f"q{index}") for index in range(VERDICTS)]
        await reward(prompts=[None] * VERDICTS, completions=completions, row=[0] * VERDICTS)
        await reward.aclose()
        return time.perf_counter() - started

    seconds = asyncio.run(once())
    usage = reward.take_report().usage["judge"]
    outcomes = [(each.outcome, each.reason) for each in reward.last]
    scores = [each.value for each in reward.last if each.value is not None]
    print(
        f"{VERDICTS} verdicts of a tiny model in vLLM's server: {len(scores)} valid, {seconds:.1f} s, "
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, {len(set(scores))} different scores from "
        f"{min(scores, default=-1):.2f} to {max(scores, default=-1):.2f}"
    )
    assert outcomes == [(Outcome.OK, "")] * VERDICTS
    assert all(0 <= each.value <= 1 for each in reward.last)
    assert usage.prompt_tokens > 0
