"""The push of weights by several processes."""

from pathlib import Path

from support.ranks import of_one_machine, run_ranks


def test_an_adapter_whose_layers_fsdp_shards_is_pushed_as_in_one_piece_and_its_base_stays(tmp_path):
    program = Path(__file__).with_name("sharded_push.py")
    ranks = run_ranks(of_one_machine(), (program, tmp_path), tmp_path, 120, OMP_NUM_THREADS="1")
    assert ranks == [{"lora": [0, 0], "dora": [0, 0]}] * 2
