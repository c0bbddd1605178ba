"""vLLM's own server with a small model on the CPU: as the judge, held to the verdict's schema, and as the sampler
(`vllm_mode: server`). The push of weights, which needs NCCL, is in tests/gpu; here the server reads the weights that
training begins with, and a learning rate of 0 keeps them."""

import asyncio
import time

import pytest
from support.keyed import keyed_rows
from support.loopback import Services, action, build_reward, row
from support.scripted import settings
from support.vllm_server import serve
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient

from salesrl_trl.config import DEFAULT_BRANCHES, SalesGRPOConfig
from salesrl_trl.data.sources import build_dataset
from salesrl_trl.telemetry.metrics import STALENESS, fraction_of
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import Action, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]
VERDICTS = 64
GROUP, BATCH = 4, 16


@pytest.fixture(scope="module")
def served(policy_path, tmp_path_factory):
    """A model of random weights with room for a judge's prompt, and the small policy's tokenizer."""
    path = tmp_path_factory.mktemp("served") / "model"
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    config = AutoConfig.from_pretrained(policy_path, max_position_embeddings=4096)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.model_max_length = 4096
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def server(served, tmp_path_factory):
    """Its address. Log-probs are those of what was sampled from, as TRL wants them."""
    with serve(
        served, tmp_path_factory.mktemp("vllm") / "log", "--served-model-name", "tiny", "--max-model-len", "4096",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    ) as url:  # fmt: skip
        yield url


# As the judge


def test_a_model_of_random_opinions_gives_64_valid_verdicts_when_held_to_the_schema(httpserver, server, served):
    services = Services(httpserver)
    # Random weights end no text and no number by themselves: what ends one is made likely where the schema allows it.
    vocabulary = AutoTokenizer.from_pretrained(served).get_vocab()
    ends = {str(token): 30 for text, token in vocabulary.items() if text in ('"', ",", "}", '"}')}
    provider = {"name": "judge", "base_url": f"{server}/v1", "model": "tiny", "response_format": "json_schema"}
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


# As the sampler


@pytest.fixture
def build(served, server, httpserver, tmp_path, monkeypatch):
    """A trainer around the server."""
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda *_, **__: None)
    monkeypatch.setattr(
        "salesrl_trl.reward.chain.parse_action",
        lambda completion: Action(user_profile="", rewritten_query=completion, history_summary=""),
    )
    tokenizer = AutoTokenizer.from_pretrained(served)
    services, built = Services(httpserver), []

    def built_with(**given):
        rows = keyed_rows(DEFAULT_BRANCHES * 16)
        own = {
            "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server, "num_generations": GROUP,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": BATCH // 4, "learning_rate": 0.0,
            "max_completion_length": 48, "held_out_eval": False,
            # a policy of random weights seldom ends by itself: one token in eight does it
            "generation_kwargs": {"stop_token_ids": list(range(16, len(tokenizer), 8)), "seed": 7},
            **given,
        }  # fmt: skip
        trainer = SalesGRPOTrainer(
            AutoModelForCausalLM.from_pretrained(served),
            build_reward(services.url, rows, deadline_s=60.0, timeout_s=60.0),
            SalesGRPOConfig(**settings(tmp_path, **own)),
            train_dataset=build_dataset(rows, "compact"),
            processing_class=tokenizer,
        )
        built.append(trainer)
        return trainer

    yield built_with
    for trainer in built:
        trainer.finish()


@pytest.mark.parametrize("lookahead", [0, 2])
def test_training_runs_on_completions_that_are_scored_one_by_one(build, lookahead):
    trainer = build(
        rollout_lookahead=lookahead, vllm_importance_sampling_mode="token_truncate", max_steps=5, eval_strategy="no"
    )
    begun = []  # of each generation batch: completions whose reward had begun when the last one was there
    generate = trainer._generate_now

    def watched(prompts):
        open_before = len(trainer._reward._open)
        output = generate(prompts)
        assert len(trainer._reward._open) >= open_before
        batch = trainer._reward._open[-1]
        begun.append(sum(each is not None for each in batch._texts))
        return output

    trainer._generate_now = watched
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [step[STALENESS] for step in steps] == [min(number, lookahead) for number in range(5)]
    # the server's log-probs are the trainer's own: one request for each completion mixes nothing up
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.01
    assert all(step["completions/mean_length"] > 1 for step in steps)
    assert len(begun) == 5
    assert sum(begun) > 5 * BATCH / 2  # the loop that starts them is another thread, which may lag a little
    assert all(step[fraction_of(Outcome.OK)] == 1.0 for step in steps)


def test_a_seed_gives_the_same_completions_one_by_one_as_all_at_once(build):
    trainer = build()
    generation = trainer.vllm_generation
    texts = [f"Question {number}: what does it cost?" for number in range(BATCH // GROUP)]
    prompts = [ids for ids in trainer._tokenizer(texts)["input_ids"] for _ in range(GROUP)]
    told = {}

    def finished(place, ids):
        assert place not in told
        told[place] = list(ids)

    at_once = generation.generate(prompts=prompts, images=None, num_generations=GROUP)
    assert not told
    with generation.streamed(finished, BATCH):
        one_by_one = generation.generate(prompts=prompts, images=None, num_generations=GROUP)
    assert one_by_one[0] == at_once[0] == prompts
    assert one_by_one[1] == at_once[1]
    assert len({tuple(ids) for ids in at_once[1][:GROUP]}) > 1  # samples of a prompt differ
    assert one_by_one[3] == at_once[3]
    for mine, theirs in zip(one_by_one[2], at_once[2], strict=True):
        assert [value for [value] in mine] == pytest.approx([value for [value] in theirs], abs=1e-4)
    assert [told[place] for place in range(BATCH)] == at_once[1]
    assert generation.generate(prompts=prompts, images=None, num_generations=GROUP)[1] == at_once[1]
    assert len(told) == BATCH  # nothing is told of once it is no longer asked for


def test_a_request_that_fails_ends_the_generation_with_its_error(build, monkeypatch):
    trainer = build(generation_kwargs={"temperature": -1.0})
    prompts = [trainer._tokenizer("hello")["input_ids"]] * GROUP
    told = []
    with (
        trainer.vllm_generation.streamed(lambda place, _: told.append(place), GROUP),
        pytest.raises(Exception, match="temperature"),
    ):
        trainer.vllm_generation.generate(prompts=prompts, images=None, num_generations=GROUP)
    assert not told
