"""Imported first, by processes that generate with transformers alone. TRL then does not import vLLM: 4 s of CPU. And
the garbage collector does not walk over what is imported, as in a recipe's process: 1 s."""

from salesrl_trl.ground.process import collect_seldom, remember_packages

remember_packages()

from trl import import_utils  # noqa: E402

import_utils.is_vllm_available = lambda *_, **__: False
collect_seldom()
