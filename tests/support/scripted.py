"""Trainers with completions that a test writes."""

import inspect

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.launch.data.sources import build_dataset
from salesrl_trl.trainer import SalesGRPOTrainer
from salesrl_trl.types import DEFAULT_BRANCHES
from support.loopback import ACTION, BAD, action, build_reward, row

DIFFERENT = tuple(action(query=f"q{index}") for index in range(96))
"""Actions that no cache answers, as many as a test may need."""


class Scripted:
    """Replaces generation: every completion is the next of `texts`, which starts over at its end."""

    texts = (ACTION, BAD)
    generated = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completions = []
        for _ in prompt_ids:
            text = self.texts[self.generated % len(self.texts)]
            completions.append([*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id])
            self.generated += 1
        return completions, None


class ScriptedTrainer(Scripted, SalesGRPOTrainer):
    """Our trainer."""


class ScriptedUpstream(Scripted, GRPOTrainer):
    """TRL's own trainer, to compare with."""


def settings(output_dir, **given):
    """Settings of a trainer that makes a few short steps on the CPU."""
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 64,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "beta": 0.1,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "weight_decay": 0.1,
        **given,
    }


def sales_settings(output_dir, **given):
    """Those of our trainer."""
    return settings(output_dir, **{"branches": [*DEFAULT_BRANCHES], "held_out_eval": False, **given})


def build_trainer(policy_path, reward, texts, rows, output_dir, kind=ScriptedTrainer, **given):
    """Our trainer with scripted completions, or one of another `kind`."""
    # All others that a test gives are settings, as are names of these.
    of_it = {name for each in (SalesGRPOTrainer, GRPOTrainer) for name in inspect.signature(each.__init__).parameters}
    own = {name: given.pop(name) for name in [*given] if name in of_it and not isinstance(given[name], str)}
    dataset = build_dataset(rows, "compact")
    own.setdefault("eval_dataset", dataset)
    trainer = kind(
        AutoModelForCausalLM.from_pretrained(policy_path),
        reward,
        SalesGRPOConfig(**sales_settings(output_dir, **given)),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(policy_path),
        **own,
    )
    trainer.texts = texts
    return trainer


def build_upstream_trainer(policy_path, reward_funcs, texts, output_dir, rows=None, **given):
    """TRL's trainer with scripted completions."""
    trainer = ScriptedUpstream(
        AutoModelForCausalLM.from_pretrained(policy_path),
        reward_funcs,
        GRPOConfig(**settings(output_dir, **given)),
        train_dataset=build_dataset(rows or [row()], "compact"),
        processing_class=AutoTokenizer.from_pretrained(policy_path),
    )
    trainer.texts = texts
    return trainer


def steps_of(trainer):
    """The log lines of a trainer's optimizer steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def default_rows():
    """Four prompts of each branch."""
    return [row(f"r{i}", branch) for i, branch in enumerate(("fairness", "hallucination") * 4)]


def loopback_reward(services, rows, **chain):
    """The usual chain of trainers in tests."""
    return build_reward(services.url, rows, **{"invalid_action_reward": 0.0, **chain})


def length(completions, **_):
    """A reward function that tells the completions of a group apart."""
    return [len(each[0]["content"]) % 17 / 17 for each in completions]


def padded_behind(input_ids, texts, tokenizer):
    """Prompts with these completions, as a model's `generate` returns them."""
    ids = [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return torch.cat([input_ids, padded], dim=1)


class Gradients(TrainerCallback):
    """The gradient of each update, one vector; `None` where there is none."""

    def __init__(self, trainer):
        self.trainer, self.found = trainer, []
        trainer.add_callback(self)

    def on_pre_optimizer_step(self, *_, **__):
        grads = [each.grad.flatten() for each in self.trainer.model.parameters() if each.grad is not None]
        self.found.append(torch.cat(grads) if grads else None)


class Reasons(TrainerCallback):
    """How many completions were left out, by reason."""

    def __init__(self):
        self.found = {}

    def on_log(self, args, state, control, logs=None, **_):
        for name, value in (logs or {}).items():
            if name.startswith("failures/reason/"):
                reason = name.removeprefix("failures/reason/")
                self.found[reason] = self.found.get(reason, 0) + round(value)


def trained_by(trainer):
    """The policy's tokens of each completion that it trains on, the reasons of those that are left out, and how
    far its log-probs are at most from the sampler's, where both are of the first weights."""
    trained, reasons, differences, score = [], Reasons(), [], trainer._generate_and_score_completions

    def scored(inputs):
        output = score(inputs)
        columns = (output[name] for name in ("completion_ids", "tool_mask", "completion_mask"))
        for ids, mask, kept in zip(*columns, strict=True):
            if bool(kept.any()):
                trained.append([int(token) for token, one in zip(ids, mask * kept, strict=True) if one])
        if "sampling_per_token_logps" in output and trainer.state.global_step == 0:
            apart = trainer._hooks.logps_of(output) - output["sampling_per_token_logps"]
            differences.append(float((apart * output["completion_mask"] * output["tool_mask"]).abs().max()))
        return output

    trainer._generate_and_score_completions = scored
    trainer.add_callback(reasons)
    return trained, reasons.found, differences
