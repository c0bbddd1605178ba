"""What the package has in place of a user's model and services: small policies, a record of the demo's services."""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGED = Path(__file__).with_name("small_policy")  # the folder of the policy. `from_pretrained` loads it.
ARITHMETIC_POLICY = Path(__file__).with_name("arithmetic_policy")
"""The policy of `recipes/own.py`: it adds two numbers, and is wrong more often than right. It is taught by
`scripts/make_arithmetic_policy.py`."""
DUAL_POLICY = Path(__file__).with_name("dual_policy")
"""The policy of `recipes/dual.py`: it answers questions of two tasks, and often takes the bait. It is taught by
`scripts/make_dual_policy.py`."""
VISION_POLICY = Path("runs/vision_policy")  # of the preset `vision`, where `scripts/make_vision_policy.py` writes it
SEARCH_POLICY = Path(__file__).with_name("search_policy")
"""The policy of `recipes/search.py`: it searches and answers, too seldom and too often. It is taught by
`scripts/make_search_policy.py`."""
POLICY_OF = {
    "arithmetic": ARITHMETIC_POLICY,
    "demo_bbq": DUAL_POLICY,
    "demo_halueval": DUAL_POLICY,
    "demo_search": SEARCH_POLICY,
}
"""By packaged dataset, the policy that knows it. `PACKAGED` knows the others."""
PROMPT_STYLE = "compact"
"""The style of the prompts that it was taught with. A run with this policy must use the same one."""
CASSETTE = "demo"  # name of the record in the setting `replay`
FILE = Path(str(files("salesrl_trl.demo") / "cassette.sqlite.gz"))
"""The record, without prompts, answers, verdicts and calls, which a replay does not need."""


def packaged_tokenizer() -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PACKAGED)
