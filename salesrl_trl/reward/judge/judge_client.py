"""The judge's client: which provider is asked, and how several verdicts become one.

Owns rubrics, the order and weights of providers, repeats and their aggregation. The module `provider` owns how one
provider is asked, the transport retries and limits.
"""

import asyncio
import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path

from salesrl_trl.data.text import read_small, unreadable
from salesrl_trl.errors import BudgetSpent, ConfigError, JudgeInvalid, ServiceError
from salesrl_trl.reward.cache import cache_key
from salesrl_trl.reward.judge.base import Judge, JudgeRecord, ProviderUsage
from salesrl_trl.reward.judge.provider import JudgeProvider, Material, ProviderClient
from salesrl_trl.reward.judge.verdict import MESSAGE_VERSION
from salesrl_trl.reward.service.deadline import seconds_or_error
from salesrl_trl.reward.service.transport import Transport
from salesrl_trl.types import Action, Answer, SalesRow, Verdict

AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
}
"""How the verdicts of several repeats become one."""


def load_rubrics(names: Sequence[str], directory: str | None = None) -> dict[str, str]:
    """Rubrics by name: `<name>.txt` in `directory`, else the packaged one.

    Raises:
        `ConfigError`: rubrics are in neither place (the message names all), or one can't be read.
    """
    packaged = packaged_rubrics()
    folder = Path(directory).expanduser() if directory else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"`rubric_dir` is {directory!r}, which is no folder. Correct the path.")
    found = {
        name: folder / f"{name}.txt" if folder and (folder / f"{name}.txt").is_file() else packaged.get(name)
        for name in names
    }
    lacking = [f"{name}.txt" for name, path in found.items() if path is None]
    if lacking:
        raise ConfigError(
            f"rubrics are missing: {', '.join(lacking)}. Expected a text file for each branch and each "
            f"`judge_<rubric>`, in {directory or 'a folder named by `rubric_dir`'}. Write them, or correct `branches` "
            "or `branch_reward_weights`."
        )
    return {name: _read_rubric(path) for name, path in found.items() if path is not None}


def packaged_rubrics() -> dict[str, Path]:
    """The rubrics that come with the package, by name."""
    return {
        path.stem: path for path in Path(str(resources.files("salesrl_trl.reward.judge") / "rubrics")).glob("*.txt")
    }


def _read_rubric(path: Path) -> str:
    try:
        rubric = read_small(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the rubric {path} can't be read ({unreadable(error)}). Expected UTF-8 text.") from None
    if not rubric.strip():
        raise ConfigError(f"the rubric {path} is empty. Expected the instructions for the judge.")
    return rubric


class JudgeClient(Judge):
    """Asks one of several OpenAI-compatible models for a verdict.

    Which provider is asked first follows the weights, and is the same for the same material. The others follow in the
    order they are listed when it fails or gives no valid verdict.

    A rubric is the system message of its judge; a branch's rubric has the branch's name. With several `repeats` the
    order of candidate and reference alternates. `aggregation`, a key of `AGGREGATIONS`, makes one verdict of them, if
    more than half are valid.
    """

    def __init__(
        self,
        providers: Sequence[JudgeProvider],
        rubrics: Mapping[str, str],
        *,
        repeats: int = 1,
        aggregation: str = "mean",
    ) -> None:
        self.providers = {provider.name: ProviderClient(provider) for provider in providers}
        """By name, in fallback order."""
        self._rubrics = rubrics
        self._repeats = repeats
        self._aggregation = aggregation
        self._identities = {name: self._identity(rubric) for name, rubric in rubrics.items()}
        self._records: list[JudgeRecord] = []

    @property
    def provider_names(self) -> tuple[str, ...]:
        """The providers' names, in fallback order."""
        return tuple(self.providers)

    @property
    def transports(self) -> dict[str, Transport]:
        """Each provider's transport, by service name."""
        return {each.settings.transport.service: each.settings.transport for each in self.providers.values()}

    def identity(self, rubric: str) -> str:
        """Says what decides a verdict beside the material, for cache keys. No credential."""
        return self._identities[rubric]

    async def judge(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Verdict:
        """As `Judge.judge`, by one of the providers."""
        material = self.material(rubric, row, action, candidate, reference)
        results = await asyncio.gather(
            *(self._one_verdict(material, repeat) for repeat in range(self._repeats)), return_exceptions=True
        )
        return self._merge(results)

    def material(
        self, rubric: str, row: SalesRow, action: Action, candidate: Answer, reference: Answer | None
    ) -> Material:
        """Everything that a provider is asked about. Arguments as in `Judge.judge`."""
        return Material(rubric, self._rubrics[rubric], row, action, candidate, reference)

    def drain_usage(self) -> dict[str, ProviderUsage]:
        """Each provider's usage since the last time."""
        return {name: each.drain_usage() for name, each in self.providers.items()}

    def drain_records(self) -> list[JudgeRecord]:
        """Every valid verdict since the last time."""
        records, self._records = self._records, []
        return records

    @property
    def places(self) -> dict[str, str]:
        """Each provider's model and address, by service name."""
        settings = [each.settings for each in self.providers.values()]
        return {each.transport.service: f"model {each.model} at {each.base_url}" for each in settings}

    async def warm_up(self, row: SalesRow, action: Action, answer: Answer) -> dict[str, float | ServiceError]:
        """Ask every provider once, by the branch's rubric. Returns seconds, or the error, by service name."""
        material = self.material(row.branch, row, action, answer, answer)
        results = await asyncio.gather(
            *(
                seconds_or_error(partial(provider.ask, material, candidate_first=True, patient=True))
                for provider in self.providers.values()
            )
        )
        self.drain_usage()
        return dict(zip(self.transports, results, strict=True))

    async def aclose(self) -> None:
        """Close the running loop's connections. The next call opens new ones."""
        for provider in self.providers.values():
            await provider.http.aclose()

    def _identity(self, rubric: str) -> str:
        providers = [each.settings for each in self.providers.values()]
        asked = [
            (
                (each.base_url, each.model, each.weight),
                (each.temperature, each.max_completion_tokens, each.response_format, dict(each.extra_body)),
            )
            for each in providers
        ]
        return cache_key("judge", MESSAGE_VERSION, asked, rubric, self._repeats, self._aggregation)

    async def _one_verdict(self, material: Material, repeat: int) -> Verdict:
        lot = hashlib.sha256(f"{material.key} {repeat}".encode()).digest()
        order = self._order(int.from_bytes(lot[:8]) / 2**64)
        candidate_first = (material.lot + repeat) % 2 == 0
        failure: ServiceError | None = None
        for provider in order:
            try:
                verdict = await provider.ask(material, candidate_first=candidate_first, patient=provider is order[-1])
            except ServiceError as error:
                # An invalid verdict says more than a provider that was down. One that was not asked says nothing.
                is_less = isinstance(failure, JudgeInvalid) or isinstance(error, BudgetSpent)
                failure = failure if failure is not None and is_less else error
                continue
            first = None if material.reference is None else candidate_first
            verdict = replace(verdict, provider=provider.settings.name)
            self._records.append(
                JudgeRecord(score=verdict.candidate, chars=len(material.candidate.text), candidate_first=first)
            )
            return verdict
        assert failure is not None
        raise failure

    def _order(self, lot: float) -> list[ProviderClient]:
        """The provider that the lot in [0, 1) falls to, then the others as they are listed."""
        every = list(self.providers.values())
        providers = [each for each in every if not each.settings.transport.is_spent] or every
        place = lot * sum(each.settings.weight for each in providers)
        for index, each in enumerate(providers):
            place -= each.settings.weight
            if place < 0:
                return [each, *providers[:index], *providers[index + 1 :]]
        return providers

    def _merge(self, results: Sequence[Verdict | BaseException]) -> Verdict:
        verdicts = [result for result in results if isinstance(result, Verdict)]
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, ServiceError):
                raise error
        if 2 * len(verdicts) <= len(results):
            raise errors[0]
        merge = AGGREGATIONS[self._aggregation]
        references = [verdict.reference for verdict in verdicts if verdict.reference is not None]
        return Verdict(
            candidate=merge([verdict.candidate for verdict in verdicts]),
            reference=merge(references) if references else None,
            reason=verdicts[0].reason,
            provider=verdicts[0].provider,
        )
