"""Training whose completions and rewards depend on the sample alone, not on its rank or on the order of samples."""

import itertools
import json
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import trl
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.demo.packaged import packaged_tokenizer
from salesrl_trl.ground.fencing import read_sections
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.names import beta_of, kl_of
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import DEFAULT_BRANCHES, Message, SalesRow
from salesrl_trl.update.ledger import kl_names
from support.loopback import VERDICT, action, build_reward
from support.pushing import generation_of
from support.scripted import settings

WORDS = ("price", "course", "schedule", "refund", "data", "nurse", "evening", "online", "teacher", "trial", "python")
UNSCORABLE = "unscorable"
"""A query with this word gets a verdict that is none."""
BRANCH_KL = {
    "fairness": {"beta": 0.1, "low": 0.02, "high": 0.2},
    "hallucination": {"beta": 0.2, "low": 0.1, "high": 0.2},
}
"""Bands that the KL of these runs crosses. The first one begins so low that its first rise is over in the first
window: with a cooldown, the branches' windows end at different steps."""
TOLERANCE = 1e-5
"""Relative; and absolute but for coefficients, as a KL is 0 at first and a loss changes its sign. Sums in another
order differ by up to 9e-7; a sum that lacks a micro-batch or a rank is off by more than 1e-2."""
BETA_TOLERANCE = 1e-4
"""A coefficient follows the logarithm of a KL whose tokens have both signs: near 0 a sum of them has fewer digits."""
GRAD_NORM_TOLERANCE = 1e-4
"""Torch sums the 100 000 squares of a head's gradient in float32, DeepSpeed in float64; 3e-5 was seen."""
PUSHES = 30
EXACT = ("_tokens", "_in_band", "_clamped")
"""Ends of the names of what is counted."""


def text_of(prompt, step, place):
    """One to nine words, most of them in an action: ragged, and different for each sample."""
    digest = zlib.crc32(f"{prompt}|{step}|{place}".encode())
    words = " ".join(WORDS[(digest >> index) % len(WORDS)] for index in range(1 + digest % 9))
    return words if digest % 5 == 0 else action(query=words)


def judge(system, user):
    """A score in [0, 1] by the action's text, of one or of each of a group."""
    sections = read_sections(user)
    scores = {
        name: zlib.crc32(written.encode()) % 101 / 100
        for name, written in sections.items()
        if name.startswith("action") and UNSCORABLE not in written
    }
    if "candidate_answer" in sections:
        return {**VERDICT, "candidate": scores["action"]} if scores else {}
    named = [{"name": name.removeprefix("action_"), "score": score} for name, score in scores.items()]
    return {"candidates": named, **{name: VERDICT[name] for name in ("reference", "reason")}}


class KeyedTrainer(SalesGRPOTrainer):
    """Generation replaced: a completion is `text_of` its prompt, the optimizer step and the place in its group."""

    text_of = staticmethod(text_of)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        group = self.num_generations if self.model.training else self.num_generations_eval
        first = self.accelerator.process_index * len(prompt_ids)
        completions = []
        for place, ids in enumerate(prompt_ids, start=first):
            text = self.text_of(self._tokenizer.decode(ids), self.state.global_step, place % group)
            completions.append([*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id])
        return completions, None


class PushingTrainer(KeyedTrainer):
    """Pushes its weights before each rollout, as with vLLM: `PUSHES` times from the second step on."""

    def _generate_single_turn(self, *args, **kwargs):
        generation = generation_of(self.model)
        for _ in range(PUSHES if self.state.global_step else 1):
            generation.sync_weights()
        return super()._generate_single_turn(*args, **kwargs)


class States(TrainerCallback):
    """The controller's state after each optimizer step and after each evaluation, by the step's number as text."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.after = {}
        self.after_evaluation = {}

    def on_step_end(self, args, state, control, **_):
        self.after[str(state.global_step)] = self._state()

    def on_evaluate(self, args, state, control, **_):
        self.after_evaluation[str(state.global_step)] = self._state()

    def _state(self):
        return json.loads(json.dumps(self.trainer.components.kl.control.state_dict()))  # as a checkpoint has it


class StopAt(TrainerCallback):
    """Ends a run after a step, with a checkpoint."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_save = control.should_training_stop = state.global_step == self.step


class SaveAt(TrainerCallback):
    """Checkpoints at some steps alone: each takes as long as three steps here."""

    def __init__(self, *steps):
        self.steps = steps

    def on_step_end(self, args, state, control, **_):
        control.should_save |= state.global_step in self.steps


def make_tiny_policy(path, kind="qwen2", **shape):
    """The smallest policy with everything: random weights, one layer unless `shape` says otherwise."""
    tokenizer = packaged_tokenizer()
    torch.manual_seed(0)
    defaults = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**defaults, **shape})).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_calling_policy(path, **shape):
    """A policy whose chat template is one that TRL reads tool calls of, with room for more turns."""
    policy = make_tiny_policy(path, **{"max_position_embeddings": 1024, **shape})
    shutil.copy(Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja", policy / "chat_template.jinja")
    return policy


def keyed_rows(branches):
    """A row of each of `branches`, no two with the same prompt."""
    return [
        SalesRow(
            row_id=f"r{index}",
            branch=branch,
            conversation=(Message(role="customer", content=f"Question {index}: what does course {7 * index} cost?"),),
        )
        for index, branch in enumerate(branches)
    ]


def build_keyed(policy, url, output_dir, branches=DEFAULT_BRANCHES * 30, lora=None, dtype=None, judging=None, **given):
    """A trainer of rows of `branches`, whose coefficients may move every two steps unless `given` otherwise. With
    `lora` it trains an adapter, and pushes its weights before each rollout."""
    rows = keyed_rows(branches)
    defaults = {"num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 20, "held_out_eval": False}
    defaults |= {"beta": 0.0, "branch_kl": BRANCH_KL, "loss_type": "dapo", "kl_update_steps": 2}
    return (PushingTrainer if lora else KeyedTrainer)(
        AutoModelForCausalLM.from_pretrained(policy, dtype=dtype),
        build_reward(url, rows, invalid_action_reward=0.0, judging=judging),
        SalesGRPOConfig(**settings(output_dir, **{**defaults, **given})),
        train_dataset=build_dataset(rows, "compact"),
        eval_dataset=build_dataset(rows[:4], "compact"),
        processing_class=AutoTokenizer.from_pretrained(policy),
        peft_config=lora,
    )


def course_of(trainer, *callbacks, resume_from=None):
    """Train, and say what happened: the logs of `steps` and `evaluations`, and the controller's state."""
    states = States(trainer)
    for callback in (states, *callbacks):
        trainer.add_callback(callback)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as launched processes have; and where cores are busy threads wait for each other
    try:
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    finally:
        trainer.finish()
        torch.set_num_threads(threads)
    first = int(next(iter(states.after)))  # the log of a resumed run begins with that of the run before
    steps = [entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] >= first]
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    seen = {"after": states.after, "after_evaluation": states.after_evaluation}
    return {"steps": steps, "evaluations": evaluations, **seen}


def betas_of(course, branch):
    """The coefficient of each step."""
    return [entry[beta_of(branch)] for entry in course["steps"]]


def check_same_course(one, other):
    """The same losses, norms of the gradient, KL statistics and coefficients at every step, but for `TOLERANCE`."""
    assert len(one["steps"]) == len(other["steps"])
    for a, b in zip(one["steps"], other["steps"], strict=True):
        assert set(a) == set(b)
        for name in ("loss", "grad_norm", *kl_names(DEFAULT_BRANCHES)):
            if a[name] is None or b[name] is None or name.endswith(EXACT):
                assert a[name] == b[name], (a["step"], name)
                continue
            tolerance = {"grad_norm": GRAD_NORM_TOLERANCE, "beta": BETA_TOLERANCE}.get(name.split("/")[0], TOLERANCE)
            absolute = 0 if name.startswith("beta/") else tolerance
            assert b[name] == pytest.approx(a[name], rel=tolerance, abs=absolute), (a["step"], name)


def check_there_was_control(course):
    """There was a KL at every step after the first, and both coefficients were lowered and raised."""
    for entry in course["steps"][1:]:
        for branch in DEFAULT_BRANCHES:
            assert entry[f"{kl_of(branch)}_tokens"] == 0 or abs(entry[kl_of(branch)]) > 1e-3  # k1 has both signs
    for branch in DEFAULT_BRANCHES:
        betas = betas_of(course, branch)
        factors = [after / before for before, after in itertools.pairwise(betas) if after != before]
        assert len(factors) >= 2, (branch, betas)
        assert min(factors) < 1 < max(factors), (branch, betas)
