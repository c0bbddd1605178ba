"""From what TRL makes of a batch to answers, with batches that a test writes."""

import contextlib
import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from support.answers import INVALID, answered

from salesrl_trl.kl.penalty import PenaltySettings
from salesrl_trl.launch.evaluation.quick import GreedySubject

END = 9
ANSWERS = {0: [1, 2, END], 1: [3, 4, 5, 6], 2: [END], 3: []}
REWARDS = {row: answered("", row / 10).reward for row in (0, 1, 2)} | {3: INVALID}
LOG_RATIO = 0.5
"""Log-prob of each token under the policy, less the one under the reference."""


class Batches:
    def __init__(self, logps="old", reference=True):
        self.logps, self.reference = logps, reference
        self.sizes, self.asides, self.asked = [], 0, 0

    @contextlib.contextmanager
    def set_aside(self):
        self.asides += 1
        yield
        self.asides += 10

    def evaluate(self, rows, step):
        self.sizes.append(len(rows))
        ids = [ANSWERS[row["row"]] for row in rows]
        longest = max(map(len, ids))
        mask = torch.tensor([[int(place < len(each)) for place in range(longest)] for each in ids])
        output = {"completion_mask": mask}
        # what stands behind an answer's end is no number, and belongs to no sum
        masked = torch.where(mask.bool(), 0.0, math.nan)
        if self.reference:
            output["ref_per_token_logps"] = masked - 1.0
        if self.logps == "old":
            output["old_per_token_logps"] = masked - 1.0 + LOG_RATIO
        rewards = [REWARDS[row["row"]] for row in rows]
        sampled, result = SimpleNamespace(completion_ids=ids), SimpleNamespace(rewards=rewards)
        return SimpleNamespace(sampled=sampled, result=result), output

    def logps_of(self, output):
        self.asked += 1
        return output["ref_per_token_logps"] + LOG_RATIO

    def subject(self, kl=None):
        run = MagicMock(scoring=self, kl=None)
        run.args.per_device_eval_batch_size, run.args.kl_penalty.return_value = 3, kl or PenaltySettings()
        run.trl.eos_token_ids, run.trl.tokenizer.pad_token_id = [END], END
        run.trl.tokenizer.batch_decode = lambda ids, **_: [" ".join(map(str, tokens)) for tokens in ids]
        run.trl.logps_of, run.trl.set_aside = self.logps_of, self.set_aside
        run.branches.of = lambda row: ("fairness", "hallucination")[row["row"] % 2]
        run.pipeline.evaluations = lambda batches, _: batches
        return GreedySubject(run)


ROWS = [{"prompt": "", "row": row} for row in range(4)]


def test_each_row_has_its_answer_in_batches_inside_one_time_set_aside():
    batches = Batches()
    answers = batches.subject().answer(ROWS)
    assert batches.sizes == [3, 1]
    assert batches.asides == 11  # entered once, left once
    assert [each.branch for each in answers] == ["fairness", "hallucination"] * 2
    assert [each.text for each in answers] == ["1 2 9", "3 4 5 6", "9", ""]
    assert [each.reward for each in answers] == [REWARDS[row] for row in range(4)]
    assert [each.tokens for each in answers] == [3, 4, 1, 0]
    assert [each.truncated for each in answers] == [False, True, False, True]


@pytest.mark.parametrize("logps", ["old", "none"])
def test_the_kl_is_that_of_the_answers_tokens(logps):
    batches = Batches(logps)
    answers = batches.subject(kl=PenaltySettings(estimator="k3")).answer(ROWS[:3])
    k3 = math.exp(-LOG_RATIO) - 1 + LOG_RATIO  # of one token
    assert [each.kl for each in answers] == pytest.approx([3 * k3, 4 * k3, k3])
    assert [each.kl_tokens for each in answers] == [3, 4, 1]
    assert batches.asked == (logps == "none")  # TRL's own are used where there are some


def test_without_a_reference_there_is_no_kl():
    answers = Batches(reference=False).subject().answer(ROWS[:3])
    assert [(each.kl, each.kl_tokens) for each in answers] == [(None, 0)] * 3
