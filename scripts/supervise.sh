#!/usr/bin/env bash
# Runs a training, and starts it again when it ended in a way that can be resumed.
#
#   scripts/supervise.sh -- accelerate launch recipes/full.py --resume_from_checkpoint auto
#   scripts/supervise.sh --max-restarts 20 -- accelerate launch recipes/full.py --resume_from_checkpoint auto
#
#   --max-restarts N     restarts in a row without progress before it gives up; default 5
#   --healthy-after S    an attempt that lasted S seconds made progress: the count and the wait begin anew; default 1800
#   --backoff S          seconds before the first restart, doubled by each further one; default 10
#   --max-backoff S      longest wait; default 600
#
# Progress is judged by time alone. Set --healthy-after above the time from a start to the first new checkpoint: a run
# that dies each time after longer than that is started again forever.
#
# `accelerate launch` ends with 1 whatever its run ended with. So this script gives the run a folder, and reads the run's
# own exit code from there. That of the command counts for a command that writes none.
#
# Restarted: 75 (stopped, its state is saved), and the ends by a signal that the machine sends: SIGABRT (134), SIGBUS
# (135), SIGKILL (137), SIGSEGV (139). Every other exit code is final and is passed on: 0 finished, 1 unknown error,
# 2 refused by checks, 3 stopped for good, 130 ended by Ctrl-C. Giving up is exit code 3, a wrong call exit code 2.
#
# INT, TERM, HUP and USR1 are passed on to the run, INT as INT, the others as TERM. Then nothing is started again, and
# the run's exit code is passed on once all its processes have ended. A second Ctrl-C is passed on too.
set -euo pipefail

EXIT_USAGE=2 EXIT_GAVE_UP=3
GRACE_S=60 # for processes of an attempt that outlive its first one, after SIGTERM

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
if (($# < 2)); then refuse "there is no command. Expected: scripts/supervise.sh -- COMMAND..."; fi
shift
if [[ ! " $* " =~ .*\ --resume[_-]from[_-]checkpoint[\ =]+([^\ ]*) ]]; then # of several, the last one counts
  refuse "the command has no --resume_from_checkpoint, so that each restart would begin from the start." \
    "Add --resume_from_checkpoint auto."
fi
resumes="${BASH_REMATCH[1]}"
if [[ ! "${resumes,,}" =~ ^(auto|true)([^[:alnum:]_./-]|$) ]]; then
  refuse "--resume_from_checkpoint is '$resumes', so that each restart would begin at the same step again." \
    "Give auto: the newest whole checkpoint of the output folder."
fi

milliseconds() {
  local fraction="000"
  if [[ "$1" == *.* ]]; then fraction="${1#*.}000"; fi
  echo $((10#${1%.*} * 1000 + 10#${fraction:0:3}))
}
seconds() { printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)); }
max_restarts=$((10#$max_restarts)) healthy_after=$((10#$healthy_after))
backoff="$(milliseconds "$backoff")" max_backoff="$(milliseconds "$max_backoff")"

launch="$(mktemp -d)" # where the run writes how it ended
trap 'rm -rf -- "$launch"' EXIT
export SALESRL_TRL_LAUNCH="$launch"
export PET_SIGNALS_TO_HANDLE=SIGQUIT # else torch's launcher kills a run 30 s after a signal

# ------------------------------------------------------------------------------------------------------ signals

child="" # the attempt under way: its first process, and its process group
pause="" # the sleep before a restart
asked="" # the signal that ends this script
late=""  # a signal that came while an attempt was being started

# shellcheck disable=SC2329 # called by the traps below
pass_on() {
  asked="SIG$1"
  if [[ -n "$child" ]]; then
    say "$asked came and is passed on to the run as SIG$2; it is not started again"
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

# Seconds since the machine started. SECONDS follows a clock that may be set back.
now() {
  local up=$SECONDS
  if [[ -r /proc/uptime ]]; then read -r up _ </proc/uptime; fi
  echo "${up%.*}"
}

# Whether a process of the attempt lives. One that has ended and that nobody asked for its exit code does not.
alive() { kill -0 -- "-$child" 2>/dev/null && grep -qsE "\) [^ZX] [0-9]+ $child " /proc/[0-9]*/stat; }

# The exit code that the run has written, once the process that waits for its end has written and printed all.
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

# Runs the command once; its exit code is in `status`. accelerate does not pass signals to the training that it started.
# So both are in a process group of their own (set -m). A terminal's Ctrl-C reaches this script alone, which passes it on.
attempt() {
  local until
  rm -rf -- "${launch:?}"/*
  set -m
  "$@" </dev/null &
  child=$!
  set +m
  if [[ -n "$late" ]]; then kill -s "$late" -- "-$child" 2>/dev/null || true; fi
  status=0
  # A signal to this script ends a wait before the process has ended.
  while kill -0 "$child" 2>/dev/null; do wait "$child" || sleep 0.1; done
  wait "$child" || status=$?
  if [[ -z "$asked" ]] && alive; then
    say "the first process ended (exit code $status) before the others: they get SIGTERM, and SIGKILL after $GRACE_S s"
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
      say "ends: exit code $status is final (after $lasted s)"
      exit "$status"
      ;;
  esac
  if ((lasted >= healthy_after)); then restarts=0 delay="$backoff"; fi
  if ((restarts >= max_restarts)); then
    say "gives up: exit code $status ($why), after $restarts restarts in a row without progress"
    exit "$EXIT_GAVE_UP"
  fi
  restarts=$((restarts + 1))
  if ((delay > max_backoff)); then delay=$max_backoff; fi
  say "restart $restarts of $max_restarts in $(seconds "$delay") s: exit code $status ($why), after $lasted s"
  sleep "$(seconds "$delay")" &
  pause=$!
  if [[ -n "$asked" ]]; then kill "$pause"; fi # it came before the line above
  wait "$pause" || true
  pause=""
  delay=$((delay * 2))
done
say "ends with the run's exit code $status: $asked came"
exit "$status"
