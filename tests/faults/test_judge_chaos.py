"""The packaged judge as a reward function, over providers that fail in every way, against a ledger of what they said.

No two replies have the same numbers. So a number shows that was not validly said of this very completion.
`CHAOS_GROUPS=10000` judges so many groups together.
"""

import itertools
import json
import os
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

GROUP, WAVE = 8, 496
GROUPS = int(os.environ.get("CHAOS_GROUPS", "250"))
PROVIDERS = {"first": 2.0, "second": 1.0, "last": 0.0}
CRITERIA = [{"text": "is right", "weight": 1.0}, {"text": "is polite", "weight": 3.0, "name": "polite"}]


def scores_of(verdict):
    return verdict["candidate"] if isinstance(verdict["candidate"], list) else [verdict["candidate"]]


def spoilt(change):
    """Of a verdict on a group, the scores of the candidates, changed."""
    return lambda verdict: {**verdict, "candidates": change([*verdict["candidates"]])}


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
SPOILS_OF_A_GROUP = {
    "a candidate less": spoilt(lambda scores: scores[1:]),
    "a candidate more": spoilt(lambda scores: [*scores, {**scores[0], "name": "gggggg"}]),
    "two for one": spoilt(lambda scores: [*scores, scores[0]]),
    "two for one, and one less": spoilt(lambda scores: [*scores[1:], scores[-1]]),
    "no names": spoilt(lambda scores: [{"score": entry["score"]} for entry in scores]),
    "a place for a name": spoilt(lambda scores: [{**entry, "name": str(at)} for at, entry in enumerate(scores)]),
    "a null": spoilt(lambda scores: [{**scores[0], "score": None}, *scores[1:]]),
    **{name: SPOILS[name] for name in ("a wrong nonce", "no nonce", "no score of the reference")},
}
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
    **{name: {"kind": "latency", "seconds": {"": 0.5}} for name in {**SPOILS, **SPOILS_OF_A_GROUP}},
}


class Ledger:
    """What was validly said: (row, item) to the scores of the candidate and, if it was shown, of the reference."""

    def __init__(self):
        self.said = defaultdict(list)
        self.random = random.Random(0)
        self.earlier = [chat("{}")]
        answers = {name: lambda path, body, name=name: self.bad(name, body) for name in FAULTS}
        answers |= {"slow": self.good, "another's": lambda path, body: self.random.choice(self.earlier)}
        self.faults = [{**fault, "good": answers[name]} for name, fault in FAULTS.items()]

    def verdict(self, body):
        """The new scores of what is judged, and these as a provider writes them."""
        system, user = (message["content"] for message in json.loads(body)["messages"])
        shown = read_sections(user)
        count = len(re.findall(r"^\d\. is ", system, re.MULTILINE))
        scores = {name: [self.random.random() for _ in range(count or 1)]
                  for name in shown if name.startswith(("candidate_", "reference_"))}  # fmt: skip
        written = {name: each if count else each[0] for name, each in scores.items()}
        reference, of_reference = written.pop("reference_answer", None), scores.pop("reference_answer", None)
        row = number_in("row", shown["conversation"])
        judged = {(row, number_in("item", shown[name])): [each, of_reference][: 2 if of_reference else 1]
                  for name, each in scores.items()}  # fmt: skip
        named = [{"name": name.removeprefix("candidate_"), "score": each} for name, each in written.items()]
        of_all = {"candidate": written["candidate_answer"]} if len(written) == 1 else {"candidates": named}
        return judged, {"nonce": nonce_of(body), **of_all, "reference": reference, "reason": ""}

    def good(self, path, body):
        judged, said = self.verdict(body)
        for of_whom, scores in judged.items():
            self.said[of_whom].append(scores)
        self.earlier.append(chat(json.dumps(said)))
        return self.earlier[-1]

    def bad(self, name, body):
        """A verdict that is spoilt, in a way that its form has."""
        said = self.verdict(body)[1]
        spoil = (SPOILS if "candidate" in said else SPOILS_OF_A_GROUP).get(name)
        return chat(json.dumps({} if spoil is None else spoil(said)))


def numbers(scores):
    """The reward of these scores, by name."""
    by_criteria = len(scores[0]) > 1
    judge, *reference = (fmean(each, [1.0, 3.0] if by_criteria else None) for each in scores)
    parts = dict(zip(("criterion_1", "polite"), scores[0], strict=True)) if by_criteria else {}
    margin = {"reference": reference[0], "margin": judge - reference[0]} if reference else {}
    return {"value": judge, "judge": judge, **parts, **margin}


def rewards_of(reward, completions):
    rows = [{"prompt": f"Tell me all about row-{number}.",
             "reference": "It is good." if number % 3 else None,
             "criteria": CRITERIA if number % 2 else None} for number in range(completions // GROUP)]  # fmt: skip
    asked = [(number // GROUP, number % (GROUP - 1)) for number in range(completions)]  # of each group, two are equal

    async def in_waves():
        rewards, verdicts = [], Counter()
        for start in range(0, completions, WAVE):
            wave = asked[start : start + WAVE]
            texts = [f"item-{item}" if item != 3 else " " for _, item in wave]  # some say nothing
            result = await reward.score_all([rows[row] for row, _ in wave], texts, group=GROUP)
            verdicts["judged_singly"] += result.report.judged_singly
            rewards += result.rewards
            verdicts += Counter({name: usage.verdicts for name, usage in result.report.usage.items()})
        await reward.aclose()
        return rewards, verdicts

    return asked, *virtual_time.run(in_waves())


def check_against(ledger, asked, rewards):
    """Each completion has the mean of one or two verdicts that were validly said of it, or a reason."""
    scored = Counter()
    for judged, each in zip(asked, rewards, strict=True):
        if each.outcome is Outcome.OK:
            got = {name: number for name, number in each.components.items() if number is not None}
            known = [numbers(said) for said in ledger.said[judged]]
            means = [
                {name: fmean(one[name] for one in chosen) for name in chosen[0]}
                for count in (1, 2)
                for chosen in itertools.combinations(known, count)
            ]
            assert {"value": each.value, **got} in [pytest.approx(mean) for mean in means]
        elif each.outcome is not Outcome.INVALID_ACTION:
            assert (each.value, each.components.get("judge")) == (None, None)
            assert each.reason
        scored[each.reason if each.value is None else each.outcome.value] += 1
    return scored


def test_each_completion_of_a_group_has_scores_of_its_own_or_a_reason(fault_in_memory):
    ledger = Ledger()
    servers = {name: fault_in_memory("some", share=0.5, others=ledger.faults, good=ledger.good) for name in PROVIDERS}
    providers = [
        {"name": name, "base_url": f"{servers[name].url}/v1", "model": "m", "weight": weight}
        for name, weight in PROVIDERS.items()
    ]
    reward = judge_reward(
        "Grade it.", judge_providers=providers, max_attempts=1, judge_timeout_s=20.0, reward_deadline_s=60.0,
        judge_mode="group",
    )  # fmt: skip
    asked, rewards, verdicts = rewards_of(reward, GROUPS * GROUP)
    scored = check_against(ledger, asked, rewards)
    met = {
        name: sum(server.scenarios.others[place].stats["requests"] for server in servers.values())
        for place, name in enumerate(FAULTS)
    }
    print(f"{GROUPS} groups: {dict(scored)}; verdicts {dict(verdicts)}; faults met {met}")
    assert scored["ok"] > 0.6 * GROUPS * GROUP and verdicts["judged_singly"] > 0.05 * GROUPS * GROUP
    assert min(met.values()) > 10
