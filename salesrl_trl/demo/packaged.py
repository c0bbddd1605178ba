"""The policy of a run that names no model: a small Qwen2 model and its tokenizer, in the package. It needs no hub.

`scripts/make_demo_policy.py` teaches it.
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
"""Its name, as `replay` has it."""
FILE = Path(str(files("salesrl_trl.demo") / "cassette.sqlite.gz"))
"""A record without prompts, answers, verdicts and calls, which a replay does not need."""
