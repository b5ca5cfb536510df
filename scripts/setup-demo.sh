#!/usr/bin/env bash
# Gives the demo the isolation of bubblewrap where that costs nothing but an
# apt-get. Never fails: without it the demo says so and runs without isolation.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

command -v bwrap >/dev/null && exit 0
if [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
	install_missing bwrap=bubblewrap || true
else
	say "bubblewrap is not installed, so the demo runs without isolation; cure: apt-get install bubblewrap"
fi
exit 0
