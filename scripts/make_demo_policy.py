#!/usr/bin/env python3
"""Teaches the built-in small policy what the demo's customers ask, and says what it can do.

    .venv/bin/python scripts/make_demo_policy.py [--out FOLDER] [--steps 4000] [--seed 0]

The policy imitates drafts of annotators, of which many are careless: they name a customer's origin, leave out the
course or the topic, and invent facts. So the policy knows what a customer asks, and GRPO has much to improve.

The conversations come from the generator of the demo's rows, with draws of their own. None holds a message of a
held-out row, and none asks a question that is kept for held-out rows. The figures at the end are those of actions for
the held-out rows, sampled at temperature 1, four for each row. They are printed and written to `figures.json`.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from datasets import Dataset
from demo_content.conversations import BRANCHES, build_split, normalise
from imitation import imitate  # beside this file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

from salesrl_trl.data.files import demo_path, load_documents
from salesrl_trl.data.rows import parse_row
from salesrl_trl.demo.packaged import PACKAGED, PROMPT_STYLE
from salesrl_trl.demo.services.rubric import judge_sections, protected_terms
from salesrl_trl.demo.services.services_app import KnowledgeIndex, search_text
from salesrl_trl.ground.shutdown import end_tidily
from salesrl_trl.judged.parsing import parse_action
from salesrl_trl.launch.data.prompts import build_prompt
from salesrl_trl.launch.data.sources import load_drafts, load_rows
from salesrl_trl.types import Action, InvalidAction, SalesRow

VOCAB_SIZE = 3072
HIDDEN_SIZE = 128
LAYERS = 2
HEADS = 4
"""Each head has size 32, the smallest that vLLM's CPU attention accepts."""
MLP_SIZE = 384
MAX_POSITIONS = 512
ROWS_AT_ONCE = 960
"""A customer's message comes once in so many conversations. There are too few phrases for more."""
BATCH_SIZE = 64
LEARNING_RATE = 4e-3
ADAM_BETA2 = 0.99
WARMUP_FRACTION = 0.05
SAMPLES = 4
MAX_COMPLETION = 64
ROWS_OF_A_BATCH = 80

_PIECES = ('{"user_profile": "', '", "rewritten_query": "', '", "history_summary": "', '"}')
"""Fixed texts of an action. Each is one token: 4 tokens instead of about 30, which the CPU generates one by one."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    """Teach a policy, save it, print its scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PACKAGED, help="folder to write to")
    parser.add_argument("--steps", type=int, default=4000, help="steps of supervised fine-tuning")
    parser.add_argument("--seed", type=int, default=0, help="of weights, conversations and their order")
    parser.add_argument("--conversations", type=int, default=9600, help="to teach from; 4 drafts each")
    parser.add_argument("--rows", type=int, help="held-out rows to measure; all by default")
    args = parser.parse_args()
    set_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    taught = Dataset.from_list(list(demonstrations(args.conversations, args.seed)))
    imitate(
        model,
        tokenizer,
        taught,
        steps=args.steps,
        warmup=WARMUP_FRACTION,
        learning_rate=LEARNING_RATE,
        per_device_train_batch_size=BATCH_SIZE,
        adam_beta2=ADAM_BETA2,
        max_length=MAX_POSITIONS,
        seed=args.seed,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True  # the trainer turned it off
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    found = figures(model, tokenizer, args.rows)
    (args.out / "figures.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{args.out}: {model.num_parameters():,} parameters, {args.steps} steps, seed {args.seed}")
    for name, value in found.items():
        print(f"  {name}: {value:.3f}")


def build_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` entries, trained on the demo's conversations and drafts."""
    texts = []
    for row, drafts in load_drafts():
        texts.append(row.context)
        texts.extend(value for draft in drafts for value in draft.values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_PIECES),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in _PIECES])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
    )


def build_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A Qwen2 of about 1.2 million random weights in float32."""
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=MLP_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def demonstrations(conversations: int, seed: int) -> Iterator[dict[str, Any]]:
    """The drafts of new conversations, each with its prompt."""
    rng = random.Random(f"demonstrations {seed}")
    held_out = [message.content for row in load_rows("demo", "heldout", BRANCHES) for message in row.conversation]
    for _ in range(conversations // ROWS_AT_ONCE):
        for position, record in enumerate(build_split("train", ROWS_AT_ONCE, set(map(normalise, held_out)), 0, rng)):
            prompt = build_prompt(parse_row(record, position, BRANCHES, "the generator"), PROMPT_STYLE)
            for draft in record["draft_actions"]:
                action = json.dumps(draft, ensure_ascii=False)
                yield {"prompt": prompt, "completion": [{"role": "assistant", "content": action}]}


def figures(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> dict[str, float]:
    """Shares of valid actions and of right documents, and the mean reward by branch, over sampled actions."""
    index = KnowledgeIndex(load_documents(demo_path("knowledge.jsonl")))
    terms = protected_terms()
    valid, right = [], []
    rewards: dict[str, list[float]] = {branch: [] for branch in BRANCHES}
    rows = load_rows("demo", "heldout", BRANCHES, most)
    for row, texts in zip(rows, sampled(model, tokenizer, rows), strict=True):
        for text in texts:
            action = parse_action(text)
            valid.append(isinstance(action, Action))
            if isinstance(action, InvalidAction):
                right.append(False)
                rewards[row.branch].append(0.0)
                continue
            profile, summary = action.others
            query = search_text(action.query, profile, summary)
            answer = "".join(passage.text for passage in index.search(query, 1, 0.0))
            right.append(answer in row.documents)
            sections = {
                "branch": row.branch,
                "conversation": row.context,
                "documents": "\n\n".join(row.documents),
                "action": json.dumps(action.as_dict(), ensure_ascii=False),
                "candidate_answer": answer,
            }
            rewards[row.branch].append(judge_sections(sections, terms).candidate)
    return {
        "valid_actions": fmean(valid),
        "right_document": fmean(right),
        **{f"reward_{branch}": fmean(values or [0.0]) for branch, values in rewards.items()},
    }


@torch.no_grad()
def sampled(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[SalesRow]) -> list[list[str]]:
    """`SAMPLES` actions for each row, at temperature 1."""
    model.eval()
    texts: list[str] = []
    for first in range(0, len(rows), ROWS_OF_A_BATCH):
        prompts = [build_prompt(row, PROMPT_STYLE) for row in rows[first : first + ROWS_OF_A_BATCH]]
        batch = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        ids = model.generate(
            **batch, do_sample=True, top_k=0, max_new_tokens=MAX_COMPLETION, num_return_sequences=SAMPLES
        )  # (rows x SAMPLES, P + C)
        texts += tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [texts[first : first + SAMPLES] for first in range(0, len(texts), SAMPLES)]


if __name__ == "__main__":
    end_tidily()
    main()
