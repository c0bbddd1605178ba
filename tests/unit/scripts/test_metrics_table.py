"""The table of metrics in docs/ARCHITECTURE.md, and the list of figures that it is made from."""

from salesrl_trl.kl.figures import kl_names
from salesrl_trl.names import FIGURES, MACHINE, MEMORY, THROUGHPUT, Metric, branches_in, pattern_of, reward_of
from salesrl_trl.reward.base import RewardNames
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.judge.bias import JudgeBias
from salesrl_trl.telemetry import perf
from scripts import make_metrics_table as tool

NAMES = RewardNames(providers=("openai",), components=("judge", "reference"), stages=("own",), services=("rag_8b",))


def test_the_page_has_the_table_of_the_list_as_it_is():
    text = tool.PAGE.read_text("utf-8")
    assert tool.page(text) == text, "python scripts/make_metrics_table.py"


def test_every_figure_that_is_logged_is_in_the_list_once():
    assert len({figure.tag for figure in FIGURES}) == len(FIGURES)
    patterns = [pattern_of(figure.tag) for figure in FIGURES]
    logged = (*RewardFigures(("a",), NAMES).names(with_baseline=True), *kl_names(("a",)), *JudgeBias().flush(),
              *perf.TIMES, *THROUGHPUT, *MEMORY, *MACHINE)  # fmt: skip
    assert [name for name in logged if not any(pattern.fullmatch(name) for pattern in patterns)] == []


def test_a_tag_that_looks_like_a_branchs_makes_no_branch(monkeypatch):
    with_kl = ["reward", "reward/a", "reward/b", "reward/of_my_own", "beta/a", "beta/b", "kl/a"]
    assert branches_in(with_kl) == ("a", "b")
    monkeypatch.setattr("salesrl_trl.names.FIGURES", (*FIGURES, Metric(reward_of("query/{branch}"), "")))
    assert branches_in(["reward/a", "rewards/judge/a", "reward/query/a"]) == ("a",)
