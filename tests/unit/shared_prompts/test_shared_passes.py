"""Log-probs, entropies and gradients of real architectures, built small, against TRL's own passes."""

import functools
import logging
import re

import pytest
import torch
from peft import LilyConfig, LoraConfig, get_peft_model
from support.padded import VOCABULARY, WIDTH, apart, gradient, padded_batch, shared, trls_own
from transformers import AutoConfig, AutoModelForCausalLM

from salesrl_trl.rollout.model_passes import Passes, unasked_tokens
from salesrl_trl.shared_prompts.shared_passes import Columns

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-6
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WITH_HEADS = {**SMALL, "head_dim": 8}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARES = {
    "qwen2": SMALL,
    "qwen3": WITH_HEADS,
    "gemma2": {**WITH_HEADS, "sliding_window": 22},
    "gemma3_text": {**WITH_HEADS, "sliding_window": 22},
    "qwen3_moe": {**WITH_HEADS, **MIXTURE},
    "mixtral": {**SMALL, "num_local_experts": 4, "sliding_window": None},
    "deepseek_v3": {
        **SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
        "num_experts_per_tok": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    },
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0, "resid_pdrop": 0,
             "embd_pdrop": 0},
}  # fmt: skip
REFUSES = {
    "bloom": ({"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "transformers' interface"),
    "lfm2": ({**SMALL, "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    # makes its positions of the mask, so that the packed ones are others
    "opt": (
        {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "word_embed_proj_dim": 32, "dropout": 0.0}, "at first use log-probs differ"
    ),
    "mistral": ({**SMALL, "sliding_window": 16}, "sliding window of 16 tokens"),
    "nemotron": (SMALL, "does not pass its keyword arguments|transformers' interface"),
    "llama": (
        {**SMALL, "max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0,
         "rope_theta": 1e4}}, "from 20 tokens on, rotary embeddings"
    ),
    "phi3": (
        {**SMALL, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
         "long_factor": [4.0] * 4}, "original_max_position_embeddings": 21}, "from 21 tokens on"
    ),
}  # fmt: skip


def small(kind, **fields):
    """A model with random weights that are large enough for a difference to show."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config).train()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 5
    return model


@pytest.mark.parametrize("kind", SHARES)
def test_an_architecture_gives_trls_log_probs_entropies_and_gradient(kind):
    model = small(kind, **SHARES[kind])
    prompts, batch = shared(model), padded_batch()
    has_router = kind in ("qwen3_moe", "mixtral")
    given = {"compute_entropy": True, "compute_aux_loss": has_router}
    theirs = trls_own(model, *batch, WIDTH, **given)
    wanted = gradient(model, *theirs)
    ours = prompts.log_probs(trls_own, model, *batch, WIDTH, **given)
    assert prompts.is_on
    counted = batch[1][:, -WIDTH:].bool()
    assert not ours[0][~counted].any()
    for mine, other in zip(ours, theirs, strict=True):
        if other is not None:
            assert apart(mine, other) < TOLERANCE
    assert apart(gradient(model, *ours), wanted) < TOLERANCE
    with torch.no_grad():  # the same in several passes
        again = prompts.log_probs(trls_own, model, *batch, WIDTH)[0]
    assert apart(again, theirs[0]) < TOLERANCE


@pytest.mark.parametrize("kind", REFUSES)
def test_an_architecture_that_cant_is_told_and_goes_trls_way(kind, caplog):
    fields, reason = REFUSES[kind]
    model = small(kind, **fields).eval()
    with caplog.at_level(logging.INFO):
        prompts = shared(model)
        with torch.no_grad():
            for batch in (padded_batch((12, 12), (10, 3)), padded_batch()):  # the first without padding
                ours, theirs = (
                    each(model, *batch, WIDTH)[0]
                    for each in (functools.partial(prompts.log_probs, trls_own), trls_own)
                )
                assert torch.equal(ours, theirs)
    assert caplog.text.count("off: sharing a group's prompt in forward passes") == 1
    assert re.search(reason, caplog.text)


def adapted(kind, **fields):
    settings = kind(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **fields)
    return get_peft_model(small("qwen2", **SMALL), settings)


def split_over_devices():
    model = small("qwen2", **SMALL)
    model.model.layers[1].to("meta")
    return model


@pytest.mark.parametrize(
    ("build", "given", "reason"),
    [
        # these adapters begin as if they were not there, so that a comparison would not see them
        (lambda: adapted(LoraConfig, alora_invocation_tokens=[5]), {}, "depends on the tokens of a whole sequence"),
        (lambda: adapted(LilyConfig), {}, "depends on the tokens of a whole sequence"),
        (split_over_devices, {}, "the model is split across devices"),
        (lambda: small("qwen2", **SMALL, attn_implementation="eager"), {}, "`eager`. Expected `sdpa`"),
        (lambda: small("qwen2", **SMALL), {"reason": "of the compiler"}, "of the compiler"),
    ],
    ids=["alora", "lily", "devices", "eager", "settings"],
)
def test_a_model_or_a_setting_that_cant_goes_trls_way(build, given, reason, caplog):
    with caplog.at_level(logging.INFO):
        prompts = shared(build(), **given)
    assert not prompts.is_on
    assert reason in caplog.text
    assert prompts.log_probs(lambda *_, **__: "TRL's", None, *padded_batch(), WIDTH) == "TRL's"


def test_a_reference_with_another_attention_goes_trls_way(caplog):
    """`model_init_kwargs` may give it one. Nothing would tell that attention what a token sees."""
    policy, reference = small("qwen2", **SMALL), small("qwen2", **SMALL, attn_implementation="eager")
    prompts, batch = shared(policy), padded_batch()
    shared(reference)  # TRL's head
    with torch.no_grad(), caplog.at_level(logging.INFO):
        prompts.log_probs(trls_own, policy, *batch, WIDTH)
        ours, theirs = prompts.log_probs(trls_own, reference, *batch, WIDTH), trls_own(reference, *batch, WIDTH)
    assert torch.equal(ours[0], theirs[0])
    assert "the reference's attention is `eager`" in caplog.text


def noisy(model):
    """As NEFTune's hook, at work in training alone."""
    model.get_input_embeddings().register_forward_hook(
        lambda module, _, out: out + torch.empty_like(out).uniform_(-1, 1) if module.training else out
    )
    return model


JITTER = {"num_local_experts": 4, "router_jitter_noise": 0.1, "sliding_window": None}
LORA = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj"], task_type="CAUSAL_LM")


@pytest.mark.parametrize(
    ("build", "draws"),
    [
        (lambda: small("mixtral", **SMALL, **JITTER), True),
        (lambda: noisy(small("qwen2", **SMALL)), True),
        (lambda: get_peft_model(noisy(small("qwen2", **SMALL)), LORA), True),
        (lambda: get_peft_model(small("qwen2", **SMALL), LORA), False),
        (lambda: small("mixtral", **{**SMALL, **JITTER, "router_jitter_noise": 0.0}), False),
    ],
    ids=["mixtral", "noise", "noise beside dropout", "dropout", "no jitter"],
)
def test_a_model_that_draws_in_training_goes_trls_way_to_the_bit(build, draws, caplog):
    """One draw for a shared prompt is another training: noise is the same for all completions, or weaker by length."""
    model, batch = build(), padded_batch()
    prompts = shared(model)
    results = []
    with caplog.at_level(logging.INFO), torch.no_grad():
        for way in (functools.partial(prompts.log_probs, trls_own), trls_own):
            torch.manual_seed(3)  # the comparison draws none of the run's numbers
            results.append(way(model, *batch, WIDTH)[0])
    assert prompts.is_on == (not draws)
    assert caplog.text.count("draws random numbers in training") == draws
    assert torch.equal(*results) == draws
    assert all(module.training for module in model.modules())


def fails_on_rows(error):
    """A model that fails where all completions are one row, which is what no reason foresees."""
    model = small("qwen2", **SMALL)

    def refuse(_, args):
        if len(args[0]) == 1:
            raise error

    model.model.layers[1].register_forward_pre_hook(refuse)
    return model


def test_a_pass_that_fails_is_no_end_but_memory_that_is_too_small_is(caplog):
    model = fails_on_rows(RuntimeError("Expected all tensors to be on the same device\nat once"))
    prompts, batch = shared(model), padded_batch()
    with caplog.at_level(logging.INFO), torch.no_grad():
        for _ in range(2):
            assert torch.equal(prompts.log_probs(trls_own, model, *batch, WIDTH)[0], trls_own(model, *batch, WIDTH)[0])
    assert caplog.text.count("such a pass fails (RuntimeError: Expected all tensors to be on the same device)") == 1
    assert not prompts.is_on
    assert model.training
    short = fails_on_rows(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        shared(short).log_probs(trls_own, short, *batch, WIDTH)


@pytest.mark.parametrize("updates", [1, 2])  # 2: a warm-up's first one has a learning rate of 0
def test_an_adapter_that_begins_as_nothing_is_compared_again_once_it_has_moved(updates, caplog):
    model, batch = get_peft_model(small("qwen2", **SMALL), LoraConfig(r=4, task_type="CAUSAL_LM")), padded_batch()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    weight = layer.lora_B["default"].weight
    # follows the place in the batch, in which a row and TRL's batch differ
    layer.register_forward_hook(lambda _, __, out: out + weight.mean() * torch.arange(out.size(1))[:, None])
    prompts = shared(model)
    with caplog.at_level(logging.INFO), torch.no_grad():
        for update in range(updates + 1):
            prompts.begin_update()
            if update == updates:
                weight.fill_(1.0)
            ours = prompts.log_probs(trls_own, model, *batch, WIDTH)[0]
            assert prompts.is_on == (update < updates)
    assert torch.equal(ours, trls_own(model, *batch, WIDTH)[0])
    assert caplog.text.count("off: sharing a group's prompt in forward passes") == 1
    assert "log-probs differ" in caplog.text


def test_what_one_rank_finds_stops_all_at_the_next_update(caplog):
    """Ranks compare when they have a shared prompt, so that they agree where all begin an update. Until each has."""
    asked, others = [], iter((1, 2))

    def of_all(number):
        asked.append(number)
        return max(number, next(others))

    model, batch = small("qwen2", **SMALL), padded_batch()
    prompts = shared(model, highest_of_all=of_all)
    with caplog.at_level(logging.INFO), torch.no_grad():
        for is_on in (True, False, False):
            prompts.begin_update()
            assert prompts.is_on == is_on
            prompts.log_probs(trls_own, model, *batch, WIDTH)
    assert asked == [1, 1]
    assert caplog.text.count("another rank found that it cannot") == 1


def test_completions_without_a_token_are_not_compared_and_a_policy_inside_its_wrapper_is():
    """As DDP's without a reference, whose passes come before."""
    model = small("qwen2", **SMALL).eval()
    prompts = shared(model)
    for completions, is_checked in (((0, 0, 6, 1, 0, 4), False), ((0, 10, 6, 1, 0, 4), True)):
        wrapped = torch.nn.DataParallel(model)
        prompts.log_probs(trls_own, wrapped, *padded_batch(completions=completions), WIDTH)
        assert prompts.is_on
        assert prompts.is_checked == is_checked


def test_a_comparison_takes_no_part_in_ddps_collectives():
    """Ranks may compare at different updates: one whose completions all failed has none to compare."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, passed = torch.nn.parallel.DistributedDataParallel(small("qwen2", **SMALL).eval()), []
        model.register_forward_pre_hook(lambda *_: passed.append(torch.is_grad_enabled()))
        prompts = shared(model.module)
        prompts.log_probs(trls_own, model, *padded_batch(completions=(4, 10, 6, 1, 5, 4)), WIDTH)
    finally:
        torch.distributed.destroy_process_group()
    assert prompts.is_checked
    assert passed == [True]  # the update's own pass


def split(ids, mask):
    prompt, completion = slice(None, -WIDTH), slice(-WIDTH, None)
    return {"prompt_ids": ids[:, prompt], "prompt_mask": mask[:, prompt],
            "completion_ids": ids[:, completion], "completion_mask": mask[:, completion]}  # fmt: skip


@pytest.mark.parametrize(
    ("lora", "checkpointing", "most_tokens"),
    [(True, True, 1), (False, False, 30), (True, False, 1000), (False, True, 1000)],
)
def test_micro_batches_that_share_a_pass_keep_their_losses_and_the_gradient_is_the_sum(
    lora, checkpointing, most_tokens
):
    model = small("qwen2", **SMALL)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    prompts, (ids, mask) = shared(model), padded_batch()
    batches = [split(ids[rows], mask[rows]) for rows in ([0, 3], [1, 4], [2, 5])]
    given = {"compute_entropy": True, "compute_aux_loss": False}
    with torch.no_grad():
        prompts.log_probs(trls_own, model, ids, mask, WIDTH)  # the comparison

    def accumulated(log_probs):
        model.zero_grad()
        losses = []
        for place, batch in enumerate(batches):
            logps, entropies, _ = log_probs(place, Columns.of([batch]))
            weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(place))
            losses.append((logps.exp() * weights).sum() + 0.3 * (entropies * weights).sum())
            losses[-1].backward()
        grads = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        return torch.stack(losses).detach(), grads

    ahead, passes = Passes(prompts, most_tokens, 1), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))

    def ours(place, batch):
        ahead.begin(batches[place:], len(batches), is_last=place + 1 == len(batches))
        return ahead.log_probs({}, trls_own, model, *batch, **given)

    losses, grads = accumulated(ours)
    assert len(passes) == {1: 3, 30: 2, 1000: 1}[most_tokens]
    wanted, wanted_grads = accumulated(lambda _, batch: trls_own(model, *batch, **given))
    assert apart(losses, wanted) < TOLERANCE
    assert apart(grads, wanted_grads) < TOLERANCE


def test_the_passes_of_an_update_are_of_one_size():
    model = small("qwen2", **SMALL)
    prompts, (ids, mask) = shared(model), padded_batch()
    prompts.log_probs(trls_own, model, ids, mask, WIDTH)  # the comparison
    batches, sizes = [split(ids[[0, 3]], mask[[0, 3]]) for _ in range(4)], []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: sizes.append(given[0].numel()))
    ahead = Passes(prompts, 55, 1)  # three of the four fit
    for place in range(4):
        ahead.begin(batches[place:], 4, is_last=place == 3)
        ahead.log_probs({}, trls_own, model, *Columns.of(batches[place : place + 1]), compute_entropy=True)
    assert sizes == [39, 39]


@pytest.mark.parametrize(
    ("weights", "padded", "fitting", "is_light", "tokens"),
    [
        (7.6e9, 10_328, 0, True, 10_328),  # as TRL's own pass
        (7.6e9, 3_072, 0, True, 3_947),  # as fill a GPU
        (7.6e9, 26_712, 0, True, 15_788),  # four times as many
        (7.6e9, 26_712, 7_300, True, 7_300),  # as keep their activations
        (7.6e9, 26_712, 1_000, True, 3_947),
        (7.6e9, 10_328, 0, False, 3_947),
        (0.5e9, 3_072, 0, False, 3_072),
        (0.5e9, 26_712, 0, True, 26_712),
        (0.5e9, 26_712, 1_000, True, 16_384),
    ],
)
def test_a_pass_is_as_large_as_fills_a_gpu_and_where_tokens_are_light_as_trls_own(
    weights, padded, fitting, is_light, tokens
):
    assert unasked_tokens(int(weights), padded, fitting, is_light=is_light) == tokens


def test_one_token_is_one_micro_batch_a_pass_even_where_nothing_is_there_to_predict():
    """Ranks that share their weights make as many passes: one of them may have an empty prompt, and all masked."""
    model = small("qwen2", **SMALL)
    prompts, (ids, mask) = shared(model), padded_batch((1, 1), (0, 0))
    prompts.log_probs(trls_own, model, *padded_batch(), WIDTH)  # the comparison
    batches, ahead, passes = [split(ids, mask), split(ids, mask)], Passes(prompts, 1, 1), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    for place, batch in enumerate(batches):
        ahead.begin(batches[place:], 2, is_last=place == 1)
        ahead.log_probs({}, trls_own, model, *Columns.of([batch]), compute_entropy=True)
        assert len(passes) == place + 1


def test_a_micro_batch_out_of_turn_is_refused():
    model = small("qwen2", **SMALL)
    prompts, (ids, mask) = shared(model), padded_batch()
    first, second, other = (split(ids, mask) for _ in range(3))
    ahead = Passes(prompts, 1000, 1)
    ahead.begin([first, second], 2, is_last=False)
    ahead.log_probs({}, trls_own, model, *Columns.of([first]), compute_entropy=True, compute_aux_loss=False)
    with pytest.raises(RuntimeError, match="another micro-batch arrived"):
        ahead.begin([other], 2, is_last=True)
    ahead.forget()
    ahead.begin([other], 1, is_last=True)


def test_ranks_that_pass_together_make_as_many_passes_as_the_one_with_most():
    model = small("qwen2", **SMALL).eval()
    prompts, passes = shared(model, highest=lambda number: max(number, 4) if number > 0 else number), []
    ids, mask = padded_batch()
    with torch.no_grad():
        prompts.log_probs(trls_own, model, ids, mask, WIDTH)
        model.register_forward_pre_hook(lambda *_: passes.append(1))
        ours = prompts.log_probs(trls_own, model, ids, mask, WIDTH)[0]
        assert len(passes) == 4
        assert apart(ours, trls_own(model, ids, mask, WIDTH)[0]) < TOLERANCE
