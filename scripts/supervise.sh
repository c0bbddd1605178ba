#!/usr/bin/env bash
# Runs a training command, and restarts it after every end that can be resumed.
#
#   scripts/supervise.sh -- accelerate launch recipes/full.py --resume_from_checkpoint auto
#   scripts/supervise.sh --max-restarts 20 -- accelerate launch recipes/full.py --resume_from_checkpoint auto
#
#   --max-restarts N     restarts in a row without progress before it gives up; default 5
#   --healthy-after S    an attempt of at least S seconds made progress and resets the count and the wait; default 1800
#   --backoff S          seconds before the first restart, doubled with each further one; default 10
#   --max-backoff S      longest wait; default 600
#
# Progress is judged by time alone. Set --healthy-after higher than the time from start to first checkpoint: a run that
# always dies later than that, but before its checkpoint, would be restarted forever.
#
# `accelerate launch` exits with 1 for every failed run. So this script passes the run a folder, and reads the run's own
# exit code from there. If the run writes none, the command's exit code is used.
#
# Restarted: 75 (stopped, state saved), and signals sent by the machine: SIGABRT (134), SIGBUS (135), SIGKILL (137),
# SIGSEGV (139). Every other exit code is final and passed on: 0 finished, 1 unknown error, 2 invalid settings or data,
# 3 can't continue, 130 ended by Ctrl-C. This script exits with 3 if it gives up, and with 2 if called incorrectly.
#
# INT, TERM, HUP and USR1 are forwarded to the run: INT as INT, the others as TERM. Then nothing is restarted, and the
# run's exit code is passed on once all its processes have exited. A second Ctrl-C is forwarded too.
set -euo pipefail

EXIT_USAGE=2 EXIT_GAVE_UP=3
GRACE_S=60 # after SIGTERM, for processes that outlive the attempt's first one

say() { printf 'supervise: %s\n' "$*" >&2; }
refuse() {
  say "refused: $*"
  exit "$EXIT_USAGE"
}

max_restarts=5 healthy_after=1800 backoff=10 max_backoff=600
while (($#)) && [[ "$1" != -- ]]; do
  case "$1" in
    --max-restarts | --healthy-after) shape='^[0-9]{1,9}$' expected="a whole number" ;;
    --backoff | --max-backoff) shape='^[0-9]{1,6}(\.[0-9]{1,3})?$' expected="seconds" ;;
    *) refuse "unknown argument '$1'. Expected [--max-restarts N] [--healthy-after S] [--backoff S] [--max-backoff S]" \
      "-- COMMAND..." ;;
  esac
  if [[ ! "${2:-}" =~ $shape ]]; then refuse "$1 is '${2:-}'. Expected $expected."; fi
  name="${1#--}"
  printf -v "${name//-/_}" '%s' "$2"
  shift 2
done
if (($# < 2)); then refuse "no command. Expected: scripts/supervise.sh -- COMMAND..."; fi
shift
if [[ ! " $* " =~ .*\ --resume[_-]from[_-]checkpoint[\ =]+([^\ ]*) ]]; then # the last one counts
  refuse "the command has no --resume_from_checkpoint, so each restart would start from scratch." \
    "Add --resume_from_checkpoint auto."
fi
resumes="${BASH_REMATCH[1]}"
if [[ ! "${resumes,,}" =~ ^(auto|true)([^[:alnum:]_./-]|$) ]]; then
  refuse "--resume_from_checkpoint is '$resumes', so each restart would begin at that step again." \
    "Use auto: the newest complete checkpoint in the output folder."
fi

milliseconds() {
  local fraction="000"
  if [[ "$1" == *.* ]]; then fraction="${1#*.}000"; fi
  echo $((10#${1%.*} * 1000 + 10#${fraction:0:3}))
}
seconds() { printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)); }
max_restarts=$((10#$max_restarts)) healthy_after=$((10#$healthy_after))
backoff="$(milliseconds "$backoff")" max_backoff="$(milliseconds "$max_backoff")"

launch="$(mktemp -d)" # where the run writes its exit code
trap 'rm -rf -- "$launch"' EXIT
export SALESRL_TRL_LAUNCH="$launch"
export PET_SIGNALS_TO_HANDLE=SIGQUIT # otherwise torch's launcher kills a run 30 s after a signal

# ------------------------------------------------------------------------------------------------------ signals

child="" # the current attempt: its first process, and its process group
pause="" # the sleep before a restart
asked="" # the signal that ends this script
late=""  # a signal received while an attempt was starting

# shellcheck disable=SC2329 # called by the traps below
pass_on() {
  asked="SIG$1"
  if [[ -n "$child" ]]; then
    say "received $asked; forwarding SIG$2 to the run, no restart"
    kill -s "$2" -- "-$child" 2>/dev/null || true
  elif [[ -n "$pause" ]]; then
    kill "$pause" 2>/dev/null || true
  else
    late="$2"
  fi
}
trap 'pass_on INT INT' INT
for each in TERM HUP USR1; do
  # shellcheck disable=SC2064 # the name as it is now
  trap "pass_on $each TERM" "$each"
done

# Seconds since the machine started. SECONDS depends on a clock that may be set back.
now() {
  local up=$SECONDS
  if [[ -r /proc/uptime ]]; then read -r up _ </proc/uptime; fi
  echo "${up%.*}"
}

# Whether a process of the attempt is alive. Zombies are not.
alive() { kill -0 -- "-$child" 2>/dev/null && grep -qsE "\) [^ZX] [0-9]+ $child " /proc/[0-9]*/stat; }

# The run's exit code, once the process that waits for its end has written and printed everything.
read_status() {
  local waiting until file
  if [[ -s "$launch/waiting" ]]; then
    read -r waiting <"$launch/waiting" || true
    until=$(($(now) + 10))
    while grep -qsE "\) [^ZX] " "/proc/$waiting/stat" && (($(now) < until)); do sleep 0.1; done
  fi
  for file in "$launch/first" "$launch/following"; do
    if [[ -s "$file" ]]; then
      read -r status <"$file"
      return
    fi
  done
}

# Runs the command once; its exit code is in `status`. accelerate does not forward signals to the training process, so both
# are in their own process group (set -m). A terminal's Ctrl-C only reaches this script, which forwards it.
attempt() {
  local until
  rm -rf -- "${launch:?}"/*
  set -m
  "$@" </dev/null &
  child=$!
  set +m
  if [[ -n "$late" ]]; then kill -s "$late" -- "-$child" 2>/dev/null || true; fi
  status=0
  # A signal to this script interrupts the wait before the process has exited.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || sleep 0.1; done
  wait "$child" || status=$?
  if [[ -z "$asked" ]] && alive; then
    say "the first process ended (exit code $status) before the others: sending them SIGTERM, and SIGKILL after $GRACE_S s"
    kill -s TERM -- "-$child" 2>/dev/null || true
    until=$(($(now) + GRACE_S))
    while alive && (($(now) < until)); do sleep 0.2; done
    kill -s KILL -- "-$child" 2>/dev/null || true
  fi
  while alive; do sleep 0.2; done
  child=""
  if ((status)); then read_status; fi
}

# ------------------------------------------------------------------------------------------------------ attempts

restarts=0 delay="$backoff" status=0
while [[ -z "$asked" ]]; do
  start=$(now)
  attempt "$@"
  lasted=$(($(now) - start))
  if [[ -n "$asked" ]]; then break; fi
  case "$status" in
    75) why="it stopped and can be resumed" ;;
    134 | 135 | 137 | 139) why="SIG$(kill -l "$status") ended it" ;;
    0)
      say "the run has finished"
      exit 0
      ;;
    *)
      say "stopping: exit code $status is final (after $lasted s)"
      exit "$status"
      ;;
  esac
  if ((lasted >= healthy_after)); then restarts=0 delay="$backoff"; fi
  if ((restarts >= max_restarts)); then
    say "giving up: exit code $status ($why), after $restarts restarts in a row without progress"
    exit "$EXIT_GAVE_UP"
  fi
  restarts=$((restarts + 1))
  if ((delay > max_backoff)); then delay=$max_backoff; fi
  say "restart $restarts of $max_restarts in $(seconds "$delay") s: exit code $status ($why), after $lasted s"
  sleep "$(seconds "$delay")" &
  pause=$!
  if [[ -n "$asked" ]]; then kill "$pause"; fi # it arrived before the line above
  wait "$pause" || true
  pause=""
  delay=$((delay * 2))
done
say "exiting with the run's exit code $status after $asked"
exit "$status"
