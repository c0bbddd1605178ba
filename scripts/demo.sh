#!/usr/bin/env bash
# From a fresh checkout to a policy in training: sets everything up, then runs the debug recipe. Arguments go to the
# recipe and win over recipes/debug.yaml:
#
#   scripts/demo.sh
#   scripts/demo.sh --max_steps 5
set -euo pipefail

if [[ -n "${VENV:-}" && "$VENV" != /* ]]; then export VENV="$PWD/$VENV"; fi
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"
venv="${VENV:-$root/.venv}"

# The demo's model is made on the spot and its data is packaged: nothing is asked of the hub.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}"

scripts/install.sh

# accelerate gives a process one CPU thread unless told otherwise; without a GPU, training is to have them all.
if grep -q '^cpu ' "$venv/.salesrl-installed"; then
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
fi

# accelerate does not hand a signal on to the training that it started, so both run in a process group of their own
# (set -m), and this shell passes Ctrl-C and `kill` to all of it; then it waits until they are really gone.
# shellcheck disable=SC2329 # called by the traps below
forward() {
  local group
  group="$(jobs -p)"
  if [[ -z "$group" ]]; then exit 1; fi
  kill -s "$1" -- "-$group" 2>/dev/null || true
}
trap 'forward INT' INT
trap 'forward TERM' TERM HUP
set -m
"$venv/bin/accelerate" launch --config_file accelerate_configs/debug.yaml recipes/debug.py "$@" </dev/null &
group=$!
status=0
wait "$group" || status=$?
while kill -0 -- "-$group" 2>/dev/null; do
  # Interrupted by a signal, or the launcher is gone and the training is not yet.
  wait "$group" || status=$?
  sleep 0.2
done
exit "$status"
