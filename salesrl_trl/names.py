"""Names that a run leaves behind: phases, reward stages, metric tags, files; and `FIGURES`, the list of logged metrics
from which the console lines, TensorBoard's layout and the ledger are built. Standard library only, so the report
starts without torch."""

import itertools
import re
import string
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from salesrl_trl.types import AGREEMENT, LENGTH, REFUSAL, Outcome

TRAIN = "train/"  # transformers' prefix for training metrics
REWARD = "reward"  # TRL's tag: mean reward over all scored completions


class StartUp(StrEnum):
    """Phases before the first step. Some overlap."""

    IMPORTS = "imports"
    CHECKS = "checks"
    SERVICES = "services"  # the embedded services start
    POLICY = "policy"
    ENGINE = "engine"
    WARM_UP = "warm_up"
    PREPARE = "prepare"


class Phase(StrEnum):
    """The phases of a step, in order. They sum to `STEP_SECONDS`."""

    DATA_LOADING = "data_loading"
    WEIGHT_PUSH = "weight_push"
    GENERATION = "generation"
    OLD_LOGPROBS = "old_logprobs"
    REFERENCE_LOGPROBS = "reference_logprobs"
    REWARD_WAIT = "reward_wait"
    ADVANTAGES = "advantages"
    BATCHING = "batching"  # tensors, shuffling, splitting, and the rest of a step around forward and backward
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LOGGING = "logging"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    UNACCOUNTED = "unaccounted"  # time outside all other phases


time_of = "time/{}_s".format  # of a phase: mean over ranks
STEP_SECONDS = "time/step_s"
EPOCH_TOTALS = "epoch_totals/"  # prefix of an epoch's totals


class Stage(StrEnum):
    """Stages of a completion's reward, in order. The 32B and 8B answers are requested concurrently."""

    PARSE = "parse"
    RAG_8B = "rag_8b"
    RAG_32B = "rag_32b"
    JUDGE = "judge"


STAGE_SHARES = {"p50": 0.5, "p95": 0.95, "max": 1.0}  # quantiles of a stage's seconds over its completions
stage_of = "time/{}_{}_s".format  # stage, share
REWARD_SECONDS = "time/reward_s"
REWARD_EXPOSED = "time/reward_exposed_s"
REWARD_HIDDEN = "time/reward_hidden_s"
JUDGE_SECONDS = "time/judge_s"

reward_of = "reward/{}".format
reference_of = "reference/{}".format
component_of = "rewards/{}/{}".format  # component, branch
mean_of = "rewards/{}/mean".format  # a reward function, by TRL
outcome_of = "outcome/{}".format
RIGHT_DOCUMENT = "retrieval/right_document"
SKIPPED_UPDATE = "failures/skipped_update"
REFERENCE_MISSING = "failures/reference_missing"
BASELINE_FALLBACK = "failures/baseline_fallback"
SINGLE_SCORED = "failures/single_scored"
FAILURE_REASONS = "failures/reason/"  # prefix of each reason code seen so far

POSITION_GAP = "judge/position_gap"
JUDGED_SINGLY = "judge/judged_singly"
USAGE = ("verdicts", "prompt_tokens", "completion_tokens", "usd")  # of a judge provider, per generation batch
CACHES = ("answers", "references")
BUDGET_CALLS = "budget/calls"
BUDGET_USD = "budget/usd"
usage_of = "judge/{}/{}".format  # provider, kind
OVERLOAD_SHARE = "overload_share"
traffic_of = "services/{}/{}".format  # service, and one of `transport.TRAFFIC`, `slots` or `OVERLOAD_SHARE`
saved_by = "cache/{}_saved".format

TOOL_FIGURES = ("calls", "failures", "errors", "seconds")  # of a tool, per generation batch
tool_figure = "tools/{}/{}".format  # tool, one of `TOOL_FIGURES`

DIALOGUE_FIGURES = ("turns", "tool_calls", AGREEMENT, REFUSAL, LENGTH, "failed", "price_share")
"""Of conversations with a partner, per generation batch."""
dialogue_figure = "dialogue/{}".format  # one of `DIALOGUE_FIGURES`

EPISODE_FIGURES = ("calls", "rewritten", "untrained")  # of episodes, per generation batch
episode_figure = "episodes/{}".format  # one of `EPISODE_FIGURES`


def kl_of(branch: str, kind: str = "") -> str:
    """The tag of a branch's KL, or with a `kind` such as `"_low"` or `"_in_band"` of a related metric."""
    return f"kl/{branch}{kind}"


beta_of = "beta/{}".format
ALL_KL = "kl"

STALENESS = "rollout/staleness"
STALENESS_MAX = "rollout/staleness_max"
TURNOVER = REFILLED, EQUAL, REWARD_OF_ALL = "refill/groups", "refill/equal", "refill/reward"
LEFT_OUT = "rollout/left_out"
EFFECTIVE_SAMPLES = "rollout/effective_sample_size"
SAMPLER_KL, SAMPLER_KL_K3 = "rollout/sampler_kl", "rollout/sampler_kl_k3"


def is_largest(name: str) -> bool:
    """Whether a metric is aggregated over batches by maximum instead of mean. True for all reward stages."""
    return name == STALENESS_MAX or (name.startswith("time/") and name.endswith("_max_s"))


perf_of = "perf/{}_s".format
PERF_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA_LOADING)
DATA_LOADING_RATIO = "perf/data_loading_ratio"
COMPUTE_RATIO = "perf/compute_ratio"
TOKENS_PER_SECOND = "perf/tokens_per_s"
SAMPLES_PER_SECOND = "perf/samples_per_s"
MFU_MODEL = "perf/mfu_model"
MFU_STEP = "perf/mfu_step"
THROUGHPUT = (*map(perf_of, PERF_PHASES), DATA_LOADING_RATIO, COMPUTE_RATIO, TOKENS_PER_SECOND, SAMPLES_PER_SECOND,
              MFU_MODEL, MFU_STEP)  # fmt: skip
GPU_BUSY = "perf/gpu_busy_ratio"
DISK_READ = "perf/disk_read_mb_s"
DISK_WRITE = "perf/disk_write_mb_s"
MACHINE = (GPU_BUSY, DISK_READ, DISK_WRITE)
GPU_RESERVED = "memory/gpu_reserved_gib"
GPU_PEAK = "memory/gpu_peak_gib"
HOST_MEMORY = "memory/host_gib"
MEMORY = ("memory/gpu_allocated_gib", GPU_RESERVED, GPU_PEAK, HOST_MEMORY)

QUICK_EVAL = "quick_eval/"  # prefix of all quick evaluation metrics
QUICK_SECONDS = f"{QUICK_EVAL}seconds"
quick_of = (QUICK_EVAL + "{}/{}").format  # branch, kind

agreement_of = "judge_meter/agreement/{}".format  # branch
JUDGE_ALARMS = "judge_meter/alarms"
BY_SECOND_JUDGE = "judge_meter/by_second_judge"

BRANCH = "{branch}"


class Metric(NamedTuple):
    """A logged metric, or a family of them with one tag per branch, stage, service and so on. `figures.toml` documents
    the fields."""

    tag: str
    meaning: str
    chart: Sequence[str] | None = None
    console: str = ""
    line: str = ""


CATEGORIES = ("Rewards by branch", "KL with band and beta", "Step time by phase", "Failures by reason")  # of charts
FIGURES = tuple(
    Metric(**metric) for metric in tomllib.loads(Path(__file__).with_name("figures.toml").read_text("utf-8"))["metric"]
)
"""All metrics besides TRL's own, under `train/`, and those of completions under `eval/` too."""

_WORDS: Mapping[str, Sequence[str]] = {
    "outcome": tuple(Outcome), "phase": tuple(Phase), "share": tuple(STAGE_SHARES), "usage": USAGE, "cache": CACHES
}  # fmt: skip


def meanings(tag: str, words: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """All expansions of the words in braces of a tag, the last word varying fastest. Unknown words, e.g. the failure
    reason, expand to themselves."""
    known = {**_WORDS, **words}
    wanted = [word for _, word, *_ in string.Formatter().parse(tag) if word]
    choices = (known.get(word, (f"{{{word}}}",)) for word in wanted)
    return (dict(zip(wanted, choice, strict=True)) for choice in itertools.product(*choices))


def line_names(parts: Collection[str], words: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """All names in these parts of the ledger's line, in the order of `FIGURES`."""
    figures = (figure for figure in FIGURES if figure.line in parts)
    return tuple(figure.tag.format(**choice) for figure in figures for choice in meanings(figure.tag, words))


def of_branches(tag: str, branches: Iterable[str]) -> dict[str, str]:
    """A tag's expansion for each branch."""
    return {branch: tag.replace(BRANCH, branch) for branch in branches}


def branches_in(tags: Collection[str]) -> tuple[str, ...]:
    """A run's branches, derived from its logged tags: each has a coefficient or, without a KL, a reward. Other metrics
    of `FIGURES` with the same prefix are not branches."""
    for family in (beta_of(BRANCH), reward_of(BRANCH)):
        start = family.removesuffix(BRANCH)
        others = [pattern_of(tag) for tag, *_ in FIGURES if tag.startswith(start) and tag != family]
        own = (tag for tag in tags if tag.startswith(start) and not any(other.fullmatch(tag) for other in others))
        if branches := {tag.removeprefix(start) for tag in own}:
            return tuple(sorted(branches))
    return ()


def pattern_of(tag: str) -> re.Pattern[str]:
    """A tag of `FIGURES` as a regular expression that matches any text for words in braces."""
    return re.compile(re.sub(r"\\\{.+?\\\}", ".+", re.escape(tag)))


# Files in a run's folder

QUICK_EVAL_FILE = "quick_eval.jsonl"  # one quick evaluation per line
HELD_OUT_FILE = "held_out.json"  # all evaluations of the held-out rows
BY_ROW = "reward_by_row"  # in the first one: each row's mean reward, null if unscored
TRACE_FILE = "trace.json"
START_UP_FILE = "start_up.json"  # start-up seconds by phase, up to the end of the first step
LOG_FILE = "run.log"  # the console output
SETTINGS_FILE = "config.yaml"  # every setting of the run, as a recipe
RUN_FILE = "run.json"  # the command, the package's commit and dependency versions
RECORD_FOLDER = "record"  # all completions of a run, if recorded
SPENT_FILE = "budget.json"  # spending of the run and its resumes, written by all ranks
REPORT_PAGE_FILE = "report.html"
CHECKPOINT_FOLDERS = "checkpoint-"  # transformers' prefix, followed by the optimizer steps done
BEST_FOLDER = "best"  # the best policy so far
BEST_NOTE_FILE = "quick_eval.json"  # in `BEST_FOLDER`: the evaluation that selected it

MODEL_CARD_FILE = "README.md"
EARLIER_RUNS = "run-"  # prefix of the folders that hold an earlier run's files

PUSHING_FOLDER = ".pushing-"  # prefix of folders being uploaded to the hub, in the output folder
SAVING_FOLDER = ".saving"  # in the output folder: a checkpoint being written or deleted
LOCK_FILE = ".lock"  # in the output folder: locked by, and naming, the run that writes there
FINISHED_FILE = "finished.json"  # written when a run has completed everything

# Files in a checkpoint

MANIFEST_FILE = "manifest.json"  # size and digest of each file; written last, so a folder without it is incomplete
KL_STATE_FILE = "kl_control.json"  # KL coefficients, current windows, and shares of steps in band
PARTS_STATE_FILE = "parts.json"  # the states of the trainer's parts by name, e.g. the judge drift monitor's
IDENTITY_FILE = "made_of.json"  # rows, branches, weights and settings of the run
UNDER_WAY_FILE = "generation_batch_{rank}.pt"  # the tensors of an unfinished generation batch
ROLLOUTS_FILE = "rollouts_{rank}.pt"  # with `save_rollouts`: completions in flight and their log-probs
