"""Whose files a folder has: an earlier run's move together, and others stay."""

import logging

import pytest

from salesrl_trl.checkpoint.run_files import one_policy, put_run_aside
from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import write_whole

OF_THE_RUN = (
    "best/model.safetensors", "best/quick_eval.json", "best.earlier/config.json", "checkpoint-2/optimizer.pt",
    "completions/completions_00001.parquet", "config-1.yaml", "config.yaml", "finished.json", "held_out-1.json",
    "held_out.json", "model.safetensors", "quick_eval.jsonl", "record/rank-0-1.sqlite",
    "record/rank-0.sqlite", "record/rank-0.sqlite-wal", "report.html", "run-1.json", "run.json",
    "runs/Nov28_vm/all/x", "runs/Nov28_vm/events.out.tfevents.1", "start_up.json", "tokenizer.json", "trace.json",
    "training_args.bin",
)  # fmt: skip
OF_OTHERS = (
    ".lock", "answers.rank0.sqlite", "checkpoint-notes.txt", "data.jsonl", "held_out_rows.json", "record/notes.txt",
    "runs/mine/runs/Nov28_vm/events.out.tfevents.1",
)  # fmt: skip
OF_ALL_RUNS = ("budget.json", "run.log")


def fill(folder, *names):
    for name in names:
        write_whole(folder / name, name)


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_runs_files_move_whole_and_those_of_others_stay(tmp_path, caplog):
    fill(tmp_path, *OF_THE_RUN, *OF_OTHERS, *OF_ALL_RUNS)
    (tmp_path / "README.md").write_text("the user's own")
    put_run_aside(tmp_path, tmp_path / "checkpoint-2")  # it resumes
    assert not (tmp_path / "run-1").exists()
    with caplog.at_level(logging.WARNING):
        put_run_aside(tmp_path, None)
    assert names(tmp_path / "run-1") == {*OF_THE_RUN, *OF_ALL_RUNS}
    stay = {name for name in names(tmp_path) if not name.startswith("run-1/")}
    assert stay == {*OF_OTHERS, *OF_ALL_RUNS, "README.md"}
    assert caplog.messages == [f"[Run] the files of an earlier run in {tmp_path} are in {tmp_path}/run-1 now"]
    put_run_aside(tmp_path, None)  # nothing is left to move
    fill(tmp_path, "config.yaml", "run.json")  # of a start that was refused
    put_run_aside(tmp_path, None)
    fill(tmp_path, "start_up.json")
    put_run_aside(tmp_path, tmp_path / "run-1/checkpoint-2")  # of the run before
    assert names(tmp_path / "run-2") == {"config.yaml", "run.json", "start_up.json", *OF_ALL_RUNS}


@pytest.mark.parametrize("needed", ["", "best", "checkpoint-2"])
def test_a_run_that_needs_a_file_of_the_earlier_one_is_refused(tmp_path, needed):
    fill(tmp_path, *OF_THE_RUN)
    with pytest.raises(ConfigError, match="Name one, or resume the earlier run with `--resume_from_checkpoint auto`"):
        put_run_aside(tmp_path, None, [str(tmp_path / needed), None])
    assert names(tmp_path) == {*OF_THE_RUN}
    put_run_aside(tmp_path, None, [str(tmp_path.parent), "me/policy"])


FULL = ("config.json", "generation_config.json", "model.safetensors")
SHARDED = ("config.json", "generation_config.json", "model-00001-of-00002.safetensors",
           "model-00002-of-00002.safetensors", "model.safetensors.index.json")  # fmt: skip
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        (FULL, ADAPTER, FULL),
        (SHARDED, ADAPTER, SHARDED),
        (ADAPTER, FULL, ADAPTER),
        (SHARDED, FULL, ()),
        (FULL, SHARDED, ()),
    ],
)
def test_a_folder_holds_one_policy_after_each_save(tmp_path, before, after, moved):
    own = {"tokenizer.json", "notes.txt", "mine.safetensors"}
    fill(tmp_path, *own)
    for files in (before, after):
        with one_policy(tmp_path, "me/base", is_adapter=files is ADAPTER):
            for shard in tmp_path.glob("model-*-of-*") if files is not ADAPTER else ():
                shard.unlink()  # as transformers does
            fill(tmp_path, *files)
    assert {name for name in names(tmp_path) if not name.startswith("run-1/")} == {*after, *own}
    assert (names(tmp_path / "run-1") if moved else set()) == {*moved}


def test_an_adapter_beside_its_own_base_leaves_the_base(tmp_path):
    fill(tmp_path, *FULL)
    with one_policy(tmp_path, str(tmp_path), is_adapter=True):
        fill(tmp_path, *ADAPTER)
    assert names(tmp_path) == {*FULL, *ADAPTER}
    fill(tmp_path / "project", "config.json")  # a user's
    with one_policy(tmp_path / "project", "me/base", is_adapter=True):
        fill(tmp_path / "project", *ADAPTER)
    assert names(tmp_path / "project") == {"config.json", *ADAPTER}
