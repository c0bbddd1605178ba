"""Stand-ins for the models and datasets of TRL's own tests, for a machine without a model hub.

A folder gets local folders of the very names that the tests ask the hub for. Run in that folder, the tests find them.
Models have random weights. Their tokenizer has few ids, or all of Qwen's: some tests write down completions in these.
"""

import codecs
import io
import json
import pydoc_data.topics
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

ORGANIZATION = "trl-internal-testing"
SMALL_VOCABULARY = 8192
END_OF_TEXT, END_OF_MESSAGE = 151_643, 151_645
SPECIAL = {END_OF_TEXT: "<|endoftext|>", 151_644: "<|im_start|>", END_OF_MESSAGE: "<|im_end|>"}
ADDED = {
    151_657: "<tool_call>",
    151_658: "</tool_call>",
    151_665: "<tool_response>",
    151_666: "</tool_response>",
    151_667: "<think>",
    151_668: "</think>",
}
TOKENS = {
    397: ">\n", 411: "out", 450: " de", 497: '",', 522: "</", 606: "name", 788: '":', 894: " any", 927: "sh",
    944: "'t", 293: " b", 314: " {", 330: ' "', 1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"',
    5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n", 13477: "crement",
    14172: "tool", 16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment",
    64648: "multiply", 93054: "_multiply", 95642: '"}}\n',
}  # fmt: skip
"""Ids of Qwen's vocabulary in completions that the tests make up."""
WORDS = (4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, 5, 4, 3, 4, 5, 5, 2)
"""How many words of each line of the Zen of Python are the prompt."""
TRAIN_ROWS = {"standard_prompt_only": 12, "conversational_prompt_only": 1}
"""Fewer than on the hub: steps take seconds on a CPU."""
TEST_ROWS = 2
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "bos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
POLICIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5", {}),
    "Qwen3ForCausalLM": ("qwen3", "qwen3", {}),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "Gemma2ForCausalLM": ("gemma2", "gemma", {"head_dim": 8}),
    "Cohere2ForCausalLM": ("cohere2", "cohere2", {"logit_scale": 1.0}),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        "glm4moe",
        {**EXPERTS, "head_dim": 2, "n_routed_experts": 4, "attention_bias": True, "use_qk_norm": True},
    ),
    "GptOssForCausalLM": ("gpt_oss", "gptoss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "NemotronHForCausalLM-nano": (
        "nemotron_h",
        "nemotron_3_nano",
        {
            **EXPERTS,
            "hidden_size": 16,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "mamba_n_groups": 1,
            "ssm_state_size": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
            "use_mamba_kernels": False,
        },
    ),
}
"""Name, type of model, chat template of TRL, and further settings."""
JUDGES = {
    "Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5"),
    "Qwen3ForSequenceClassification": ("qwen3", "qwen3"),
    "LlamaForSequenceClassification-3.2": ("llama", "llama3_2"),
}


def _write_tokenizer(folder: Path, with_ids_of_qwen: bool) -> int:
    """A tokenizer of common words, and of bytes. Every id has a text of its own. Returns the number of ids."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_word = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = dict(enumerate(letters))
    if with_ids_of_qwen:
        written = {number: whole.pre_tokenize_str(text)[0][0] for number, text in TOKENS.items()}
        texts |= {**written, **SPECIAL, **ADDED}
    words = {word for topic in pydoc_data.topics.topics.values() for word, _ in by_word.pre_tokenize_str(topic)}
    further = chain(sorted(words.difference(texts.values())), (f"Ġw{number}" for number in count()))
    size = max(ADDED) + 1 if with_ids_of_qwen else SMALL_VOCABULARY - len(SPECIAL) - len(ADDED)
    vocabulary = {texts[number] if number in texts else next(further): number for number in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = by_word, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL.values()])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED.values()])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[END_OF_MESSAGE], pad_token=SPECIAL[END_OF_TEXT]
    ).save_pretrained(folder)
    return len(vocabulary) if with_ids_of_qwen else SMALL_VOCABULARY


def _write_model(model: PreTrainedModel, folder: Path, tokenizer: Path, template: str) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).hardlink_to(file)
    text = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    (folder / "chat_template.jinja").write_text(text)


def _zen() -> Iterator[tuple[str, str]]:
    """The beginning of each line of the Zen of Python, and its end."""
    with redirect_stdout(io.StringIO()):
        import this
    lines = codecs.decode(this.s, "rot13").splitlines()[2:]
    for line, size in zip(lines, WORDS, strict=True):
        words = line.split(" ")
        yield " ".join(words[:size]), " " + " ".join(words[size:])


def _write_zen(folder: Path) -> None:
    rows = [
        ({"prompt": prompt}, {"prompt": [{"role": "user", "content": f"What is better than {end}?"}]})
        for prompt, end in _zen()
    ]
    configs = []
    for place, (name, size) in enumerate(TRAIN_ROWS.items()):
        for split, part in (("train", rows[:size]), ("test", rows[-TEST_ROWS:])):
            file = folder / name / f"{split}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row[place]) + "\n" for row in part))
        configs.append({"config_name": name, "data_files": [
            {"split": split, "path": f"{name}/{split}.jsonl"} for split in ("train", "test")]})  # fmt: skip
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")


def _remote_model(recipes: Path, sizes: dict[str, Any]) -> PreTrainedModel:
    """The model with code of its own, which lies in TRL's checkout."""
    sys.path.insert(0, str(recipes))
    from _remote_code.configuration_remote import RemoteConfig
    from _remote_code.modeling_remote import RemoteForCausalLM

    RemoteConfig.register_for_auto_class()
    RemoteForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    return RemoteForCausalLM(RemoteConfig(**sizes))


def build(folder: Path, checkout: Path, with_ids_of_qwen: bool) -> None:
    """Build the stand-ins.

    Args:
        folder (`Path`):
            The folder that gets them.
        checkout (`Path`):
            A checkout of TRL.
        with_ids_of_qwen (`bool`):
            Whether policies have Qwen's ids, 152 thousand of them. Else they have few, and steps take less time.
    """
    torch.manual_seed(0)
    hub, tokenizer = folder / ORGANIZATION, folder / "tokenizer"
    size = _write_tokenizer(tokenizer, with_ids_of_qwen)
    known = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    usual = {**SIZES, "vocab_size": size, "pad_token_id": known.pad_token_id, "eos_token_id": known.eos_token_id}
    for name, (kind, template, more) in POLICIES.items():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**usual, **more}))
        _write_model(model, hub / f"tiny-{name}", tokenizer, template)
    for name, (kind, template) in JUDGES.items():
        config = AutoConfig.for_model(kind, **{**usual, "hidden_size": 16, "num_labels": 1})
        _write_model(AutoModelForSequenceClassification.from_config(config), hub / f"tiny-{name}", tokenizer, template)
    remote = _remote_model(checkout / "scripts/generate_tiny_models/for_causal_lm", usual)
    _write_model(remote, hub / "tiny-RemoteForCausalLM", tokenizer, "llama3_2")
    _write_zen(hub / "zen")
