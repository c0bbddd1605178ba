"""vLLM's own server with a small model on the CPU: as the judge, held to the verdict's schema, and as the sampler
(`vllm_mode: server`). The push of weights, which needs NCCL, is in tests/gpu; here the server reads the weights that
training begins with, and a learning rate of 0 keeps them.

Launched with two processes, it trains on completions of a server:

    python -m torch.distributed.run --nproc_per_node 2 tests/integration/test_vllm_server.py MODEL SERVER SERVICES OUT
"""

import asyncio
import copy
import functools
import itertools
import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.keyed import keyed_rows, make_tiny_policy
from support.loopback import Services, action, any_action, build_reward, row
from support.ranks import of_one_machine, run_ranks
from support.real import real_model
from support.scripted import build_trainer
from support.vllm_server import serve
from transformers import AutoTokenizer
from trl.generation.vllm_client import VLLMClient

from salesrl_trl.errors import WeightSyncError
from salesrl_trl.generation.engine_loop import CompletionTasks
from salesrl_trl.judged.verdict import response_format
from salesrl_trl.launch.checks.outcome import StageVerdict
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.preflight.runner import examine
from salesrl_trl.launch.preflight.training import STEP_STAGE
from salesrl_trl.launch.settings import parse
from salesrl_trl.names import STALENESS, outcome_of
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import DEFAULT_BRANCHES, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]
VERDICTS = 24
GROUP, BATCH = 4, 16


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model of random weights with room for a judge's prompt."""
    path = tmp_path_factory.mktemp("served") / "model"
    make_tiny_policy(path, hidden_size=64, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(path)
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


def test_a_model_of_random_opinions_gives_valid_verdicts_alone_when_held_to_the_schema(
    httpserver, server, served, monkeypatch
):
    services = Services(httpserver)
    # Random weights can't copy a nonce either: there is one for all requests here, and the schema holds it.
    monkeypatch.setattr("salesrl_trl.judged.provider.make_nonce", lambda: "0" * 16)
    schema = copy.deepcopy(response_format(expect_reference=True))
    schema["json_schema"]["schema"]["properties"]["nonce"] = {"type": "string", "const": "0" * 16}
    # Random weights end no text and no number by themselves: what ends one is made likely where the schema allows it.
    vocabulary = AutoTokenizer.from_pretrained(served).get_vocab()
    ends = {str(token): 30 for text, token in vocabulary.items() if text in ('"', ",", "}", '"}')}
    provider = {"name": "judge", "base_url": f"{server}/v1", "model": "tiny", "response_format": "json_schema"}
    provider |= {"temperature": 1.0, "max_completion_tokens": 300}
    provider |= {"extra_body": {"logit_bias": ends, "response_format": schema}}
    limits = {"initial_concurrency": 16, "max_concurrency": 16}
    patience = {"attempts": 2, "timeout_s": 120.0, "deadline_s": 240.0}
    reward = build_reward(services.url, [row()], providers=[provider], limits=limits, **patience)

    async def once():
        started = time.perf_counter()
        completions = [action(query=f"q{index}") for index in range(VERDICTS)]
        result = await reward.score_all([{"row": 0}] * VERDICTS, completions)
        await reward.aclose()
        return result, time.perf_counter() - started

    result, seconds = asyncio.run(once())
    usage = result.report.usage["judge"]
    outcomes = [(each.outcome, each.reason) for each in result.rewards]
    scores = [each.value for each in result.rewards if each.value is not None]
    print(
        f"{VERDICTS} verdicts of a tiny model in vLLM's server: {len(scores)} valid, {seconds:.1f} s, "
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, {len(set(scores))} different scores from "
        f"{min(scores, default=-1):.2f} to {max(scores, default=-1):.2f}"
    )
    assert outcomes == [(Outcome.OK, "")] * VERDICTS
    assert all(0 <= each.value <= 1 for each in result.rewards)
    assert usage.prompt_tokens > 0


@pytest.mark.real_model
@pytest.mark.timeout(3000)
def test_verdicts_of_a_real_model_are_read_when_it_is_held_to_the_schema(httpserver, tmp_path):
    model, some = real_model(), 4
    provider = {"name": "judge", "model": "real", "response_format": "json_schema", "max_completion_tokens": 300}
    limits = {"initial_concurrency": some, "max_concurrency": some}
    # Its generation config ends at a line break, as an answer does, and a verdict may have some.
    options = ("--served-model-name", "real", "--max-model-len", "4096", "--generation-config", "vllm")
    with serve(model, tmp_path / "log", *options) as url:
        reward = build_reward(
            Services(httpserver).url, [row()], providers=[provider | {"base_url": f"{url}/v1"}], limits=limits,
            attempts=2, timeout_s=600.0, deadline_s=1200.0,
        )  # fmt: skip

        async def once():
            completions = [action(query=f"What does the {name} course cost?") for name in "abcd"]
            result = await reward.score_all([{"row": 0}] * some, completions)
            await reward.aclose()
            return result.rewards

        rewards = asyncio.run(once())
    print([(each.outcome, each.reason, each.value) for each in rewards])
    assert [each.value for each in rewards if each.value is not None]
    assert all(each.value is None or 0 <= each.value <= 1 for each in rewards)


# As the sampler


def without_a_push(patch):
    """The server keeps its weights; every completion is an action."""
    patch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    patch.setattr(VLLMClient, "update_named_params", lambda *_, **__: None)
    patch.setattr("salesrl_trl.judged.chain.parse_action", any_action)


def trainer_of(served, server, services, out, **given):
    """A trainer around the server, with BATCH completions of this process a step."""
    rows = keyed_rows(DEFAULT_BRANCHES * 32)  # no prompt comes twice
    reward = build_reward(services, rows, deadline_s=60.0, timeout_s=60.0)
    tokens = len(AutoTokenizer.from_pretrained(served))
    own = {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server, "num_generations": GROUP,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": BATCH // 4, "learning_rate": 0.0,
        "max_completion_length": 48, "eval_strategy": "no", "eval_dataset": build_dataset(rows[:2], "compact"),
        "vllm_importance_sampling_mode": "token_truncate",
        # a policy of random weights seldom ends by itself: one token in eight does it
        "generation_kwargs": {"stop_token_ids": list(range(16, tokens, 8)), "seed": 7},
        **given,
    }  # fmt: skip
    return build_trainer(served, reward, (), rows, out, SalesGRPOTrainer, **own)


@pytest.fixture
def build(served, server, httpserver, tmp_path, monkeypatch):
    """A trainer around the server."""
    without_a_push(monkeypatch)
    services, built = Services(httpserver), []

    def built_with(**given):
        built.append(trainer_of(served, server, services.url, tmp_path, **given))
        return built[-1]

    yield built_with
    for trainer in built:
        trainer.finish()


def test_a_preflight_compares_with_a_server_and_makes_full_steps_with_its_completions(
    served, server, tmp_path, monkeypatch
):
    without_a_push(monkeypatch)
    given = ["--model_name_or_path", str(served), "--prompt_template", "compact"]
    given += ["--output_dir", str(tmp_path / "run"), "--max_completion_length", "24"]
    given += ["--vllm_mode", "server", "--vllm_server_base_url", server]
    given += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--num_generations", "4"]
    given += ["--generation_kwargs", '{"stop_token_ids": [16, 24, 32, 40]}', "--max_train_rows", "8"]
    plan = Plan(parse(given, Path(__file__).parents[2] / "recipes/debug.yaml"), in_depth=True)
    (step,) = examine(plan, (STEP_STAGE,))
    assert step.verdict is StageVerdict.PASSED
    assert step.figures["logp_difference_nats"] < 0.01
    assert step.figures["completion_tokens"] == 24


def check_steps(log_history, lookahead):
    """Every completion was scored, and the server's log-probs are the trainer's own: one request for each completion
    mixes nothing up."""
    steps = [entry for entry in log_history if "loss" in entry]
    assert [step[STALENESS] for step in steps] == [min(number, lookahead) for number in range(5)]
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.01
    assert all(step["completions/mean_length"] > 1 for step in steps)
    assert all(step[outcome_of(Outcome.OK)] == 1.0 for step in steps)


def test_the_reward_of_a_completion_starts_when_the_server_has_finished_it(build, monkeypatch):
    trainer = build(max_steps=5)
    generate, asked = VLLMClient.generate, itertools.count(1)

    def held_back(client, *arguments, **request):
        is_last_of_a_batch = next(asked) % BATCH == 0
        output = generate(client, *arguments, **request)
        end = time.monotonic() + 60
        while is_last_of_a_batch and time.monotonic() < end:
            *_, latest = trainer.components.reward_loop._open.values()
            if sum(sample is not None for sample in latest._samples) == BATCH - 1:
                return output
            time.sleep(0.01)
        assert not is_last_of_a_batch, "rewards do not start before the whole batch is there"
        return output

    monkeypatch.setattr(VLLMClient, "generate", held_back)
    trainer.train()
    check_steps(trainer.state.log_history, 0)
    assert next(asked) == 5 * BATCH + 1


def test_the_server_generates_while_the_trainer_trains(build):
    trainer = build(rollout_lookahead=2, max_steps=5, temperature=0.6)
    client, sampler = trainer.vllm_generation.vllm_client, trainer.components.sampler
    ask, compute_loss = sampler._begin, trainer.compute_loss
    asked, trained = [], [threading.Event() for _ in range(5)]  # the step at which each rollout was asked for

    def held_back(step, generate, *arguments, **request):
        output = generate(*arguments, **request)
        assert step is None or trained[step].wait(60), "the trainer waits for what it does not need yet"
        return output

    def watched(*arguments):
        step = trainer.state.global_step
        generate = client.generate
        client.generate = functools.partial(held_back, step if asked else None, generate)
        try:
            return ask(*arguments)
        finally:
            client.generate = generate
            asked.append(step)

    def training(*arguments, **given):
        trained[trainer.state.global_step].set()
        return compute_loss(*arguments, **given)

    sampler._begin, trainer.compute_loss = watched, training
    trainer.train()
    check_steps(trainer.state.log_history, 2)
    assert asked == [0, 0, 0, 1, 2]


def test_an_evaluation_between_two_rollouts_of_a_server_is_of_the_weights_in_training(build):
    trainer = build(rollout_lookahead=1, max_steps=3, eval_strategy="steps", eval_steps=1)
    pushes, sync = [], trainer.vllm_generation.sync_weights
    trainer.vllm_generation.sync_weights = lambda: (pushes.append(trainer.state.global_step), sync())
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert [entry["step"] for entry in evaluations] == [1, 2, 3]
    assert pushes == [0, 1, 2, 3]  # once for each state of the weights


def test_without_importance_ratios_too_a_servers_weights_are_checked_once(build, caplog):
    caplog.set_level(logging.INFO)
    trainer = build(max_steps=2, vllm_importance_sampling_correction=False, temperature=0.6)
    trainer.train()
    assert caplog.text.count("[Weights] vLLM samples from the weights being trained") == 1
    other = build(max_steps=2, vllm_importance_sampling_correction=False)
    with torch.no_grad():
        other.model.lm_head.weight.mul_(30)  # and nothing is pushed here
    with pytest.raises(WeightSyncError, match="differ from the trainer's by"):
        other.train()
    assert other.state.global_step == 0


def test_two_processes_ask_a_server_each_for_its_own(served, server, httpserver, tmp_path):
    services = Services(httpserver)
    arguments = (__file__, served, server, services.url, tmp_path)
    one, other = run_ranks(of_one_machine(), arguments, tmp_path, 240, OMP_NUM_THREADS="1")
    for rank in (one, other):
        check_steps(rank["log"], 2)
        assert rank["asked"] == 5 * BATCH
        assert rank["prompts"] == 5 * BATCH // GROUP
    assert not set(one["texts"]) & set(other["texts"])


def main(served, server, services, out):
    rank = int(os.environ["RANK"])
    asked, generate = [], VLLMClient.generate

    def watched(client, prompts, **request):
        asked.extend(prompts)
        return generate(client, prompts, **request)

    with pytest.MonkeyPatch.context() as patch:
        without_a_push(patch)
        for module in ("client", "generation"):  # a server's client needs it for the push alone
            patch.setattr(f"trl.generation.vllm_{module}.is_vllm_available", lambda: True)
        patch.setattr("trl.generation.vllm_generation.LLM", None, raising=False)
        patch.setattr(VLLMClient, "generate", watched)
        trainer = trainer_of(
            served, server, services, out, rollout_lookahead=2, max_steps=5, ddp_backend="gloo", report_to="none"
        )
        trainer.train()
        trainer.finish()
    texts = sorted({trainer._tokenizer.decode(prompt) for prompt in asked})
    report = {"log": trainer.state.log_history, "asked": len(asked), "prompts": len(texts), "texts": texts}
    Path(out, f"rank{rank}.json").write_text(json.dumps(report))


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
    batch = CompletionTasks(BATCH, generation.loop, finished)
    generation.batch = batch
    assert generation.generate(prompts=prompts, images=None, num_generations=GROUP) == ([], [], [], [])
    generation.batch = None
    assert [turn.ids for turn in batch.results()] == at_once[1]
    assert len({tuple(ids) for ids in at_once[1][:GROUP]}) > 1  # samples of a prompt differ
    for turn, theirs in zip(batch.results(), at_once[2], strict=True):
        assert turn.logprobs == pytest.approx([value for [value] in theirs], abs=1e-4)
    assert [told[place] for place in range(BATCH)] == at_once[1]
    assert generation.generate(prompts=prompts, images=None, num_generations=GROUP)[1] == at_once[1]
    assert len(told) == BATCH  # nothing is told of once it is no longer asked for


if __name__ == "__main__":
    main(*sys.argv[1:])
