"""Every name that a run leaves behind: phases, stages of a reward, tags of figures, files. And `FIGURES`, the list of
what is logged, from which the console's lines, TensorBoard's layout and the ledger are made. Standard
library only: the report starts without torch."""

import itertools
import re
import string
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from salesrl_trl.types import Outcome

TRAIN = "train/"  # transformers puts this before the tag of every training figure
REWARD = "reward"  # TRL's own tag: mean reward over all completions that were scored


class StartUp(StrEnum):
    """Phases before the first step. Some go on side by side."""

    IMPORTS = "imports"
    CHECKS = "checks"
    SERVICES = "services"  # the embedded services start
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
    BATCHING = "batching"  # tokens to tensors, shuffling, splitting, and the rest of a training step around its passes
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    LOGGING = "logging"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    UNACCOUNTED = "unaccounted"  # time that belongs to no other phase


time_of = "time/{}_s".format  # of a phase: mean over ranks
STEP_SECONDS = "time/step_s"
EPOCH_TOTALS = "epoch_totals/"  # before an epoch's steps, tokens, failures, seconds, and mean reward of each branch


class Stage(StrEnum):
    """Stages of one completion's reward, in their order. The 32B answer is asked for beside the 8B answer."""

    PARSE = "parse"
    RAG_8B = "rag_8b"
    RAG_32B = "rag_32b"
    JUDGE = "judge"


STAGE_SHARES = {"p50": 0.5, "p95": 0.95, "max": 1.0}  # of a stage's seconds, over completions that had it
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
FAILURE_REASONS = "failures/reason/"  # before each reason code that has been seen

POSITION_GAP = "judge/position_gap"
JUDGED_SINGLY = "judge/judged_singly"
USAGE = ("verdicts", "prompt_tokens", "completion_tokens", "usd")  # of a judge provider, in a generation batch
CACHES = ("answers", "references")
BUDGET_CALLS = "budget/calls"
BUDGET_USD = "budget/usd"
usage_of = "judge/{}/{}".format  # provider, kind
OVERLOAD_SHARE = "overload_share"
traffic_of = "services/{}/{}".format  # service, and one of `transport.TRAFFIC`, `slots` or `OVERLOAD_SHARE`
saved_by = "cache/{}_saved".format

TOOL_FIGURES = ("calls", "failures", "errors", "seconds")  # of a tool, in a generation batch
tool_figure = "tools/{}/{}".format  # tool, one of `TOOL_FIGURES`

EPISODE_FIGURES = ("calls", "rewritten", "untrained")  # of episodes, in a generation batch
episode_figure = "episodes/{}".format  # one of `EPISODE_FIGURES`


def kl_of(branch: str, kind: str = "") -> str:
    """A branch's KL, or with `kind`, such as `"_low"` or `"_in_band"`, a figure beside it."""
    return f"kl/{branch}{kind}"


beta_of = "beta/{}".format
ALL_KL = "kl"

STALENESS = "rollout/staleness"
STALENESS_MAX = "rollout/staleness_max"
TURNOVER = REFILLED, EQUAL, REWARD_OF_ALL = "refill/groups", "refill/equal", "refill/reward"
LEFT_OUT = "rollout/left_out"


def is_largest(name: str) -> bool:
    """Whether a figure over several batches is the largest value, not the mean. True for all stages of a reward."""
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

QUICK_EVAL = "quick_eval/"  # before the tag of every figure of a quick evaluation
QUICK_SECONDS = f"{QUICK_EVAL}seconds"
quick_of = (QUICK_EVAL + "{}/{}").format  # branch, kind

agreement_of = "judge_meter/agreement/{}".format  # branch
JUDGE_ALARMS = "judge_meter/alarms"
BY_SECOND_JUDGE = "judge_meter/by_second_judge"

BRANCH = "{branch}"


class Metric(NamedTuple):
    """What is logged under one tag, or under a tag for each branch, stage, service and so on. `figures.toml` says what
    each field is."""

    tag: str
    meaning: str
    chart: Sequence[str] | None = None
    console: str = ""
    line: str = ""


CATEGORIES = ("Rewards by branch", "KL with band and beta", "Step time by phase", "Failures by reason")  # of charts
FIGURES = tuple(
    Metric(**figure) for figure in tomllib.loads(Path(__file__).with_name("figures.toml").read_text("utf-8"))["metric"]
)
"""Every figure beside TRL's own, under `train/`, and as far as they are of completions under `eval/`."""

_WORDS: Mapping[str, Sequence[str]] = {
    "outcome": tuple(Outcome), "phase": tuple(Phase), "share": tuple(STAGE_SHARES), "usage": USAGE, "cache": CACHES
}  # fmt: skip


def meanings(tag: str, words: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """What the words in braces of a tag stand for: each choice of them, the last word's fastest. A word that is not
    known stands for itself, as that of failures' reasons."""
    known = {**_WORDS, **words}
    wanted = [word for _, word, *_ in string.Formatter().parse(tag) if word]
    choices = (known.get(word, (f"{{{word}}}",)) for word in wanted)
    return (dict(zip(wanted, choice, strict=True)) for choice in itertools.product(*choices))


def line_names(parts: Collection[str], words: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Every name of these parts of the ledger's line, in the order of `FIGURES`."""
    figures = (figure for figure in FIGURES if figure.line in parts)
    return tuple(figure.tag.format(**choice) for figure in figures for choice in meanings(figure.tag, words))


def of_branches(tag: str, branches: Iterable[str]) -> dict[str, str]:
    """A tag with `{branch}`, for each branch."""
    return {branch: tag.replace(BRANCH, branch) for branch in branches}


def branches_in(tags: Collection[str]) -> tuple[str, ...]:
    """The branches of a run by the tags that it logged: each has a coefficient or, in a run without a KL, a reward.
    Another figure of `FIGURES` that begins alike is no branch."""
    for family in (beta_of(BRANCH), reward_of(BRANCH)):
        start = family.removesuffix(BRANCH)
        others = [pattern_of(tag) for tag, *_ in FIGURES if tag.startswith(start) and tag != family]
        own = (tag for tag in tags if tag.startswith(start) and not any(other.fullmatch(tag) for other in others))
        if branches := {tag.removeprefix(start) for tag in own}:
            return tuple(sorted(branches))
    return ()


def pattern_of(tag: str) -> re.Pattern[str]:
    """A tag of `FIGURES` as a regular expression: any text for each word in braces."""
    return re.compile(re.sub(r"\\\{.+?\\\}", ".+", re.escape(tag)))


# Files in a run's folder

QUICK_EVAL_FILE = "quick_eval.jsonl"  # one quick evaluation a line
HELD_OUT_FILE = "held_out.json"  # every evaluation of the held-out rows
BY_ROW = "reward_by_row"  # in the first one: the mean reward of each row, none for one that was not scored
TRACE_FILE = "trace.json"
START_UP_FILE = "start_up.json"  # seconds of the start by phase, to the end of the first step
LOG_FILE = "run.log"  # the lines that the console showed
SETTINGS_FILE = "config.yaml"  # every setting of the run, as a recipe
RUN_FILE = "run.json"  # the command, the package's code and the versions of the others
RECORD_FOLDER = "record"  # with a record: every completion of a run
SPENT_FILE = "budget.json"  # what the run and its resumes have spent. All ranks write there.
REPORT_PAGE_FILE = "report.html"
CHECKPOINT_FOLDERS = "checkpoint-"  # transformers' prefix; the optimizer steps done follow it
BEST_FOLDER = "best"  # the best policy so far
BEST_NOTE_FILE = "quick_eval.json"  # in `BEST_FOLDER`: the evaluation that selected this policy

MODEL_CARD_FILE = "README.md"
EARLIER_RUNS = "run-"  # before a number: the folder of an earlier run's files, in the folder of the run after it

PUSHING_FOLDER = ".pushing-"  # before a random name, in the output folder: what is being uploaded to the hub
SAVING_FOLDER = ".saving"  # in the output folder: a checkpoint that is being written, and one that is being deleted
LOCK_FILE = ".lock"  # in the output folder: locked by the run that writes there, whose name it holds
FINISHED_FILE = "finished.json"  # written when a run has done everything

# Files in a checkpoint

MANIFEST_FILE = "manifest.json"  # size and digest of each file. Written last: a folder without it is no checkpoint
KL_STATE_FILE = "kl_control.json"  # KL coefficients, windows under way, and shares of steps in band
PARTS_STATE_FILE = "parts.json"  # the states of the trainer's parts by name, such as the monitor's of the judge
IDENTITY_FILE = "made_of.json"  # rows, branches, weights and settings of the run
UNDER_WAY_FILE = "generation_batch_{rank}.pt"  # of a checkpoint inside a generation batch: its tensors
ROLLOUTS_FILE = "rollouts_{rank}.pt"  # with `save_rollouts`: completions in flight, and their log-probs
