"""Checks of the prompt: its template, and the room for prompt and completion."""

from salesrl_trl.config import DataConfig, SalesGRPOConfig
from salesrl_trl.data.lengths import LengthLimit
from salesrl_trl.data.prompts import PROMPT_STYLES
from salesrl_trl.data.templates import PromptTemplate, read_template
from salesrl_trl.errors import ConfigError
from salesrl_trl.types import DEFAULT_FORMAT


def prompt_of(config: DataConfig, fields: tuple[str, ...] = DEFAULT_FORMAT.fields) -> str | PromptTemplate:
    """The policy's prompt: the user's template, or the name of a packaged style.

    Raises:
        `ConfigError`: the template does not work, or the packaged prompt asks for other fields than `fields`.
    """
    if config.prompt_template not in PROMPT_STYLES:
        return read_template(config.prompt_template, fields)
    if config.prompt_template == "instruct" and fields != DEFAULT_FORMAT.fields:
        raise ConfigError(
            f"`action_fields` is {', '.join(fields)}, but the packaged prompt asks for "
            f"{', '.join(DEFAULT_FORMAT.fields)}. Give a `prompt_template` that asks for yours (docs/DATA.md)."
        )
    return config.prompt_template


def prompt_limit(
    data: DataConfig, training: SalesGRPOConfig, positions: int | None, server_room: int | None = None
) -> LengthLimit | None:
    """The longest prompt that leaves room for a completion of `max_completion_length`.

    Args:
        data (`DataConfig`), training (`SalesGRPOConfig`):
            Settings.
        positions (`int`, *optional*):
            The model's positions, in tokens.
        server_room (`int`, *optional*):
            The longest prompt and completion together that a vLLM server accepts, in tokens.

    Returns:
        `LengthLimit`, *optional*: `None` if no limit is known.

    Raises:
        `ConfigError`: there is no room for a prompt, or for one of `max_prompt_tokens`.
    """
    room, source = _room(training, positions, server_room)
    asked, completion = data.max_prompt_tokens, training.max_completion_length or 1
    if room is not None and (asked or 1) + completion > room:
        prompt = "a prompt" if asked is None else f"`max_prompt_tokens` {asked}"
        raise ConfigError(
            f"{prompt} and `max_completion_length` {completion} do not fit into {source} {room}: completions would be "
            "cut short. Raise the length, or lower the others."
        )
    if asked is not None:
        return LengthLimit(tokens=asked, reason="`max_prompt_tokens`")
    if room is None:
        return None
    return LengthLimit(tokens=room - completion, reason=f"{source} {room} less `max_completion_length` {completion}")


def _room(training: SalesGRPOConfig, positions: int | None, server_room: int | None) -> tuple[int | None, str]:
    """Tokens of prompt and completion together, and the name of what limits them."""
    if not training.use_vllm or training.vllm_mode != "colocate":
        if server_room is not None:
            return server_room, "the vLLM server's length"
        return positions, "the model's positions"
    room, source = positions, "the model's positions"
    if training.vllm_max_model_length is not None:
        room, source = training.vllm_max_model_length, "`vllm_max_model_length`"
    if isinstance(given := training.parsed_engine_kwargs().get("max_model_len"), int):
        room, source = given, "`max_model_len` of `vllm_engine_kwargs`"
    if positions is not None and room is not None and room > positions:
        raise ConfigError(
            f"{source} is {room}, but the model has {positions} positions: vLLM would refuse to start. Expected "
            f"{positions} or less, with room for `max_completion_length` {training.max_completion_length} in it. "
            f"Set `vllm_max_model_length: {positions}`."
        )
    return room, source
