"""Imported first, by processes that generate with transformers alone. TRL then does not import vLLM: 5 s of CPU."""

from trl import import_utils

import_utils.is_vllm_available = lambda *_, **__: False
