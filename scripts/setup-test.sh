#!/usr/bin/env bash
# Installs and starts what the tests need on Debian: packages, a Docker engine, the
# test image, the npm packages of e2e and e2e/clients. Does nothing where all of it is there. Where
# CI is "true" a part that is missing fails the script; elsewhere it is a warning,
# and the tests that need the part skip with a reason.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

# The image is rebuilt when this changes: raise it together with its packages.
image=aisandbox-test
image_version=2
image_label=dev.ai-sandbox.test-image
image_suite=bookworm
image_packages=git,ca-certificates,nodejs,procps

cache=/var/cache/aisandbox
[ -w /var/cache ] || cache=${XDG_CACHE_HOME:-$HOME/.cache}/aisandbox

packages() {
	install_missing git=git bwrap=bubblewrap busybox=busybox-static ps=procps \
		node=nodejs npm=npm dockerd=docker.io iptables=iptables debootstrap=debootstrap || true
	# Debian keeps the server's programs out of PATH. The tests start servers of their
	# own; the one that the package starts is not used.
	PATH="$PATH:$(printf '%s:' /usr/lib/postgresql/*/bin)" install_missing initdb=postgresql psql=postgresql-client || true
}

engine_up() { docker version >/dev/null 2>&1 </dev/null; }

engine() {
	command -v docker >/dev/null || {
		missing "docker is not installed"
		return 1
	}
	engine_up && return 0
	# An engine that is on its way up is waited for; a second one is never started.
	if pgrep -x dockerd >/dev/null; then
		say "waiting for the Docker engine that is starting"
	elif [ "$(id -u)" = 0 ]; then
		say "starting the Docker engine (log: /var/log/aisandbox-dockerd.log)"
		rm -f /var/run/docker.pid
		PATH="$PATH:/usr/sbin:/sbin" setsid nohup dockerd >/var/log/aisandbox-dockerd.log 2>&1 </dev/null &
	else
		missing "no Docker engine is running; start it as root"
		return 1
	fi
	for _ in $(seq 150); do
		engine_up && return 0
		sleep 0.2
	done
	tail -n 15 /var/log/aisandbox-dockerd.log >&2 2>/dev/null || true
	missing "the Docker engine did not answer within 30 s"
	return 1
}

# The first Debian mirror that apt itself uses for the suite, so that the image comes
# from where packages come from.
mirror() {
	apt-get indextargets --format '$(SITE) $(RELEASE) $(CREATED_BY)' 2>/dev/null |
		awk -v s="$image_suite" '$2 == s && $3 == "Packages" {print $1; exit}'
}

build_rootfs() {
	local tar=$1 dir
	mkdir -p "$cache"
	dir=$(mktemp -d "$cache/rootfs.XXXXXX")
	say "building the root file system of $image with debootstrap (about a minute, once)"
	if ! root debootstrap --variant=minbase --include="$image_packages" "$image_suite" "$dir" $(mirror) \
		>"$cache/debootstrap.log" 2>&1 </dev/null; then
		tail -n 15 "$cache/debootstrap.log" >&2
		root rm -rf "$dir"
		return 1
	fi
	root tar -C "$dir" --numeric-owner --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
		--exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' -cf - . >"$tar.part"
	root rm -rf "$dir"
	mv "$tar.part" "$tar"
}

test_image() {
	local have tar=$cache/rootfs-v$image_version.tar
	have=$(docker image inspect --format "{{index .Config.Labels \"$image_label\"}}" $image 2>/dev/null </dev/null || true)
	[ "$have" = "$image_version" ] && return 0
	if [ ! -s "$tar" ]; then
		build_rootfs "$tar" || {
			missing "could not build the Docker image $image"
			return 1
		}
	fi
	say "importing the Docker image $image, version $image_version"
	docker import --change "LABEL $image_label=$image_version" "$tar" $image >/dev/null || {
		missing "could not import the Docker image $image"
		return 1
	}
}

npm_packages() {
	local dir
	for dir in e2e e2e/clients; do
		[ "$dir/node_modules/.package-lock.json" -nt "$dir/package-lock.json" ] && continue
		command -v npm >/dev/null || {
			missing "npm is not installed, so $dir has no packages"
			return 1
		}
		say "installing the npm packages of $dir"
		(cd "$dir" && npm ci --no-audit --no-fund --loglevel=error </dev/null) || {
			missing "npm ci in $dir failed"
			return 1
		}
		touch "$dir/node_modules/.package-lock.json"
	done
}

packages
if engine; then test_image || true; fi
npm_packages || true
exit "$failed"
