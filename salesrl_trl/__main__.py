"""`salesrl COMMAND [ARGUMENT ...]`: a short name for each `python -m` command of the package.

Standard library only. The process is replaced by the command's, so arguments, module path, output and exit code are
those of `python -m`.
"""

import os
import sys
from importlib.util import find_spec
from typing import NoReturn

from salesrl_trl.errors import nearest
from salesrl_trl.ground.own_code import code
from salesrl_trl.ground.shutdown import EXIT_BAD_INPUT, end_tidily

COMMANDS = {
    "train": ("salesrl_trl.launch.train", "train a policy; without a recipe, with the built-in one"),
    "preflight": ("salesrl_trl.launch.preflight", "check settings, data, services and memory before a run"),
    "evaluate": ("salesrl_trl.launch.evaluate", "score a policy on held-out rows"),
    "rejudge": ("salesrl_trl.record.rejudge", "judge a recorded run again and compare"),
    "report": ("salesrl_trl.record.report", "write a page about a run"),
    "view": ("salesrl_trl.record.view", "show a run's completions live in a browser"),
    "translate": ("salesrl_trl.launch.translate", "convert a verl configuration into a recipe"),
    "services": ("salesrl_trl.demo.services", "start the demo's RAG service and judge"),
    "env": ("salesrl_trl.launch.env", "show code, versions and settings, or how two runs differ"),
}
"""Each command with its module and description. Commands whose module is absent are hidden."""


def main() -> NoReturn:
    end_tidily()
    word, rest = (sys.argv[1], sys.argv[2:]) if sys.argv[1:] else ("--help", [])
    offered = {name: entry for name, entry in COMMANDS.items() if find_spec(entry[0])}
    if word in ("-h", "--help"):
        lines = [f"  {name:<10} {description} (python -m {module})" for name, (module, description) in offered.items()]
        end = "`salesrl COMMAND --help` lists a command's arguments. `salesrl --version` prints the version."
        print("\n".join(["usage: salesrl COMMAND [ARGUMENT ...]", "", *lines, "", end]))
        sys.exit()
    if word == "--version":
        print(f"salesrl_trl {code()}")
        sys.exit()
    if word not in offered:
        guess = nearest(word, offered)
        print(f"salesrl: unknown command {word!r}.{guess} Expected one of: {', '.join(offered)}.", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    os.execv(sys.executable, [sys.executable, "-m", offered[word][0], *rest])


if __name__ == "__main__":
    main()
