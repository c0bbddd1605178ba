"""The reward chain inside the trainer: what is logged, what is shown, and what stays secret."""

import json
import logging

import pytest
from support.loopback import VERDICT, chat_completion
from support.scripted import DIFFERENT, steps_of

from salesrl_trl.errors import ServiceUnavailable, TooFewRewardsError
from salesrl_trl.judged.budget import Price
from salesrl_trl.judged.cache import AnswerStore
from salesrl_trl.reward.reward_loop import warm_up

PLANTED = "sk-planted-4242424242"


def test_what_services_and_judges_did_is_logged_with_each_step(scripted_trainer, services):
    body = chat_completion(json.dumps(VERDICT))
    services.set("judge", {**body, "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}})
    services.answers["8b"] = [(503, {}, {}, 0), services.answers["8b"][0]]
    judge = {"name": "judge", "price": Price(prompt_token=10e-6)}
    trainer = scripted_trainer(texts=DIFFERENT, max_steps=2, chain={"attempts": 3, "providers": [judge]})
    trainer.train()
    first, second = steps_of(trainer)
    # four different completions a step, over rows of one conversation
    assert (first["judge/judge/verdicts"], second["judge/judge/verdicts"]) == (4, 4)
    assert first["judge/judge/prompt_tokens"] == 400
    assert first["judge/judge/usd"] == pytest.approx(0.004)  # 400 tokens of 10 dollars a million
    assert (first["services/rag_8b/calls"], first["services/rag_8b/sent"]) == (4, 5)
    assert (first["services/rag_8b/failures"], first["services/rag_8b/retries"]) == (1, 1)
    assert second["services/rag_8b/failures"] == 0
    assert 0 < first["time/judge_s"] <= first["time/reward_s"]


def test_the_warm_up_stops_a_run_that_could_not_score(scripted_trainer, services, caplog):
    trainer = scripted_trainer()
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        warm_up(trainer.components.reward_loop)
    assert "[WarmUp] rag_8b: 0." in caplog.text
    services.set("judge", {}, status=500)
    with pytest.raises(ServiceUnavailable, match="failed their warm-up"):
        warm_up(trainer.components.reward_loop)


@pytest.mark.parametrize("endpoint", ["8b", "judge"])
def test_a_key_that_a_service_echoes_gets_nowhere(scripted_trainer, services, tmp_path, caplog, endpoint):
    stores = {name: AnswerStore(tmp_path / "run" / f"{name}.sqlite") for name in ("answers", "references")}
    echo = {
        "error": {"message": f"Incorrect API key provided: {PLANTED}", "code": "invalid_api_key", "param": PLANTED}
    }
    services.set(endpoint, echo, status=401, headers={"WWW-Authenticate": f"Bearer {PLANTED}", "X-Key": PLANTED})
    trainer = scripted_trainer(
        texts=DIFFERENT, max_steps=2, max_skipped_generations=9, save_strategy="steps", save_steps=1,
        log_completions=True, chain={**stores, "providers": [{"name": "judge", "api_key": PLANTED}]},
    )  # fmt: skip
    rewards, result = [], trainer.components.reward_loop.result
    trainer.components.reward_loop.result = lambda *given: rewards.append(result(*given)) or rewards[-1]
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(TooFewRewardsError) as failed:
            trainer.train()
        trainer.save_model()
        trainer.finish()
    told = str(failed.value) + caplog.text + repr(rewards) + repr(vars(trainer.args)) + str(trainer.state.log_history)
    assert f"{'rag_8b' if endpoint == '8b' else 'judge'}_http_401" in told
    assert PLANTED not in told
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".sqlite" for path in files)
    assert [path for path in files if PLANTED.encode() in path.read_bytes()] == []
