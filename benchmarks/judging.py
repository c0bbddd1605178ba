"""What a way of judging is worth where the truth is known: many small policies side by side, at equal judge calls.

    python -m benchmarks.judging [--seeds 32] [--calls 2560] [--most_steps 40] [--worlds noise_0.3] [--arms plain]

A policy reads a prompt of `FEATURES` numbers and writes one word in each of `SLOTS` places. The true reward is the
share of right words, so that its expectation on held-out prompts is computed, not sampled. All runs of a cell (a world
and an arm) are trained at once, as one tensor: on policy, Adam, TRL's advantages of a group, 64 completions a step in
groups of 8. A run stops when its calls are spent, or its steps. A *world* is a judge that is wrong in training. An
*arm* is a way to ask it. "Less plain": the mean of pairs (arm less plain, same seed), with a 95 % interval of
Student's t.
"""

import argparse
import math
import statistics

import torch

from salesrl_trl.ground.row_statistics import critical

FEATURES, SLOTS, WORDS, GROUP, GROUPS = 4, 5, 6, 8, 8
# A judge with a taste likes word 0 in the first place. The policy seldom writes it at first, and it is mostly wrong.

WORLDS = {
    "true": {},
    "noise_0.15": {"noise": 0.15},
    "noise_0.3": {"noise": 0.3},
    "flips_15": {"flips": 0.15},
    "flips_30": {"flips": 0.3},
    "taste_0.4": {"taste": 0.4},
    "tenths": {"noise": 0.15, "digits": 10},
    "position_0.2": {"noise": 0.15, "position": 0.2},
    "pass_or_fail": {"passes": 0.8},
    "all_right": {"passes": 1.0},
    "pass_or_fail_flips_15": {"passes": 0.8, "flips": 0.15},
}
CHEAP = {"cheap": {"noise": 0.3, "taste": 0.3}, "near": {"noise": 0.1, "taste": 0.3}}
"""Two cheap judges, both with a taste that the strong one lacks, at a twentieth of its price. The number in an arm's
name is the share of completions that the strong one sees too: proxy + seen * (strong - proxy) / share."""
PRICE = 1 / 20


class Policies:
    """`runs` policies, each linear in a prompt's features, and Adam over all of them."""

    def __init__(self, seeds, rate):
        self.made = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.right = self.normal(SLOTS, WORDS, FEATURES)
        start = 1.6 * self.right + 0.8 * self.normal(SLOTS, WORDS, FEATURES)
        self.weights, self.bias = start, torch.zeros(len(seeds), SLOTS, WORDS)
        self.bias[:, 0, 0] = -3.0
        self.weights.requires_grad_(), self.bias.requires_grad_()
        self.adam = torch.optim.Adam([self.weights, self.bias], lr=rate, betas=(0.9, 0.99))
        self.held_out = self.normal(256, FEATURES)

    def normal(self, *shape):
        return torch.stack([torch.randn(*shape, generator=one) for one in self.made])

    def uniform(self, *shape):
        return torch.stack([torch.rand(*shape, generator=one) for one in self.made])

    def logps(self, prompts):
        """Of each word: shape (runs, prompts, slots, words)."""
        return (torch.einsum("rpf,rswf->rpsw", prompts, self.weights) + self.bias[:, None]).log_softmax(-1)

    def answers(self, prompts):
        return torch.einsum("rpf,rswf->rpsw", prompts, self.right).argmax(-1)

    @torch.no_grad()
    def held_out_reward(self):
        chosen = self.logps(self.held_out).gather(-1, self.answers(self.held_out)[..., None])
        return chosen.exp().mean((1, 2, 3))

    def sample(self):
        """Prompts, words of shape (runs, groups, group, slots), true rewards, and whose first word is 0."""
        prompts = self.normal(GROUPS, FEATURES)
        with torch.no_grad():
            logps = self.logps(prompts)[:, :, None].expand(-1, -1, GROUP, -1, -1)
        lot = -torch.log(-torch.log(self.uniform(*logps.shape[1:]).clamp(1e-12, 1 - 1e-7)))
        words = (logps + lot).argmax(-1)
        truth = (words == self.answers(prompts)[:, :, None]).float().mean(-1)
        return prompts, words, truth, (words[..., 0] == 0).float()

    def train(self, prompts, words, advantages, are_going_on):
        """One step. `advantages`: shape (runs, groups, group). Runs that have ended stay as they are."""
        chosen = self.logps(prompts)[:, :, None].expand(-1, -1, GROUP, -1, -1).gather(-1, words[..., None])[..., 0]
        self.adam.zero_grad()
        (-(advantages * chosen.mean(-1)).mean((1, 2)) * are_going_on).sum().backward()
        before = [each.detach().clone() for each in (self.weights, self.bias)]
        self.adam.step()
        with torch.no_grad():
            for each, was in zip((self.weights, self.bias), before, strict=True):
                each[~are_going_on] = was[~are_going_on]


def judged(policies, truth, tasty, *, noise=0.0, flips=0.0, taste=0.0, digits=20, position=0.0, passes=None,
           places=None):  # fmt: skip
    """One verdict on each completion. `places`: its place in a call for a whole group, from 0 to 1."""
    if passes is not None:  # 1 for a true reward of this and more, otherwise 0
        truth = (truth > passes - 1e-3).float()
    score = (1 - taste) * truth + taste * tasty
    turned = policies.uniform(*truth.shape[1:]) < flips
    score = torch.where(turned, 1 - score, score) + noise * policies.normal(*truth.shape[1:])
    if places is not None:
        score = score + position * (0.5 - places)
    return (score.clamp(0, 1) * digits).round() / digits


def spread(scores, noise):
    """Which groups differ by more than the judge's noise: shape (runs, groups)."""
    return scores.var(-1) > (noise**2).clamp_min(1e-9)


def ask(arm, world, policies):
    """A step's groups by an arm: prompts, words, scores, weights of groups, calls of each run."""
    prompts, words, truth, tasty = policies.sample()
    runs = len(truth)
    # What a preflight measures: the standard deviation of two verdicts on the same completion. Its calls do not count.
    twin = judged(policies, truth, tasty, **world) - judged(policies, truth, tasty, **world)
    noise = twin.square().mean((1, 2), keepdim=True)[..., 0].div(2).sqrt()  # shape (runs, 1)
    all_calls = torch.full((runs,), float(GROUPS * GROUP))
    weights = torch.ones(runs, GROUPS)
    once = judged(policies, truth, tasty, **world)
    if arm == "plain":
        return prompts, words, once, weights, all_calls
    if arm == "twice":
        return prompts, words, (once + judged(policies, truth, tasty, **world)) / 2, weights, 2 * all_calls
    if arm == "undecided":  # a second verdict where the group differs by no more than noise
        again = ~spread(once, noise)
        scores = torch.where(again[..., None], (once + judged(policies, truth, tasty, **world)) / 2, once)
        return prompts, words, scores, weights, all_calls + again.sum(-1) * GROUP
    if arm == "weighted":
        return prompts, words, once, (1 - noise**2 / once.var(-1).clamp_min(1e-9)).clamp(0, 1), all_calls
    if arm == "drop":
        return prompts, words, once, spread(once, noise).float(), all_calls
    if arm in ("refill_equal", "refill_noise"):
        known = torch.full_like(noise, 1e-4) if arm == "refill_equal" else noise
        calls = all_calls
        for _ in range(2):  # at most two more groups for one
            poor = ~spread(once, known)
            if not poor.any():
                break
            more, more_words, more_truth, more_tasty = policies.sample()
            fresh = judged(policies, more_truth, more_tasty, **world)
            prompts = torch.where(poor[..., None], more, prompts)
            words = torch.where(poor[..., None, None], more_words, words)
            once = torch.where(poor[..., None], fresh, once)
            calls = calls + poor.sum(-1) * GROUP
        return prompts, words, once, weights, calls
    if arm.startswith("group_"):  # k calls for a group: each candidate at k places of the order
        orders = int(arm.removeprefix("group_"))
        places = policies.uniform(*truth.shape[1:]).argsort(-1).argsort(-1) / (GROUP - 1)
        scores = [
            judged(policies, truth, tasty, **world, places=places if order % 2 == 0 else 1 - places)
            for order in range(orders)
        ]
        return prompts, words, sum(scores) / orders, weights, all_calls * orders / GROUP
    which, share = arm.split("_")[0], float(arm.split("_")[1])
    cheap = judged(policies, truth, tasty, **CHEAP[which])
    calls = all_calls * (PRICE + share)
    if share == 0:
        return prompts, words, cheap, weights, calls
    seen = (policies.uniform(*truth.shape[1:]) < share).float()
    return prompts, words, cheap + seen * (once - cheap) / share, weights, calls


ARMS = ("plain", "twice", "undecided", "weighted", "drop", "refill_equal", "refill_noise", "group_1", "group_2",
        "cheap_0", "cheap_0.25", "cheap_0.5", "near_0", "near_0.25", "near_0.5")  # fmt: skip


def train(arm, world, seeds, *, calls, most_steps, rate):
    """Held-out true reward of each run before and after, steps and calls of each."""
    policies = Policies(seeds, rate)
    before = policies.held_out_reward()
    spent, steps = torch.zeros(len(seeds)), torch.zeros(len(seeds))
    while (going := (spent < calls) & (steps < most_steps)).any():
        prompts, words, scores, weights, asked = ask(arm, world, policies)
        middle = scores.mean(-1, keepdim=True)
        advantages = (scores - middle) / (scores.std(-1, keepdim=True) + 1e-4) * weights[..., None]
        policies.train(prompts, words, advantages, going)
        spent, steps = spent + asked * going, steps + going
    return before, policies.held_out_reward(), steps, spent


def interval(values):
    """Mean, and half of its 95 % interval."""
    return statistics.mean(values), critical(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--calls", type=float, default=2560, help="of a run: 64 are a step of the arm plain")
    parser.add_argument("--most_steps", type=float, default=math.inf)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    chosen = parser.parse_args()
    print("| world | arm | steps | calls | held out before | after | less plain |\n|---|---|---|---|---|---|---|")
    for name in chosen.worlds:
        plain = None
        for arm in chosen.arms:
            world = WORLDS[name]
            before, after, steps, calls = train(
                arm,
                world,
                range(1, chosen.seeds + 1),
                calls=chosen.calls,
                most_steps=chosen.most_steps,
                rate=chosen.rate,
            )
            if plain is None:
                plain = after
            mean, half = interval((after - plain).tolist()) if arm != chosen.arms[0] else (0.0, 0.0)
            told = f"{mean:+.3f} ± {half:.3f}" + (" (0 within)" if abs(mean) <= half and half else "")
            print(
                f"| {name} | {arm} | {steps.mean():.0f} | {calls.mean():.0f} | {before.mean():.3f} "
                f"| {after.mean():.3f} | {told} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
