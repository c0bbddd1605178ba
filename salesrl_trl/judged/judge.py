"""The judge interface and the client for judge services: rubrics, provider selection, and aggregation of verdicts."""

import asyncio
import hashlib
import statistics
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from salesrl_trl.data.files import nearest_file, unreadable
from salesrl_trl.errors import BudgetSpent, ConfigError, JudgeInvalid, ServiceError
from salesrl_trl.judged.cache import cache_key
from salesrl_trl.judged.provider import JudgeProvider, Material, ProviderClient
from salesrl_trl.judged.verdict import MESSAGE_VERSION, Candidates
from salesrl_trl.service.event_loop import clocked
from salesrl_trl.service.transport import Transport
from salesrl_trl.types import Action, Answer, JudgeRecord, ProviderUsage, SalesRow, Verdict


class Judge(ABC):
    """Scores answers by any means. Pass an object to `SalesReward`, or name its dotted path in the setting
    `judge_providers`. Only `judge` is required; with `orders`, implement `judge_group` too.

        class Shortest(Judge):
            async def judge(self, rubric, row, action, candidate, reference):
                score = 1 / (1 + len(candidate.text) / 400)
                return Verdict(candidate=score, reference=None if reference is None else 0.5, reason="by length")

    One object serves all completions concurrently on one event loop. Run blocking work, such as a local model, in
    `asyncio.to_thread`. The object must be picklable, because the reward may run in its own process; load models on
    the first call, not at construction.
    """

    orders: int = 0  # calls per prompt that judge its completions together; 0: each completion is judged alone
    provider_names: tuple[str, ...] = ()
    """Providers with their own usage, in a fixed order."""
    transports: Mapping[str, Transport] = MappingProxyType({})
    """Transports by service name. Their requests count against the run's budget."""

    async def judge_group(
        self, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None
    ) -> Sequence[Verdict]:
        """Score several candidates for one row together, each alongside the reference, with one verdict per candidate.
        If it raises `ServiceError`, they are judged one by one in the remaining time."""
        raise NotImplementedError(f"{type(self).__name__} has `orders`. Expected a method `judge_group`.")

    @abstractmethod
    async def judge(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        """Score the candidate and, if given, the reference.

        Args:
            rubric (`str`):
                The rubric: the branch's name, or `<rubric>` of a component `judge_<rubric>`.
            row (`SalesRow`):
                The conversation, its branch and the documents known to answer it.
            action (`Action`):
                The policy's output.
            candidate (`Answer`):
                The 8B endpoint's answer to the action.
            reference (`Answer`, *optional*):
                The 32B endpoint's answer, if any. The verdict scores it if and only if it is given.

        Raises:
            `JudgeInvalid`: the answer is not a verdict.
            `ServiceError`: the call failed.
        """

    def identity(self, rubric: str) -> str:
        """A hash of everything but the material that determines a verdict, for cache keys, without credentials. By
        default it covers the class and the rubric's name; extend it if verdicts depend on more, e.g. a model file."""
        return cache_key("judge", *self.places.values(), rubric)

    @property
    def places(self) -> Mapping[str, str]:
        """Each service's model and address by name, for messages. Reason codes start with that name."""
        return {"judge": f"{type(self).__module__}.{type(self).__qualname__}"}

    def drain_usage(self) -> dict[str, ProviderUsage]:
        """Usage by provider since the last call."""
        return {}

    def drain_records(self) -> Sequence[JudgeRecord]:
        """All valid verdicts since the last call."""
        return ()

    async def warm_up(self, row: SalesRow, action: Action, answer: Answer) -> Mapping[str, float | ServiceError]:
        """Request one verdict. Returns its seconds, or the error, by service name."""
        asked = await seconds_or_error(judged(self, row.branch, row, [(action, answer)], answer))
        return dict.fromkeys(self.places, asked)

    async def aclose(self) -> None:  # noqa: B027  for those that have something to close
        """Close the running event loop's resources. The next call reopens them."""


async def seconds_or_error(asked: Awaitable[object]) -> float | ServiceError:
    result = await clocked(asked)
    return result if isinstance(result, ServiceError) else result[1]


async def judged(
    judge: Judge, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None
) -> Sequence[Verdict]:
    """Verdicts on a single candidate or a group. Raises as `Judge.judge` does."""
    if len(candidates) > 1:
        verdicts = await judge.judge_group(rubric, row, candidates, reference)
    else:
        verdicts = [await judge.judge(rubric, row, *candidates[0], reference)]
    check_verdicts(len(candidates), reference is not None, verdicts)
    return verdicts


def check_verdicts(count: int, expect_reference: bool, verdicts: Sequence[Verdict]) -> None:
    if len(verdicts) != count:
        raise JudgeInvalid(f"{len(verdicts)} verdicts on {count} candidates", code="judge_wrong_candidates")
    if any((verdict.reference is not None) != expect_reference for verdict in verdicts):
        raise JudgeInvalid("the verdict and its material disagree about a reference", code="judge_no_reference")


AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
}
"""How repeated verdicts are combined."""


def load_rubrics(names: Sequence[str], directory: str | None = None, *, direct: bool = False) -> dict[str, str]:
    """Rubrics by name: `<name>.txt` in `directory`, else the built-in one. `direct`: as in `packaged_rubrics`."""
    paths = packaged_rubrics(direct)
    folder = Path(directory).expanduser() if directory else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"`rubric_dir` is {directory!r}, which is not a folder.{nearest_file(folder)} Correct it.")
    if folder is not None:
        paths |= {name: folder / f"{name}.txt" for name in names if (folder / f"{name}.txt").is_file()}
    if lacking := [f"{name}.txt" for name in names if name not in paths]:
        raise ConfigError(
            f"rubrics not found: {', '.join(lacking)}. Expected a text file for each branch and each "
            f"`judge_<rubric>` in {directory or 'the folder `rubric_dir`'}. Write them, or correct `branches` or "
            "`branch_reward_weights`."
        )
    rubrics = {}
    for name in names:
        path = paths[name]
        try:
            rubrics[name] = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the rubric {path} can't be read ({unreadable(error)}). Expected UTF-8 text.") from None
        if not rubrics[name].strip():
            raise ConfigError(f"the rubric {path} is empty. Expected the instructions for the judge.")
    return rubrics


def packaged_rubrics(direct: bool = False) -> dict[str, Path]:
    """The built-in rubrics by name. `direct`: for a policy that answers without an action."""
    folder = Path(str(resources.files("salesrl_trl.judged") / "rubrics"), "direct" if direct else "")
    return {path.stem: path for path in folder.glob("*.txt")}


class JudgeClient(Judge):
    """Requests verdicts from one of several OpenAI-compatible models.

    The weights select the first provider, deterministically for the same material. If it fails or returns an invalid
    verdict, the others follow in listed order. `repeats` is the number of verdicts per completion; with `orders`, a
    prompt's completions are judged together that often. If more than half are valid, `aggregation` combines them.
    """

    def __init__(
        self, providers: Sequence[JudgeProvider], rubrics: Mapping[str, str], *, repeats: int = 1,
        aggregation: str = "mean", orders: int = 0,
    ) -> None:  # fmt: skip
        self.orders = orders
        self.providers = {provider.name: ProviderClient(provider) for provider in providers}
        """By name, in fallback order."""
        self.provider_names = tuple(self.providers)
        self.transports = {provider.transport.service: provider.transport for provider in providers}
        self._rubrics = rubrics
        self._repeats = repeats
        self._aggregation = aggregation
        self._records: list[JudgeRecord] = []

    def identity(self, rubric: str) -> str:
        asked = [
            (
                provider.base_url, provider.model, provider.weight, provider.temperature,
                provider.max_completion_tokens, provider.response_format, dict(provider.extra_body),
            )
            for provider in (client.settings for client in self.providers.values())
        ]  # fmt: skip
        return cache_key("judge", MESSAGE_VERSION, asked, self._rubrics[rubric], self._repeats, self._aggregation)

    async def judge(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        [verdict] = await self._judged(self.material(rubric, row, [(action, candidate)], reference), self._repeats)
        return verdict

    async def judge_group(
        self, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None
    ) -> list[Verdict]:
        return await self._judged(self.material(rubric, row, candidates, reference), self.orders)

    async def _judged(self, material: Material, times: int) -> list[Verdict]:
        asked = (self._first_valid(material, order, number) for number, order in enumerate(material.orders(times)))
        return self._merge(await asyncio.gather(*asked, return_exceptions=True))

    def material(self, rubric: str, row: SalesRow, candidates: Candidates, reference: Answer | None) -> Material:
        return Material(rubric, self._rubrics[rubric], row, candidates, reference)

    def drain_usage(self) -> dict[str, ProviderUsage]:
        return {name: provider.drain_usage() for name, provider in self.providers.items()}

    def drain_records(self) -> list[JudgeRecord]:
        records, self._records = self._records, []
        return records

    @property
    def places(self) -> dict[str, str]:
        asked = (client.settings for client in self.providers.values())
        return {each.transport.service: f"model {each.model} at {each.base_url}" for each in asked}

    async def warm_up(self, row: SalesRow, action: Action, answer: Answer) -> dict[str, float | ServiceError]:
        material = self.material(row.branch, row, [(action, answer)], answer)
        asked = [provider.ask(material, order=(0, 1), patient=True) for provider in self.providers.values()]
        results = await asyncio.gather(*map(seconds_or_error, asked))
        self.drain_usage()
        return dict(zip(self.transports, results, strict=True))

    async def aclose(self) -> None:
        for provider in self.providers.values():
            await provider.http.aclose()

    async def _first_valid(self, material: Material, order: Sequence[int], number: int) -> list[Verdict]:
        lot = hashlib.sha256(f"{material.key} {number}".encode()).digest()
        providers = self._order(int.from_bytes(lot[:8]) / 2**64)
        failures: list[ServiceError] = []
        for provider in providers:
            try:
                verdicts = await provider.ask(material, order=order, patient=provider is providers[-1])
            except ServiceError as error:
                failures.append(error)
                continue
            for place, verdict in enumerate(verdicts):
                behind = 2 * order.index(place) + 1 - len(order)  # positive in the second half
                first = None if behind == 0 else behind < 0
                self._records.append(JudgeRecord(score=verdict.candidate, candidate_first=first))
            return [replace(verdict, provider=provider.settings.name) for verdict in verdicts]
        # prefer the error of an invalid verdict over an outage, and an outage over an exhausted budget
        worth = {error: (isinstance(error, JudgeInvalid), not isinstance(error, BudgetSpent)) for error in failures}
        raise max(reversed(failures), key=worth.__getitem__)

    def _order(self, lot: float) -> list[ProviderClient]:
        """The provider drawn by a number in [0, 1), then the others in listed order."""
        every = [*self.providers.values()]
        providers = [provider for provider in every if not provider.settings.transport.is_spent] or every
        place = lot * sum(provider.settings.weight for provider in providers)
        for index, provider in enumerate(providers):
            place -= provider.settings.weight
            if place < 0:
                return [provider, *providers[:index], *providers[index + 1 :]]
        return providers

    def _merge(self, results: Sequence[list[Verdict] | BaseException]) -> list[Verdict]:
        valid = [result for result in results if not isinstance(result, BaseException)]
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, ServiceError):
                raise error
        if 2 * len(valid) <= len(results):
            raise errors[0]
        merge = AGGREGATIONS[self._aggregation]
        merged = []
        for verdicts in zip(*valid, strict=True):
            references = [verdict.reference for verdict in verdicts if verdict.reference is not None]
            of_criteria = zip(*(verdict.criteria for verdict in verdicts), strict=True)
            merged.append(
                replace(
                    verdicts[0],
                    candidate=merge([verdict.candidate for verdict in verdicts]),
                    reference=merge(references) if references else None,
                    criteria=[merge(scores) for scores in of_criteria],
                )
            )
        return merged
