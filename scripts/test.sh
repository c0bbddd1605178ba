#!/usr/bin/env bash
# Everything that a change must pass, here and in CI: set-up, lint, format, types, tests. Stops at the first failure.
# Given arguments go to pytest, which then runs once, in one process:
#
#   scripts/test.sh
#   scripts/test.sh -m "not slow" tests/unit
set -euo pipefail

if [[ -n "${VENV:-}" && "$VENV" != /* ]]; then export VENV="$PWD/$VENV"; fi
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"
bin="${VENV:-$root/.venv}/bin"

run() {
  local name="$1" start=$SECONDS status=0
  shift
  "$@" || status=$?
  if ((status)); then
    printf 'test: FAILED: %s (exit %d, after %d s); the steps after it were not run\n' \
      "$name" "$status" "$((SECONDS - start))" >&2
    exit "$status"
  fi
  printf 'test: passed: %s (%d s)\n' "$name" "$((SECONDS - start))"
}

# No test needs the hub. One GiB of KV cache is plenty for the tiny models of tests.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}"

run "install" scripts/install.sh
run "ruff check" "$bin/ruff" check .
run "ruff format" "$bin/ruff" format --check .
run "mypy" "$bin/mypy"
if (($# == 0)); then
  # A process for each core, to four, each with a thread: they hold torch and now and then a vLLM engine. By files, in
  # their order, which begins with the long ones.
  cores="$(nproc)"
  OMP_NUM_THREADS=1 run "tests" "$bin/python" -m pytest -q -m "not (alone or gpu)" \
    -n "$((cores < 4 ? cores : 4))" --dist loadfile --no-loadscope-reorder
  set -- -m "alone or gpu"
fi
printf 'test: pytest, one test at a time (%d s so far)\n' "$SECONDS"
# In place of this shell, so that a signal reaches it and its exit status is the script's.
exec "$bin/python" -m pytest "$@"
