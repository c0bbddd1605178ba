"""KL laws against the simulated plant of `kl_plant`, side by side, as a table in Markdown. 15 s on one core.

python -m benchmarks.kl_simulate [--runs 200] [--windows 60]
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, median, quantiles

from benchmarks.kl_laws import FactorLaw, ZieglerLaw
from benchmarks.kl_plant import TARGETS, Branch, Course, Plant, drawn, run
from salesrl_trl.kl.law import AdaptiveLaw, KLLaw

LAWS: dict[str, KLLaw | None] = {
    "fixed": None,
    "Ziegler et al., `n_steps / horizon` 0.5": ZieglerLaw(),
    "Ziegler et al., `n_steps / horizon` 1": ZieglerLaw(gain=1.0),
    "factors of 1.15 and 0.85 (`FactorLaw`)": FactorLaw(),
    "packaged (`AdaptiveLaw`)": AdaptiveLaw(),
}
TITLES = ("law", "windows until back: median / 90 %", "in band after a third: mean / worst", "undershoot: runs / mean",
          "fresh policy: in band after a third", "out of reach: said / falsely said", "coefficient then")  # fmt: skip


def too_high(seed: int) -> Plant:
    """Every KL is three times its upper edge, and the coefficient that holds it three times the first one."""
    return drawn(random.Random(seed), asked=(1.1, 1.1), start=3.0)


def fresh(seed: int) -> Plant:
    """Every KL rises from 0, with a drive that is up to 4.5 times too weak or too strong."""
    return drawn(random.Random(seed))


def out_of_reach(seed: int) -> Plant:
    """The optimizer's noise alone keeps the KL at 1.3 to 2 times its upper edge."""
    return drawn(random.Random(seed), floor=(1.3, 2.0), of_edge=lambda target: target.high, asked=(-0.5, 1.0))


def measured(seed: int) -> Plant:
    """The run at a rate of 1e-3 whose fairness fell from 0.17 to 0.11 only; hallucination with the same constants."""
    return Plant([Branch(floor=0.087, drive=0.0213, kl=0.17) for _ in TARGETS], random.Random(seed))


def courses(law: KLLaw | None, plant: Callable[[int], Plant], runs: int, windows: int) -> list[tuple[str, Course]]:
    """Every branch of every run, seeds 0 to `runs` - 1."""
    return [each for seed in range(runs) for each in run(law, plant(seed), windows).items()]


def until_back(branch: str, course: Course) -> int:
    """Windows until the true KL lies at or below the upper edge; all of them if it never does."""
    high = TARGETS[branch].high or 0.0
    return next((number for number, kl in enumerate(course.true) if kl <= high), len(course.true))


def undershoot(branch: str, course: Course) -> float:
    """How far the true KL falls below the band after it came back, as a logarithm; 0 if it does not."""
    after = course.true[until_back(branch, course) :]
    return max(0.0, math.log((TARGETS[branch].low or 0.0) / min(after))) if after else 0.0


def in_band(branch: str, course: Course) -> float:
    """Share of measured windows in band after the first third."""
    return fmean(TARGETS[branch].contains(kl) for kl in course.measured[len(course.measured) // 3 :])


def row(name: str, law: KLLaw | None, runs: int, windows: int) -> Sequence[str]:
    """A law's figures as cells, in the order of `TITLES`."""
    high, new, never = (courses(law, plant, runs, windows) for plant in (too_high, fresh, out_of_reach))
    back, shares = [until_back(*each) for each in high], [in_band(*each) for each in high]
    under = [undershoot(*each) for each in high]
    said, false = ([course.noticed is not None for _, course in each] for each in (never, high + new))
    return (
        name, f"{median(back):.0f} / {quantiles(back, n=10)[-1]:.0f}", f"{fmean(shares):.1%} / {min(shares):.0%}",
        f"{fmean(each > 0 for each in under):.1%} / {fmean(under):.3f}",
        f"{fmean(in_band(*each) for each in new):.1%}",
        f"{fmean(said):.1%} / {fmean(false):.1%}",
        f"x {median(course.betas[-1] / course.betas[0] for _, course in never):.3g}",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, then the course of the measured run under each law."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="seeds of each case")
    parser.add_argument("--windows", type=int, default=60)
    args = parser.parse_args(argv)
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for name, law in LAWS.items():
        print(f"| {' | '.join(row(name, law, args.runs, args.windows))} |", flush=True)
    for name, law in LAWS.items():
        course = run(law, measured(1), 30)["fairness"]
        print(f"{name}: fairness {course.true[0]:.3f} -> {course.true[-1]:.3f}, beta {course.betas[0]:.3g} -> "
              f"{course.betas[-1]:.3g} in 150 updates, out of reach said after window {course.noticed}")  # fmt: skip


if __name__ == "__main__":
    main()
