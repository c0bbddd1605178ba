#!/usr/bin/env bash
# Finds or builds FlashAttention for training on this machine's GPU, in this checkout's environment. From the next run on,
# `attn_implementation: auto` uses it. vLLM ships its own.
#
#   scripts/install_flash_attn.sh
#
# It tries these in order, and reports which one succeeded:
#
#   1. an installed version;
#   2. on a Hopper GPU: PyTorch's wheel of FlashAttention 3 (flash-attn-3);
#   3. a wheel of flash-attn from your package index;
#   4. the wheel published by flash-attn's authors for this torch, CUDA and Python;
#   5. a build for this GPU only, which requires nvcc. Its expected duration is printed first.
#
# The result must match SDPA here, forward and backward. Shared prompts, the default, don't need it, because they use
# PyTorch's flash kernels. It only helps with TRL's own forward and backward passes (docs/background/exactness.md): there it
# saved 0 to 2 % on an H100 (FlashAttention 3, 7B's shape, 1,280 tokens); longer sequences may gain more.
#
#   VENV      the folder of the environment; default: .venv in this checkout
#   MAX_JOBS  concurrent compilers; default: one per core and per 6 GiB of free memory
#   NVCC_APPEND_FLAGS  features to exclude, which halves the time: "-DFLASHATTENTION_DISABLE_SOFTCAP" (used by Gemma 2)
#             "-DFLASHATTENTION_DISABLE_DROPOUT". A call that requires an excluded feature fails with its name
set -euo pipefail

GIB_A_JOB=6 # its largest file needs 5 GiB to compile
FILES=73 SECONDS_A_FILE=270 LONGEST_S=300 # for one architecture; 32 compilers finished 60 files in 587 s
LOG_LINES=25

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${VENV:-$root/.venv}"
# shellcheck source=scripts/packages.sh
. "$root/scripts/packages.sh"

say() { printf 'install_flash_attn: %s\n' "$*"; }
stop() {
  say "stopped: $1" >&2
  shift
  printf '  %s\n' "$@" >&2
  exit 1
}

# Prints the version if the module's results match SDPA: a wheel for another torch or GPU installs but fails here.
version_of() {
  "$venv/bin/python" - "$1" "$2" 2>/dev/null <<'END'
import importlib, importlib.metadata, sys
import torch

attend = importlib.import_module(sys.argv[1]).flash_attn_func
torch.manual_seed(0)
given = [torch.randn(2, 96, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

def found(out):
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out.float().square().sum(), given)]

exact = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in given), is_causal=True)
for ours, theirs in zip(found(attend(*given, causal=True)), found(exact.transpose(1, 2)), strict=True):
    assert (ours - theirs).float().norm() <= 0.02 * theirs.float().norm()
print(importlib.metadata.version(sys.argv[2]))
END
}
is_done() {
  local found
  if found="$(version_of flash_attn_interface flash-attn-3)"; then
    say "FlashAttention 3 ($found) is there: $1"
  elif found="$(version_of flash_attn flash-attn)"; then
    say "FlashAttention 2 ($found) is there: $1"
  else
    return 1
  fi
  exit 0
}

[[ -x "$venv/bin/python" ]] ||
  stop "no environment in $venv." "Create one with scripts/install.sh, or set VENV=/path."
if is_done "it was installed already"; then exit 0; fi
# Prints the GPU's compute capability, and torch's CUDA version without its dot ("9.0 130").
card="$("$venv/bin/python" -c '
import torch
major, minor = torch.cuda.get_device_capability()
print(f"{major}.{minor}", torch.version.cuda.replace(".", ""))
' 2>/dev/null)" ||
  stop "torch of $venv sees no CUDA GPU." "FlashAttention runs on GPUs alone. Elsewhere SDPA is used; nothing to install."
read -r capability cuda <<<"$card"
((${capability%.*} >= 8)) ||
  stop "the GPU has compute capability $capability." "FlashAttention needs 8.0 (Ampere) or newer. SDPA is used; nothing to install."
requirement="$(sed -n 's/^    \(flash-attn>=.*\)$/\1/p' "$root/setup.cfg")"
say "only TRL's own forward passes use it: shared prompts, the default, use PyTorch's flash kernels"
log="$(mktemp "${TMPDIR:-/tmp}/install_flash_attn.XXXXXX")"

if [[ "${capability%.*}" == 9 ]]; then
  say "looking for PyTorch's wheel of FlashAttention 3 for CUDA $cuda"
  "${pip[@]}" --no-deps --only-binary :all: --extra-index-url "https://download.pytorch.org/whl/cu$cuda" flash-attn-3 \
    >"$log" 2>&1 && is_done "PyTorch's wheel" || true
fi
say "looking for a wheel of $requirement in your package index"
"${pip[@]}" --no-deps --only-binary :all: "$requirement" >"$log" 2>&1 && is_done "a wheel of your package index" || true

# Its setup first tries to download its authors' wheel, and otherwise builds.
cores="$(nproc)"
free_gib="$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo)"
jobs=$((free_gib / GIB_A_JOB < cores ? free_gib / GIB_A_JOB : cores))
export MAX_JOBS="${MAX_JOBS:-$((jobs > 0 ? jobs : 1))}" NVCC_THREADS=1
case "${capability%.*}" in 8) arch=80 ;; *) arch="${capability/./}" ;; esac
export FLASH_ATTN_CUDA_ARCHS="$arch"
# ALiBi, which transformers never uses, is a third of the compilation. A call that requires it fails with its name.
export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} -DFLASHATTENTION_DISABLE_ALIBI"
if command -v nvcc >/dev/null || [[ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]]; then
  minutes=$(((FILES * SECONDS_A_FILE / MAX_JOBS + LONGEST_S) / 60))
  say "looking for its authors' wheel. If there is none, it is built for sm_$arch: about $minutes minutes with $MAX_JOBS" \
    "compilers at a time ($cores cores, $free_gib GiB free; MAX_JOBS sets another number). Its log: $log"
else
  say "looking for its authors' wheel. Without one, this stops, as nvcc is required to build it"
  export FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE # otherwise its setup exits before looking
fi
status=0
"$venv/bin/python" -m pip install --verbose --no-input --no-deps --no-build-isolation "$requirement" \
  >"$log" 2>&1 || status=$?
how="its authors' wheel"
if grep -q 'Building from source' "$log"; then how="built here for sm_$arch"; fi
if ((status == 0)); then is_done "$how" || true; fi
if [[ -n "${FLASH_ATTENTION_SKIP_CUDA_BUILD:-}" ]]; then # useless without kernels
  "$venv/bin/python" -m pip uninstall --yes --quiet flash-attn >>"$log" 2>&1 || true
fi
tail -n "$LOG_LINES" "$log" | sed 's/^/  | /' >&2
advice="The end of its log shows the reason. Training works without it, with SDPA."
if ! command -v nvcc >/dev/null && [[ ! -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]]; then
  advice="There is no nvcc to build it with: install the CUDA toolkit of torch's version (CUDA $cuda) and set CUDA_HOME."
  advice+=" Training works without FlashAttention: SDPA is used."
elif grep -qiE 'killed|cannot allocate|out of memory' "$log"; then
  advice="The machine ran out of memory: rerun with MAX_JOBS=$((MAX_JOBS / 2 > 0 ? MAX_JOBS / 2 : 1))."
fi
stop "FlashAttention could not be installed (exit $status)." "$advice"
