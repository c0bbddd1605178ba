#!/usr/bin/env python3
"""Teaches the policy of `recipes/own.py` to add two numbers, from answers of which half are wrong.

    .venv/bin/python scripts/make_arithmetic_policy.py [--out FOLDER] [--steps 1500] [--seed 0]

So it often has the right answer and is often wrong, which GRPO improves. It saw no held-out question. The figures at
the end are its shares of right answers at temperature 1, of the training and of the held-out questions.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from imitation import imitate  # beside this file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM, set_seed
from transformers import Qwen2Config as Config

from salesrl_trl.data.files import ARITHMETIC, FILES, demo_records
from salesrl_trl.demo.packaged import ARITHMETIC_POLICY, PACKAGED
from salesrl_trl.ground.shutdown import end_tidily

WRONG = 0.5  # share of the answers
ERRORS = (-10, -2, -1, 1, 2, 10)  # by which they are wrong
ANSWERS = 8  # to learn from, for each question
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_POSITIONS = 64


def main() -> None:
    """Teach a policy, save it, print its scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ARITHMETIC_POLICY, help="folder to write to")
    parser.add_argument("--steps", type=int, default=1500, help="steps of supervised fine-tuning")
    parser.add_argument("--seed", type=int, default=0, help="of weights, answers and their order")
    args = parser.parse_args()
    set_seed(args.seed)
    tokenizer = build_tokenizer(MAX_POSITIONS)
    model = build_model(tokenizer, hidden_size=64, layers=2)
    imitate(
        model,
        tokenizer,
        demonstrations(args.seed),
        steps=args.steps,
        warmup=0.05,
        learning_rate=3e-3,
        per_device_train_batch_size=128,
        adam_beta2=0.99,
        max_length=MAX_POSITIONS,
        seed=args.seed,
    )
    model.config.use_cache = True  # the trainer turned it off
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    shares = {
        split: share_of_right(model, tokenizer, demo_records(f"{ARITHMETIC}/{file}")) for split, file in FILES.items()
    }
    (args.out / "figures.json").write_text(json.dumps(shares, indent=2) + "\n", encoding="utf-8")
    print(f"{args.out}: {model.num_parameters():,} parameters, {args.steps} steps, seed {args.seed}: {shares}")


def build_tokenizer(longest: int, texts: Sequence[str] = (), size: int = 0) -> PreTrainedTokenizerBase:
    """A tokenizer of bytes, with the chat template of the demo's policy. With `texts` it has `size` entries, those
    that shorten the texts most."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if texts:
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=letters, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(PACKAGED / "chat_template.jinja").read_text("utf-8"),
        padding_side="left",
        model_max_length=longest,
    )


def build_model(tokenizer: PreTrainedTokenizerBase, *, hidden_size: int, layers: int) -> PreTrainedModel:
    """A Qwen2 of random weights in float32."""
    heads = hidden_size // 32  # the smallest size that vLLM's CPU attention accepts
    config = Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def demonstrations(seed: int) -> Dataset:
    """Questions of the training rows, each with several answers."""
    rng = random.Random(f"arithmetic {seed}")
    rows = []
    for record in demo_records(f"{ARITHMETIC}/{FILES['train']}"):
        for _ in range(ANSWERS):
            answer = int(record["answer"]) + (rng.choice(ERRORS) if rng.random() < WRONG else 0)
            rows.append({"prompt": record["prompt"], "completion": [{"role": "assistant", "content": str(answer)}]})
    return Dataset.from_list(rows)


@torch.no_grad()
def share_of_right(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, records: Sequence[Mapping[str, Any]], longest: int = 8
) -> float:
    """Share of right answers, of up to `longest` tokens. Four are sampled for each `prompt`, which has an `answer`."""
    batch = tokenizer.apply_chat_template(
        [record["prompt"] for record in records], add_generation_prompt=True, padding=True, return_tensors="pt",
        return_dict=True,
    ).to(model.device)  # fmt: skip
    ids = model.eval().generate(**batch, do_sample=True, top_k=0, max_new_tokens=longest, num_return_sequences=4)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(text == records[place // 4]["answer"] for place, text in enumerate(texts)) / len(texts)


if __name__ == "__main__":
    end_tidily()
    main()
