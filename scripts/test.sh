#!/usr/bin/env bash
# Everything that a change must pass, locally and in CI: install, lint, format, types, tests with the locked versions, some
# with the lowest versions allowed by setup.cfg and with the newest vLLM and transformers, and one file with trackers. Stops
# at the first failure.
#
#   scripts/test.sh
#   scripts/test.sh --durations                      # also shows the seconds of each step and test file
#   scripts/test.sh -m "not slow" tests/unit         # arguments are passed to pytest, which runs in one process
set -euo pipefail

if [[ -n "${VENV:-}" && "$VENV" != /* ]]; then export VENV="$PWD/$VENV"; fi
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"
venv="${VENV:-$root/.venv}"
bin="$venv/bin"
lowest="$venv/lowest" newest="$venv/newest" trackers="$venv/trackers"
# shellcheck source=scripts/packages.sh
. scripts/packages.sh

durations=() steps=() forks=
if [[ $# == 1 && "$1" == --durations ]]; then
  durations=(--durations-by-file)
  shift
fi

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
  steps+=("$(printf '%5d s  %s' "$((SECONDS - start))" "$name")")
}

# One worker for each of the other versions, as pytest's own process imports nothing (tests/support/forked.py).
#
# With the lowest versions: a training, a test for each dependency, and those of upstream's hooks. Without the page's
# script with tools, because TRL parses the built-in policy's tool calls only with a newer transformers.
test_lowest() {
  wait "$lowest_made" || return
  PYTHONPATH="$lowest${PYTHONPATH:+:$PYTHONPATH}" "$bin/python" -m pytest -q -m "not (alone or gpu or slow)" \
    -n 1 "${durations[@]}" tests/integration/test_readme.py tests/upstream \
    --deselect "tests/integration/test_readme.py::test_the_scripts_of_the_how_to_pages_train_as_they_stand[agents-and-tools-Tools-2]" \
    tests/unit/test_packaging.py::test_versions_of_the_environment tests/unit/test_names.py \
    tests/unit/reward/test_chain.py tests/faults/test_http_faults.py tests/unit/demo/services/test_services_http.py \
    tests/unit/demo/services/test_knowledge_index.py tests/unit/build/test_checks.py tests/unit/data/test_templates.py \
    tests/unit/telemetry/test_device.py tests/unit/telemetry/test_layout.py tests/unit/shared_prompts \
    tests/unit/view/test_report.py \
    tests/unit/telemetry/test_flops.py::test_weights_that_zero_3_took_away_count_in_full
}

# With the newest vLLM and transformers: TRL's hooks, trainings, the push of weights, saving, a vLLM server.
test_newest() {
  wait "$newest_made" || return
  PYTHONPATH="$newest${PYTHONPATH:+:$PYTHONPATH}" "$bin/python" -m pytest -q -m "not (alone or gpu)" \
    -n 1 "${durations[@]}" tests/upstream tests/unit/config/test_config.py tests/unit/generation \
    tests/integration/test_weight_push.py tests/integration/test_hub.py tests/integration/test_trainer.py
}

# A run that reports to every tracker.
test_trackers() {
  wait "$trackers_made" || return
  PYTHONPATH="$trackers${PYTHONPATH:+:$PYTHONPATH}" \
    "$bin/python" -m pytest -q "${durations[@]}" tests/integration/test_trackers.py
}

# Checks that need other versions, or none, run alongside the tests, while these wait, and are shown afterwards.
beside_the_tests() {
  make_folder "$lowest" requirements/lowest.txt &
  lowest_made=$!
  make_folder "$newest" requirements/newest.txt &
  newest_made=$!
  make_folder "$trackers" requirements/trackers.txt &
  trackers_made=$!
  run "mypy" "$bin/mypy"
  run "tests with trackers" test_trackers
  run "tests with the lowest versions" test_lowest
  run "tests with the newest versions" test_newest
}

# A fresh environment isn't compiled: compile it once rather than in each of a hundred processes.
unset PYTHONDONTWRITEBYTECODE
# No test needs the Hub. One GiB of KV cache is plenty for the tests' tiny models.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}"
# On shared cores, threads that spin while waiting triple the CPU time of a process with two threads.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"

run "install" scripts/install.sh
run "ruff check" "$bin/ruff" check .
run "ruff format" "$bin/ruff" format --check .
if (($#)); then
  run "mypy" "$bin/mypy"
else
  # One server of forks for the tests in parallel and those after them (tests/support/forked.py), until this shell, or
  # what replaces it, ends. A GPU's driver may not survive a fork.
  if [[ ! -e /dev/nvidiactl ]]; then
    coproc FORKS { exec "$bin/python" tests/support/forked.py hold; }
    read -r forks <&"${FORKS[0]}" || forks=
    exec {held}>"/dev/fd/${FORKS[1]}" # unlike that one, open also in what replaces this shell
  fi
  # One per pytest: it removes old folders, and fails if another one does so at the same time.
  beside="$(mktemp -d)"
  export OMP_NUM_THREADS=1
  set -m # its own process group, which ends as a whole
  PYTEST_DEBUG_TEMPROOT="$beside" beside_the_tests >"$beside/log" 2>&1 &
  others=$!
  set +m
  trap 'kill -- "-$others" 2>/dev/null || true; rm -rf -- "$beside"' EXIT
  # One more process than cores, up to four, each with one thread, because tests sometimes wait. Each file runs in one
  # worker; tests/conftest.py puts the long ones first.
  cores="$(env -u OMP_NUM_THREADS nproc)" # which otherwise returns that variable
  run "tests" env ${forks:+FOLDER_OF_FORKS="$forks"} "$bin/python" -m pytest -q \
    -m "not (alone or docker or gpu or real_model or bench)" --ignore tests/integration/test_trackers.py \
    -n "$((cores < 3 ? cores + 1 : 4))" --dist loadfile --no-loadscope-reorder "${durations[@]}"
  status=0
  wait "$others" || status=$?
  cat -- "$beside/log"
  if ((status)); then exit "$status"; fi
  unset OMP_NUM_THREADS
  rm -rf -- "$beside"
  trap - EXIT
  # Only files with these marks: collecting all tests takes longer than running these.
  marks="alone|docker|real_model"
  if [[ -e /dev/nvidiactl ]]; then marks="$marks|gpu"; fi
  mapfile -t marked < <(grep -rlE "mark\.($marks)\b" --include='test_*.py' tests)
  set -- -m "alone or docker or gpu or real_model" "${durations[@]}" "${marked[@]}"
  if ((${#durations[@]})); then printf 'test: %s\n' "${steps[@]}"; fi
fi
printf 'test: pytest, one test at a time (%d s so far)\n' "$SECONDS"
# pytest replaces this shell, so it receives the signals, and its exit status is the script's.
exec "${forks:-$bin}/python" -m pytest "$@"
