"""The list of figures, from which the table of metrics in docs/background/architecture.md is made."""

from salesrl_trl import names
from salesrl_trl.names import FIGURES, MACHINE, MEMORY, THROUGHPUT, Metric, branches_in, pattern_of, reward_of
from salesrl_trl.parts import step_lines, trackers
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.reward.scorer import RewardNames
from salesrl_trl.telemetry import perf
from salesrl_trl.update.ledger import kl_names

NAMES = RewardNames(providers=("openai",), components=("judge", "reference"), stages=("own",), services=("rag_8b",))


def unlisted(tags):
    patterns = [pattern_of(figure.tag) for figure in FIGURES]
    return [tag for tag in tags if not any(pattern.fullmatch(tag) for pattern in patterns)]


def test_every_figure_that_is_logged_is_in_the_list_once():
    assert len({figure.tag for figure in FIGURES}) == len(FIGURES)
    logged = (*RewardFigures(("a",), NAMES).names(["baseline", "refill"]), *kl_names(("a",)), names.POSITION_GAP,
              *perf.TIMES, *THROUGHPUT, *MEMORY, *MACHINE)  # fmt: skip
    assert unlisted(logged) == []


def test_every_name_of_a_figure_is_in_the_list():
    named = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]
    named += [value.__self__.replace("{}", "any") for value in vars(names).values() if hasattr(value, "__self__")]
    tags = [tag for tag in named if "/" in tag and not tag.endswith("/")]
    assert len(tags) > 40
    assert unlisted(tags) == []


def test_a_tag_that_looks_like_a_branchs_makes_no_branch(monkeypatch):
    with_kl = ["reward", "reward/a", "reward/b", "reward/of_my_own", "beta/a", "beta/b", "kl/a"]
    assert branches_in(with_kl) == ("a", "b")
    monkeypatch.setattr("salesrl_trl.names.FIGURES", (*FIGURES, Metric(reward_of("query/{branch}"), "")))
    assert branches_in(["reward/a", "rewards/judge/a", "reward/query/a"]) == ("a",)


def test_a_figure_by_branch_needs_a_line_in_the_list_to_be_on_the_console_and_in_the_layout(monkeypatch):
    words = {"chart": ("Rewards by branch", "query"), "console": "query"}
    listed = (*FIGURES, Metric("query/{branch}", "characters of a query", **words))
    for reader in (names, trackers):
        monkeypatch.setattr(reader, "FIGURES", listed)
    line = step_lines.step_line(1, 2, {"query/a": 31.0}, ["a", "b"], {}, 1.0)
    assert "| query a=31.00 b=n/a |" in line
    chart = trackers.custom_scalars({"branch": ["a", "b"]}, [])["Rewards by branch"]["query"]
    assert chart == ["Multiline", ["^query/a$", "^query/b$"]]
