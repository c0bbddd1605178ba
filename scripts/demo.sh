#!/usr/bin/env bash
# From a fresh checkout to training: installs everything, then runs the debug recipe. Arguments are passed to the recipe
# and override recipes/debug.yaml:
#
#   scripts/demo.sh
#   scripts/demo.sh --max_steps 5
set -euo pipefail

if [[ -n "${VENV:-}" && "$VENV" != /* ]]; then export VENV="$PWD/$VENV"; fi
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"
venv="${VENV:-$root/.venv}"

# The demo needs nothing from the Hub: its model and data are in the package.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}"

scripts/install.sh

# By default, accelerate gives each process one CPU thread. Without a GPU, let training use all of them.
if grep -q '^cpu ' "$venv/.salesrl-installed"; then
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc)}"
fi

# accelerate does not forward signals to the training process, so both run in their own process group (set -m). This shell
# forwards Ctrl-C and `kill` to the whole group, and waits until all its processes have exited.
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
"$venv/bin/accelerate" launch --config_file accelerate_configs/debug.yaml recipes/debug.py --held_out_examples 3 "$@" </dev/null &
group=$!
status=0
wait "$group" || status=$?
while kill -0 -- "-$group" 2>/dev/null; do
  # A signal interrupted the wait, or the launcher exited before the training process.
  wait "$group" || status=$?
  sleep 0.2
done
exit "$status"
