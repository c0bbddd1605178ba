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

# In place of this shell, so that Ctrl-C reaches the launcher and the training, and the exit status is theirs.
exec "$venv/bin/accelerate" launch --config_file accelerate_configs/debug.yaml recipes/debug.py "$@"
