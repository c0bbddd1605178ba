"""`vllm_mode: server`: rollouts through vLLM's own server, here on the CPU. The push of weights, which needs NCCL, is
in tests/gpu; here the server reads the weights that training begins with, and a learning rate of 0 keeps them."""

import pytest
from support.keyed import keyed_rows, make_tiny_policy
from support.loopback import Services, build_reward
from support.scripted import settings
from support.vllm_server import serve
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_client import VLLMClient

from salesrl_trl.config import DEFAULT_BRANCHES, SalesGRPOConfig
from salesrl_trl.data.sources import build_dataset
from salesrl_trl.telemetry.metrics import STALENESS, fraction_of
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import Action, Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("one_thread")]
GROUP, BATCH = 4, 16


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("served") / "policy", hidden_size=64)


@pytest.fixture(scope="module")
def server(policy, tmp_path_factory):
    """Its address. Log-probs are those of what was sampled from, as TRL wants them."""
    with serve(
        policy, tmp_path_factory.mktemp("vllm") / "log", "--max-model-len", "256",
        "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    ) as url:  # fmt: skip
        yield url


@pytest.fixture
def build(policy, server, httpserver, tmp_path, monkeypatch):
    """A trainer around the server."""
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(VLLMClient, "update_named_params", lambda *_, **__: None)
    monkeypatch.setattr(
        "salesrl_trl.reward.chain.parse_action",
        lambda completion: Action(user_profile="", rewritten_query=completion, history_summary=""),
    )
    tokenizer = AutoTokenizer.from_pretrained(policy)
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
            AutoModelForCausalLM.from_pretrained(policy),
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
