"""The packaged judge as a reward function, over providers that fail in every way, against a ledger of what they said.

No two replies have the same numbers. So a number shows that was not validly said of this very completion.
"""

import json
import random
import re
from collections import Counter, defaultdict
from statistics import fmean

import pytest
from faults.fault_server import chat, nonce_of
from faults.mixed_up import number_in
from support import virtual_time

from salesrl_trl import judge_reward
from salesrl_trl.ground.fencing import make_nonce, read_sections
from salesrl_trl.types import Outcome

COMPLETIONS, GROUP, WAVE = 3000, 8, 500
PROVIDERS = {"first": 2.0, "second": 1.0, "last": 0.0}
CRITERIA = [{"text": "is right", "weight": 1.0}, {"text": "is polite", "weight": 3.0, "name": "polite"}]


def scores_of(verdict):
    return verdict["candidate"] if isinstance(verdict["candidate"], list) else [verdict["candidate"]]


SPOILS = {
    "a wrong nonce": lambda verdict: {**verdict, "nonce": make_nonce()},
    "no nonce": lambda verdict: {**verdict, "nonce": None},
    "a score less": lambda verdict: {**verdict, "candidate": scores_of(verdict)[1:]},
    "a score more": lambda verdict: {**verdict, "candidate": [*scores_of(verdict), 0.5]},
    "a score of null": lambda verdict: {**verdict, "candidate": [None, *scores_of(verdict)[1:]]},
    "a score outside [0, 1]": lambda verdict: {**verdict, "candidate": [1.5, *scores_of(verdict)[1:]]},
    "no score of the reference": lambda verdict: {**verdict, "reference": None} if verdict["reference"] else {},
}
"""What makes a verdict invalid. A row without criteria has one score, and a list is no number."""
FAULTS = {
    "500": {"kind": "status", "status": 500},
    "400": {"kind": "status", "status": 400},
    "429": {"kind": "status", "status": 429, "headers": {"Retry_After": "2"}},
    "reset": {"kind": "hang_up"},
    "broken JSON": {"kind": "body", "body": '{"choices": [{"message": {"content": "0.9'},
    "an error in a 200": {"kind": "body", "body": '{"error": {"message": "busy", "code": 500}}'},
    "no JSON in the text": {"kind": "body", "body": json.dumps(chat("I would say 0.9."))},
    "hanging": {"kind": "latency", "seconds": {"": 1e5}},
    "slow": {"kind": "latency", "seconds": {"": 9.0}},
    "another's": {"kind": "latency", "seconds": {"": 0.5}},
    **{name: {"kind": "latency", "seconds": {"": 0.5}} for name in SPOILS},
}


class Ledger:
    """What was validly said: (row, item) to the scores of the candidate and, if it was shown, of the reference."""

    def __init__(self):
        self.said = defaultdict(list)
        self.random = random.Random(0)
        self.earlier = [chat("{}")]
        answers = {name: lambda path, body, spoil=spoil: chat(json.dumps(spoil(self.verdict(body)[2])))
                   for name, spoil in SPOILS.items()}  # fmt: skip
        answers |= {"slow": self.good, "another's": lambda path, body: self.random.choice(self.earlier)}
        self.faults = [{**fault, "good": answers.get(name, self.good)} for name, fault in FAULTS.items()]

    def verdict(self, body):
        """What is judged, its new scores, and these as a provider writes them."""
        system, user = (message["content"] for message in json.loads(body)["messages"])
        shown = read_sections(user)
        judged = number_in("row", shown["conversation"]), number_in("item", shown["candidate_answer"])
        count = len(re.findall(r"^\d\. is ", system, re.MULTILINE))
        scores = [[self.random.random() for _ in range(count or 1)] for _ in range(1 + ("reference_answer" in shown))]
        candidate, reference = [*(each if count else each[0] for each in scores), None][:2]
        said = {"nonce": nonce_of(body), "candidate": candidate, "reference": reference, "reason": ""}
        return judged, scores, said

    def good(self, path, body):
        judged, scores, said = self.verdict(body)
        self.said[judged].append(scores)
        self.earlier.append(chat(json.dumps(said)))
        return self.earlier[-1]


def numbers(scores):
    """The reward of these scores, by name."""
    by_criteria = len(scores[0]) > 1
    judge, *reference = (fmean(each, [1.0, 3.0] if by_criteria else None) for each in scores)
    parts = dict(zip(("criterion_1", "polite"), scores[0], strict=True)) if by_criteria else {}
    margin = {"reference": reference[0], "margin": judge - reference[0]} if reference else {}
    return {"value": judge, "judge": judge, **parts, **margin}


def rewards_of(reward):
    rows = [{"prompt": f"Tell me all about row-{number}.",
             "reference": "It is good." if number % 3 else None,
             "criteria": CRITERIA if number % 2 else None} for number in range(COMPLETIONS // GROUP)]  # fmt: skip
    asked = [(number // GROUP, number % (GROUP - 1)) for number in range(COMPLETIONS)]  # of each group, two are equal

    async def in_waves():
        rewards, verdicts = [], Counter()
        for start in range(0, COMPLETIONS, WAVE):
            wave = asked[start : start + WAVE]
            result = await reward.score_all([rows[row] for row, _ in wave], [f"item-{item}" for _, item in wave])
            rewards += result.rewards
            verdicts += Counter({name: usage.verdicts for name, usage in result.report.usage.items()})
        await reward.aclose()
        return rewards, verdicts

    return asked, *virtual_time.run(in_waves())


def test_each_completion_has_a_verdict_of_its_own_or_a_reason(fault_in_memory):
    ledger = Ledger()
    servers = {name: fault_in_memory("some", share=0.6, others=ledger.faults, good=ledger.good) for name in PROVIDERS}
    providers = [
        {"name": name, "base_url": f"{servers[name].url}/v1", "model": "m", "weight": weight}
        for name, weight in PROVIDERS.items()
    ]
    reward = judge_reward(
        "Grade it.", judge_providers=providers, max_attempts=2, judge_timeout_s=20.0, reward_deadline_s=60.0
    )
    asked, rewards, verdicts = rewards_of(reward)
    scored = Counter()
    for judged, each in zip(asked, rewards, strict=True):
        if each.outcome is Outcome.OK:
            got = {name: number for name, number in each.components.items() if number is not None}
            assert {"value": each.value, **got} in [pytest.approx(numbers(said)) for said in ledger.said[judged]]
        else:
            assert (each.value, each.components.get("judge")) == (None, None)
            assert each.reason
        scored[each.reason if each.value is None else "scored"] += 1
    met = {name: sum(server.scenarios.others[place].stats["requests"] for server in servers.values())
           for place, name in enumerate(FAULTS)}  # fmt: skip
    print(f"{len(rewards)} completions: {dict(scored)}; verdicts {dict(verdicts)}; faults met {met}")
    assert 0.5 * COMPLETIONS < scored["scored"] < COMPLETIONS
    assert min(*met.values(), *verdicts.values()) > 20
