"""Names from elsewhere: verl's configuration (0.5 to 0.9), scripts with upper-case names, and earlier versions.
`coming_from.yaml` maps them to settings, and this module converts their values."""

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import ceil
from pathlib import Path, PurePath
from typing import Any, NamedTuple, cast

import yaml

from salesrl_trl.config.keys import FORMER, with_entries
from salesrl_trl.data.files import read_yaml

GONE = "gone"  # the part of the table for earlier versions
Given = Mapping[str, Any]  # values by the keys of the table
_OVERLONG = "reward_model.overlong_buffer"  # of DAPO


class Name(NamedTuple):
    system: str
    here: str = ""
    see: str = ""
    note: str = ""
    values: Mapping[object, object] | None = None
    by: str = "each"
    when: str = ""
    look: tuple[object, ...] = ()
    default: object = None


@functools.cache
def _content() -> Mapping[str, Given]:
    return cast(Mapping[str, Given], read_yaml(Path(__file__).with_suffix(".yaml")))


def beside() -> Mapping[str, object]:
    """The settings without an equivalent in verl."""
    return _content()["beside"]


@functools.cache
def names() -> dict[str, Name]:
    return {name: Name(GONE, here=place) for name, place in FORMER.items()} | {
        key: Name(system, **({"here": line} if isinstance(line, str) else line))
        for system, lines in _content().items()
        if system != "beside"
        for key, line in lines.items()
    }


def plain(name: str) -> str:
    """A name as in the table: without the first part, and normalised over verl's versions."""
    name = name.lstrip("+").removeprefix("actor_rollout_ref.").removeprefix("reward.")  # of verl 0.9
    return name.replace("reward_kwargs.overlong_buffer_cfg.", "overlong_buffer.")


def line_of(name: str) -> Name:
    """The table's line for a known name, with `*` in its settings replaced by the match."""
    key = known_as(name) or ""
    return names()[key]._replace(here=names()[key].here.replace("*", plain(name)[key.find("*") :]))


def known_as(name: str) -> str | None:
    """The key in the table for a name, which may omit leading parts: `"optim.lr"`. `None` for an unknown name."""
    name = plain(name)
    ends = [name] if name in names() else [key for key in names() if key.endswith(f".{name}")]
    return ends[0] if len(ends) == 1 else next((key for key in names() if fnmatchcase(name, key)), None)


def converted(key: str, value: object, given: Given) -> dict[str, object] | None:
    """The settings for a value, `given` the others. `None` if it can't be converted."""
    name = line_of(key)
    try:
        if not given.get(name.when, True):
            return {}
        if name.values is not None:
            here = name.values[value]
            return {name.here: here} if name.here and here is not None else {}
        return _convert(name.by, name.here, value, given) if name.here else None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration):
        return None


def answer(name: str, value: object, given: Given) -> str:
    """The equivalent of a name, with the converted value if there is one. Empty for an unknown name."""
    if (key := known_as(name)) is None:
        return ""
    line = names()[key]
    if line.system == GONE:
        return f"here {line.here}" if line.here else f"gone: {line.note}"
    settings = None if value is None else converted(key, value, given)
    here = flow(settings) if settings else line.here or line.see
    text = ": ".join(filter(None, (f"here {here}" if here else "not here", "" if settings else line.note)))
    return f"of verl; {text}" if line.system == "verl" else text


def flat(given: Mapping[str, object], before: str = "") -> dict[str, object]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`, without Hydra's classes."""
    found = dict[str, object]()
    for name, value in given.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{name}.")
        elif name != "_target_":
            found[f"{before}{name}"] = value
    return found


def value_of(text: str) -> object:
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return text


def flow(settings: Mapping[str, object]) -> str:
    """`{"a": 1, "b.c": 2}` as YAML on one line: `"a: 1, b: {c: 2}"`."""
    return yaml.safe_dump(with_entries(settings), default_flow_style=True, sort_keys=False, width=10**6).strip()[1:-1]


def updates(given: Given) -> int:
    prompts, mini = given.get("data.train_batch_size") or 1, given.get("actor.ppo_mini_batch_size")
    return ceil(prompts / (mini or prompts)) * (given.get("actor.ppo_epochs") or 1)


def processes(given: Given) -> int:
    return int((given.get("trainer.n_gpus_per_node") or 1) * (given.get("trainer.nnodes") or 1))


def _sizes(given: Given) -> dict[str, object]:
    group, prompts = given["rollout.n"], given["data.train_batch_size"]
    mini = min(given.get("actor.ppo_mini_batch_size") or prompts, prompts)
    share, rest = divmod(mini * group, processes(given))  # completions of a process and an optimizer step
    share = group * ceil(mini / processes(given)) if rest else share
    most = min(given.get("actor.ppo_micro_batch_size_per_gpu") or group, share)
    size = next(size for size in range(most, 0, -1) if share % size == 0)
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": share // size}
    return sizes | ({"steps_per_generation": share // size * ceil(prompts / mini)} if mini < prompts else {})


def _correction(given: Given) -> dict[str, object]:
    """The importance weights and masks of verl's `rollout_correction`; nothing if all are off."""

    def of(name: str, default: Any = None) -> Any:
        return given.get(f"algorithm.rollout_correction.{name}", default)

    level, is_bypass, rejections = of("rollout_is"), of("bypass_mode"), str(of("rollout_rs") or "")
    settings: dict[str, object] = {}
    if level and not is_bypass:
        low, high = ([None, *map(float, str(of("rollout_is_threshold", 2.0)).split("_"))])[-2:]
        settings["vllm_importance_sampling_mode"] = f"{level}_{'truncate' if low is None else 'mask'}"
        settings |= {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    weights = "bypass" if is_bypass else "none" if not level else "normalized" * bool(of("rollout_is_batch_normalize"))
    if weights and (level or is_bypass or rejections):
        settings["rollout_correction.weights"] = weights
    names = [name.strip() for name in rejections.split(",") if name.strip()]
    thresholds = str(of("rollout_rs_threshold")).split(",") * (len(names) if names else 0)
    for name, threshold in zip(names, thresholds, strict=False):
        ends = [*map(float, threshold.split("_"))]
        settings[f"rollout_correction.reject.{name}"] = ends if len(ends) > 1 else ends[0]
    return settings


def _function(here: str, value: str, given: Given) -> dict[str, object]:
    path = PurePath(value).with_suffix("")
    parts = path.parts[-1:] if path.is_absolute() or ".." in path.parts else path.parts
    function = ".".join((*parts, given.get("custom_reward_function.name") or "compute_score"))
    if not given.get(f"{_OVERLONG}.enable"):
        return {here: [function]}
    most = given.get("reward_model.reward_kwargs.max_resp_len") or given["data.max_response_length"]
    cache = given[f"{_OVERLONG}.len"]
    overlong = f"salesrl_trl.soft_overlong_punishment(max_completion_len={most}, soft_punish_cache={cache})"
    return {here: [function, overlong], "reward_weights": [1.0, given.get(f"{_OVERLONG}.penalty_factor", 1.0)]}


def _convert(by: str, here: str, value: Any, given: Given) -> dict[str, object]:
    """The settings `here` with their values. `by`: the name of the conversion in the table. Raises for invalid
    values."""
    *others, setting = here.split(", ")
    match by:
        case "overlong" if not given["custom_reward_function.path"]:
            raise LookupError
        case "within" | "overlong":  # `_function` adds the overlong reward
            return {}
        case "sizes":
            return _sizes(given)
        case "correction":
            return _correction(given)
        case "function":
            return _function(here, value, given)
        case "steps":
            number = {setting: value * updates(given)} if value > 0 else {}
            return dict.fromkeys(others, "steps" if number else "no") | number
        case "files" if not isinstance(value, str):  # several are entries of `dataset`
            [value] = value if here != "dataset" or len(value) == 1 else [[{"path": path} for path in value]]
        case "lora":
            return {others[0]: True, others[1]: value, setting: 0.0} if value else {}
        case "kl":
            return {others[0]: value, setting: given.get("actor.kl_loss_type") in ("kl", "k1")}
        case "epochs" if not value:
            return {"mode": "rollouts"}
        case "column" if here.endswith(f".{value}"):
            return {}
        case "positive" if value <= 0:
            return {}
        case "not_negative":
            value = max(value, 0)
        case "one_more":
            value += 1
        case "lengths":
            value += given["data.max_response_length"]
        case "text":
            value = str(value)
        case "trackers":
            value = [name for name in ([value] if isinstance(value, str) else value) if name != "console"] or "none"
    return dict.fromkeys([*others, setting], value)
