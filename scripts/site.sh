#!/usr/bin/env bash
# Builds the documentation site, with search, into site/. Open site/index.html. Fails on a broken link.
#
#   scripts/site.sh
set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd -- "$root"
scripts/install.sh
venv="${VENV:-$root/.venv}"
# shellcheck source=scripts/packages.sh
. scripts/packages.sh
make_folder "$venv/site" requirements/site.txt
PYTHONPATH="$venv/site:$root" "$venv/bin/python" -m sphinx --quiet --fail-on-warning --keep-going -b html docs site
echo "site: $root/site/index.html"
