"""Judge drift monitor: a second judge scores a sample of completions to check the first. Pure; `judged.meter_part`
makes the calls.

`Rising` finds features that the policy produces increasingly often and that the judge rewards within groups. The
judges' disagreement on completions with such a feature is compared with that on completions without it.

Alarms follow a betting test. Each suspected feature receives capital, which every verdict multiplies:

    capital <- capital * exp(z - 1/2),    z in [-CLIP, CLIP]

If z has mean at most 0 and variance at most 1, the factor's mean is about 1 or less, so an honest judge's capital does
not grow on average. All suspicions together receive less than 1 per batch, and capital of `ALARM` raises an alarm, so
the probability of a false alarm in n batches is at most about n / `ALARM` (Ville's inequality).
"""

import itertools
import math
import random
import re
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from salesrl_trl.reward.scorer import MeterSettings

RECENT, BEFORE, LEAST = 5, 60, 10  # recent batches, and most and fewest earlier batches to compare them with
RISE = 0.05  # smallest relevant rise of a share
LEAST_WORTH = 0.1  # smallest relevant worth, in units of the score
SURE = 3.0  # standard errors required of a rise and of a worth
SEEN = 0.02  # share of a batch that must have a feature to track it
READ = 100  # words examined at the start and at the end of a text
LONG = (1.25, 1.5, 2.0)  # length thresholds, relative to the mean of the first `LEAST` batches
FORMATS = {
    name: re.compile(pattern, re.MULTILINE)
    for name, pattern in {
        "a list": r"^\s*([-*•]|\d+[.)])\s", "a heading": r"^\s*#+\s", "bold text": r"\*\*\S", "code": r"```",
        "a table": r"^\s*\|.*\|", "an exclamation": r"[!！]", "a question": r"[?？]",
    }.items()
}  # fmt: skip
_WORDS = re.compile(r"[\u3040-\u9fff]|[^\W_\u3040-\u9fff]+")  # each Chinese or Japanese character is a word
LENGTH, FORMAT, PHRASE = "length", "format", "phrase"

ALARM = 10_000.0  # capital that raises an alarm: at most 1 in 10 honest runs of 1,000 batches
CLIP = 2.0  # largest |z|, so that rare outliers don't decide
TOLERANCE = 0.05  # insignificant difference between two judges, in units of the score
CONFIRMED = 0.7  # share of a feature's worth that the second judge must confirm
FLOOR = 0.05  # smallest standard deviation of a difference, for judges with coarse scores
SUSPECTS = 4  # features under suspicion at a time
CLEARED = math.exp(-2)  # remaining share of its capital at which a suspect is cleared
AGAIN = 2.0  # multiple of its importance that makes a cleared feature suspect again
RANDOM = 0.3  # share of calls on randomly drawn completions, for the judges' agreement
FEWEST, MOST = 12, 160  # fewest doubly scored completions for a scale, and the number kept
RELATED, CONFIDENT = 0.3, 2.33  # a correlation that is surely smaller is reported; 99 %, in standard errors
MOST_AT_ONCE = 8  # most suspect completions scored per batch
OF_EACH_BATCH = 0.8  # capital

WARN, STOP, SECOND_JUDGE = "warn", "stop", "second_judge"  # actions on an alarm

Feature = tuple[str, str]  # a feature's kind and name: `("phrase", "dear customer")`
Features = frozenset[Feature]


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    text: str
    branch: str
    group: int  # the same for all completions of a prompt
    score: float


class Rise(NamedTuple):
    before: float  # share of earlier completions with the feature
    now: float
    worth: float  # the judge's mean score difference within groups, with the feature minus without it

    @property
    def importance(self) -> float:
        return (self.now - self.before) * self.worth


class _Batch(NamedTuple):
    size: int
    spread: float  # sum of squared deviations from the group mean
    sums: Mapping[Feature, tuple[int, float, float]]
    """By feature: the number of completions with it, the sum of their scores' deviations from the group mean, and the
    sum over groups of m (1 - m / n), where m of n have it. The ratio of the last two is the within-group slope."""

    @property
    def counts(self) -> Counter[Feature]:
        return Counter({feature: m for feature, (m, _, _) in self.sums.items()})


class Rising:
    """Feature statistics over the latest batches."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque(maxlen=BEFORE + RECENT)
        self._counts = Counter[Feature]()  # completions with a feature in all of them
        self._lengths: list[float] = []  # mean length of the first batches

    def features(self, text: str) -> Features:
        """A text's features: one- and two-word phrases, formats, and length classes."""
        words = _WORDS.findall(text.lower())
        if len(words) > 2 * READ:
            words = [*words[:READ], "...", *words[-READ:]]
        phrases = {*words, *map(" ".join, itertools.pairwise(words))}
        formats = [name for name, pattern in FORMATS.items() if pattern.search(text)]
        usual = statistics.fmean(self._lengths) if self._lengths else math.inf
        lengths = [f"a length of {times:g} times the initial one" for times in LONG if len(text) >= times * usual]
        kinds = ((PHRASE, phrases), (FORMAT, formats), (LENGTH, lengths))
        return frozenset((kind, name) for kind, names in kinds for name in names)

    def add(self, written: Sequence[Written], features: Iterable[Features]) -> None:
        if written and len(self._lengths) < LEAST:
            self._lengths.append(statistics.fmean(len(completion.text) for completion in written))
        groups = defaultdict[int, list[tuple[float, Features]]](list)
        for completion, features_of_text in zip(written, features, strict=True):
            groups[completion.group].append((completion.score, features_of_text))
        counts, spread = Counter[Feature](), 0.0
        totals, contrasts = defaultdict[Feature, float](float), defaultdict[Feature, float](float)
        for group in groups.values():
            mean, having = statistics.fmean(score for score, _ in group), Counter[Feature]()
            for score, features_of_text in group:
                having.update(features_of_text)
                spread += (score - mean) ** 2
                for feature in features_of_text:
                    totals[feature] += score - mean
            counts.update(having)
            for feature, m in having.items():
                contrasts[feature] += m * (1 - m / len(group))
        least = max(1, SEEN * len(written))
        frequent = {feature: (m, totals[feature], contrasts[feature]) for feature, m in counts.items() if m > least}
        if len(self._batches) == self._batches.maxlen:
            self._counts -= self._batches[0].counts
        self._batches.append(_Batch(len(written), spread, frequent))
        self._counts += self._batches[-1].counts

    def found(self) -> dict[Feature, Rise]:
        batches = [*self._batches]
        before, recent = batches[:-RECENT], batches[-RECENT:]
        n_old, n_new = (sum(batch.size for batch in part) for part in (before, recent))
        if len(before) < LEAST or not n_old * n_new:
            return {}
        sd = math.sqrt(sum(batch.spread for batch in batches) / (n_old + n_new))
        counts, rises = Counter[Feature](), dict[tuple[int, float], tuple[Feature, Rise]]()
        for batch in recent:
            counts.update(batch.counts)
        for feature, new in sorted(counts.items()):  # independent of hash order
            earlier, now = (self._counts[feature] - new) / n_old, new / n_new
            pooled = self._counts[feature] / (n_old + n_new)
            error = math.sqrt(pooled * (1 - pooled) * (1 / n_old + 1 / n_new))
            if now - earlier < max(RISE, SURE * error):
                continue
            sums = [batch.sums[feature] for batch in batches if feature in batch.sums]
            _, total, contrast = (sum(column) for column in zip(*sums, strict=True))
            rise = Rise(earlier, now, total / contrast if contrast else 0.0)
            if rise.worth >= LEAST_WORTH and rise.worth > SURE * sd / math.sqrt(contrast):
                rises.setdefault((new, round(total, 9)), (feature, rise))  # phrases of one sentence count once
        return dict(sorted(rises.values(), key=lambda one: -one[1].importance))


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """A feature that the judge rewards and the second judge does not."""

    what: Feature
    rise: Rise
    confirmed: float  # its worth by the second judge, on the completions that it scored
    example: str

    def described(self, *, with_text: bool) -> str:
        """Describe the alarm. `with_text` includes the phrase and the example, which may quote a customer."""
        kind, name = self.what
        shown = f"the phrase {name!r}" if kind == PHRASE and with_text else "a phrase" if kind == PHRASE else name
        example = f". For example: {self.example}" if with_text else ""
        return (
            f"{shown} is in {self.rise.now:.0%} of the completions, up from {self.rise.before:.0%}; within groups, "
            f"the judge rewards it with {self.rise.worth:+.2f}, the second judge with {self.confirmed:+.2f}"
            f"{example}"
        )


@dataclass(slots=True)
class _Suspect:
    rise: Rise
    capital: float
    least: float  # capital at which it is cleared
    gaps: list[float] = field(default_factory=list)  # the judge's score minus the second judge's


@dataclass(slots=True)
class _SecondCall:
    written: Written
    features: Features
    tested: Sequence[Feature]  # its suspect features at the time
    is_by_lot: bool
    second: float = math.nan

    def gap(self, ratio: float) -> float:
        return self.written.score - ratio * self.second


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """The correlation; NaN if a side is constant."""
    try:
        return statistics.correlation(left, right)
    except statistics.StatisticsError:
        return math.nan


class Meter:
    def __init__(self, settings: MeterSettings) -> None:
        self.alarms: list[Alarm] = []  # emptied by the reader
        self._settings = settings
        self._rng = random.Random(0)
        self._calls = self._by_lot = 0.0  # remaining calls, and those reserved for random draws
        self._rising = Rising()
        self._free = 0.0  # unassigned capital
        self._suspects: dict[Feature, _Suspect] = {}
        self._cleared: dict[Feature, float] = {}  # importance below which a feature is ignored
        self._numbers = itertools.count()
        self._open: dict[int, _SecondCall] = {}  # by number
        self._known: deque[_SecondCall] = deque(maxlen=MOST)

    def agreement(self, branch: str) -> float:
        """Correlation of both judges on the latest randomly drawn completions; NaN if undefined."""
        drawn = self._drawn(branch)
        return correlation([call.written.score for call in drawn], [call.second for call in drawn])

    def is_unrelated(self, branch: str) -> bool:
        """Whether that correlation is below `RELATED`, by Fisher's z."""
        count, agreement = len(self._drawn(branch)), self.agreement(branch)
        if count < FEWEST or math.isnan(agreement):
            return False
        return math.atanh(max(min(agreement, 0.999), -0.999)) + CONFIDENT / math.sqrt(count - 3) < math.atanh(RELATED)

    def _drawn(self, branch: str) -> list[_SecondCall]:
        return [call for call in self._known if call.is_by_lot and call.written.branch == branch]

    def add(self, written: Sequence[Written], size: int) -> dict[int, int]:
        """Add a training batch of `size` completions, some of them in `written`. Returns the second judge's
        assignments: a number for each, and its index in `written`."""
        self._calls += self._settings.share * size
        self._by_lot += self._settings.share * size * RANDOM
        self._free += OF_EACH_BATCH
        features = [self._rising.features(completion.text) for completion in written]
        asked = self._choose(written, features)  # by earlier suspicions, so that chance can't select them
        self._rising.add(written, features)
        self._look_for_suspects()
        return asked

    def add_scores(self, scores: Mapping[int, float | None]) -> None:
        """Add scores by the numbers from `add`. `None` is a failed call and is ignored."""
        for number, score in scores.items():
            call = self._open.pop(number)
            if score is None:
                continue
            call.second = score
            for feature in call.tested:
                if feature in self._suspects:
                    self._wager(feature, call)
            self._known.append(call)

    def _choose(self, written: Sequence[Written], features: Sequence[Features]) -> dict[int, int]:
        """Draw random completions and some with suspect features, the most important features first."""
        asked = dict[int, int]()
        chosen: dict[int, bool] = {}  # by index, whether drawn at random
        while self._by_lot >= 1 and self._calls >= 1 and written:
            self._by_lot, self._calls = self._by_lot - 1, self._calls - 1
            chosen[self._rng.randrange(len(written))] = True
        lots, limit = self._rng.sample(range(len(written)), len(written)), len(chosen) + MOST_AT_ONCE
        for feature in self._suspects:
            for place in lots:
                if self._calls < 1 or len(chosen) == limit:
                    break
                if feature in features[place] and place not in chosen:
                    chosen[place] = False
                    self._calls -= 1
        for place, is_by_lot in chosen.items():
            tested = [feature for feature in self._suspects if feature in features[place]]
            number = next(self._numbers)
            asked[number] = place
            self._open[number] = _SecondCall(written[place], features[place], tested, is_by_lot)
        return asked

    def _look_for_suspects(self) -> None:
        """Suspect the most important features that rise and are rewarded. Each receives half of the free capital and
        returns it when it is displaced or stops rising."""
        rises, cleared = self._rising.found(), self._cleared
        taken = [feature for feature, rise in rises.items() if rise.importance >= cleared.get(feature, 0.0)][:SUSPECTS]
        before, self._suspects = self._suspects, {}
        self._free += sum(suspect.capital for feature, suspect in before.items() if feature not in taken)
        for feature in taken:
            if (suspect := before.get(feature)) is None:
                capital = self._free / 2
                self._free -= capital
                suspect = _Suspect(rises[feature], capital, capital * CLEARED)
            suspect.rise = rises[feature]
            self._suspects[feature] = suspect

    def _wager(self, feature: Feature, call: _SecondCall) -> None:
        """Bet that the judge favours a completion over the second judge, relative to completions of its branch without
        the feature."""
        scored, branch = self._known, call.written.branch
        others = [other for other in scored if other.written.branch == branch and feature not in other.features]
        if len(others) < FEWEST:
            return
        # 1. Scale the second judge's scores, and estimate the usual disagreement.
        spreads = (
            statistics.stdev(other.written.score for other in scored),
            statistics.stdev(other.second for other in scored),
        )
        ratio = min(max((spreads[0] + FLOOR) / (spreads[1] + FLOOR), 0.5), 2.0)
        sd = max(statistics.stdev(other.gap(ratio) for other in scored), FLOOR)
        # 2. Bet.
        suspect = self._suspects[feature]
        suspect.gaps.append(call.gap(ratio) - statistics.fmean(other.gap(ratio) for other in others))
        allowed = max(TOLERANCE, (1 - CONFIRMED) * suspect.rise.worth)
        z = (suspect.gaps[-1] - allowed) / sd
        suspect.capital *= math.exp(min(max(z, -CLIP), CLIP) - 0.5)
        # 3. Raise the alarm, or clear the suspect.
        if suspect.capital >= ALARM:
            confirmed = suspect.rise.worth - statistics.fmean(suspect.gaps)
            alarm = Alarm(what=feature, rise=suspect.rise, confirmed=confirmed, example=call.written.text)
            self.alarms.append(alarm)
        if suspect.capital >= ALARM or suspect.capital <= suspect.least:
            del self._suspects[feature]
            self._cleared[feature] = AGAIN * suspect.rise.importance
