"""A run of the debug recipe that a test stops, without vLLM: python tests/support/run_until_stopped.py SETTINGS...

Every micro-batch of the training is a line of `trained.jsonl` in its folder: the number of steps before, and prompts.
"""

import json
import sys
from pathlib import Path

import torch

import salesrl_trl.trainer
from salesrl_trl.launch import train
from support.loopback import action
from support.scripted import ScriptedTrainer

RECIPE = Path(__file__).parents[2] / "recipes/debug.yaml"
PROMPTS = 16
STEPS = 8
"""An epoch: two prompts a step, two completions of each."""
LOOKAHEAD = 2
SETTINGS = {
    "use_cpu": True,
    "use_vllm": False,
    "max_train_rows": PROMPTS,
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "rollout_lookahead": LOOKAHEAD,
    "reward_deadline_s": 90,
    "judge_timeout_s": 90,
    "hedge_fraction": 0,
    "cache_answers": False,
    "held_out_eval": False,
    "quick_eval_steps": 0,
    "report_to": "none",
}


class Recorded(ScriptedTrainer):
    """Writes down what it trains on."""

    texts = tuple(action(query=f"q{number}") for number in range(400))

    def _compute_loss(self, model, inputs):
        prompts = self._tokenizer.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)
        with Path(self.args.output_dir, "trained.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"done": self.state.global_step, "prompts": prompts}) + "\n")
        return super()._compute_loss(model, inputs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    salesrl_trl.trainer.SalesGRPOTrainer = Recorded
    arguments = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value).lower())]
    train.main(RECIPE, [*arguments, *sys.argv[1:]])
