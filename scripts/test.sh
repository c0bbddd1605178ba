#!/usr/bin/env bash
# Everything that a change must pass, here and in CI: set-up, lint, format, types, tests with the locked versions, and
# some of them with the lowest ones that setup.cfg allows. Stops at the first failure.
# Given arguments go to pytest, which then runs once, in one process:
#
#   scripts/test.sh
#   scripts/test.sh -m "not slow" tests/unit
set -euo pipefail

if [[ -n "${VENV:-}" && "$VENV" != /* ]]; then export VENV="$PWD/$VENV"; fi
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"
venv="${VENV:-$root/.venv}"
bin="$venv/bin"
lowest="$venv/lowest"

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

# The lowest versions, in a folder that lies before the locked ones on the path. Made once: kept until the list changes.
make_lowest() {
  local stamp="$lowest/.made-of" list="requirements/lowest.txt"
  if cmp -s "$list" "$stamp"; then return; fi
  rm -rf -- "$lowest"
  "$bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --no-compile \
    --only-binary :all: --target "$lowest" -r "$list"
  cp -- "$list" "$stamp"
}

# With the lowest versions: one room of tests for each package, what upstream's hooks are, and a training.
test_lowest() {
  make_lowest
  PYTHONPATH="$lowest${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 "$bin/python" -m pytest -q \
    -m "not (alone or gpu or slow)" -n 2 --dist loadfile --no-loadscope-reorder \
    tests/integration/test_readme.py tests/upstream tests/unit/test_packaging.py::test_versions_of_the_environment \
    tests/unit/reward/test_chain.py tests/faults/test_http_faults.py tests/unit/demo/services/test_services_http.py \
    tests/unit/demo/services/test_knowledge_index.py tests/unit/run/test_preflight.py tests/unit/data/test_templates.py \
    tests/unit/telemetry/test_device.py tests/unit/telemetry/test_layout.py \
    tests/unit/report/test_report_records.py \
    tests/unit/report/test_report_plots.py::test_a_run_with_everything_gives_every_picture \
    tests/unit/telemetry/test_flops.py::test_of_two_adapters_copies_of_the_head_the_one_that_runs_is_counted
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
  run "tests with the lowest versions" test_lowest
  set -- -m "alone or gpu"
fi
printf 'test: pytest, one test at a time (%d s so far)\n' "$SECONDS"
# In place of this shell, so that a signal reaches it and its exit status is the script's.
exec "$bin/python" -m pytest "$@"
