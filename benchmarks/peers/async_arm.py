"""The arm `async_N`: TRL's AsyncGRPO with `max_staleness: N`, the trainer on one GPU and vLLM's server on another.

    python -m benchmarks.peers.async_arm PLAN OUT

- TRL's packing asks a hub for FlashAttention 3. Here it gets PyTorch's own attention over rows of several lengths.
- Its worker wants a chat template whose answers TRL can parse: Qwen2.5's, which is in TRL.
"""

import os
import random
import sys
import tempfile
import types
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker, packing

from benchmarks.lengths import completion_tokens
from benchmarks.peers.clock import Clock
from benchmarks.peers.packed_attention import varlen
from benchmarks.peers.task import Plan, batch_scored
from benchmarks.peers.trl_arm import settings_of


class DrawnLengths(async_rollout_worker._AsyncRolloutLoop):
    """Completions are as long as `benchmarks.lengths` draws them."""

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        most, kind = os.environ["PEERS_TOKENS"].split()
        sample = random.getrandbits(32)
        self.max_tokens = completion_tokens(prompt_ids, sample, int(most), kind)  # read before the first await
        return await super()._generate_one_turn(prompt_ids)


def main(plan: Plan, out: Path) -> None:
    """Train, and write the figures."""
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=varlen)
    os.environ["PEERS_TOKENS"] = f"{plan.tokens} {plan.lengths}"  # the worker is a process of its own
    tokenizer = AutoTokenizer.from_pretrained(plan.folder)
    tokenizer.chat_template = qwen2_5_chat_template
    settings = settings_of(plan, tempfile.mkdtemp())
    args = AsyncGRPOConfig(
        **settings, dtype="bfloat16", vllm_server_base_url=plan.url, token_budget=0, max_staleness=max(plan.ahead, 1)
    )
    data = Dataset.from_list(plan.conversations())
    trainer = AsyncGRPOTrainer(plan.folder, batch_scored, args, data, tokenizer, callbacks=[Clock(plan, out)])
    trainer.rollout_worker._loop_cls = DrawnLengths
    trainer.train()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    from benchmarks.peers import async_arm  # under this name its worker finds the functions

    async_arm.main(Plan.read(Path(sys.argv[1])), Path(sys.argv[2]))
