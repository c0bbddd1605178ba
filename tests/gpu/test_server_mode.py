"""Rollouts through vLLM's server on a GPU of its own: the weights in training reach it, with and without lookahead."""

import pytest
import torch
from gpu.launched import debug_recipe, figures_of
from support.runs import check_times, scalars
from support.vllm_server import serve

from benchmarks.vllm_server import for_training
from salesrl_trl.demo.packaged import PACKAGED

STEPS = 8
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU is the server's, another the trainer's"),
]


@pytest.mark.parametrize("lookahead", [0, 2])
def test_the_server_samples_from_the_weights_in_training(tmp_path, lookahead):
    options = ("--gpu-memory-utilization", "0.3", *for_training(320))
    with serve(PACKAGED, tmp_path / "server.log", *options, CUDA_VISIBLE_DEVICES="1") as url:
        debug_recipe(
            tmp_path / "run", max_steps=STEPS, model_name_or_path=PACKAGED, vllm_mode="server",
            vllm_server_base_url=url, held_out_eval="false", quick_eval_steps=0, rollout_lookahead=lookahead,
            vllm_importance_sampling_mode="token_truncate", CUDA_VISIBLE_DEVICES="0",
        )  # fmt: skip
    check_times(tmp_path / "run", STEPS)
    logged = scalars(tmp_path / "run")
    assert logged["train/rollout/staleness"] == [min(step, lookahead) for step in range(STEPS)]
    assert len(set(logged["train/reward"])) > 1
    differences = logged["train/sampling/sampling_logp_difference/mean"]
    fresh = differences if not lookahead else differences[:1]
    assert max(fresh) < 0.02
    # a rollout of earlier weights is one: what was pushed are those in training then, and they moved
    assert not lookahead or min(differences[lookahead:]) > max(fresh)


def test_a_server_that_generates_while_the_trainer_trains_makes_shorter_steps(tmp_path):
    words = ["--server", "1", "--shape", "0.5b", "--steps", "2", "--latency", "0.64", "0.36"]
    words += ["--arms", "exact", "lookahead_2", "floor"]
    figures = figures_of("pipeline", tmp_path, *words, CUDA_VISIBLE_DEVICES="0")
    exact, ahead = figures["arms"]["exact"], figures["arms"]["lookahead_2"]
    assert exact["reward_failures"] == ahead["reward_failures"] == 0
    assert ahead["completion_tokens"] == pytest.approx(exact["completion_tokens"])
    assert ahead["step_s_mean"] < 0.9 * figures["floor_s"]  # less than a step that waits for no reward but generates
