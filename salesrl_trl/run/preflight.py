"""What is looked at before any model is loaded.

Owns the checks that need the machine or several settings: is there a model at that path, can the output be written, do
the embedded services know what they are to score. Settings by themselves are checked in `config`, rows in `data`,
addresses in `probe`.
"""

import difflib
import os
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import set_zero3_state
from transformers.trainer_utils import get_last_checkpoint

from salesrl_trl.config import DataConfig, RewardConfig, SalesGRPOConfig
from salesrl_trl.data.lengths import Limit
from salesrl_trl.data.templates import PromptTemplate, read_template
from salesrl_trl.demo.services.index import load_documents
from salesrl_trl.errors import ConfigError, ModelNotFoundError
from salesrl_trl.reward.judge.client import packaged_rubrics
from salesrl_trl.reward.scoring import OTHER_RUBRIC
from salesrl_trl.reward.service.http import key_fault
from salesrl_trl.run.precision import GIB, Room
from salesrl_trl.types import DEFAULT_FORMAT


def prompt_of(config: DataConfig, fields: tuple[str, ...] = DEFAULT_FORMAT.fields) -> str | PromptTemplate:
    """What the policy is prompted with: a template of one's own, or the name of a packaged style.

    Raises:
        `ConfigError`: the template does not work, or the packaged prompt asks for other fields than `fields`.
    """
    if config.prompt_template is not None:
        return read_template(config.prompt_template, fields)
    if config.prompt_style == "instruct" and fields != DEFAULT_FORMAT.fields:
        raise ConfigError(
            f"`action_fields` is {', '.join(fields)}, but the packaged prompt asks for "
            f"{', '.join(DEFAULT_FORMAT.fields)}. Give a `prompt_template` that asks for yours (docs/DATA.md)."
        )
    return config.prompt_style


def check_stand_ins(config: RewardConfig, branches: Sequence[str], own_rows: str | None) -> list[str]:
    """Whether the embedded services know what they are to score. Also looks at the embedded RAG service's documents.

    Args:
        config (`RewardConfig`):
            Settings.
        branches (`Sequence[str]`):
            Branch names.
        own_rows (`str`, *optional*):
            A dataset of the run that is not the demo.

    Returns:
        `list[str]`: lines for the run's banner, where `allow_stand_ins` lets them score what they don't know.

    Raises:
        `ConfigError`: they don't, and `allow_stand_ins` is not set.
        `DataError`: `knowledge_file` can't be read.
    """
    if config.knowledge_file is not None:
        load_documents(Path(config.knowledge_file).expanduser())
    own_fields = config.action_format().fields != DEFAULT_FORMAT.fields
    if config.embeds_rag and own_fields:
        raise ConfigError(
            f"The embedded RAG service takes the action's fields {', '.join(DEFAULT_FORMAT.fields)} alone. Set "
            "`rag_base_url` or `vector_store_path`, or leave out `action_fields`."
        )
    faults = []
    if config.embeds_judge and own_fields:
        faults.append("The embedded judge does not read `action_fields` of yours. Set `judge_base_url`.")
    if config.embeds_judge and (own := _own_rubrics(config, branches)):
        faults.append(
            "The embedded judge is a program that knows the packaged rubrics and the demo alone. It reads no rubric "
            f"and can't follow yours ({own}). Set `judge_base_url` and `judge_model`, or `judge_providers`."
        )
    if config.embeds_rag and config.knowledge_file is None and own_rows is not None:
        faults.append(
            f"The embedded RAG service answers the rows of {own_rows} from the demo's course catalogue. Set "
            "`rag_base_url` or `vector_store_path`, or `knowledge_file` for your documents in the embedded service."
        )
    if faults and not config.allow_stand_ins:
        raise ConfigError(
            f"{' '.join(faults)} To try things with scores that mean nothing, set `allow_stand_ins: true`."
        )
    return [f"THE SCORES OF THIS RUN MEAN NOTHING (`allow_stand_ins`). {fault}" for fault in faults]


def _own_rubrics(config: RewardConfig, branches: Sequence[str]) -> str:
    """Rubrics that are not packaged, of branches and of weights."""
    packaged = packaged_rubrics()
    folder = Path(config.rubric_dir).expanduser() if config.rubric_dir else None
    weighed = [component for weights in config.parsed_branch_weights().values() for component in weights]
    others = [each.removeprefix(OTHER_RUBRIC) for each in weighed if each.startswith(OTHER_RUBRIC)]
    names = dict.fromkeys((*branches, *others))
    own = [name for name in names if name not in packaged or (folder and (folder / f"{name}.txt").is_file())]
    return ", ".join(f"{name}.txt" for name in own)


def prompt_limit(
    data: DataConfig, training: SalesGRPOConfig, positions: int | None, server_room: int | None = None
) -> Limit | None:
    """How long a prompt may be, so that a completion of `max_completion_length` has room behind it.

    Args:
        data (`DataConfig`), training (`SalesGRPOConfig`):
            Settings.
        positions (`int`, *optional*):
            Tokens that the model is made for.
        server_room (`int`, *optional*):
            Tokens that a vLLM server has room for.

    Returns:
        `Limit`, *optional*: `None` where nothing is known to bound a prompt.

    Raises:
        `ConfigError`: there is no room for a prompt, or for one of `max_prompt_tokens`.
    """
    room, source = positions, "the model's positions"
    if server_room is not None:
        room, source = server_room, "the vLLM server's length"
    if training.use_vllm and training.vllm_mode == "colocate":
        if training.vllm_max_model_length is not None:
            room, source = training.vllm_max_model_length, "`vllm_max_model_length`"
        if "max_model_len" in (extra := training.parsed_engine_kwargs()):
            room, source = extra["max_model_len"], "`max_model_len` of `vllm_engine_kwargs`"
        if positions is not None and room is not None and room > positions:
            raise ConfigError(
                f"{source} is {room}, but the model has {positions} positions: vLLM would refuse to start. Expected "
                f"{positions} or less, with room for `max_completion_length` {training.max_completion_length} in it. "
                f"Set `vllm_max_model_length: {positions}`."
            )
    asked, completion = data.max_prompt_tokens, training.max_completion_length or 1
    if room is None:
        return None if asked is None else Limit(tokens=asked, reason="`max_prompt_tokens`")
    if (asked or 1) + completion > room:
        prompt = "a prompt" if asked is None else f"`max_prompt_tokens` {asked}"
        raise ConfigError(
            f"{prompt} and `max_completion_length` {completion} do not fit into {source} {room}: completions would be "
            "cut short. Raise the length, or lower the others."
        )
    reason = f"{source} {room} less `max_completion_length` {completion}"
    return (
        Limit(tokens=room - completion, reason=reason)
        if asked is None
        else Limit(tokens=asked, reason="`max_prompt_tokens`")
    )


def positions_of(model: Any) -> int | None:
    """Tokens that a model is made for, by its configuration; `None` where that doesn't say, or where its positions are
    scaled (YaRN and the like), which vLLM reckons with by rules of its own."""
    text = model.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    scaled = getattr(text, "rope_parameters", None) or {}
    kinds = {scaled.get("rope_type", "default")} | {
        each.get("rope_type", "default") for each in scaled.values() if isinstance(each, dict)
    }
    return positions if isinstance(positions, int) and kinds <= {"default"} else None


def check_model(name_or_path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The model's configuration. Raises `ModelNotFoundError` unless there is one, locally or on the hub."""
    path = Path(name_or_path).expanduser()
    looks_local = name_or_path.startswith(("/", ".", "~")) or path.is_dir() or name_or_path.count("/") > 1
    if looks_local and not (path / "config.json").is_file():
        found = "a folder without config.json" if path.is_dir() else "nothing"
        raise ModelNotFoundError(
            f"`model_name_or_path` is {name_or_path!r}, where there is {found}. Expected a folder that "
            "`save_pretrained` wrote, or the name of a model on the hub. Correct the path, or leave it out to train "
            "the small demo policy."
        )
    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"`model_name_or_path` is {name_or_path!r}, whose configuration could not be loaded "
            f"({type(error).__name__}). Expected a folder with config.json, or the name of a model on a hub that this "
            "machine can reach. Correct it, log in if the model is gated, or leave it out to train the small demo "
            "policy."
        ) from error


def load_tokenizer(name_or_path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """The model's tokenizer. Raises `ModelNotFoundError` without one, `ConfigError` where it has no chat template."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"`model_name_or_path` is {name_or_path!r}, whose tokenizer could not be loaded ({type(error).__name__}). "
            "Expected tokenizer files beside the model's configuration. Save the tokenizer there too."
        ) from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {name_or_path!r} has no chat template, so that prompts can't become tokens. Expected "
            "an instruct model, or a chat_template.jinja beside the tokenizer."
        )
    return tokenizer


def parameter_count(name_or_path: str, revision: str | None, trust_remote_code: bool) -> int:
    """A model's parameters, of which it is built without the weights. On one process alone: under ZeRO-3 transformers
    would split them over all, and wait for the others."""
    config = AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    with torch.device("meta"), set_zero3_state():  # as if they were split already
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return int(sum(parameter.numel() for parameter in model.parameters()))


def room_for_training(
    name_or_path: str,
    revision: str | None,
    trust_remote_code: bool,
    device: torch.device,
    *,
    vllm_share: float,
    has_reference: bool,
    processes: int,
) -> Room | None:
    """What the card has and a model would take; `None` without a CUDA device."""
    if device.type != "cuda":
        return None
    return Room(
        parameters=parameter_count(name_or_path, revision, trust_remote_code),
        memory_gib=torch.cuda.get_device_properties(device).total_memory / GIB,
        vllm_share=vllm_share,
        has_reference=has_reference,
        is_replicated=processes > 1,
    )


def read_key(variable: str | None, setting: str) -> str | None:
    """The key in an environment variable; `None` where none is configured.

    Raises:
        `ConfigError`: the variable is named but not set, or what it holds can't be sent. The message names it; a key
            never stands in a message.
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"`{setting}` names the environment variable {variable}, which is not set. Expected it to hold the key. "
            f"Export it before the launch, or leave `{setting}` out."
        )
    if fault := key_fault(key):
        raise ConfigError(
            f"the key in the environment variable {variable} (`{setting}`) holds {fault}. Expected printable ASCII "
            "characters alone. Export it without what was copied along, such as a line break at its end."
        )
    return key


def earlier_start(output_dir: Path | str, resumes: bool) -> list[str]:
    """What an earlier run left in the output folder that this one uses or writes over, in lines for the banner."""
    folder, notes = Path(output_dir).expanduser(), []
    kept = sorted(folder.glob("answers.rank*.sqlite"))
    if kept and not resumes:
        written = datetime.fromtimestamp(max(each.stat().st_mtime for each in kept)).isoformat(" ", "minutes")
        notes.append(
            f"8B answers and verdicts of an earlier start, last written {written}, are used again where requests are "
            f"equal: delete {folder}/answers.rank*.sqlite if the judge behind the same name has changed"
        )
    if not resumes and any(folder.glob("model*.safetensors")):
        notes.append(f"{folder} holds the policy of an earlier run, which this one will overwrite")
    return notes


def check_output_dir(path: Path | str) -> None:
    """Raise `ConfigError` unless files can be written there; the folder is made."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"nothing can be written to `output_dir` {str(path)!r} ({error.strerror}). Expected a folder, or a place "
            "for one, with room and the right to write. Name another."
        ) from None


def check_checkpoint(path: str | None, output_dir: str) -> str | None:
    """The checkpoint to resume from, `"true"` being the last one in `output_dir`. Raises `ConfigError` unless it is
    there."""
    asked = str(path).lower()
    if path is None or asked == "false":
        return None
    if asked == "true" and Path(output_dir).expanduser().is_dir():
        path = get_last_checkpoint(str(Path(output_dir).expanduser())) or path
    if (Path(path).expanduser() / "trainer_state.json").is_file():
        return str(Path(path).expanduser())
    found = sorted(each.parent.name for each in Path(output_dir).expanduser().glob("checkpoint-*/trainer_state.json"))
    near = difflib.get_close_matches(Path(path).name, found, n=1)
    guess = f" Did you mean {Path(output_dir) / near[0]}?" if near else ""
    held = f"{output_dir} holds {', '.join(found)}" if found else f"{output_dir} holds none"
    raise ConfigError(f"`resume_from_checkpoint` is {path!r}, where there is no checkpoint.{guess} {held}.")
