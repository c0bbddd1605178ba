"""Checks of the model: its configuration, tokenizer and size. Loads no weights."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_utils import set_zero3_state

from salesrl_trl.errors import ConfigError, ModelNotFoundError
from salesrl_trl.run.precision import GIB, Room


def check_model(name_or_path: str, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """Load the model's configuration. Raises `ModelNotFoundError` if there is none, locally or on the hub."""
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


def load_tokenizer(name_or_path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    Raises:
        `ModelNotFoundError`: there is none.
        `ConfigError`: it has no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"`model_name_or_path` is {name_or_path!r}, whose tokenizer could not be loaded ({type(error).__name__}). "
            "Expected tokenizer files beside the model's configuration. Save the tokenizer there too."
        ) from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {name_or_path!r} has no chat template, so prompts can't become tokens. Expected an "
            "instruct model. Name one, or save a chat_template.jinja beside the tokenizer."
        )
    return tokenizer


def positions_of(model: PretrainedConfig) -> int | None:
    """The number of tokens that a model is made for.

    Returns:
        `int`, *optional*: `None` if the configuration does not say. Also `None` for scaled positions (YaRN and
        others): vLLM has rules of its own for them.
    """
    text = model.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    scaled = getattr(text, "rope_parameters", None) or {}
    kinds = {scaled.get("rope_type", "default")} | {
        each.get("rope_type", "default") for each in scaled.values() if isinstance(each, dict)
    }
    return positions if isinstance(positions, int) and kinds <= {"default"} else None


def parameter_count(name_or_path: str, revision: str | None, trust_remote_code: bool) -> int:
    """Count a model's parameters. The model is built without its weights, in this process alone."""
    config = AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    # Under ZeRO-3 transformers splits a model over all processes while it builds it, and waits for the others.
    with torch.device("meta"), set_zero3_state():  # as if it were split already
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
    """The card's memory and the model's size; `None` without a CUDA device."""
    if device.type != "cuda":
        return None
    return Room(
        parameters=parameter_count(name_or_path, revision, trust_remote_code),
        memory_gib=torch.cuda.get_device_properties(device).total_memory / GIB,
        vllm_share=vllm_share,
        has_reference=has_reference,
        is_replicated=processes > 1,
    )
