"""Checks of the policy's configuration, tokenizer and attention, without loading weights."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_utils import set_zero3_state
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from trl import ModelConfig, get_peft_config

from salesrl_trl.errors import ConfigError, ModelNotFoundError

if TYPE_CHECKING:
    from peft import PeftModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


FLASH = {
    "flash_attention_3": (is_flash_attn_3_available, (9, 0), (9, 9)),  # made for Hopper
    "flash_attention_2": (is_flash_attn_2_available, (8, 0), (99, 9)),
}
"""FlashAttention's names in transformers, fastest first: is it installed, the oldest and newest compute capability."""


def check_model(name_or_path: str, revision: str | None, trust_remote_code: bool) -> PretrainedConfig:
    """Load the model's configuration. Raises `ModelNotFoundError` if it does not exist locally or on the hub."""
    path = Path(name_or_path).expanduser()
    is_local = name_or_path.startswith(("/", ".", "~")) or path.is_dir() or name_or_path.count("/") > 1
    if is_local and not (path / "config.json").is_file():
        state = "a folder without config.json" if path.is_dir() else "which does not exist"
        expected = "Expected a folder written by `save_pretrained`, or a model on the hub."
        raise ModelNotFoundError(f"`model_name_or_path` is {name_or_path!r}, {state}. {expected}")
    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        found = f"`model_name_or_path` is {name_or_path!r}, whose configuration could not be loaded"
        expected = "Expected a folder with config.json, or a reachable model on the hub."
        raise ModelNotFoundError(f"{found} ({type(error).__name__}). {expected}") from error


def load_tokenizer(name_or_path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Raises `ModelNotFoundError` if it does not exist, and `ConfigError` if it lacks an
    end token or a chat template."""
    folder = Path(name_or_path).expanduser()
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        # from config.json alone, transformers builds a tokenizer without a vocabulary
        raise ModelNotFoundError(f"`model_name_or_path` is {name_or_path!r}, a folder without a tokenizer. Add it.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        found = f"`model_name_or_path` is {name_or_path!r}, whose tokenizer could not be loaded"
        raise ModelNotFoundError(f"{found} ({type(error).__name__}).") from error
    if tokenizer.eos_token_id is None:
        effect = "which TRL needs to find the end of a completion"
        remedy = "Set `eos_token` in tokenizer_config.json to the token that ends a turn of the chat template."
        raise ConfigError(f"the tokenizer of {name_or_path!r} lacks an end token, {effect}. {remedy}")
    if tokenizer.chat_template is None:
        remedy = "Use an instruct model, or save a chat_template.jinja beside the tokenizer."
        raise ConfigError(f"the tokenizer of {name_or_path!r} lacks a chat template. {remedy}")
    return tokenizer


def generation_config_of(name_or_path: str, revision: str | None) -> GenerationConfig | None:
    """The model's generation settings; `None` without a generation_config.json."""
    try:
        return GenerationConfig.from_pretrained(name_or_path, revision=revision)
    except OSError:
        return None


def positions_of(model: PretrainedConfig) -> int | None:
    """The model's maximum length in tokens. `None` if the configuration lacks it, and for scaled positions (e.g.
    YaRN), for which vLLM applies its own rules."""
    text = model.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    scaled = getattr(text, "rope_parameters", None) or {}
    by_layer = [scaled, *(each for each in scaled.values() if isinstance(each, dict))]
    is_scaled = any(each.get("rope_type", "default") != "default" for each in by_layer)
    return positions if isinstance(positions, int) and not is_scaled else None


def reads_pictures(model: PretrainedConfig) -> bool:
    """Whether a model with this configuration reads pictures."""
    return type(model) in AutoModelForImageTextToText._model_mapping


def model_class(model: PretrainedConfig) -> type[AutoModelForCausalLM]:
    """The transformers class that loads a policy with this configuration."""
    kind: type[AutoModelForCausalLM] = AutoModelForImageTextToText if reads_pictures(model) else AutoModelForCausalLM
    return kind


def empty_model(name_or_path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """A model without its weights, on torch's `meta` device, in this process alone."""
    config = AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    # Under ZeRO-3, transformers partitions a model while building it, and waits for the other processes.
    with torch.device("meta"), set_zero3_state():  # as if it were partitioned already
        return model_class(config).from_config(config, trust_remote_code=trust_remote_code)


def put_adapter(model: PreTrainedModel, lora: ModelConfig) -> "PeftModel":
    """Add the settings' LoRA adapter to an empty model, in place."""
    from peft import get_peft_model

    settings = get_peft_config(ModelConfig(**{**vars(lora), "use_peft": True}))
    layers = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    try:
        with torch.device("meta"):
            return get_peft_model(model, settings, low_cpu_mem_usage=True)
    except ValueError as error:
        found = f"`lora_target_modules` is {lora.lora_target_modules}, which matches no layer ({error})"
        expected = f"Expected some of the model's linear layers: {', '.join(sorted(layers))}; or `all-linear`."
        raise ConfigError(f"{found}. {expected}") from error


def choose_attention(
    asked: str | None, device: torch.device, in_16_bits: bool, model: PretrainedConfig
) -> tuple[str | None, str | None]:
    """The implementation for `from_pretrained`, and a line for the banner. `asked`: the setting `attn_implementation`;
    only `auto` is resolved here. `in_16_bits` refers to the forward pass."""
    if asked != "auto":
        return asked, None
    kind = model_class(model)._model_mapping.get(type(model), None)
    chosen = "sdpa" if getattr(kind, "_supports_sdpa", False) else None  # else transformers uses eager
    if device.type != "cuda" or not in_16_bits or not getattr(kind, "_supports_flash_attn", False):
        return chosen, f"attention: {chosen or 'eager'}; FlashAttention needs a GPU, 16 bits and a supported model"
    capability = torch.cuda.get_device_capability(device)
    for name, (is_installed, oldest, newest) in FLASH.items():
        if oldest <= capability <= newest and is_installed():
            return name, f"attention: {name}"
    return chosen, f"attention: {chosen or 'eager'}; scripts/install_flash_attn.sh installs FlashAttention"
