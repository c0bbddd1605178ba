"""Checks of the model: its configuration and its tokenizer. Loads no weights."""

import contextlib
import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
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
from transformers.utils.hub import is_offline_mode, try_to_load_from_cache
from trl import ModelConfig, get_peft_config

from salesrl_trl.errors import ConfigError, ModelNotFoundError

if TYPE_CHECKING:
    from peft import PeftModel

HUB_TIMEOUT_S = 10.0
"""Seconds for the hub's answer about a model."""
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of files of weights."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


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
    if not looks_local:
        _reach_hub(name_or_path, revision)
    try:
        return AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"`model_name_or_path` is {name_or_path!r}, whose configuration could not be loaded "
            f"({type(error).__name__}). Expected a folder with config.json, or the name of a model on a hub that this "
            "machine can reach. Correct it, log in if the model is gated, or leave it out to train the small demo "
            "policy."
        ) from error


def _reach_hub(name: str, revision: str | None) -> None:
    """Ask the hub for the model once. Without it `from_pretrained` tries for most of a minute, and prints each try.

    The hub's own client has certificates and kinds of proxies that Python has not. It decides where these matter.
    """
    is_cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    if is_cached or is_offline_mode() or urllib.request.getproxies().keys() - {"no"}:
        return
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urllib.request.urlopen(f"{hub}/api/models/{urllib.parse.quote(name)}", timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return  # it answered; `from_pretrained` says what it lacks
    except (OSError, http.client.HTTPException) as error:
        if isinstance(getattr(error, "reason", error), ssl.SSLError):
            return
        shown = re.sub("//.*@", "//", hub)  # without a password
        raise ModelNotFoundError(
            f"`model_name_or_path` is {name!r}, which is not on this machine, and the hub can't be reached at "
            f"{shown} ({type(error).__name__}). Expected a folder that `save_pretrained` wrote, or a hub that this "
            "machine can reach. Name such a folder, set `HTTPS_PROXY` or `HF_ENDPOINT`, or leave the model out to "
            "train the small demo policy."
        ) from error


def check_weights(folder: Path) -> None:
    """Raise `ModelNotFoundError` if a file of a local model's weights is absent, `ConfigError` if one is cut off."""
    if not folder.is_dir():
        return
    files = {path.name for ending in WEIGHT_FILES for path in folder.glob(f"*{ending}")}
    expected = set[str]()
    for index in folder.glob("*.safetensors.index.json"):
        with contextlib.suppress(ValueError, KeyError, AttributeError):  # transformers says what is wrong with it
            expected |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    absent = sorted(expected - files) or ([] if files else ["model.safetensors"])
    if absent:
        raise ModelNotFoundError(
            f"`model_name_or_path` is {str(folder)!r}, where {', '.join(absent[:3])} is missing ({len(absent)} in "
            "all). Expected all weights beside config.json. Fetch the model again, or wait until its copy is complete."
        )
    for name in sorted(files):
        if name.endswith(".safetensors"):
            try:
                with safe_open(folder / name, "pt"):  # reads the head, and compares it with the file's size
                    pass
            except SafetensorError as error:
                raise ConfigError(
                    f"{folder / name} holds no weights, or a part of them ({error}; {(folder / name).stat().st_size} "
                    "bytes). Expected a whole file. Fetch it again; a file of 130 bytes is a pointer of Git LFS: "
                    "`git lfs pull`."
                ) from error


def load_tokenizer(name_or_path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    Raises:
        `ModelNotFoundError`: there is none.
        `ConfigError`: it has no chat template.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelNotFoundError(  # from config.json alone transformers makes a tokenizer without a vocabulary
            f"`model_name_or_path` is {name_or_path!r}, where there is no tokenizer. Expected one of "
            f"{', '.join(TOKENIZER_FILES)} beside config.json. Save the tokenizer there too."
        )
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


def generation_config_of(name_or_path: str, revision: str | None) -> GenerationConfig | None:
    """The model's generation settings. `None` if there is no such file."""
    try:
        return GenerationConfig.from_pretrained(name_or_path, revision=revision)
    except OSError:
        return None


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


def reads_pictures(model: PretrainedConfig) -> bool:
    """Whether a model of this configuration reads pictures beside text."""
    return type(model) in AutoModelForImageTextToText._model_mapping


def model_class(model: PretrainedConfig) -> Any:
    """The class of transformers that loads a policy of this configuration."""
    return AutoModelForImageTextToText if reads_pictures(model) else AutoModelForCausalLM


def empty_model(name_or_path: str, revision: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """A model without its weights, on torch's `meta` device, in this process alone."""
    config = AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    # Under ZeRO-3 transformers splits a model over all processes while it builds it, and waits for the others.
    with torch.device("meta"), set_zero3_state():  # as if it were split already
        return model_class(config).from_config(config, trust_remote_code=trust_remote_code)


def put_adapter(model: PreTrainedModel, lora: ModelConfig) -> "PeftModel":
    """Put the LoRA adapter of the settings on an empty model, which changes it.

    Raises:
        `ConfigError`: the model has no layer of the names in `lora_target_modules`, or PEFT knows none by itself.
    """
    from peft import get_peft_model

    settings = get_peft_config(ModelConfig(**{**vars(lora), "use_peft": True}))
    linear = linear_layers(model)
    try:
        with torch.device("meta"):
            return get_peft_model(model, settings, low_cpu_mem_usage=True)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ConfigError(
            f"`lora_target_modules` is {lora.lora_target_modules}, which gives no adapter ({error}). Expected names "
            f"of the model's layers. Set some of its linear layers: {linear}; or `all-linear`."
        ) from error


def linear_layers(model: torch.nn.Module) -> str:
    """The last names of a model's linear layers: `"down_proj, gate_proj, k_proj"`."""
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))
