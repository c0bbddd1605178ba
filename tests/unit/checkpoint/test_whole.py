"""Which folders are whole checkpoints, which of them a run goes on from, and which files move when another begins."""

import errno
import itertools
import json
import logging
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from salesrl_trl.checkpoint import run_files, whole
from salesrl_trl.checkpoint.keeper import Keeper
from salesrl_trl.checkpoint.run_files import one_policy, put_run_aside
from salesrl_trl.checkpoint.whole import fault_of, find, newest, seal
from salesrl_trl.errors import CheckpointError, ConfigError
from salesrl_trl.ground import process
from salesrl_trl.ground.process import write_whole
from salesrl_trl.names import IDENTITY_FILE, KL_STATE_FILE, MANIFEST_FILE, PARTS_STATE_FILE, SAVING_FOLDER

FILES = {"model.safetensors": 9000, "optimizer.pt": 5000, "trainer_state.json": 300, "global_step3/mp_rank_00.pt": 700}


def fill(folder, seed=0):
    for name, size in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(random.Random(f"{seed}{name}").randbytes(size))


def checkpoint(output_dir, step, **sealed):
    folder = output_dir / f"checkpoint-{step}"
    fill(folder, step)
    seal(folder, **{"processes": 1, "has_optimizer": True, **sealed})
    return folder


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def touch(name):
    return lambda folder: (folder / name).touch()


DAMAGES = {
    "a flipped bit": (
        lambda folder: flip(folder / "model.safetensors"),
        "model.safetensors is modified since the save",
    ),
    "a cut": (lambda folder: os.truncate(folder / "optimizer.pt", 17), "optimizer.pt is not as long as when it was"),
    "a missing file": (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt is missing"),
    "missing files": (lambda folder: [(folder / name).unlink() for name in FILES], "and 3 more files are missing"),
    "other weights": (touch("pytorch_model.bin"), "pytorch_model.bin is not part of the checkpoint"),
    "another's adapter": (touch("global_step3/adapter_model.safetensors"), "adapter_model.safetensors is not part of"),
    "no manifest": (lambda folder: (folder / MANIFEST_FILE).unlink(), "it lacks manifest.json"),
    "a torn manifest": (lambda folder: os.truncate(folder / MANIFEST_FILE, 40), "its manifest.json is unreadable"),
    "another manifest": (lambda folder: (folder / MANIFEST_FILE).write_text("[1]"), "its manifest.json is unreadable"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_its_reason_and_the_one_before_is_taken(tmp_path, caplog, damage, said):
    before, last = checkpoint(tmp_path, 20), checkpoint(tmp_path, 40)
    assert find("auto", str(tmp_path)) == find("true", str(tmp_path)) == find(True, str(tmp_path)) == last
    damage(last)
    with pytest.raises(ConfigError, match=f"cannot resume from .*checkpoint-40: .*{said}"):
        find(str(last), str(tmp_path))
    assert find("auto", str(tmp_path)) == find(True, str(tmp_path)) == before
    assert "checkpoint-40 is skipped: " in caplog.text
    assert said in caplog.text


def test_a_checkpoint_that_another_machine_removes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    names_of = whole._names

    def removed(folder):
        shutil.rmtree(older, ignore_errors=True)
        return names_of(folder)

    monkeypatch.setattr(whole, "_names", removed)
    assert [*whole.whole(tmp_path)] == [newer]


def test_the_model_alone_is_no_checkpoint_to_go_on_from(tmp_path):
    assert "`save_only_model`" in fault_of(checkpoint(tmp_path, 20, has_optimizer=False))


def test_a_checkpoint_with_a_foreign_file_that_is_not_read_is_taken(tmp_path):
    last = checkpoint(tmp_path, 40)
    (last / "notes.md").touch()
    (last / ".nfs0001").symlink_to(last / "gone")
    assert find("auto", str(tmp_path)) == find(last, str(tmp_path)) == last


def test_of_two_runs_in_a_folder_the_later_one_goes_on_and_the_earlier_ones_checkpoints_go(tmp_path, keeper):
    checkpoint(tmp_path, 40)
    checkpoint(tmp_path, 60)
    keeper.args.save_total_limit = 2
    save(keeper, 5)
    assert newest(tmp_path) == tmp_path / "checkpoint-5"  # saved last, by the manifests' numbers: 1, 2, 3
    assert sorted(each.name for each in tmp_path.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-60"]
    flip(tmp_path / "checkpoint-5/model.safetensors")
    save(keeper, 7)  # a damaged one counts: 4, not 3 again
    assert newest(tmp_path) == tmp_path / "checkpoint-7"


def test_without_a_checkpoint_auto_begins_from_the_start_and_others_say_what_is_there(tmp_path):
    assert find(None, str(tmp_path)) is find("false", str(tmp_path)) is find("auto", str(tmp_path)) is None
    assert find("auto", str(tmp_path / "not there")) is None
    with pytest.raises(ConfigError, match="contains no intact checkpoint"):
        find("true", str(tmp_path))
    checkpoint(tmp_path, 20)
    with pytest.raises(ConfigError, match=r"\S+ contains checkpoint-20\."):
        find(str(tmp_path / "checkpoint-2"), str(tmp_path))


def test_a_folder_without_a_manifest_is_taken_by_those_who_trust_it(tmp_path, caplog):
    folder = checkpoint(tmp_path, 20)
    (folder / MANIFEST_FILE).unlink()
    assert find(folder, str(tmp_path), without_manifest=True) == folder
    assert "its integrity cannot be verified" in caplog.text


@pytest.fixture
def keeper(tmp_path):
    args = SimpleNamespace(
        output_dir=str(tmp_path), process_index=0, local_process_index=0, save_only_model=False, save_total_limit=None
    )
    keeper = Keeper(args, None, SimpleNamespace(is_skipping=False))
    keeper.args = args
    return keeper


class State(SimpleNamespace):
    def save_to_json(self, path):
        (self.folder.parent / path).write_text(json.dumps({"best": self.best_model_checkpoint}))


def save(keeper, step, write=fill, best=None):
    root = Path(keeper.args.output_dir)

    def written():
        write(Path(keeper.args.output_dir) / f"checkpoint-{step}")

    keeper.save(State(global_step=step, best_model_checkpoint=best, folder=root), written)


def test_a_checkpoint_is_not_in_its_place_before_it_is_whole(tmp_path, keeper):
    def write(folder):
        fill(folder)
        assert folder.parent == tmp_path / SAVING_FOLDER
        assert list(tmp_path.glob("checkpoint-*")) == []

    save(keeper, 3, write)
    assert fault_of(tmp_path / "checkpoint-3") is None
    save(keeper, 3, lambda folder: pytest.fail("it is there"))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_takes_the_place_of_an_earlier_one(tmp_path, keeper, damaged):
    earlier = checkpoint(tmp_path, 3)
    if damaged:
        flip(earlier / "model.safetensors")
    save(keeper, 3, lambda folder: fill(folder, "new"))
    assert fault_of(earlier) is None
    assert (earlier / "model.safetensors").read_bytes() == random.Random("newmodel.safetensors").randbytes(9000)


@pytest.mark.parametrize("files", range(len(FILES)))
def test_a_save_that_fails_leaves_the_checkpoints_before_it(tmp_path, keeper, files):
    save(keeper, 3)

    def full(folder):
        fill(folder)
        for name in list(FILES)[files:]:
            os.truncate(folder / name, 10)
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError, match=r"checkpoint-4 could not be saved \(OSError.* No space.*checkpoint-3 is"
    ):
        save(keeper, 4, full)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["checkpoint-3"]
    assert newest(tmp_path) == tmp_path / "checkpoint-3"
    save(keeper, 4)
    assert newest(tmp_path) == tmp_path / "checkpoint-4"


def test_the_oldest_are_deleted_but_not_the_best_nor_the_last_nor_damaged_ones(tmp_path, keeper):
    keeper.args.save_total_limit = 2
    for step in (1, 2, 3):
        save(keeper, step, best=str(tmp_path / "checkpoint-1"))
    assert [each.name for each in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-1", "checkpoint-3"]
    flip(tmp_path / "checkpoint-3/model.safetensors")
    os.truncate(tmp_path / "checkpoint-3/optimizer.pt", 3)
    save(keeper, 4)
    save(keeper, 5)
    left = [each.name for each in sorted(tmp_path.glob("checkpoint-*"))]
    assert left == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]


def killed_at(call, root):
    """The exit code of a process that puts `new` in place of `best` and is killed before its system call `call`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = itertools.count()

    def counted(real):
        return lambda *args, **kwargs: os._exit(9) if next(calls) == call else real(*args, **kwargs)

    acts = [(os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "rename"), (Path, "replace"), (process, "_exchanged")]
    try:
        for owner, name in acts:
            setattr(owner, name, counted(getattr(owner, name)))
        process.put_in_place(root / "new", root / "best")
        os._exit(0)
    finally:
        os._exit(1)


def test_a_process_that_is_killed_anywhere_leaves_the_old_folder_or_the_new_one_whole(tmp_path):
    seen, end = set(), 9
    for call in range(60):
        for name in ("best", "new"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            (tmp_path / name).mkdir()
            for part in ("a", "b"):
                (tmp_path / name / part).write_text(name)
        end = killed_at(call, tmp_path)
        there = {(tmp_path / "best" / part).read_text() for part in ("a", "b")}
        assert len(there) == 1
        seen |= there
        if end == 0:
            break
    assert (end, seen) == (0, {"best", "new"})


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


def write_named(folder, *names):
    for name in names:
        write_whole(folder / name, name)


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_runs_files_move_whole_and_those_of_others_stay(tmp_path, caplog):
    write_named(tmp_path, *OF_THE_RUN, *OF_OTHERS, *OF_ALL_RUNS)
    (tmp_path / "README.md").write_text("the user's own")
    put_run_aside(tmp_path, tmp_path / "checkpoint-2")  # it resumes
    assert not (tmp_path / "run-1").exists()
    with caplog.at_level(logging.WARNING):
        put_run_aside(tmp_path, None)
    assert names(tmp_path / "run-1") == {*OF_THE_RUN, *OF_ALL_RUNS}
    stay = {name for name in names(tmp_path) if not name.startswith("run-1/")}
    assert stay == {*OF_OTHERS, *OF_ALL_RUNS, "README.md"}
    assert caplog.messages == [f"[Run] moved the files of an earlier run in {tmp_path} to {tmp_path}/run-1"]
    put_run_aside(tmp_path, None)  # nothing is left to move
    write_named(tmp_path, "config.yaml", "run.json")  # of a start that was refused
    put_run_aside(tmp_path, None)
    write_named(tmp_path, "start_up.json")
    put_run_aside(tmp_path, tmp_path / "run-1/checkpoint-2")  # of the run before
    assert names(tmp_path / "run-2") == {"config.yaml", "run.json", "start_up.json", *OF_ALL_RUNS}


def test_an_earlier_runs_files_move_from_a_record_that_is_on_another_disk(tmp_path, monkeypatch):
    write_named(tmp_path / "disk", "rank-0.sqlite")
    write_named(tmp_path / "run", "trace.json")
    (tmp_path / "run/record").symlink_to(tmp_path / "disk")

    def across_disks(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", across_disks)
    put_run_aside(tmp_path / "run", None)
    assert names(tmp_path / "run") == {"run-1/trace.json", "run-1/record/rank-0.sqlite"}
    assert not names(tmp_path / "disk")


def test_a_pushed_checkpoint_has_the_packages_own_state():
    assert {KL_STATE_FILE, PARTS_STATE_FILE, IDENTITY_FILE} <= {*run_files.FILES["state"]}


@pytest.mark.parametrize("needed", ["", "best", "checkpoint-2"])
def test_a_run_that_needs_a_file_of_the_earlier_one_is_refused(tmp_path, needed):
    write_named(tmp_path, *OF_THE_RUN)
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
    write_named(tmp_path, *own)
    for files in (before, after):
        with one_policy(tmp_path, "me/base", is_adapter=files is ADAPTER):
            for shard in tmp_path.glob("model-*-of-*") if files is not ADAPTER else ():
                shard.unlink()  # as transformers does
            write_named(tmp_path, *files)
    assert {name for name in names(tmp_path) if not name.startswith("run-1/")} == {*after, *own}
    assert (names(tmp_path / "run-1") if moved else set()) == {*moved}


def test_an_adapter_beside_its_own_base_leaves_the_base(tmp_path):
    write_named(tmp_path, *FULL)
    with one_policy(tmp_path, str(tmp_path), is_adapter=True):
        write_named(tmp_path, *ADAPTER)
    assert names(tmp_path) == {*FULL, *ADAPTER}
    write_named(tmp_path / "project", "config.json")  # a user's
    with one_policy(tmp_path / "project", "me/base", is_adapter=True):
        write_named(tmp_path / "project", *ADAPTER)
    assert names(tmp_path / "project") == {"config.json", *ADAPTER}
