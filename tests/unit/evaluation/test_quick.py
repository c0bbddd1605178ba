"""Quick evaluations of a subject that a test writes: when, what is recorded and logged, and which policy is kept."""

import json
import logging
from functools import partial
from unittest.mock import Mock

import pytest
from datasets import Dataset
from support.answers import INVALID, WrittenSubject, answered, one_rank, quick_evaluations

from salesrl_trl.config.quick_evaluations import QuickEvalSettings
from salesrl_trl.data.branches import Branches
from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.evaluation.quick import sample

ROWS = [{"prompt": "", "row": place} for place in range(2)]


def script(fairness, hallucination):
    return [answered("fairness", fairness), answered("hallucination", hallucination)]


@pytest.fixture
def evaluator(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="salesrl_trl")

    def build(subject, ranks=None, **settings):
        settings = QuickEvalSettings(**{"steps": 2, "best": "worst_branch", **settings})
        made = quick_evaluations(monkeypatch, subject, tmp_path, settings, ranks, ROWS)

        def run(first, last):
            subject.step = first
            made.load_state_dict({})
            for step in range(first, last + 1):
                subject.step = step
                if step:
                    made.after_step(step)

        return run

    return build


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "quick_eval.jsonl").read_text().splitlines()]


def kept(folder):
    note = json.loads((folder / "best/quick_eval.json").read_text())
    return note["step"], (folder / "best/model.safetensors").read_text()


RISING = {step: script(step / 10, 0.9) for step in range(2, 11, 2)}


def test_an_evaluation_is_due_at_every_so_many_th_step_and_asks_for_the_same_rows(evaluator, tmp_path):
    subject = WrittenSubject(RISING)
    evaluator(subject)(0, 7)
    assert subject.asked == [(2, 2), (4, 2), (6, 2)]
    assert steps(tmp_path) == [2, 4, 6]


def test_what_is_logged(evaluator):
    subject = WrittenSubject({2: [answered("fairness", 0.5, kl=1.0, kl_tokens=10), answered("hallucination", None)]})
    evaluator(subject)(0, 2)
    logged = subject.logged[2]
    assert logged.pop("quick_eval/seconds") >= 0
    assert logged == {
        "quick_eval/reward": 0.5,
        "quick_eval/fairness/score": 0.5,
        "quick_eval/fairness/truncated": 0.0,
        "quick_eval/fairness/length": 10.0,
        "quick_eval/fairness/kl": 0.1,
        "quick_eval/fairness/beta": 0.1,
        "quick_eval/hallucination/score": None,
        "quick_eval/hallucination/truncated": 0.0,
        "quick_eval/hallucination/length": 10.0,
        "quick_eval/hallucination/kl": None,
        "quick_eval/hallucination/beta": None,
    }


def test_the_best_policy_so_far_is_in_the_folder_whole(evaluator, tmp_path, caplog):
    subject = WrittenSubject({2: script(0.2, 0.9), 4: script(0.5, 0.6), 6: script(0.9, 0.4)})
    evaluator(subject)(0, 6)
    assert kept(tmp_path) == (4, "step 4")
    assert f"[Best@4] worst_branch 0.500, saved in {tmp_path / 'best'}" in caplog.messages
    assert not any(line.startswith("[Best@6]") for line in caplog.messages)
    assert not list(tmp_path.glob("best.*"))  # nothing half done


def test_a_policy_whose_saving_leaves_no_weights_does_not_take_the_place_of_one_that_has_some(
    evaluator, tmp_path, caplog
):
    evaluator(WrittenSubject(RISING))(0, 2)
    evaluator(WrittenSubject(RISING, weights="config.json"))(2, 4)
    assert kept(tmp_path) == (2, "step 2")
    assert "wrote no weights" in caplog.text


@pytest.mark.parametrize("evaluated", [True, False], ids=["evaluated", "ended_between_checkpoint_and_evaluation"])
def test_a_resumed_run_has_each_evaluation_once(evaluator, tmp_path, evaluated):
    evaluator(WrittenSubject(RISING))(0, 4)
    record = tmp_path / "quick_eval.jsonl"
    assert [json.loads(line)["best"] for line in record.read_text().splitlines()] == [False, True]
    if evaluated:
        record.write_text(record.read_text() + '{"step": 40, "rew')  # cut off
    else:
        record.unlink()
    again = WrittenSubject(RISING)
    evaluator(again)(2, 6)
    assert steps(tmp_path) == [2, 4, 6]
    assert again.asked[0][0] == (4 if evaluated else 2)


def test_the_best_of_steps_that_a_run_goes_back_behind_is_put_aside(evaluator, tmp_path):
    evaluator(WrittenSubject(RISING))(0, 6)
    evaluator(WrittenSubject({4: script(0.1, 0.1)}))(2, 4)
    assert kept(tmp_path) == (4, "step 4")  # its own best is gone, so the next one is the best
    assert (tmp_path / "best.earlier/model.safetensors").read_text() == "step 6"


def test_an_evaluation_without_verdicts_has_no_score_says_why_and_keeps_no_policy(evaluator, tmp_path, caplog):
    subject = WrittenSubject({2: [answered("fairness", None), answered("hallucination", None, reward=INVALID)]})
    evaluator(subject)(0, 2)
    line = caplog.messages[0]
    assert "mode=greedy fairness=n/a (0 of 1 scored) hallucination=0.00" in line
    assert line.endswith("failures not_json=1 rag_8b_timeout=1")
    assert caplog.messages[1] == "[Pareto@2] 0 of 1 evaluations on the front: none"
    assert not (tmp_path / "best").exists()


def test_a_full_disk_ends_no_run(evaluator, tmp_path, caplog, monkeypatch):
    subject = WrittenSubject(RISING)

    full = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr("salesrl_trl.launch.evaluation.quick_record.QuickEvalHistory.write", full)
        evaluator(subject, best=None)(0, 4)
    assert "quick_eval.jsonl can't be written (OSError)" in caplog.text
    assert list(subject.logged) == [2, 4]


def test_a_best_policy_that_cannot_be_saved_leaves_the_one_before_as_the_one_to_beat(evaluator, tmp_path, caplog):
    subject = WrittenSubject({2: script(0.1, 0.1), 4: script(0.9, 0.9), 6: script(0.5, 0.5)})
    save = subject.save

    def save_or_fail(folder):
        save(folder)
        if subject.step == 4:
            raise OSError(28, "No space left on device")

    subject.save = save_or_fail
    evaluator(subject)(0, 6)
    assert "the best policy was not kept: it can't be saved (OSError)" in caplog.text
    assert kept(tmp_path) == (6, "step 6")  # 0.5 is above the 0.1 of step 2, which was in the folder
    assert not list(tmp_path.glob("best.*"))


class Meeting:
    """Two ranks, one after the other: what the main one handed out is there when the second one asks."""

    def __init__(self, monkeypatch):
        self._patch = partial(monkeypatch.setattr, "salesrl_trl.launch.evaluation.quick.broadcast_object_list")
        self._handed_out = []

    def main(self):
        self._patch(lambda values: self._handed_out.append(values) or values)
        return one_rank(count=2)

    def second(self):
        waiting = iter(self._handed_out)
        self._patch(lambda _: next(waiting))
        return one_rank(count=2, index=1)


def test_another_rank_saves_its_part_and_neither_renames_nor_writes_nor_speaks(
    evaluator, tmp_path, caplog, monkeypatch
):
    meeting, subject = Meeting(monkeypatch), WrittenSubject(RISING)
    evaluator(WrittenSubject(RISING), ranks=meeting.main())(0, 2)
    caplog.clear()
    before = (tmp_path / "quick_eval.jsonl").stat().st_mtime_ns
    evaluator(subject, ranks=meeting.second())(0, 2)
    assert (tmp_path / "best.new/model.safetensors").is_file()  # for the main one to rename
    assert (tmp_path / "quick_eval.jsonl").stat().st_mtime_ns == before
    assert caplog.messages == []
    assert subject.logged[2]["quick_eval/reward"] == pytest.approx(0.55)


def test_all_ranks_save_or_none_whatever_a_figure_gives_on_them(evaluator, monkeypatch):
    """A figure that each rank computes otherwise must not have one rank save, which waits for the others."""
    meeting = Meeting(monkeypatch)

    class OfThisRank:
        name, form = "mine", ".2f"

        def __init__(self, values):
            self._values = iter(values)

        def __call__(self, answers):
            return next(self._values)

    for ranks, values in ((meeting.main, [0.1] * 9), (meeting.second, [0.1] * 3 + [0.5] * 3 + [0.9] * 3)):
        subject = WrittenSubject(RISING)
        evaluator(subject, ranks=ranks(), best="mine", figures=(OfThisRank(values),))(0, 6)
        assert subject.saved == [2]


BRANCHES = Branches(("fairness", "hallucination"))


@pytest.mark.parametrize("count", [1, 2])
def test_each_rank_has_as_many_rows_and_no_row_is_there_twice(count):
    rows = [{"prompt": f"p{row}", "row": row, "branch": BRANCHES.names[row % 2]} for row in range(9)]
    dataset = Dataset.from_list(rows)
    taken = [sample(dataset, 6, BRANCHES, one_rank(count=count, index=index)) for index in range(count)]
    assert [len(rows) for rows in taken] == [6 // count] * count
    assert sorted(row["row"] for rows in taken for row in rows) == [0, 1, 2, 3, 4, 5]


def test_an_evaluation_without_held_out_rows_is_refused():
    with pytest.raises(ConfigError, match="need an `eval_dataset`, which is NoneType"):
        sample(None, 4, BRANCHES, one_rank())
    one = Dataset.from_list([{"prompt": "", "row": 0, "branch": "fairness"}])
    with pytest.raises(ConfigError, match="1 held-out rows for 2 processes"):
        sample(one, 4, BRANCHES, one_rank(count=2))
