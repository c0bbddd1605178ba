"""KL laws against the simulated plant of `kl_plant`, side by side, as a table in Markdown. 15 s on one core.

python -m benchmarks.kl_simulate [--runs 200] [--windows 60]
"""

import argparse
import functools
import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, median, quantiles

from benchmarks.kl_laws import FactorLaw, ZieglerLaw
from benchmarks.kl_plant import TARGETS, Course, Plant, drawn, run
from salesrl_trl.kl.law import AdaptiveLaw, KLLaw

LAWS: dict[str, KLLaw | None] = {
    "fixed": None,
    "Ziegler et al., `n_steps / horizon` 1": ZieglerLaw(gain=1.0),
    "factors of 1.15 and 0.85 (`FactorLaw`)": FactorLaw(),
    "packaged (`AdaptiveLaw`)": AdaptiveLaw(),
}
TITLES = ("plant", "law", "windows until back: median / 90 %", "in band after a third: mean / worst",
          "undershoot: runs / mean", "said to stall")  # fmt: skip
FIRST_SEED = 1000


def too_high(seed: int, **given: float) -> Plant:
    """Every KL is three times its upper edge, and the coefficient that holds it three times the first one."""
    return drawn(random.Random(seed), asked=(1.1, 1.1), start=3.0, **given)


def fresh(seed: int, **given: float) -> Plant:
    """Every KL rises from 0, with a drive that is up to 4.5 times too weak or too strong."""
    return drawn(random.Random(seed), **given)


def out_of_reach(seed: int) -> Plant:
    """The optimizer's noise alone keeps the KL at 1.3 to 2 times its upper edge."""
    return drawn(random.Random(seed), floor=(1.3, 2.0), of_edge=lambda target: target.high, asked=(-0.5, 1.0))


PLANTS: dict[str, tuple[Callable[[int], Plant], int]] = {
    "three times too high": (too_high, 1),
    "the same, 4 times slower": (functools.partial(too_high, slower=4.0), 3),
    "4 times faster": (functools.partial(too_high, slower=0.25), 1),
    "twice the noise": (functools.partial(too_high, noisier=2.0), 1),
    "fresh": (fresh, 1),
    "fresh, 4 times slower": (functools.partial(fresh, slower=4.0), 3),
    "out of reach": (out_of_reach, 1),
}
"""Plants by name, and how many times as long their runs are."""


def courses(law: KLLaw | None, plant: Callable[[int], Plant], runs: int, windows: int) -> list[tuple[str, Course]]:
    """Every branch of every run."""
    return [each for seed in range(FIRST_SEED, FIRST_SEED + runs) for each in run(law, plant(seed), windows).items()]


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


def row(plant: str, law: str, runs: int, windows: int) -> Sequence[str]:
    """A law's figures on a plant as cells, in the order of `TITLES`."""
    make, longer = PLANTS[plant]
    found = courses(LAWS[law], make, runs, windows * longer)
    shares = [in_band(*each) for each in found]
    too_high_at_first = [each for each in found if each[1].true[0] > (TARGETS[each[0]].high or 0.0)]
    back = [until_back(*each) for each in too_high_at_first]
    under = [undershoot(*each) for each in too_high_at_first]
    return (
        plant, law, f"{median(back):.0f} / {quantiles(back, n=10)[-1]:.0f}" if len(back) > 1 else "-",
        f"{fmean(shares):.1%} / {min(shares):.0%}",
        f"{fmean(each > 0 for each in under):.1%} / {fmean(under):.3f}" if under else "-",
        f"{fmean(course.noticed is not None for _, course in found):.1%}",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="seeds of each case")
    parser.add_argument("--windows", type=int, default=60)
    args = parser.parse_args(argv)
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for plant in PLANTS:
        for law in LAWS:
            print(f"| {' | '.join(row(plant, law, args.runs, args.windows))} |", flush=True)


if __name__ == "__main__":
    main()
