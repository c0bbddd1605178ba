"""A stage of the reward from outside the package: one class, as an object or by its dotted path in the settings."""

import math

import pytest
from seams.own_reward import LONG, Brevity, Doubt, Gate
from support.loopback import ACTION, ANSWER, VERDICT, action, build_reward, row

from salesrl_trl.errors import ConfigError
from salesrl_trl.launch.assembly import build_reward as build_from_settings
from salesrl_trl.launch.checks.reward import prepare_reward
from salesrl_trl.reward.batch import NOTHING_SCORED
from salesrl_trl.reward.figures import RewardFigures
from salesrl_trl.types import Outcome
from salesrl_trl.update.ledger import Ledger

BRANCHES = ("fairness", "hallucination")
BREVITY = 1 - len(ANSWER["answer"]) / LONG
WEIGHTS = {"fairness": {"judge": 1.0, "brevity": 2.0, "doubt": 0.5}}


def outcomes(result):
    return [(each.outcome, each.reason) for each in result.rewards]


def test_stages_before_and_behind_the_judge_add_components_that_weights_weigh(services, anywhere):
    reward = build_reward(
        services.url, [row()], weights=WEIGHTS, stage_components=("brevity", "doubt"), stages=[Doubt(), Brevity()]
    )
    assert reward.names.stages == ("doubt", "brevity")
    assert {"brevity", "doubt", "certainty"} <= set(reward.names.components)
    result = anywhere(reward, [ACTION])
    (scored,) = result.rewards
    verdict = VERDICT["candidate"]
    assert scored.value == pytest.approx(verdict + 2 * BREVITY - 0.5 * verdict)
    assert scored.components["certainty"] == pytest.approx(BREVITY)  # the stage before the judge ran before it
    assert scored.reference_value is None  # the doubt about the reference is not known
    assert {"brevity", "doubt"} <= set(scored.seconds)
    order = [span.name for span in result.report.spans if not span.name.startswith("rag")]
    assert order == ["parse", "brevity", "judge", "doubt"]


def test_a_stage_refuses_with_its_reason_and_the_judge_is_not_asked(services, result_of):
    texts = [action(query) for query in ("invalid", "missing", "raises", "unknown component", "no code")]
    result = result_of(build_reward(services.url, [row()], stages=[Gate()]), texts)
    assert outcomes(result) == [
        (Outcome.INVALID_ACTION, "gate_closed"),
        (Outcome.INFRA, "gate_broken"),
        (Outcome.INFRA, "raised_RuntimeError"),
        (Outcome.INFRA, "raised_ValueError"),
        (Outcome.INFRA, "raised_ValueError"),
    ]
    assert result.values == [-0.25, None, None, None, None]
    assert services.calls["judge"] == 0


def test_a_component_that_a_stage_can_not_have_is_missing_and_named(services, result_of):
    services.verdict('{"candidate": 0.75, "reference": 0.5, "reason": "unsure"}')
    kinds = {"weights": WEIGHTS, "stage_components": ("brevity", "doubt"), "stages": [Brevity(), Doubt()]}
    assert outcomes(result_of(build_reward(services.url, [row()], **kinds), [ACTION])) == [(Outcome.INFRA, "no_doubt")]
    reward = build_reward(services.url, [row()], missing="reweight", **kinds)
    assert result_of(reward, [ACTION]).values == [pytest.approx(3.5 / 3 * (0.75 + 2 * BREVITY))]


def test_settings_name_stages_by_their_dotted_paths(services, settings, result_of, tmp_path):
    config = settings(
        judge_base_url=f"{services.url}/v1",
        reward_stages=["seams.own_reward.Brevity", "seams.own_reward.Gate"],
        branch_reward_weights={"fairness": {"judge": 1.0, "brevity": 2.0}},
    )
    parts = prepare_reward(config, BRANCHES)
    reward = build_from_settings(config, parts, [row()], services.url, f"{services.url}/v1", output_dir=tmp_path)
    assert reward.names.stages == ("brevity", "gate")
    (scored,) = result_of(reward, [ACTION]).rewards
    assert scored.value == pytest.approx(VERDICT["candidate"] + 2 * BREVITY)
    assert scored.reference_value == pytest.approx(VERDICT["reference"] + 2 * BREVITY)


def test_a_weight_needs_a_stage_that_adds_its_component_and_a_stage_is_one(services, settings):
    with pytest.raises(ConfigError, match="names 'brevity'"):
        build_reward(services.url, [row()], weights={"fairness": {"brevity": 1.0}}, stage_components=("brevity",))
    with pytest.raises(ConfigError, match="Expected a `RewardStage`"):
        build_reward(services.url, [row()], stages=["brevity"])


def test_components_and_seconds_of_a_stage_are_figures_under_the_same_names_on_every_rank(services, result_of):
    reward = build_reward(services.url, [row()], stages=[Brevity(), Gate()])
    result = result_of(reward, [ACTION, action("invalid")])
    figures = {}
    for rank, rewards in enumerate((result.rewards, ())):  # the second rank has scored nothing
        made = RewardFigures(BRANCHES, reward.names)
        ledger = Ledger(made)
        table = made.encode(rewards, [0] * len(rewards))
        ledger.record_rewards("train", table, made.encode_report(NOTHING_SCORED))
        figures[rank] = ledger.flush("train")
    assert list(figures[0]) == list(figures[1])
    own = {"time/brevity_p50_s", "time/brevity_p95_s", "time/brevity_max_s"}
    assert own <= figures[0].keys() and not own & Ledger(RewardFigures(BRANCHES)).flush("train").keys()
    seconds = [each.seconds["brevity"] for each in result.rewards]
    assert figures[0]["time/brevity_max_s"] == pytest.approx(max(seconds))
    assert math.isnan(figures[1]["time/brevity_max_s"])
    assert figures[0]["rewards/brevity/fairness"] == pytest.approx(BREVITY)
    assert math.isnan(figures[0]["rewards/brevity/hallucination"])
