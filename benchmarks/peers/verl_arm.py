"""verl's arms: `verl_sync`, and `verl_async_N`, its `colocate_async` with rollouts at most N versions old.

    python -m benchmarks.peers.verl_arm PLAN OUT [KEY=VALUE ...]    # more settings of verl

Starts verl's own trainer in a process of its own, and takes the time at which each step's line comes. This module is
also the file of the reward and of the agent loop, which draws the length of each completion.

- `sampler.max_off_policy_threshold` counts versions from 1 on, so N steps ahead are N + 1.
- Its strategy is `wait`: nothing is dropped, as with this package.
- No padding is computed, as in verl's own examples. FlashAttention is not on the package index: PyTorch's own kernel
  for rows of several lengths takes its place (`packed_attention`).
- `use_fused_kernels`: without FlashAttention verl takes log-probs from the logits token by token otherwise, one small
  kernel after another. The fused ones compute 512 tokens at once and keep no logits. verl's `fsdp2` can't have them.
- `bypass_mode`: vLLM's log-probs are the old ones. verl computes them again otherwise, for several updates a batch.
- vLLM serves the adapter, verl's default. PEFT 0.21 finds no tensors of an adapter inside FSDP's modules, and vLLM
  stops with a `StopIteration` then: PEFT 0.20 finds them. `verl_merged_async_N` merges the adapter, for which verl
  copies all weights to the host and back in each step.
- vLLM stays awake: an adapter of a model of 7B and vLLM fit on a card together. Else its weights go to the host, too.
- vLLM runs as TRL and this package start it: CUDA graphs of decoding, no compilation.
"""

import functools
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.task import GROUP, PROMPTS, RANK, RATE, TEMPLATE, Plan, scored, write_result
from benchmarks.processes import sigterm_afterwards

GPU_SHARE = 0.35
"""Of the card's memory, for vLLM, as in TRL's arms."""
KEPT = ("timing_s/", "actor/loss", "response_length/mean", "perf/max_memory", "training/off_policy")
"""Beginnings of the figures of a step that go into the result."""


async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict, **_: Any) -> float:
    """verl's reward function."""
    return await scored(solution_str, extra_info["rag_s"], extra_info["judge_s"])


def drawn_length(sampling: dict[str, Any], index: Any, session: Any) -> dict[str, Any]:
    """Sampling parameters of one completion, with its own length."""
    sample = random.getrandbits(32) if session is None else int(session)
    return {**sampling, "max_tokens": plan_at(os.environ["PEERS_PLAN"]).length(int(index), sample), "ignore_eos": True}


plan_at = functools.cache(lambda path: Plan.read(Path(path)))
"""The plan that verl's workers find."""


def write_rows(plan: Plan, path: Path) -> None:
    """The file of verl's data set."""
    import pandas

    rows = [
        {
            "prompt": [{"role": "user", "content": row["text"]}], "data_source": "peers",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": row["row"], "rag_s": float(row["rag_s"]), "judge_s": float(row["judge_s"])},
        }
        for row in plan.rows()
    ]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(path)


def command(plan: Plan, scratch: Path) -> list[str]:
    """verl's command line."""
    asynchronous = "async" in plan.arm
    loop = scratch / "agent.yaml"
    loop.write_text("- name: drawn\n  _target_: benchmarks.peers.verl_loop.DrawnLength\n")
    graphs = "{mode:0,cudagraph_mode:FULL_DECODE_ONLY}"
    slots = PROMPTS * GROUP * 3 // 2 if plan.lengths == "heavy" and asynchronous else PROMPTS * GROUP
    sizes = ",".join(map(str, sorted({1, 2, 4, 8, 16, 32, 64, slots})))
    actor, rollout, model = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
    settings = {
        "algorithm.adv_estimator": "grpo", "data.train_files": scratch / "rows.parquet",
        "data.val_files": scratch / "rows.parquet", "data.train_batch_size": PROMPTS, "data.shuffle": False,
        "data.max_prompt_length": plan.prompt_tokens + TEMPLATE, "data.max_response_length": plan.tokens,
        "data.dataloader_num_workers": 0, "data.val_batch_size": PROMPTS,
        f"{model}.path": plan.folder, f"{model}.use_remove_padding": True,
        f"{model}.use_fused_kernels": True, "algorithm.rollout_correction.bypass_mode": True,
        f"+{model}.override_config.attn_implementation": "packed", f"{model}.enable_gradient_checkpointing": True,
        f"{actor}.ppo_mini_batch_size": PROMPTS, f"{actor}.ppo_micro_batch_size_per_gpu": plan.micro_batch,
        f"{actor}.optim.lr": RATE, f"{actor}.fsdp_config.model_dtype": "bfloat16", f"{actor}.use_kl_loss": False,
        f"{rollout}.name": "vllm", f"{rollout}.n": GROUP, f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": plan.micro_batch, f"{rollout}.load_format": "safetensors",
        f"{rollout}.gpu_memory_utilization": GPU_SHARE, f"{rollout}.free_cache_engine": False,
        f"{rollout}.max_num_seqs": slots,
        f"{rollout}.max_model_len": plan.longest, f"{rollout}.cudagraph_capture_sizes": f"[{sizes}]",
        f"+{rollout}.engine_kwargs.vllm.compilation_config": graphs, f"{rollout}.agent.num_workers": 2,
        f"{rollout}.agent.agent_loop_config_path": loop, f"{rollout}.agent.default_agent_loop": "drawn",
        "reward.num_workers": 2, "reward.custom_reward_function.path": Path(__file__).resolve(),
        "trainer.use_v1": True, "trainer.v1.trainer_mode": "colocate_async" if asynchronous else "sync",
        "trainer.n_gpus_per_node": 1, "trainer.nnodes": 1, "trainer.logger": "[console,file]", "trainer.save_freq": -1,
        "trainer.val_before_train": False, "trainer.test_freq": -1, "trainer.resume_mode": "disable",
        "trainer.total_training_steps": plan.steps, "trainer.default_local_dir": scratch / "checkpoints",
        "+ray_kwargs.ray_init.include_dashboard": False, "+ray_kwargs.ray_init.num_gpus": 1,
        "ray_kwargs.ray_init.num_cpus": 16,  # places, not cores: its actors outnumber the cores of a small host
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }  # fmt: skip
    if not plan.full:
        settings |= {f"{model}.lora_rank": RANK, f"{model}.lora_alpha": RANK, f"{model}.target_modules": "all-linear"}
        settings[f"{model}.lora.merge"] = "merged" in plan.arm
    if plan.lengths == "heavy":  # as many tokens as a padded micro-batch has, however many completions these are
        settings |= {f"{actor}.use_dynamic_bsz": True}
        settings |= {f"{actor}.ppo_max_token_len_per_gpu": plan.micro_batch * plan.longest}
    if asynchronous:
        settings |= {
            "trainer.v1.colocate_async.num_warmup_batches": plan.ahead,
            "trainer.v1.sampler.max_off_policy_threshold": plan.ahead + 1,
            "trainer.v1.sampler.max_off_policy_strategy": "wait",
        }  # fmt: skip
    words = [f"{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "verl.trainer.main_ppo", *words]


def main(plan: Plan, out: Path, words: list[str]) -> None:
    """Train, and write the figures after each step."""
    scratch = Path(tempfile.mkdtemp())
    write_rows(plan, scratch / "rows.parquet")
    plan.write(scratch / "plan.json")
    steps_file = scratch / "steps.jsonl"
    environment = {
        **os.environ, "PEERS_PLAN": str(scratch / "plan.json"), "VERL_FILE_LOGGER_PATH": str(steps_file),
        "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "HYDRA_FULL_ERROR": "1", "WANDB_MODE": "disabled",
        "VERL_USE_EXTERNAL_MODULES": "benchmarks.peers.packed_attention",
    }  # fmt: skip
    ends: list[float] = []
    try:
        with sigterm_afterwards():
            process = subprocess.Popen(command(plan, scratch) + words, env=environment, start_new_session=True)
        while process.poll() is None and len(ends) < plan.last_counted:
            time.sleep(0.02)
            done = steps_file.read_text().splitlines() if steps_file.is_file() else []
            if len(done) > len(ends):
                ends.append(time.perf_counter())
                _write(plan, out, ends, done)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    if len(ends) < plan.last_counted:
        sys.exit(process.wait(30) or 1)


def _write(plan: Plan, out: Path, ends: list[float], done: list[str]) -> None:
    seconds = [math.nan, *(end - start for start, end in itertools.pairwise(ends))]
    print(f"step {len(seconds)}: {seconds[-1]:.2f} s", flush=True)
    figures = [json.loads(line)["data"] for line in done]
    last = {name: round(value, 3) for name, value in figures[-1].items() if name.startswith(KEPT)}
    lengths = [round(each["response_length/mean"]) for each in figures if "response_length/mean" in each]
    own = [round(each["timing_s/step"], 3) for each in figures if "timing_s/step" in each]
    write_result(out, plan, seconds, completion_tokens=lengths, own_step_s=own, last_step=last)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends verl too
    main(Plan.read(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:])
