"""Engine options, pictures, and the push. The engine itself is in tests/integration."""

import os
import socket
from contextlib import ExitStack, nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
import trl.generation.vllm_generation as upstream_vllm
import trl.trainer.grpo_trainer as upstream_trainer
from support.pushing import llm_of
from transformers import ProcessorMixin

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.generation.vllm import SalesVLLMGeneration
from salesrl_trl.wiring.policy import Policy

IDLE = SimpleNamespace(pushing=nullcontext)  # a loop with nothing under way
WHOLE = SimpleNamespace(fsdp_version=None)  # a policy that nothing shards


def bare(**members):
    generation = SalesVLLMGeneration.__new__(SalesVLLMGeneration)
    vars(generation).update(members)
    return generation


def test_trl_is_left_as_it_was_even_when_the_trainer_fails_to_build(tmp_path):
    stock = upstream_trainer.VLLMGeneration
    args = SalesGRPOConfig(output_dir=str(tmp_path), use_cpu=True, beta=0.5, use_vllm=True, rollout_lookahead=1)
    policy = Policy(args, has_kl=False, gets_adapter=False)
    with pytest.raises(RuntimeError), policy.building("a-model"):
        assert upstream_trainer.VLLMGeneration is not stock
        assert (args.beta, args.vllm_importance_sampling_mode) == (0.0, "token_truncate")
        assert args.epsilon_high == pytest.approx(1.2**2 - 1)
        raise RuntimeError
    assert upstream_trainer.VLLMGeneration is stock
    assert (args.beta, args.vllm_importance_sampling_mode, args.epsilon_high) == (0.5, None, None)


@pytest.mark.parametrize("port", ["", "0", "12321"], ids=["none named", "any", "named"])
def test_the_engine_is_built_with_trls_arguments_and_ours_on_top(monkeypatch, port):
    seen = {}

    def engine(**kwargs):
        seen.update(kwargs)
        if port != "12321":  # until vLLM listens, another program takes any port that it can
            with suppress(OSError):
                others.enter_context(socket.create_server(("", int(os.environ["MASTER_PORT"]))))
            store, *_ = next(torch.distributed.rendezvous("env://", 0, 1))  # as vLLM does
            store.set("rank", "0")
        raise InterruptedError  # all that follows needs a model

    monkeypatch.setattr(upstream_vllm, "LLM", engine)
    generation = bare(
        engine_options={"enforce_eager": True, "seed": 5},
        mode="colocate", tensor_parallel_size=1, gpu_memory_utilization=0.5, max_model_length=64, max_num_seqs=4,
        enable_sleep_mode=True, model_impl="auto", trust_remote_code=False,
        model=SimpleNamespace(name_or_path="some/model"),
        accelerator=SimpleNamespace(
            num_processes=1, process_index=0, local_process_index=0, device=torch.device("cpu")
        ),
    )  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(InterruptedError), ExitStack() as others:
        generation._init_vllm()
    assert upstream_vllm.LLM is engine
    assert (seen["model"], seen["max_num_seqs"], seen["logprobs_mode"]) == ("some/model", 4, "processed_logprobs")
    assert (seen["enforce_eager"], seen["seed"]) == (True, 5)
    assert not seen["enable_sleep_mode"]  # vLLM refuses it on a CPU
    # TRL would take 29500 while it is free, as every run that starts in the same moment
    given = os.environ["MASTER_PORT"]
    assert given == port if port == "12321" else given not in ("29500", "0", "")


class Seeing(ProcessorMixin):
    image_token_id = 9

    def __init__(self):
        pass


def seeing_generation(monkeypatch, seen_as):
    """A colocated engine whose prompts become what `seen_as` makes of them."""
    asked = []

    def generate(self, prompts, images, num_generations, profiler=None):
        asked.append((prompts, images))
        return [seen_as(ids) for ids in prompts], [], [], []

    monkeypatch.setattr(upstream_vllm.VLLMGeneration, "generate", generate)
    return bare(mode="colocate", processing_class=Seeing(), generation_kwargs={}), asked


def test_vllm_gets_one_token_for_each_picture_and_puts_in_the_others(monkeypatch):
    prompts, images = [[1, 9, 9, 9, 2, 9, 9, 3], [4, 5]], [["a", "b"], None]
    expanded = {(1, 9, 2, 9, 3): prompts[0], (4, 5): prompts[1]}
    generation, asked = seeing_generation(monkeypatch, lambda ids: expanded.get(tuple(ids), ids))
    generation.generate(prompts, images, 2)
    assert asked == [([[1, 9, 2, 9, 3], [4, 5]], images)]
    generation.generate(prompts, None, 2)
    assert asked[1] == (prompts, None)  # a text is left as it is


def test_a_vllm_that_reads_a_picture_as_other_tokens_is_refused(monkeypatch):
    generation, _ = seeing_generation(monkeypatch, lambda ids: [1, 9, 9, 2])
    with pytest.raises(ConfigError, match="prompt 0 with its images to 4 tokens, and the trainer to 5"):
        generation.generate([[1, 9, 9, 9, 2]], [["a"]], 1)


def test_with_new_weights_vllm_forgets_what_the_vision_tower_made_of_pictures():
    dropped = []
    for processor in (Seeing(), object()):
        llm = llm_of()
        llm.llm_engine.reset_encoder_cache = lambda processor=processor: dropped.append(processor)
        accelerator = SimpleNamespace(device=torch.device("cuda"))
        seen = {"processing_class": processor, "engine_options": {}, "loop": IDLE, "enable_sleep_mode": False}
        bare(
            mode="colocate", accelerator=accelerator, llm=llm, _dist=WHOLE, _iter_named_params=lambda: iter(()), **seen
        ).sync_weights()
    assert [type(each) for each in dropped] == [Seeing]


def test_an_engine_that_quantises_is_woken_and_reads_all_weights_anew():
    done = []
    generation = bare(
        mode="colocate", engine_options={"quantization": "fp8_per_channel"}, enable_sleep_mode=True,
        accelerator=SimpleNamespace(device=torch.device("cuda")),
        _iter_named_params=lambda: iter([("a", 1), ("b", 2)]), loop=IDLE, _dist=WHOLE,
    )  # fmt: skip
    generation.llm = llm_of(reload_weights=lambda weights_iterator: done.append(list(weights_iterator)))
    generation.llm.wake_up = lambda tags: done.append(tags)
    generation.llm.reset_prefix_cache = lambda: done.append("cache")
    generation.sync_weights()
    assert done == [["weights"], [("a", 1), ("b", 2)], "cache"]
    assert not generation._llm_weights_sleeping
