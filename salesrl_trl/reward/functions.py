"""Custom reward functions: how they are called, and what their return values and exceptions mean."""

import asyncio
import contextlib
import copy
import functools
import inspect
import itertools
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, SupportsFloat, SupportsIndex

from salesrl_trl.errors import ConfigError, FunctionError, ServiceError
from salesrl_trl.ground.texts import encodable
from salesrl_trl.names import Stage
from salesrl_trl.reward.batch import BatchReport, Completion, Sample, completion_text
from salesrl_trl.reward.scorer import ARGUMENTS, AT_ONCE, DEADLINE_S, TRL_ARGUMENTS, Needs, Per, RewardNames, Scorer
from salesrl_trl.reward.stage_times import StageTimes, place_of
from salesrl_trl.reward.together import Together
from salesrl_trl.service.breaker import Breaker
from salesrl_trl.service.event_loop import THREADS, deadline, is_cancelled
from salesrl_trl.service.statuses import service_error_of
from salesrl_trl.service.transport import Transport
from salesrl_trl.telemetry.completion_record import CompletionRecord, Judged, noted_in
from salesrl_trl.types import LARGEST_REWARD, NOT_APPLICABLE, RESERVED_REASONS, Outcome, Reward, missing

Function = Callable[..., object]

MOST_CALLS = 1024  # concurrent calls of a function without its own transport
_CODE = re.compile(r"[a-z0-9_]{1,64}")
BREACHES = ("signature", "no_list", "wrong_length", "no_number")  # bugs that affect every completion
_ARGUMENTS = re.compile(r"missing \d+ required|unexpected keyword|positional(-only)? arguments?|multiple values for")
"""Matches a `TypeError` about a call's arguments."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class RewardFunction(Scorer):
    """A custom function as a reward.

    Args:
        function (`Callable`):
            Sync or async. Receives the arguments it names, or all of them if it accepts `**kwargs`: see the table in
            docs/how-to/own-rewards.md, plus TRL's `trainer_state`, `log_extra` and `log_metric`.
        per (`Per`):
            What one call scores.
        deadline_s (`float`, *optional*, defaults to `300.0`):
            Seconds allowed per completion, including retries.
        transport (`Transport`, *optional*):
            Makes the calls with its own limits, retries and hedges, and counts them against a budget if it has a
            `quota`. By default each call is made once, and retried only after `ServiceOverloaded`.
    """

    def __init__(
        self, function: Function, per: Per = Per.BATCH, *, deadline_s: float = DEADLINE_S,
        transport: Transport | None = None,
    ) -> None:  # fmt: skip
        super().__init__(deadline_s)
        parameters = inspect.signature(function).parameters.values()
        named = {each.name: each.default is each.empty for each in parameters if each.kind in _BY_NAME}
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        inner = function
        self._is_verls = per is Per.COMPLETION and named.keys() >= VERLS_OWN
        if self._is_verls:
            further = {name: is_needed for name, is_needed in named.items() if name not in VERLS}
            function = functools.partial(_call_verls, function, VERLS if self._takes_all else VERLS & named.keys())
            named, self._takes_all = {**VERLS_ROW, **further}, False
        self._function = function
        self._per = per
        while isinstance(inner, functools.partial):
            inner = inner.func
        functools.update_wrapper(self, inner, updated=())
        self.__name__: str = getattr(inner, "__name__", type(inner).__name__)
        self._is_async = any(map(inspect.iscoroutinefunction, (inner, getattr(inner, "__call__", None))))  # noqa: B004
        body = getattr(inspect.unwrap(inner), "__code__", None) or getattr(type(inner).__call__, "__code__", None)
        self._place = "a function of your own" if body is None else f"at {body.co_filename}:{body.co_firstlineno}"
        self._named = frozenset(named)
        self._needed = frozenset(name for name, is_needed in named.items() if is_needed)
        code = re.sub(r"\W+", "_", self.__name__.lower()).strip("_") or "reward"
        self._transport = transport or Transport(
            code, max_concurrency=MOST_CALLS, initial_concurrency=MOST_CALLS, attempt_timeout_s=deadline_s,
            max_attempts=1, hedge_fraction=0.0, breaker=Breaker(failures_to_open=math.inf),  # each call is made
        )  # fmt: skip
        self.budget = self._transport.budget
        self._transport.notes = transport is not None  # otherwise the function's own result is all there is to record
        self.code = self._transport.service  # name in metrics and reason codes
        self._at_once = AT_ONCE if transport is None else transport.max_concurrency
        self._together: Together[Sample, Reward] = Together(per, self._rewards)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Pickle a decorated function by name, as functions are."""
        name = getattr(self, "__qualname__", "")
        if getattr(sys.modules.get(self.__module__), name, None) is not self:
            return super().__reduce_ex__(protocol)
        if self.__module__ == "__main__":
            raise pickle.PicklingError(f"{name} is defined in the main program")
        return name

    @property
    def names(self) -> RewardNames:
        needs = Needs(function=self.__name__, per=self._per, columns=self._needed - {*ARGUMENTS[self._per]})
        return RewardNames(
            functions={self.own_name: self.own_name}, together=self._per, at_once=self._at_once, needs=(needs,),
            columns=None if self._takes_all else self._named | {"prompt"}, services=(self.code,),
            stages=() if self.code in tuple(Stage) else (self.code,), places={self.code: self._place},
        )  # fmt: skip

    async def drain(self) -> BatchReport:
        if self.budget is not None:
            self.budget.settle()
        return BatchReport(traffic={self.code: self._transport.drain_traffic()})

    async def score(self, sample: Sample, stages: StageTimes) -> Reward:
        record, reward = stages.own_record, None
        try:
            with noted_in(record):
                reward = await self._scored(sample, stages)
        finally:
            _note(self.__name__, reward, record)
        return reward

    async def _scored(self, sample: Sample, stages: StageTimes) -> Reward:
        if self._per is Per.COMPLETION:
            return (await stages.timed(self._rewards([sample]), self.code))[0]
        with self._together.entered(sample) as member:
            try:
                reward = await member.result(sample)
            finally:
                member.note(stages.own_record, self._per.value)
            stages.record(self.code, member.started, failed=reward.value is None)
            return reward

    async def _rewards(self, samples: Sequence[Sample]) -> list[Reward]:
        try:
            with deadline(self.deadline_s):
                return await self._transport.call(lambda: self._called(samples))
        except ServiceError as error:
            return [self._failed(error)] * len(samples)

    def _failed(self, error: ServiceError) -> Reward:
        """An unscored reward because of this error. Errors raised by the function itself are logged once."""
        if isinstance(error, FunctionError) and error.worth_retrying and error.__cause__ is not None:  # it raised
            self.faults.log(f"the reward function {self.__name__}", error.__cause__)
        code = f"{self.code}_missing" if error.code == NOT_APPLICABLE else error.code  # this is a failure
        words = str(error) if isinstance(error, FunctionError) else code  # other messages may quote a customer
        return self._unscored(code, words)

    async def _called(self, samples: Sequence[Sample]) -> list[Reward]:
        """Call the function once. Raises `ServiceError` if it raises or returns something other than rewards."""
        # 1. Call it with the arguments it names.
        columns: dict[str, list[object]] = {}
        metrics: list[tuple[str, float]] = []

        def log_extra(column: str, values: Iterable[object]) -> None:
            columns.setdefault(column, []).extend(values)

        def log_metric(name: str, value: float) -> None:
            metrics.append((name, float(value)))

        arguments = self._arguments(samples) | {"log_extra": log_extra, "log_metric": log_metric}
        named = {name: value for name, value in arguments.items() if self._takes_all or name in self._named}
        if lacking := sorted(self._needed - named.keys()):
            raise self._refused("signature", f"nothing, because no column provides {', '.join(lacking)}")
        returned = await self._returned(named, len(samples))
        # 2. Convert its result into one reward per completion.
        returned = [returned] if self._per is Per.COMPLETION else self._listed(returned, len(samples))
        rewards = [self._reward(value) for value in returned]
        # 3. Add what it logged.
        columns, metrics = encodable((columns, metrics), f"what the reward function {self.__name__} logged")
        for name, values in columns.items():
            if len(values) != len(samples):
                self.faults.log_once(
                    f"{self.__name__} logs {name!r} {len(values)} times for {len(samples)} completions"
                )
                continue
            columned = zip(rewards, values, strict=True)
            rewards = [replace(reward, columns={**reward.columns, name: value}) for reward, value in columned]
        rewards[0] = replace(rewards[0], metrics=(*rewards[0].metrics, *metrics))
        return rewards

    async def _returned(self, arguments: Mapping[str, object], count: int = 1) -> object:
        """The function's result. It may modify its arguments, which are copies. Raises `ServiceError` for whatever it
        raises."""
        arguments = {name: _copied(value) for name, value in arguments.items()}
        try:
            if self._is_async:
                returned = self._function(**arguments)
            else:
                returned = await asyncio.wrap_future(THREADS.submit(_listing, self._function, arguments, count))
            return await returned if inspect.isawaitable(returned) else returned  # a sync wrapper of an async function
        except ServiceError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # from custom code
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if (failure := service_error_of(self.code, error)) is not None:
                raise failure from error
            raised = type(error).__name__
            text, code = f"{self.__name__} raised {raised} at {place_of(error)}", f"{self.code}_raised_{raised}"
            if isinstance(error, TypeError) and _ARGUMENTS.search(str(error)):
                text, code = f"{text}, where the arguments do not match.", f"{self.code}_signature"
            failed = FunctionError(text, code)
            failed.worth_retrying = True
            raise failed from error

    def _arguments(self, samples: Sequence[Sample]) -> dict[str, object]:
        first, is_batch = samples[0].row, self._per is Per.BATCH
        values: dict[str, object] = {
            name: [sample.row[name] for sample in samples] if is_batch else first[name]
            for name in first
            if name not in ("prompt", "completion", *TRL_ARGUMENTS)
        }
        texts, ids = [sample.completion for sample in samples], [list(sample.token_ids) for sample in samples]
        prompts = [sample.row["prompt"] for sample in samples]
        values |= {"prompts": prompts} if is_batch else {"prompt": prompts[0]}
        if self._per is Per.COMPLETION:
            values |= {"completion": texts[0], "completion_ids": ids[0]}
        else:
            values |= {"completions": texts, "completion_ids": ids}
        return values | {name: first[name] for name in TRL_ARGUMENTS if name in first}

    def _listed(self, returned: object, count: int) -> list[object]:
        is_other = isinstance(returned, str | bytes | Mapping) or getattr(returned, "ndim", 1) == 0
        if is_other or not isinstance(returned, Sized) or not isinstance(returned, Iterable):
            raise self._refused("no_list", f"a {type(returned).__name__} for {count} completions. Expected a list")
        if len(returned) != count:
            raise self._refused("wrong_length", f"{len(returned)} rewards for {count} completions. Expected one each")
        return list(returned)

    def _reward(self, value: object) -> Reward:
        if value is None:
            return self._unscored(NOT_APPLICABLE, f"{self.__name__} returned None")
        if isinstance(value, Reward):
            texts = {name: getattr(value, name) for name in ("reason", "components", "columns", "metrics")}
            given: Reward = replace(value, **encodable(texts, f"what the reward function {self.__name__} returned"))
            is_code = given.reason not in RESERVED_REASONS and _CODE.fullmatch(given.reason)
            if given.value is None and not is_code:
                return replace(given, reason=f"{self.code}_missing")  # free text may quote a customer
            parts = {f"{self.__name__}/{name}": part for name, part in given.components.items() if part is not None}
            reason = {f"{self.__name__}/reason": given.reason} if given.reason else {}
            metrics = tuple((f"rewards/{name}", part) for name, part in parts.items())
            code = given.reason if is_code or given.outcome is Outcome.OK else f"{self.code}_invalid"
            return replace(given, reason=code, columns={**parts, **reason}, metrics=metrics)
        if self._is_verls and isinstance(value, Mapping) and "score" in value:
            reward = self._reward(value["score"])
            numbers = {str(name): _number(part) for name, part in value.items() if name != "score"}
            parts = {name: part for name, part in numbers.items() if part is not None and abs(part) <= LARGEST_REWARD}
            return reward if reward.value is None else self._reward(replace(reward, components=parts))
        number, expected = _number(value), "for a completion. Expected a number, None or a Reward"
        if number is not None and abs(number) <= LARGEST_REWARD:  # NaN is not
            return Reward.scored(number)
        code, what = ("no_number", f"a {type(value).__name__}") if number is None else ("not_finite", f"{number}")
        refused = self._refused(code, f"{what} {expected}")
        return self._unscored(refused.code, str(refused))

    def _unscored(self, code: str, words: str) -> Reward:
        """An unscored reward: `code` for metrics, `words` for the recording and TRL's table."""
        breach = words if code.removeprefix(f"{self.code}_") in BREACHES else ""
        return replace(missing(Outcome.INFRA, code), columns={f"{self.__name__}/reason": words}, breach=breach)

    def _refused(self, code: str, what: str) -> FunctionError:
        self.faults.log_once(f"the reward function {self.__name__} returned {what}; such completions stay unscored")
        return FunctionError(f"{self.__name__} ({self._place}) returned {what}.", f"{self.code}_{code}")


VERLS = {"data_source", "solution_str", "ground_truth", "extra_info"}
VERLS_OWN = {"solution_str", "ground_truth"}  # the arguments that identify such a function
VERLS_ROW = {"completion": True, "reward_model": True, "data_source": False, "extra_info": False}
"""The inputs from which these arguments are built, and whether each is required."""


def _call_verls(
    function: Function, asked: set[str], /, completion: Completion, reward_model: Mapping[str, object],
    data_source: str = "", extra_info: Mapping[str, object] | None = None, **further: object,
) -> object:  # fmt: skip
    """Call a function of verl's signature, `compute_score(data_source, solution_str, ground_truth, extra_info)`, with
    those it `asked` for, plus further arguments as for any function."""
    given: dict[str, object] = {"data_source": data_source, "solution_str": completion_text(completion)}
    given |= {"ground_truth": reward_model["ground_truth"], "extra_info": dict(extra_info or {})}
    return function(**{name: given[name] for name in asked}, **further)


def _number(value: object) -> float | None:
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # e.g. a tensor with several numbers
        return float(value) if isinstance(value, SupportsFloat | SupportsIndex) else None
    return None


def _listing(function: Function, arguments: Mapping[str, object], count: int) -> object:
    """The function's result. A generator is consumed here, on the function's thread, up to `count` + 1 rewards."""
    returned = function(**arguments)
    return list(itertools.islice(returned, count + 1)) if isinstance(returned, Iterator) else returned


def _copied(value: object) -> object:
    """A deep copy of containers and arrays. Strings, numbers and objects such as images are shared."""
    if isinstance(value, Mapping):
        return {name: _copied(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_copied(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return copy.deepcopy(value) if hasattr(value, "__array__") else value  # arrays are mutable


def _note(name: str, reward: Reward | None, record: CompletionRecord) -> None:
    """Record the result of the function `name` for a completion and what it logged. Parts are in the reward."""
    if reward is None:  # cancelled
        record.verdicts[name] = Judged(reason="was given up before it answered")
        return
    for key, value in reward.columns.items():
        if key == f"{name}/reason":
            record.verdicts[name] = Judged(candidate=reward.value, reason=str(value))
        elif value is not None and key not in {f"{name}/{part}" for part in reward.components}:
            number = float(value) if isinstance(value, int | float) and abs(value) <= LARGEST_REWARD else None
            record.verdicts[key] = Judged(candidate=number, reason="" if number is not None else str(value))


def reward_of(function: object) -> Scorer:
    """Wrap a function as a reward; a reward is returned unchanged. Raises `ConfigError` for anything else."""
    if isinstance(function, Scorer):
        return function
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"a reward function is of type {kind}. Expected a function, a reward model or its id.")
    is_verls = inspect.signature(function).parameters.keys() >= VERLS_OWN
    return RewardFunction(function, Per.COMPLETION if is_verls else Per.BATCH)


def per_completion(
    function: Function | None = None, /, *, deadline_s: float = DEADLINE_S, transport: Transport | None = None
) -> Any:
    """Decorate a function that scores one completion as soon as it is generated. The function accepts `prompt`,
    `completion` and dataset columns by name, and returns a number, `None` or a `Reward`. Options: `deadline_s` and
    `transport` of `RewardFunction`."""
    return _decorated(function, Per.COMPLETION, deadline_s, transport)


def per_group(
    function: Function | None = None, /, *, deadline_s: float = DEADLINE_S, transport: Transport | None = None
) -> Any:
    """Decorate a function that scores all completions of a prompt as soon as the last one is generated. The function
    accepts `prompt`, `completions` and dataset columns by name, and returns a list with a number, `None` or a `Reward`
    per completion. Options as for `per_completion`."""
    return _decorated(function, Per.GROUP, deadline_s, transport)


def per_batch(
    function: Function | None = None, /, *, deadline_s: float = DEADLINE_S, transport: Transport | None = None
) -> Any:
    """Decorate a TRL-style function, which accepts `prompts`, `completions` and columns as lists. Only needed to set
    options, the same as for `per_completion`."""
    return _decorated(function, Per.BATCH, deadline_s, transport)


def _decorated(function: Function | None, per: Per, deadline_s: float, transport: Transport | None) -> object:
    def decorate(function: Function) -> RewardFunction:
        return RewardFunction(function, per, deadline_s=deadline_s, transport=transport)

    return decorate if function is None else decorate(function)


def soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> RewardFunction:
    """The soft overlong penalty that DAPO adds to the task reward.

    It is 0 up to `max_completion_len - soft_punish_cache` tokens and decreases linearly to -1 at `max_completion_len`
    (https://huggingface.co/papers/2503.14476, equation 13). Set verl's `penalty_factor` via `reward_weights`.
    """
    from trl.rewards import get_soft_overlong_punishment  # importing trl is slow

    if not 0 < soft_punish_cache <= max_completion_len:
        raise ConfigError(f"`soft_punish_cache` is {soft_punish_cache}. Expected 1 to {max_completion_len} tokens.")
    of_batch = get_soft_overlong_punishment(max_completion_len, soft_punish_cache)
    return RewardFunction(functools.partial(soft_overlong, of_batch), Per.COMPLETION)


def soft_overlong(of_batch: Callable[[list[list[int]]], list[float]], completion_ids: list[int]) -> float:
    return of_batch([completion_ids])[0]
