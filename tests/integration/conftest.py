"""A warm-started small policy, made once for all integration tests, and a trainer around it."""

import pytest
from support.loopback import ACTION, BAD, Services, build_reward, row
from transformers import AutoModelForCausalLM, AutoTokenizer

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.data.sources import build_dataset
from salesrl_trl.policy import make_policy
from salesrl_trl.trainer import SalesGRPOTrainer

WARM_START_STEPS = 40
"""Enough for some valid actions."""


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "policy"
    make_policy(path, WARM_START_STEPS, seed=0)
    return path


@pytest.fixture
def services(httpserver):
    return Services(httpserver)


class ScriptedTrainer(SalesGRPOTrainer):
    """The trainer with its generation replaced: every completion is the next of `texts`, which starts over."""

    texts = ()
    generated = 0

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completions = []
        for _ in prompt_ids:
            text = self.texts[self.generated % len(self.texts)]
            completions.append([*self._tokenizer(text)["input_ids"], self._tokenizer.eos_token_id])
            self.generated += 1
        return completions, None


@pytest.fixture
def scripted_trainer(policy_path, services, tmp_path):
    """Build a trainer whose completions are scripted and whose services are on loopback."""
    built = []

    def build(texts=(ACTION, BAD), **settings):
        defaults = {
            "output_dir": str(tmp_path / "run"),
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
        }
        rows = [row(f"r{i}", branch) for i, branch in enumerate(("fairness", "hallucination") * 4)]
        trainer = ScriptedTrainer(
            AutoModelForCausalLM.from_pretrained(policy_path),
            build_reward(services.url, rows, invalid_action_reward=0.0),
            SalesGRPOConfig(**{**defaults, "held_out_eval": False, **settings}),
            train_dataset=build_dataset(rows, "compact"),
            eval_dataset=build_dataset(rows, "compact"),
            processing_class=AutoTokenizer.from_pretrained(policy_path),
        )
        trainer.texts = texts
        built.append(trainer)
        return trainer

    yield build
    for trainer in built:
        trainer.finish()
