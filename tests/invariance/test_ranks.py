"""One rank with the whole batch, and two ranks with half of it each, in two micro-batches.

A batch has three groups of four, so that the second one is split between the ranks. The baseline is the hybrid one,
whose advantages each rank cuts out of the whole batch's.

As a program it is one of two ranks: it saves a checkpoint, and goes on from there once more. Without DeepSpeed the
last rank is asked to stop on the way, and both go on from there. With it they train five steps with split weights too.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from support.keyed import StopAt, build_keyed, check_same_course, check_there_was_control, course_of
from support.ranks import ROOT, run_ranks
from transformers import TrainerCallback

from benchmarks.vllm_server import held_port
from salesrl_trl.errors import RunStopped
from salesrl_trl.types import DEFAULT_BRANCHES
from salesrl_trl.update.ledger import kl_names

STEPS = 16
COMMON = {"hybrid_reference_weight": 0.3, "max_steps": STEPS}
EVALUATING = {"eval_strategy": "steps", "eval_steps": STEPS // 2, "num_generations_eval": 2}
"""4 rows with 2 completions each, of which 4 are a batch: the second batch is begun before the first is scored."""
ONE_RANK = {**COMMON, **EVALUATING, "per_device_train_batch_size": 12, "per_device_eval_batch_size": 4}
TWO_RANKS = {**COMMON, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
CHECKPOINT = 9
"""In the middle of a window of two steps."""
ON_TWO_MACHINES = ("accelerate.commands.launch", "--config_file", f"{ROOT}/accelerate_configs/two_machines.yaml")
WITH_DEEPSPEED = ("accelerate.commands.launch", "--config_file", f"{ROOT}/accelerate_configs/full.yaml")
LAUNCH_LIMIT_S = 240
"""A launch takes about 30 s on two idle cores."""
WEIGHT_TOLERANCE = 1e-4
"""A hundredth of one step of Adam at the learning rate 1e-2, of which 16 are made; 5e-6 was seen."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_rank(train):
    course = train(**ONE_RANK)
    check_there_was_control(course)
    return course


@pytest.fixture(scope="module")
def launch(tiny, services_url):
    """Train on two ranks; what each of them wrote."""

    def run(launchers, out, **settings):
        given = json.dumps({**TWO_RANKS, **settings})
        arguments = (__file__, tiny, services_url, out, given, CHECKPOINT)
        return run_ranks(launchers, arguments, out, LAUNCH_LIMIT_S)

    return run


@pytest.fixture(scope="module")
def gloo(launch, tmp_path_factory):
    """The folder of a run of two ranks without DeepSpeed, each launched as on a machine of its own, and what each rank
    wrote."""
    out = tmp_path_factory.mktemp("gloo")
    with held_port() as port:
        machines = [(*ON_TWO_MACHINES, "--machine_rank", rank, "--main_process_port", str(port)) for rank in "01"]
        return out, launch(machines, out, ddp_backend="gloo", **EVALUATING, per_device_eval_batch_size=2)


def test_two_ranks_have_the_same_loss_kl_and_coefficients_as_one_and_the_same_keys(one_rank, gloo):
    out, ranks = gloo
    for rank in ranks:
        assert rank["distributed"] == "MULTI_CPU"
        check_same_course(one_rank, rank["whole"])
    _check_weights(one_rank["weights"], out)
    _check_ranks_agree(*(rank["whole"] for rank in ranks))


def test_an_evaluation_whose_batches_overlap_has_the_figures_of_one_rank_under_the_same_keys_on_both(one_rank, gloo):
    evaluations = [rank["whole"]["evaluations"] for rank in gloo[1]]
    assert [entry["step"] for entry in one_rank["evaluations"]] == [STEPS // 2, STEPS]
    for own, *ranks in zip(one_rank["evaluations"], *evaluations, strict=True):
        assert ranks[0].keys() == ranks[1].keys()
        for name in ("eval_reward", "eval_completions/mean_length", "eval_outcome/ok"):
            assert [rank[name] for rank in ranks] == pytest.approx([own[name]] * 2, rel=1e-5), name


def test_a_run_of_two_ranks_goes_on_on_one_with_its_coefficients_and_windows(train, one_rank, gloo):
    out, (rank, _) = gloo
    resumed = train(resume_from=out / "run" / f"checkpoint-{CHECKPOINT}", **ONE_RANK)
    check_same_course({"steps": one_rank["steps"][CHECKPOINT:]}, resumed)
    assert all(figures["steps"] for figures in rank["whole"]["after"][str(CHECKPOINT)].values())  # windows under way
    for step, state in resumed["after"].items():
        for branch, figures in state.items():
            whole = rank["whole"]["after"][step][branch]
            for name in ("tokens", "steps", "cooldown", "measured_steps", "steps_in_band"):
                assert figures[name] == whole[name], (step, branch, name)


def test_two_ranks_of_which_one_is_asked_to_stop_go_on_as_if_nothing_had_come(gloo):
    _, ranks = gloo
    for rank in ranks:
        # its rewards were in, so that the step under way counts
        assert f"after {CHECKPOINT + 5} steps. A checkpoint was saved" in rank["stopped"]
        assert list(rank["resumed"]["after"]) == [str(step) for step in range(CHECKPOINT + 6, STEPS + 1)]
        for step, state in rank["resumed"]["after"].items():
            assert state == rank["whole"]["after"][step], step


def test_two_ranks_under_deepspeed_zero_2_have_the_same_loss_kl_and_coefficients_as_one_without(
    launch, one_rank, tmp_path
):
    ranks = launch([(*WITH_DEEPSPEED, "--mixed_precision", "no")], tmp_path)
    for rank in ranks:
        assert rank["distributed"] == "DEEPSPEED"
        check_same_course(one_rank, rank["whole"])
        # from a checkpoint on, each rank goes the very same way
        assert list(rank["resumed"]["after"]) == [str(step) for step in range(CHECKPOINT + 1, STEPS + 1)]
        for step, state in rank["resumed"]["after"].items():
            assert state == rank["whole"]["after"][step], step
        # with ZeRO-3, which splits the policy while it is loaded
        check_same_course({"steps": one_rank["steps"][:5]}, rank["sharded"])
        assert len(set(rank["first_weights"])) == 1
    _check_ranks_agree(*(rank["whole"] for rank in ranks))
    _check_weights(one_rank["weights"], tmp_path)


def _check_ranks_agree(one, other):
    assert [set(entry) for entry in one["steps"]] == [set(one["steps"][0])] * len(other["steps"])
    for a, b in zip(one["steps"], other["steps"], strict=True):
        assert set(a) == set(b)
        names = ("loss", "grad_norm", *kl_names(DEFAULT_BRANCHES))
        assert {name: a[name] for name in names} == {name: b[name] for name in names}
    assert one["after"] == other["after"]


def _check_weights(expected, out):
    weights = torch.load(out / "weights.pt")
    assert weights.keys() == expected.keys()
    largest = max((weights[name] - value).abs().max().item() for name, value in expected.items())
    print(f"largest difference of weights: {largest}")
    assert largest < WEIGHT_TOLERANCE


class AskedToStop(TrainerCallback):
    """In the middle of a step, this rank is asked to stop."""

    def __init__(self, trainer, step, is_asked):
        self.trainer, self.step, self.is_asked = trainer, step, is_asked

    def on_substep_end(self, args, state, control, **_):
        if self.is_asked and state.global_step == self.step:
            self.trainer.request_stop("SIGTERM")


def main(policy, url, out, settings, step):
    rank = int(os.environ["RANK"])
    given = {**json.loads(settings), "save_strategy": "steps", "save_steps": int(step)}

    def build():
        return build_keyed(policy, url, Path(out, "run"), **given)

    trainer = build()
    assert trainer.accelerator.num_processes == int(os.environ["WORLD_SIZE"])
    distributed = trainer.accelerator.distributed_type.value
    told = {"distributed": distributed, "whole": course_of(trainer)}
    assert trainer.components.passes.prompts.is_on
    if rank == 0:
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), Path(out, "weights.pt"))
    checkpoint = Path(out, "run", f"checkpoint-{step}")
    if distributed != "DEEPSPEED":
        for other in checkpoint.parent.glob("checkpoint-*"):
            if rank == 0 and other != checkpoint:
                shutil.rmtree(other)
        asked = build()
        try:
            course_of(asked, AskedToStop(asked, int(step) + 4, rank == 1), resume_from=checkpoint)
        except RunStopped as error:
            told["stopped"] = str(error)
        told["resumed"] = course_of(build(), resume_from="auto")
    else:
        told["resumed"] = course_of(build(), resume_from=checkpoint)
        AcceleratorState._reset_state()
        os.environ |= {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}
        sharded = build_keyed(policy, url, Path(out, "sharded"), **{**given, "save_strategy": "no"})
        told["sharded"] = course_of(sharded, StopAt(5))
        assert sharded.components.passes.prompts.is_on
        told["first_weights"] = [each.components.policy.first_weights for each in (trainer, sharded)]
    Path(out, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
