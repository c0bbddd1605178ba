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


def test_with_a_weight_the_reference_moves_the_baseline_and_the_table_shows_the_advantages(
    scripted_trainer, services, tmp_path
):
    services.functions["8b"] = answer
    services.judge_by(judge)
    trainer = scripted_trainer(
        TEXTS, num_generations=4, per_device_train_batch_size=8, max_steps=1, hybrid_reference_weight=0.5,
        scale_rewards="none", log_completions=True,
    )  # fmt: skip
    kept, generate = [], trainer._generate_and_score_completions
    trainer._generate_and_score_completions = lambda inputs: kept.append(generate(inputs)) or kept[-1]
    trainer.train()
    # means 0.1875 and 0.6875, reference 0.5: baselines 0.34375 and 0.59375
    expected = [worth(query) - (0.34375 if index < 4 else 0.59375) for index, query in enumerate(QUERIES)]
    assert kept[0]["advantages"].tolist() == pytest.approx(expected)
    (line,) = steps_of(trainer)
    assert line["failures/baseline_fallback"] == 0.0
    table = pd.concat(pd.read_parquet(path) for path in (tmp_path / "run/completions").glob("*.parquet"))
    assert table["advantage"].tolist() == pytest.approx(expected)
