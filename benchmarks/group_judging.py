"""How well verdicts on a group agree with the truth, and what their order does, beside single verdicts.

    python -m benchmarks.group_judging [--groups 500] [--bias 0.2] [--noise 0.15] [--arms "group, orders 2"]

The whole client judges: rubric, fences, names, HTTP, reading. The judge on loopback is simulated. An answer's text is
its true score. A verdict on it has noise, the same in both forms, and likes what stands in front: by half of `--bias`
more at the front, by half of it less at the end, and in between in proportion. So a candidate before its reference has
`--bias` more than one behind it. "agreement": the correlation of score and truth inside groups. "order": the mean
error of candidates that stood in the first half of their first call, less that of the others, with its standard error.
"""

import argparse
import asyncio
import json
import math
import random
import statistics

from aiohttp import web

from salesrl_trl import judge_reward
from salesrl_trl.ground.fencing import read_nonce, read_sections

GROUP = 8
ARMS = {
    "single": {},
    "single, repeats 2": {"judge_repeats": 2},
    **{f"group, orders {count}": {"judge_mode": "group", "judge_orders": count} for count in (1, 2, 4)},
}


class BiasedJudge:
    """Counts its calls, and keeps where each answer stood when it was first judged: in [-1, 1], 1 in front."""

    def __init__(self, noise, bias):
        self.noise, self.bias = noise, bias
        self.random = random.Random(0)
        self.calls, self.places = 0, {}

    async def complete(self, request):
        self.calls += 1
        body = await request.json()
        message = body["messages"][-1]["content"]
        shown = {
            name: text
            for name, text in read_sections(message).items()
            if name.startswith(("candidate_", "reference_"))
        }
        scores = {}
        for place, (name, text) in enumerate(shown.items()):
            front = 1 - 2 * place / max(len(shown) - 1, 1)
            self.places.setdefault(text, front)
            score = float(text.split()[0]) + self.random.gauss(0, self.noise) + self.bias / 2 * front
            scores[name] = min(max(score, 0.0), 1.0)
        reference = scores.pop("reference_answer", None)
        named = [{"name": name.removeprefix("candidate_"), "score": score} for name, score in scores.items()]
        said = {"candidate": named[0]["score"]} if len(named) == 1 else {"candidates": named}
        content = json.dumps({"nonce": read_nonce(message), **said, "reference": reference, "reason": ""})
        return web.json_response(
            {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": content}}]}
        )


async def measured(settings, args):
    """Calls for each group, agreement and order effect of one way to judge."""
    judge, app = BiasedJudge(args.noise, args.bias), web.Application()
    app.router.add_post("/v1/chat/completions", judge.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    reward = judge_reward("Grade it.", judge_base_url=url, judge_model="m", **settings)
    made = random.Random(1)
    truth = [made.uniform(0.2, 0.8) for _ in range(GROUP * args.groups)]
    texts = [f"{number:.6f} of {place}" for place, number in enumerate(truth)]
    rows = [
        {"prompt": f"Question {place // GROUP}", "reference": f"0.5 of {place // GROUP}"}
        for place in range(len(truth))
    ]
    result = await reward.score_all(rows, texts, group=GROUP)
    await reward.aclose()
    await runner.cleanup()
    assert result.report.judged_singly == 0
    values, errors = result.values, {True: [], False: []}
    agreement = []
    for first in range(0, len(truth), GROUP):
        agreement.append(statistics.correlation(values[first : first + GROUP], truth[first : first + GROUP]))
    for text, value, number in zip(texts, values, truth, strict=True):
        if judge.places[text]:
            errors[judge.places[text] > 0].append(value - number)
    gap = statistics.fmean(errors[True]) - statistics.fmean(errors[False])
    error = math.sqrt(sum(statistics.variance(part) / len(part) for part in errors.values()))
    of_mean = statistics.stdev(agreement) / math.sqrt(len(agreement))
    return judge.calls / args.groups, statistics.fmean(agreement), of_mean, gap, error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--bias", type=float, default=0.2)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--arms", nargs="+", default=[*ARMS])
    args = parser.parse_args()
    print(f"{args.groups} groups of {GROUP}, noise {args.noise}, bias {args.bias}")
    print("| way | calls for a group | agreement | order |\n|---|---|---|---|")
    for name in args.arms:
        calls, agreement, of_mean, gap, error = asyncio.run(measured(ARMS[name], args))
        print(f"| {name} | {calls:g} | {agreement:.3f} ± {of_mean:.3f} | {gap:+.4f} ± {error:.4f} |", flush=True)


if __name__ == "__main__":
    main()
