"""Built-in replacements for a user's model and services: small policies and a record of the demo services."""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGED = Path(__file__).with_name("small_policy")  # the policy's folder, for `from_pretrained`
ARITHMETIC_POLICY = Path(__file__).with_name("arithmetic_policy")
"""The policy of `recipes/own.py`: it adds two numbers, usually incorrectly. Trained by
`scripts/make_arithmetic_policy.py`."""
DUAL_POLICY = Path(__file__).with_name("dual_policy")
"""The policy of `recipes/dual.py`: it answers questions of two tasks and often falls for their traps. Trained by
`scripts/make_dual_policy.py`."""
VISION_POLICY = Path("runs/vision_policy")  # for the preset `vision`, written by `scripts/make_vision_policy.py`
SEARCH_POLICY = Path(__file__).with_name("search_policy")
"""The policy of `recipes/search.py`: it searches and answers, but at the wrong times. Trained by
`scripts/make_search_policy.py`."""
DIALOGUE_POLICY = Path(__file__).with_name("dialogue_policy")
"""The policy of `recipes/dialogue.py`: it offers, searches and argues, but without regard to its customer. Trained by
`scripts/make_dialogue_policy.py`."""
POLICY_OF = {
    "arithmetic": ARITHMETIC_POLICY,
    "demo_bbq": DUAL_POLICY,
    "demo_halueval": DUAL_POLICY,
    "demo_search": SEARCH_POLICY,
    "demo_dialogue": DIALOGUE_POLICY,
}
"""Built-in dataset -> the policy trained on it. `PACKAGED` covers the others."""
PROMPT_STYLE = "compact"
"""The prompt style of its training data, required in runs with this policy."""
CASSETTE = "demo"  # the record's name in the setting `replay`
FILE = Path(str(files("salesrl_trl.demo") / "cassette.sqlite.gz"))
"""The record without prompts, answers, verdicts and calls, which replays don't need."""


def packaged_tokenizer() -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PACKAGED)
