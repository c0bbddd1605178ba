"""The frozen reference's reward in the baseline, from the judge's verdicts to the advantages that train."""

import pandas as pd
import pytest
from support.loopback import action
from support.scripted import steps_of

QUERIES = tuple(f"q{index}" for index in range(8))
TEXTS = tuple(action(query=query) for query in QUERIES)  # two groups of four
REFERENCE = 0.5


def worth(query):
    """q0 .. q7: 0 to 0.875."""
    return int(query[1:]) / 8


def answer(request):
    """The 8B answer repeats its query, by which the judge knows the candidate."""
    passages = [{"id": "d1", "text": "...", "score": 0.5}]
    text = f"This answers {request.json['rewritten_query']}."
    return 200, {"answer": text, "passages": passages, "took_ms": 1.0}


def judge(system, user):
    query = next(query for query in QUERIES if f"This answers {query}." in user)
    reference = REFERENCE if "It costs 5980 yuan." in user else None
    return {"candidate": worth(query), "reference": reference, "reason": ""}


@pytest.fixture
def train(scripted_trainer, services):
    """Train for one update of two groups; returns the advantages by completion and the log line."""

    def run(**given):
        services.functions["8b"] = answer
        services.judge_by(judge)
        trainer = scripted_trainer(
            TEXTS, num_generations=4, per_device_train_batch_size=8, max_steps=1, hybrid_reference_weight=0.5,
            scale_rewards="none", **given,
        )  # fmt: skip
        kept, generate = [], trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: kept.append(generate(inputs)) or kept[-1]
        trainer.train()
        (line,) = steps_of(trainer)
        return kept[0]["advantages"].tolist(), line

    return run


def over(first, second):
    """The advantages over a baseline for each group."""
    return pytest.approx([worth(query) - (first if index < 4 else second) for index, query in enumerate(QUERIES)])


def test_with_a_weight_the_reference_moves_the_baseline_and_the_table_shows_the_advantages(train, tmp_path):
    advantages, line = train(log_completions=True)
    # means 0.1875 and 0.6875, reference 0.5
    assert advantages == over(0.34375, 0.59375)
    assert line["failures/baseline_fallback"] == 0.0
    table = pd.concat(pd.read_parquet(path) for path in (tmp_path / "run/completions").glob("*.parquet"))
    assert table["advantage"].tolist() == pytest.approx(advantages)


def test_a_row_whose_reference_failed_has_grpos_baseline_and_is_counted(train, services):
    services.set("32b", {}, status=500)
    advantages, line = train()
    assert advantages == over(0.1875, 0.6875)
    assert line["failures/baseline_fallback"] == line["failures/reference_missing"] == 1.0
