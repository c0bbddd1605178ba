"""A policy whose layers FSDP2 shards over two processes."""

from pathlib import Path

import pytest
from support.ranks import of_one_machine, run_ranks

TOLERANCE = 2e-6
"""Relative, in float32."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    program, out = Path(__file__).with_name("sharded.py"), tmp_path_factory.mktemp("sharded")
    return run_ranks(of_one_machine(), (program, out), out, 120, OMP_NUM_THREADS="1")


def test_one_pass_for_a_groups_prompt_gives_trls_log_probs_and_gradient(ranks):
    assert max(far for rank in ranks for far in rank["passes"]) < TOLERANCE


def test_an_adapter_is_pushed_as_in_one_piece_and_its_base_stays(ranks):
    assert [(rank["lora"], rank["dora"]) for rank in ranks] == [([0, 0], [0, 0])] * 2
