# Sourced by the set-up scripts: what they say, how they fail, how they install.
# shellcheck shell=bash

failed=0

say() { printf 'setup: %s\n' "$*"; }

# A part that could not be set up. The tests that need it fail where CI is "true",
# so the script fails there too, before they run; elsewhere those tests skip.
missing() {
	if [ "${CI:-}" = true ]; then
		printf 'setup: FAILED: %s\n' "$*" >&2
		failed=1
	else
		printf 'setup: warning: %s\n' "$*" >&2
	fi
}

# root COMMAND ARG…: runs it as root, without ever asking for a password.
root() {
	if [ "$(id -u)" = 0 ]; then
		"$@"
	elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
		sudo -n --preserve-env=DEBIAN_FRONTEND "$@"
	else
		return 1
	fi
}

# install_missing COMMAND=PACKAGE…: installs the Debian packages whose command is
# not there. Returns 1 when one of them could not be had.
install_missing() {
	local pair want=()
	for pair in "$@"; do
		PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%=*}" >/dev/null || want+=("${pair#*=}")
	done
	[ ${#want[@]} = 0 ] && return 0
	if ! command -v apt-get >/dev/null; then
		missing "${want[*]} not installed, and this is no Debian: install them by hand"
		return 1
	fi
	say "installing ${want[*]} with apt-get"
	export DEBIAN_FRONTEND=noninteractive
	local log
	log=$(mktemp)
	if root apt-get update -q >"$log" 2>&1 </dev/null &&
		root apt-get install -q -y --no-install-recommends "${want[@]}" >>"$log" 2>&1 </dev/null; then
		rm -f "$log"
		return 0
	fi
	tail -n 15 "$log" >&2
	rm -f "$log"
	missing "could not install ${want[*]}: run as root, or: apt-get install ${want[*]}"
	return 1
}
