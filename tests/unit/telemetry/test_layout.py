"""TensorBoard's layout: every chart's lines are metrics that exist, and every chart is legal."""

import re
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from transformers import ProgressCallback, TrainerControl, TrainerState
from transformers.integrations import TensorBoardCallback

from salesrl_trl import names
from salesrl_trl.parts.trackers import TrackersPart, custom_scalars
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.scorer import RewardNames
from salesrl_trl.telemetry import perf
from salesrl_trl.update.ledger import Ledger

BRANCHES = ("fairness", "hallucination")
QUICK = ("score", "questions")
REWARDS = RewardFigures(BRANCHES, RewardNames(components=("judge", "brevity"), providers=("openai",)))
WORDS = {**REWARDS.words, "figure": QUICK}
TAGS = {
    f"train/{name}"
    for name in (
        *Ledger(REWARDS, with_kl=True, further=["refill"]).flush("train"), *perf.TIMES,
        *names.THROUGHPUT, *names.MEMORY, *names.MACHINE, "failures/reason/rag_8b_timeout", names.BY_SECOND_JUDGE,
        names.JUDGE_ALARMS, *map(names.agreement_of, BRANCHES),
        *(names.quick_of(branch, what) for branch in BRANCHES for what in (*QUICK, "beta")),
    )
}  # fmt: skip


ALL_TAGS = TAGS | {tag.removeprefix("train/") for tag in TAGS if any(f"/{branch}" in tag for branch in BRANCHES)}


def charts(banded=BRANCHES):
    return [
        (category, title, kind, tags)
        for category, group in custom_scalars(WORDS, banded).items()
        for title, (kind, tags) in group.items()
    ]


def test_every_line_of_every_chart_is_a_metric():
    for _, title, kind, tags in charts():
        for tag in tags:
            found = [each for each in ALL_TAGS if (each == tag if kind == "Margin" else re.search(tag, each))]
            assert found, (title, tag)
            # a regular expression is to find its own metric only, but for the failures' reasons
            assert len(found) == 1 or title == "completions"


def test_a_branch_with_a_band_has_its_edges_drawn_and_one_without_has_a_line():
    kinds = {title: (kind, tags) for _, title, kind, tags in charts(banded=("fairness",))}
    band = ["kl/fairness", "kl/fairness_low", "kl/fairness_high"]
    assert kinds["KL of fairness"] == ("Margin", band)
    assert kinds["KL of hallucination"] == ("Multiline", [r"^kl/hallucination$"])


def part_of(words, banded, callbacks):
    """A part as a trainer with these trackers connects it."""
    targets = {branch: SimpleNamespace(has_band=branch in banded) for branch in BRANCHES}
    args = SimpleNamespace(report_to=["tensorboard"], kl_targets=lambda: targets)
    trl = SimpleNamespace(callbacks=SimpleNamespace(callbacks=callbacks))
    part = TrackersPart()
    part.connect(SimpleNamespace(args=args, trl=trl, figures=SimpleNamespace(words=words)))
    return part


def logged_into(folder):
    accumulator = EventAccumulator(str(folder)).Reload()
    return {tag: [each.value for each in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


@pytest.mark.parametrize("branches", [BRANCHES, ("fairness",)])
def test_each_of_several_branches_has_a_run_and_so_a_colour_and_the_runs_own_file_is_as_before(tmp_path, branches):
    tensorboard = TensorBoardCallback(tb_writer=None)
    layout = part_of({**WORDS, "branch": branches}, branches, [ProgressCallback(), tensorboard])
    layout.on_train_begin(None, TrainerState(), TrainerControl())  # another rank has no writer
    tensorboard.tb_writer = SummaryWriter(tmp_path)
    state = TrainerState(global_step=3)
    logs = {"loss": 1.0, "reward/fairness": 0.25, "kl/hallucination": 0.5, "kl/fairness": None}
    layout.on_train_begin(None, state, TrainerControl())
    tensorboard.on_log(None, state, TrainerControl(), logs=logs)
    layout.on_log(None, state, TrainerControl(), logs=logs)
    tensorboard.on_train_end(None, state, TrainerControl())
    layout.on_train_end(None, state, TrainerControl())
    assert logged_into(tmp_path) == {f"train/{name}": [value] for name, value in logs.items() if value}
    assert "custom_scalars__config__" in EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]
    own = {path.name: logged_into(path) for path in tmp_path.iterdir() if path.is_dir()}
    several = {"fairness": {"reward/fairness": [0.25]}, "hallucination": {"kl/hallucination": [0.5]}}
    assert own == (several if branches == BRANCHES else {})
