# shellcheck shell=bash
# Installs packages into the environment $venv. Sourced by install.sh, test.sh and site.sh.
#
# uv downloads packages concurrently and links them from its cache. pip installs uv, which gets pip's settings (indexes,
# folders of wheels, certificates). pip installs everything itself if one of these holds:
#
# - pip can't install uv;
# - pip has a setting that uv lacks;
# - uv fails.

UV="uv==0.13.9"

# shellcheck disable=SC2154 # set by the script that sources this file
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input)
uv=() # the command, or empty

# Reads `pip config list` and prints uv's command, one word per line. Fails with the name of a setting that uv lacks.
uv_command() {
  "$venv/bin/python" -m pip config list | "$venv/bin/python" -c '
import ast, sys

OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "constraint": "--constraints",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
FLAGS = {"no-index": "--no-index", "no-cache-dir": "--no-cache"}
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "proxy": "ALL_PROXY",
}
OF_PIP_ALONE = {
    "break-system-packages", "cache-dir", "config-file", "disable-pip-version-check", "no-color", "no-compile",
    "no-input", "no-warn-conflicts", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv",
    "root-user-action", "verbose",
}
sections = {"global": {}, "install": {}, ":env:": {}}  # later ones take precedence
for line in sys.stdin:
    name, _, value = line.strip().partition("=")
    section, _, name = name.partition(".")
    if section in sections:
        sections[section][name] = ast.literal_eval(value)
settings = sections["global"] | sections["install"] | sections[":env:"]

variables, options = ["UV_NO_PROGRESS=1"], []
for name, value in settings.items():
    if name in OPTIONS:
        options += [word for each in value.split() for word in (OPTIONS[name], each)]
    elif name in FLAGS:
        options += [FLAGS[name]] * (value.lower() in ("1", "true", "yes", "on", "y", "t"))
    elif name in VARIABLES:
        variables.append(f"{VARIABLES[name]}={value}")
    elif name not in OF_PIP_ALONE:
        sys.exit(f"pip has the setting {name}, which uv lacks")
python = sys.argv[1]
# Like pip: the best version of all indexes.
command = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python, "--index-strategy", "unsafe-best-match"]
print(*variables, *command, *options, sep="\n")
' "$venv/bin/python"
}

# Sets `uv` if uv is installed and supports all of pip's settings; otherwise fails with the reason.
find_uv() {
  local words
  uv=()
  "$venv/bin/python" -m uv --version >/dev/null 2>&1 || { echo "uv is not installed"; return 1; }
  words="$(uv_command)" || return 1
  mapfile -t uv <<<"$words"
  uv=(env "${uv[@]}")
}

# Installs a list of packages into a folder that precedes the locked ones on the path. Recreated if the list changes.
make_folder() {
  local folder="$1" list="$2" stamp="$1/.made-of" arguments
  if cmp -s "$list" "$stamp"; then return; fi
  rm -rf -- "$folder"
  arguments=(--no-deps --only-binary :all: --target "$folder" -r "$list")
  { find_uv && "${uv[@]}" "${arguments[@]}"; } || "${pip[@]}" --no-compile "${arguments[@]}" || return
  cp -- "$list" "$stamp"
}
