"""An LLM judge as a reward function: it scores each completion as soon as it's generated.

`packaged_judge.py` uses the built-in judge instead. For a judge class inside the built-in reward, see
docs/how-to/llm-judge.md, "A judge class of your own".
"""

import json
import os

from datasets import Dataset
from openai import AsyncOpenAI

from salesrl_trl import Reward, SalesGRPOConfig, SalesGRPOTrainer, Transport, per_completion

MODEL = os.environ.get("MODEL", "Qwen/Qwen2.5-0.5B-Instruct")
RUBRIC = 'Grade the answer. Reply with JSON alone: {"right": 0 to 1, "polite": 0 to 1, "why": "a few words"}'

# `OPENAI_BASE_URL` and `OPENAI_API_KEY` point to the judge. The client doesn't retry, because the transport does: a
# busy judge lowers the concurrency and costs no attempt, and after five failures in a row the transport pauses.
judge = AsyncOpenAI(max_retries=0)
calls = Transport("judge", max_concurrency=64, attempt_timeout_s=30.0, max_attempts=3, outage_patience_s=60.0)


@per_completion(transport=calls, deadline_s=120.0)
async def helpful(prompt, completion, answer):
    """A score with its components and the judge's reason. `answer` is a column of the dataset."""
    asked = f"Question: {prompt[-1]['content']}\nRight answer: {answer}\nAnswer: {completion[0]['content']}"
    messages = [{"role": "system", "content": RUBRIC}, {"role": "user", "content": asked}]
    reply = await judge.chat.completions.create(model=os.environ.get("JUDGE", "gpt-5-mini"), messages=messages)
    verdict = json.loads(reply.choices[0].message.content)  # invalid JSON raises, and the call is retried
    right, polite = float(verdict["right"]), float(verdict["polite"])
    return Reward.scored(0.8 * right + 0.2 * polite, reason=verdict["why"], right=right, polite=polite)


rows = [{"prompt": [{"role": "user", "content": f"What is {a} plus 5?"}], "answer": str(a + 5)} for a in range(64)]
config = SalesGRPOConfig("runs/judge", max_steps=2, max_completion_length=32, rollout_lookahead=1, report_to="none")
trainer = SalesGRPOTrainer(MODEL, helpful, config, Dataset.from_list(rows))
trainer.train()
trainer.finish()
