#!/usr/bin/env python3
"""The machine, settings, rows, RAG service and judge, without a model: the short way into a preflight.

    .venv/bin/python scripts/test_components.py --config recipes/full.yaml --rag.base_url http://...:8801
    .venv/bin/python scripts/test_components.py --json

Takes the recipe and all settings of a training line. The default recipe is recipes/full.yaml. Without addresses it
starts the embedded services. Exit code: 0, or 2 after the first stage that failed. See docs/how-to/preflight.md.
"""

import gc
import sys

from salesrl_trl.launch.preflight.__main__ import main
from salesrl_trl.launch.process import end_tidily

if __name__ == "__main__":
    end_tidily()
    gc.disable()  # this process lives for seconds, and collections take a fifth of the CPU time of its imports
    sys.exit(main(["--stage", "environment,config,data,rag,judge", *sys.argv[1:]]))
