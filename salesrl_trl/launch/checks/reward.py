"""Checks of the reward's settings against the branches, the environment and the services' addresses."""

import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

from salesrl_trl.agents.mcp_tools import mcp_tools
from salesrl_trl.agents.partner import Partner
from salesrl_trl.agents.tools import Search, Tool
from salesrl_trl.config.checks import build_object, check, load_object
from salesrl_trl.data.files import load_documents
from salesrl_trl.demo.packaged import CASSETTE
from salesrl_trl.demo.services.launcher import EMBEDDED_MODEL
from salesrl_trl.errors import ConfigError, ServiceError
from salesrl_trl.judged.judge import Judge, load_rubrics, packaged_rubrics
from salesrl_trl.judged.rag_client import ENDPOINTS, RagBackend
from salesrl_trl.judged.scoring import COMPONENTS, OTHER_RUBRIC, RewardStage, Scoring
from salesrl_trl.launch.checks.addresses import check_models, check_rag
from salesrl_trl.launch.reward_config import RewardConfig
from salesrl_trl.reward.functions import reward_of
from salesrl_trl.reward.scorer import Scorer
from salesrl_trl.service.http import key_fault
from salesrl_trl.types import DEFAULT_FORMAT, JUDGE, MCP, SALES, SEARCH

logger = logging.getLogger(__name__)

MOST_BYTES = 4096  # maximum size of a key file. Tokens with embedded claims have about a thousand characters.
MEANINGLESS = "THE SCORES MEAN NOTHING"  # marks lines about embedded services that score unknown data


@dataclass
class RewardParts:
    """The parts read by the checks, from which `launch.assembly` builds the reward pipeline."""

    scoring: Scoring
    rubrics: dict[str, str]
    rag_key: str | None = field(repr=False)
    judge_keys: dict[str, str | None] = field(repr=False)  # by provider name
    rag: RagBackend | None  # the user's own client
    judge: Judge | None  # the user's own judge
    stages: tuple[RewardStage, ...]
    functions: Mapping[str, Scorer]  # those of `reward_funcs`, by path
    tool_paths: Sequence[str]
    search: Search | None  # the built-in tool
    partner: Partner | None  # the other side of conversations
    partner_key: str | None = field(repr=False)
    reference_weighed: bool  # whether a reward or a baseline contains the reference's score

    @cached_property
    def tools(self) -> list[Tool]:
        """The functions of the setting `tools`. Opens a session with each MCP server, to list its tools."""
        tools: list[Tool] = []
        for path in self.tool_paths:
            if path.startswith(MCP):
                tools += mcp_tools(path.removeprefix(MCP))
            else:
                search = self.search if path == SEARCH else None
                tools.append(search.function if search else cast(Tool, load_object(path, "tools")))
        names = [getattr(tool, "__name__", "") for tool in tools]
        names += [] if self.partner is None else [self.partner.name]
        twice = sorted({name for name in names if names.count(name) > 1})
        check(
            not twice,
            f"`tools` has several tools named {', '.join(twice)}, or a partner. Expected unique names.",
        )
        return tools


def prepare_reward(config: RewardConfig, branches: Sequence[str], hybrid_baseline: bool = False) -> RewardParts:
    """Check rubrics, weights and keys, and that the configured addresses answer. `hybrid_baseline`: whether
    `hybrid_reference_weight` is greater than 0."""
    parts = read_reward(config, branches, hybrid_baseline)
    if (address := config.rag_service.base_url) is not None and config.uses_rag:
        check_rag(address, parts.rag_key)
    if not config.asks_nobody:
        check_judges(config, parts)
        check_partner(config, parts)
    return parts


def read_reward(
    config: RewardConfig,
    branches: Sequence[str],
    hybrid_baseline: bool = False,
    rubrics: Mapping[str, str] | None = None,
) -> RewardParts:
    """`prepare_reward` without requests. `rubrics`: by name, instead of files."""
    paths = [path for path in config.reward_funcs if path not in (SALES, JUDGE)]
    functions = {path: reward_of(load_object(path, "reward_funcs")) for path in paths}
    check(not (hybrid_baseline and paths), "`hybrid_reference_weight` needs a reference, which `reward_funcs` lack.")
    search = Search(deadline_s=config.reward_deadline_s) if SEARCH in config.tools else None
    played = config.parsed_partner()
    weights = config.parsed_branch_weights()
    unknown = sorted(weights.keys() - set(branches))
    check(not unknown, f"`branch_reward_weights` names the branches {unknown}. Expected some of {list(branches)}.")
    of_search = {name for parts in weights.values() for name in parts} & ({*COMPONENTS} - {"judge", "margin"})
    expected = "Expected `judge`, `margin`, `judge_<rubric>` or a component of `reward_stages`."
    found = f"`branch_reward_weights` weights {sorted(of_search)}, which `{JUDGE}` does not have"
    check(not (config.judges_answers and of_search), f"{found}. {expected}")
    stages = [build_object(path, "reward_stages", RewardStage) for path in config.reward_stages]
    client = config.rag_service.client
    rag = None if client is None else build_object(client, "rag.client", RagBackend)
    if rag is not None and (named := tuple(getattr(rag, "transports", ()))) != ENDPOINTS:
        raise ConfigError(f"`rag.client` is {client!r} with the `transports` {[*named]}. Expected {[*ENDPOINTS]}.")
    judge = None if config.judges.own is None else build_object(config.judges.own, "judge_providers", Judge)
    weighed, rubrics = {**{branch: {"judge": 1.0} for branch in branches}, **weights}, dict(rubrics or {})
    if config.judges.own is None and config.uses_services:
        names = [name for name in _rubric_names(weighed, branches) if name not in rubrics]
        rubrics |= load_rubrics(names, config.rubric_dir, direct=config.judges_answers)
    rag_key, keys = rag_key_of(config), dict[str, str | None]()
    for judged_by in config.judges.providers:
        setting = f"{config.judges.place_of(judged_by)}.api_key_env"
        keys[judged_by.name] = None if config.asks_nobody else read_key(judged_by.api_key_env, setting)
    scoring = Scoring(
        weights=weighed,
        missing=config.missing_component,
        invalid_action=config.invalid_action_reward,
        stage_components=tuple(component for stage in stages for component in stage.components),
    ).with_stages(stages)
    unjudged = [branch for branch in branches if not scoring.rubrics(branch)]
    if hybrid_baseline and unjudged:
        expected = f"Expected `judge`, `margin` or `judge_<rubric>` in `branch_reward_weights` for {unjudged}."
        raise ConfigError(f"`hybrid_reference_weight` is more than 0, but not every branch has a judge. {expected}")
    return RewardParts(
        scoring=scoring, rubrics=rubrics, rag_key=rag_key, judge_keys=keys, rag=rag, judge=judge, stages=tuple(stages),
        functions=functions, tool_paths=config.tools, search=search,
        partner=None if played is None else played.build(),
        partner_key=None if played is None else read_key(played.api_key_env, "partner.api_key_env"),
        reference_weighed=hybrid_baseline or any("margin" in parts for parts in scoring.weights.values()),
    )  # fmt: skip


def rag_key_of(config: RewardConfig) -> str | None:
    return None if config.asks_nobody else read_key(config.rag_service.api_key_env, "rag.api_key_env")


def check_judges(config: RewardConfig, parts: RewardParts) -> list[str]:
    """Check that the judge, or at least one of several, answers and serves its model. Of several, each that fails is
    logged as a warning. Returns lines as `check_rag` does."""
    providers, failures, notes = config.judges.providers, [], list[str]()
    for provider in providers:
        try:
            key, setting = parts.judge_keys[provider.name], f"{config.judges.place_of(provider)}.base_url"
            notes += check_models(provider.base_url, key, provider.model, setting=setting)
        except ServiceError as error:
            failures.append(error)
            if len(providers) > 1:
                logger.warning(str(error))
    if providers and len(failures) == len(providers):
        raise failures[0]
    return notes


def check_partner(config: RewardConfig, parts: RewardParts) -> list[str]:
    """Check that the model that plays the customer answers, if any. Returns lines as `check_rag` does."""
    partner = config.parsed_partner()
    if partner is None or not config.asks_model:
        return []
    return check_models(partner.base_url, parts.partner_key, partner.model, "partner.base_url", partner.name)


def check_stand_ins(config: RewardConfig, branches: Sequence[str], own_rows: str | None) -> list[str]:
    """Check that the embedded services know the rows and rubrics to score. `own_rows`: a dataset other than the demo.
    Returns lines for the banner if they score unknown data, with `allow_stand_ins` or by a built-in rubric."""
    if (knowledge := config.rag_service.knowledge_file) is not None:
        load_documents(Path(knowledge).expanduser())
    if config.asks_nobody and own_rows is not None and (replay := config.parsed_replay()) and replay.run == CASSETTE:
        expected = "Expected the output folder of a run with your rows and `record: true`."
        raise ConfigError(f"`replay: {CASSETTE}` only has rewards for the demo's rows, not for {own_rows}. {expected}")
    own_fields = config.rag_service.action_format.fields != DEFAULT_FORMAT.fields
    if config.embeds_rag and own_fields:
        usual = ", ".join(DEFAULT_FORMAT.fields)
        raise ConfigError(f"`rag.action_fields` needs `rag.base_url`: the embedded RAG service only accepts {usual}.")
    faults, packaged = [], packaged_rubrics(config.judges_answers)
    if config.embeds_judge and own_fields:
        faults.append("The embedded judge does not read your own action fields. Set `judge_providers`.")
    folder = Path(config.rubric_dir).expanduser() if config.rubric_dir else None
    names = _rubric_names(config.parsed_branch_weights(), branches)
    own = [name for name in names if name not in packaged or (folder and (folder / f"{name}.txt").is_file())]
    if config.embeds_judge and own:
        files = ", ".join(f"{name}.txt" for name in own)
        faults.append(f"The embedded judge ignores rubrics, including yours ({files}). Set `judge_providers`.")
    if config.embeds_rag and knowledge is None and own_rows is not None:
        remedy = "Set `rag.base_url`, or `rag.knowledge_file` to your documents."
        found = f"The embedded RAG service answers the rows of {own_rows} from the demo's course catalogue"
        faults.append(f"{found}. {remedy}")
    if faults and not config.allow_stand_ins:
        raise ConfigError(f"{' '.join(faults)} For a smoke test with meaningless scores, set `allow_stand_ins: true`.")
    is_mock = config.embeds_judge or any(judge.model == EMBEDDED_MODEL for judge in config.judges.providers)
    if config.uses_services and is_mock and own_rows is not None and not faults:
        return [f"{MEANINGLESS} in this run. The embedded judge only knows the demo, not the rows of {own_rows}."]
    return [f"{MEANINGLESS} in this run (`allow_stand_ins`). {fault}" for fault in faults]


def read_key(variable: str | None, setting: str) -> str | None:
    """The key from the environment variable, or from the file named by `<variable>_FILE`; `None` without a variable.

    Raises `ConfigError` if neither or both are set, if the key is no ASCII, or if the file is unreadable, readable by
    others, empty or too large. The message shows neither key nor path, as users who confuse the variables put the key
    into the path, nor the variable if the setting may contain the key instead of its name.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if path := os.environ.get(f"{variable}_FILE"):
        if key:
            raise ConfigError(f"{variable} and {variable}_FILE are both set. Expected one of them. Unset the other.")
        key = _key_in(path, variable)
    if not key:
        is_name = re.fullmatch("[A-Z][A-Z0-9_]*", variable) is not None  # else it may be the key itself
        named = f"the environment variable {variable}" if is_name else "an environment variable (not shown)"
        expected = "Expected a variable with the key, or with the suffix _FILE, one with the path of the key's file."
        raise ConfigError(f"`{setting}` names {named}, which is not set. {expected}")
    if fault := key_fault(key):
        where = f"the environment variable {variable} (`{setting}`)"
        raise ConfigError(f"the key in {where} or its file holds {fault}. Expected printable ASCII characters.")
    return key


def _key_in(path: str, variable: str) -> str:
    where = f"the file that the environment variable {variable}_FILE names"
    try:
        # non-blocking: don't wait for the writer of a named pipe
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MOST_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(f"{where} can't be read ({error.strerror}). Expected a file with only the key.") from None
    fault = None
    if status.st_mode & 0o077 and stat.S_ISREG(status.st_mode):
        fault = f"has the permissions {stat.S_IMODE(status.st_mode):03o}, so that other users can read the key"
    elif not content.strip() or len(content) > MOST_BYTES:
        fault = "is empty" if len(content) <= MOST_BYTES else f"exceeds {MOST_BYTES} bytes"
    if fault is not None:
        more = f'Expected only the key, in a file readable only by its owner: chmod 600 "${variable}_FILE"'
        raise ConfigError(f"{where} {fault}. {more}")
    return content.decode("utf-8", errors="replace").strip()


def _rubric_names(weights: Mapping[str, Mapping[str, float]], branches: Sequence[str]) -> tuple[str, ...]:
    """Each branch's own rubric, and those named by the weights."""
    named = [component for components in weights.values() for component in components]
    others = [name.removeprefix(OTHER_RUBRIC) for name in named if name.startswith(OTHER_RUBRIC)]
    return tuple(dict.fromkeys((*branches, *others)))
