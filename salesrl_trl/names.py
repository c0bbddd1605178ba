"""Every name that a run leaves behind: tags of figures, phases, reward stages, files.

Owns the names alone, so that a dashboard can rely on them, and the report reads what the trainer writes. The standard
library only: the report starts without torch. Computes nothing; each room computes the figures that it knows.
"""

from enum import StrEnum

from salesrl_trl.types import Outcome

TRAIN = "train/"
"""transformers puts this before the tag of every training figure."""
REWARD = "reward"
"""TRL's own tag: mean reward over all completions that were scored."""

# Phases of a run and of a step


class StartUp(StrEnum):
    """Phases before the first step. Some go on side by side."""

    IMPORTS = "imports"
    CHECKS = "checks"
    SERVICES = "services"
    """The embedded services start."""
    READ_AHEAD = "read_ahead"
    """The policy's files are read into memory, before they are asked for."""
    POLICY = "policy"
    ENGINE = "engine"
    WARM_UP = "warm_up"
    PREPARE = "prepare"


class Phase(StrEnum):
    """Every part of a step, in the order of a step. They sum to `STEP_SECONDS`."""

    DATA_LOADING = "data_loading"
    WEIGHT_PUSH = "weight_push"
    GENERATION = "generation"
    OLD_LOGPROBS = "old_logprobs"
    REFERENCE_LOGPROBS = "reference_logprobs"
    REWARD_WAIT = "reward_wait"
    ADVANTAGES = "advantages"
    BATCHING = "batching"
    """Tokens to tensors, shuffling, splitting, and the rest of a training step around its passes."""
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LOGGING = "logging"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    UNACCOUNTED = "unaccounted"
    """Time that belongs to no other phase."""


def time_of(phase: str) -> str:
    """Seconds of a step in a phase, mean over ranks."""
    return f"time/{phase}_s"


STEP_SECONDS = "time/step_s"
EPOCH_TOTALS = "epoch_totals/"
"""Before the totals of an epoch: steps, tokens, failures, seconds, and the mean reward of each branch."""

# Time of the rewards


class Stage(StrEnum):
    """Stages of one completion's reward, in their order. The 32B answer is asked for beside the 8B answer."""

    PARSE = "parse"
    RAG_8B = "rag_8b"
    RAG_32B = "rag_32b"
    JUDGE = "judge"


STAGE_SHARES = {"p50": 0.5, "p95": 0.95, "max": 1.0}
"""Percentiles of a stage's seconds, over the completions of a batch that had this stage."""


def stage_of(stage: str, share: str) -> str:
    """Seconds of a reward stage at one of `STAGE_SHARES`."""
    return f"time/{stage}_{share}_s"


def slowest_of(stage: str) -> str:
    """Seconds of a reward stage for the completion that was scored last."""
    return f"time/slowest_{stage}_s"


REWARD_SECONDS = "time/reward_s"
"""Seconds from a batch's first call to its last answer: the makespan of its rewards."""
REWARD_EXPOSED = "time/reward_exposed_s"
"""The part of that makespan in which the trainer waited."""
REWARD_HIDDEN = "time/reward_hidden_s"
"""The rest: it ran behind other work."""
JUDGE_SECONDS = "time/judge_s"

# Rewards and their failures


def reward_of(branch: str) -> str:
    """Mean reward of a branch's scored completions."""
    return f"reward/{branch}"


def reference_of(branch: str) -> str:
    """Mean judge score of the frozen 32B answers beside a branch's scored completions."""
    return f"reference/{branch}"


RIGHT_DOCUMENT = "retrieval/right_document"
"""Share of answers whose best passage is a document that is known to answer the row. Rows without one do not count."""


def outcome_of(outcome: Outcome) -> str:
    """Share of completions with this outcome."""
    return f"outcome/{outcome.value}"


SKIPPED_UPDATE = "failures/skipped_update"
REFERENCE_MISSING = "failures/reference_missing"
BASELINE_FALLBACK = "failures/baseline_fallback"
"""Share of groups without a reference's reward in their baseline. Only logged where the baseline is to have one."""
SINGLE_SCORED = "failures/single_scored"
"""Share of groups with one scored completion only. GRPO learns nothing from such a group."""
FAILURE_REASONS = "failures/reason/"
"""Before each reason code that has been seen: completions with this reason since the last line."""

LENGTH_CORRELATION = "judge/length_correlation"
"""Pearson's correlation of a verdict's score with the length of the answer. A judge that prefers length shows here."""
POSITION_GAP = "judge/position_gap"
"""Mean score of candidates shown before the reference, minus the mean score of those shown after it."""
USAGE = ("verdicts", "prompt_tokens", "completion_tokens", "usd")
"""Figures of each judge provider, per generation batch."""
CACHES = ("answers", "references")
BUDGET_CALLS = "budget/calls"
"""Requests to the reward's services so far, of all ranks and of the runs before. Only where something is limited or
has a price, as the next."""
BUDGET_USD = "budget/usd"
"""US dollars for judges so far, by their prices."""
BUDGET_FORECAST = "budget/forecast"
"""Share of the nearest limit that is used after the last step, if the steps to come cost as much as those since the
run's first line. Only where something is limited."""


def usage_of(provider: str, kind: str) -> str:
    """One of `USAGE` of a judge provider."""
    return f"judge/{provider}/{kind}"


def traffic_of(service: str, kind: str) -> str:
    """One of `transport.TRAFFIC` of a service, or its `slots`."""
    return f"services/{service}/{kind}"


def saved_by(cache: str) -> str:
    """Calls that one of `CACHES` saved."""
    return f"cache/{cache}_saved"


# KL


def kl_of(branch: str, kind: str = "") -> str:
    """A branch's KL as its loss has it, without the coefficient: nats per token, mean over its tokens on all ranks.

    Args:
        branch (`str`):
            Its name.
        kind (`str`, *optional*):
            A figure beside the KL itself, for example `"_low"`, `"_high"` or `"_in_band"`; `kl_names` lists all.
    """
    return f"kl/{branch}{kind}"


def beta_of(branch: str) -> str:
    """The KL coefficient in a branch's loss."""
    return f"beta/{branch}"


ALL_KL = "kl"
"""The KL of all branches together, in place of TRL's own figure."""

# Rollouts

STALENESS = "rollout/staleness"
"""Optimizer steps between the weights that sampled a completion and those that are first trained on it: mean."""
STALENESS_MAX = "rollout/staleness_max"
LEFT_OUT = "rollout/left_out"
"""Share of tokens, or completions, that the correction for the sampler's distribution takes out of the loss."""
BOUNDED = "rollout/bounded"
"""Share of tokens, or completions, with an importance ratio that this correction has bounded."""


def is_largest(name: str) -> bool:
    """Whether a figure over several batches is the largest value, not the mean. True for all stages of a reward."""
    return name == STALENESS_MAX or (name.startswith("time/") and name.endswith("_max_s"))


# Weights

CHANGED_SHARE = "weights/changed_share"
"""Share of the weights that changed. In a log entry of its own, at the steps in which it was measured."""

# Throughput and memory


def perf_of(phase: Phase) -> str:
    """Seconds of a step in one of `PERF_PHASES`, beside the throughput."""
    return f"perf/{phase}_s"


PERF_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA_LOADING)
DATA_LOADING_RATIO = "perf/data_loading_ratio"
COMPUTE_RATIO = "perf/compute_ratio"
"""Share of a step's time in which the accelerator works."""
TOKENS_PER_SECOND = "perf/tokens_per_s"
SAMPLES_PER_SECOND = "perf/samples_per_s"
MFU_MODEL = "perf/mfu_model"
"""Model FLOPs utilisation in the time of the policy's own passes."""
MFU_STEP = "perf/mfu_step"
"""Model FLOPs utilisation in the time of the whole step."""
THROUGHPUT = (*map(perf_of, PERF_PHASES), DATA_LOADING_RATIO, COMPUTE_RATIO, TOKENS_PER_SECOND, SAMPLES_PER_SECOND,
              MFU_MODEL, MFU_STEP)  # fmt: skip
GPU_BUSY = "perf/gpu_busy_ratio"
"""Share of the time in which the main rank's GPU ran a kernel, by the driver."""
DISK_READ = "perf/disk_read_mb_s"
DISK_WRITE = "perf/disk_write_mb_s"
"""MB/s of all disks of the main rank's machine, whoever used them."""
MACHINE = (GPU_BUSY, DISK_READ, DISK_WRITE)
GPU_RESERVED = "memory/gpu_reserved_gib"
GPU_PEAK = "memory/gpu_peak_gib"
HOST_MEMORY = "memory/host_gib"
MEMORY = ("memory/gpu_allocated_gib", GPU_RESERVED, GPU_PEAK, HOST_MEMORY)

# Quick evaluations

QUICK_EVAL = "quick_eval/"
"""Before the tag of every figure of a quick evaluation."""
QUICK_SECONDS = f"{QUICK_EVAL}seconds"


def quick_of(branch: str, kind: str) -> str:
    """A figure of a branch in a quick evaluation: `score`, `truncated`, `length`, `kl`, `beta`, or one of your own."""
    return f"{QUICK_EVAL}{branch}/{kind}"


# Files in a run's folder

QUICK_EVAL_FILE = "quick_eval.jsonl"
"""One quick evaluation a line."""
HELD_OUT_FILE = "held_out.json"
"""Every evaluation of the held-out rows."""
TRACE_FILE = "trace.json"
START_UP_FILE = "start_up.json"
"""Seconds of the start by phase, to the end of the first step."""
LOG_FILE = "run.log"
"""The lines that the console showed."""
SETTINGS_FILE = "config.yaml"
"""Every setting of the run, as a recipe."""
RUN_FILE = "run.json"
"""The command, the package's code and the versions of the others."""
SPENT_FILE = "budget.json"
"""What the run and its resumes have spent. All ranks write there."""
REPORT_PAGE_FILE = "report.html"
REPORT_TEXT_FILE = "report.txt"
CHECKPOINT_FOLDERS = "checkpoint-"
"""transformers' prefix; the optimizer steps done follow it."""
BEST_FOLDER = "best"
"""The best policy so far."""
BEST_NOTE_FILE = "quick_eval.json"
"""In `BEST_FOLDER`: the evaluation that selected this policy."""

SAVING_FOLDER = ".saving"
"""In the output folder: a checkpoint that is being written, and one that is being deleted."""
LOCK_FILE = ".lock"
"""In the output folder: locked by the run that writes there, whose name it holds."""
FINISHED_FILE = "finished.json"
"""Written when a run has done everything."""

# Files in a checkpoint

MANIFEST_FILE = "manifest.json"
"""Size and digest of each file of the checkpoint. Written last: a folder without it is no checkpoint."""
KL_STATE_FILE = "kl_control.json"
"""KL coefficients, windows under way, and shares of steps in band."""
IDENTITY_FILE = "made_of.json"
"""Rows, branches, weights and settings of the run."""
UNDER_WAY_FILE = "generation_batch_{rank}.pt"
"""Of each process, where the checkpoint lies inside a generation batch: token ids, advantages and log-probs."""
ROLLOUTS_FILE = "rollouts_{rank}.pt"
"""Of each process, with `save_rollouts`: the completions in flight, and their log-probs."""
