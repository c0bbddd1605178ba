"""Another policy of the buffer is one class outside of the package: which groups a step trains on first."""

import itertools
from collections import Counter

import pytest
from datasets import Dataset
from support.scripted import Scripted, settings, steps_of

from salesrl_trl import ByArrival, per_completion
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError
from salesrl_trl.names import STALENESS_MAX
from salesrl_trl.rollout.buffer import choose
from salesrl_trl.trainer import SalesGRPOTrainer

MOST = 5
ROWS = 16


class ShortestFirst(ByArrival):
    """Of the groups whose rewards are in, those with the fewest tokens."""

    def key(self, group):
        return sum(group.lengths)


class Longer(Scripted, SalesGRPOTrainer):
    """A row's completions are the longer, the further behind it lies. Keeps the prompts that are trained on."""

    def __init__(self, *args, **kwargs):
        self.trained = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        lengths = [int(text.split("row ")[1].split()[0]) for text in self._tokenizer.batch_decode(prompt_ids)]
        return [[*self._tokenizer("yes " * (1 + length))["input_ids"], 0] for length in lengths], None

    def _compute_loss(self, model, inputs):
        self.trained += [self._tokenizer.batch_decode(inputs["prompt_ids"], skip_special_tokens=True)]
        return super()._compute_loss(model, inputs)


@per_completion
async def score(completion):
    return float(len(completion[-1]["content"]) % 7)


@pytest.fixture
def train(tiny, tmp_path):
    def train(policy, **given):
        rows = [{"prompt": [{"role": "user", "content": f"row {number} :"}]} for number in range(ROWS)]
        args = {"beta": 0.0, "per_device_train_batch_size": 8, "max_steps": 8, "rollout_lookahead": 2, **given}
        args = SalesGRPOConfig(**settings(tmp_path / "run", **args))
        trainer = Longer(str(tiny), [score], args, Dataset.from_list(rows), buffer_policy=policy)
        try:
            trainer.train()
        finally:
            trainer.finish()
        return trainer

    return train


def test_a_policy_decides_the_order_and_no_row_is_lost_or_gets_too_old(train):
    trainer = train(ShortestFirst(MOST))
    prompts = Counter(itertools.chain(*trainer.trained))
    assert len(prompts) == ROWS and set(prompts.values()) == {2 * 2}  # two completions, in each of two epochs
    assert 2 < max(entry[STALENESS_MAX] for entry in steps_of(trainer)) <= MOST


def test_of_the_groups_that_are_in_the_shortest_come_first_and_those_that_can_not_wait_before_them():
    class Group:
        def __init__(self, version, lengths, is_scored=True):
            self.version, self.lengths, self.is_scored = version, lengths, is_scored

    groups = [Group(0, [9]), Group(1, [5]), Group(1, [1], is_scored=False), Group(1, [7]), Group(2, [3])]
    policy = ShortestFirst(MOST)
    assert choose(policy, groups, 2, following=range(3, 6)) == [groups[1], groups[4]]
    # the step 6 is too late for the first one
    assert choose(policy, groups, 2, following=range(6, 7)) == [groups[0], groups[4]]
    groups[0].is_scored = False
    assert choose(policy, groups, 2, following=range(6, 7)) == []


def test_a_policy_that_fails_ends_the_run_and_one_with_too_low_an_age_is_refused(train):
    class Failing(ByArrival):
        def key(self, group):
            raise KeyError

    with pytest.raises(ConfigError, match="the buffer policy Failing failed"):
        train(Failing(MOST))
    with pytest.raises(ConfigError, match="below the lookahead of 2 steps"):
        train(ByArrival(1))
