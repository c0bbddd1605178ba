#!/usr/bin/env python3
"""Runs examples/notebook.ipynb with an installed package, and stores the outputs in the file.

    python -m venv /tmp/nb && /tmp/nb/bin/pip install . nbclient ipykernel
    /tmp/nb/bin/python scripts/run_notebook.py [--notebook FILE]

Run it after changing a code cell: a test fails if the outputs belong to other code. The kernel runs in a temporary
folder, so that it imports the installed package and not this checkout. Progress bars, warnings about this machine and
absolute paths are removed from the outputs.
"""

import argparse
import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples/notebook.ipynb"
MARK = "salesrl_trl"
"""Key of the notebook's metadata that has the hash of the cells."""
KEPT = re.compile(r"^\d\d:\d\d:\d\d (?!\[Run\] version )")
"""Lines of a stream worth showing: those of the package, except for the commit."""
TIMEOUT_S = 600


def fingerprint(notebook: dict[str, Any]) -> str:
    """A hash of the code, in order. Texts may change without a new run."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def cleaned(output: dict[str, Any]) -> dict[str, Any] | None:
    """An output as it is stored, or nothing."""
    if output["output_type"] != "stream":
        return output
    lines = [line for line in "".join(output["text"]).splitlines() if KEPT.match(line)]
    text = re.sub(r"/\S*/ipykernel_\d+/\d+\.py", "<cell>", "\n".join(lines))
    return {**output, "text": [line + "\n" for line in text.splitlines()]} if lines else None


def joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Outputs with neighbouring pieces of the same stream merged."""
    result = list[dict[str, Any]]()
    for each in outputs:
        stream = each.get("name") if each["output_type"] == "stream" else None
        if result and stream and stream == result[-1].get("name"):
            result[-1]["text"] = "".join([*result[-1]["text"], *each["text"]])
        else:
            result.append(dict(each))
    return result


def run(path: Path) -> None:
    """Execute every cell in one kernel, and write the file again."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": folder}}).execute()
    plain = json.loads(nbformat.writes(notebook))
    for cell in plain["cells"]:
        cell["metadata"] = {}
        if cell["cell_type"] == "code":
            cell["outputs"] = [each for output in joined(cell["outputs"]) if (each := cleaned(output)) is not None]
    plain["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        MARK: {"outputs_of": fingerprint(plain)},
    }
    path.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notebook", type=Path, default=NOTEBOOK, help="the file to run and to write")
    run(parser.parse_args().notebook)


if __name__ == "__main__":
    main()
