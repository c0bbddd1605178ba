"""A policy whose layers FSDP2 shards over two processes. As a program it is one of them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.padded import VOCABULARY, WIDTH, apart, gradient, padded_batch, shared, trls_own
from support.pushing import CPU, pushed
from support.ranks import of_one_machine, run_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

TOLERANCE = 2e-6
"""Relative, in float32."""


def policy(vocabulary):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    ))  # fmt: skip


def highest(number):
    found = torch.tensor([number])
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return int(found)


def shard(model, layers, mesh):
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)


def distances(mesh):
    model = policy(VOCABULARY)
    prompts = shared(model, highest=highest)
    shard(model, model.model.layers, mesh)
    batch = padded_batch(seed=distributed.get_rank())

    def passed(log_probs):
        model.zero_grad()
        logps, entropies, _ = log_probs(model, *batch, WIDTH, compute_entropy=True)
        return logps.detach(), gradient(model, logps, entropies, zero=False)

    theirs = passed(trls_own)
    ours = passed(lambda *args, **given: prompts.log_probs(trls_own, *args, **given))
    assert prompts.is_on
    assert prompts.is_checked
    return [float(apart(one, other)) for one, other in zip(ours, theirs, strict=True)]


def adapted(**lora):
    base = policy(64).to(torch.bfloat16)
    config = LoraConfig(target_modules="all-linear", **lora)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)  # FSDP2 wants one number format in a layer
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 50
    return model


def local(model):
    return {name: weight.to_local().clone() for name, weight in model.named_parameters()}


def unequal(one, other):
    assert set(one) == set(other)
    return sum(not torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("sharded")
    return run_ranks(of_one_machine(), (__file__, out), out, 120, OMP_NUM_THREADS="1")


def test_one_pass_for_a_groups_prompt_gives_trls_log_probs_and_gradient(ranks):
    assert max(far for rank in ranks for far in rank["passes"]) < TOLERANCE


def test_an_adapter_is_pushed_as_in_one_piece_and_its_base_stays(ranks):
    assert [(rank["lora"], rank["dora"]) for rank in ranks] == [([0, 0], [0, 0])] * 2


def main(out):
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    found = {"passes": distances(mesh)}
    # how many pushed weights differ from those of the policy in one piece, and how many of its own the push changed
    for kind, lora in {"lora": {}, "dora": {"use_dora": True}}.items():
        model = adapted(**lora)
        whole = pushed(model)
        shard(model, model.base_model.model.model.layers, mesh)
        before = local(model)
        found[kind] = unequal(pushed(model, CPU, fsdp_version=2), whole), unequal(local(model), before)
    Path(out, f"rank{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()  # the first to end may take the other with it
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
