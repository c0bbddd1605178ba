"""What the package holds in place of a user's model and services: a small policy, and a record of the demo's services.

Owns the places of both. The settings and the checks of a run ask for them. The policy is a Qwen2 model with its
tokenizer, and needs no hub: `scripts/make_demo_policy.py` teaches it. The record has what the services said of some
completions of every row: `scripts/make_demo_cassette.py` makes it.
"""

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGED = Path(__file__).with_name("small_policy")
"""The folder of the policy. `from_pretrained` loads it."""
PROMPT_STYLE = "compact"
"""The style of the prompts that it was taught with. A run with this policy must use the same one."""


def packaged_tokenizer() -> "PreTrainedTokenizerBase":
    """The tokenizer of the small policy."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PACKAGED)


CASSETTE = "demo"
"""Name of the record in the setting `replay`."""
FILE = Path(str(files("salesrl_trl.demo") / "cassette.sqlite.gz"))
"""The record, without prompts, answers, verdicts and calls, which a replay does not need."""
