#!/bin/sh
# Tests of src/stats.sh. The exit code says whether all of them passed.
cd "$(dirname "$0")" || exit 1
. src/stats.sh

failed=0

# check FUNCTION WANT NUMBER... compares what a function prints with what it should.
check() {
	function=$1 want=$2
	shift 2
	got=$(printf '%s\n' "$@" | "$function")
	if [ "$got" = "$want" ]; then
		echo "ok    $function of $*"
	else
		echo "FAIL  $function of $*: got '$got', want '$want'"
		failed=$((failed + 1))
	fi
}

check count 5 4 8 15 16 23
check sum 66 23 8 15 16 4
check smallest -2 7 -2 10
check largest 10 7 -2 10
check median 15 23 8 15 16 4
check median 8 16 4 8 15
check median 7 7

if [ "$failed" -gt 0 ]; then
	echo "$failed failed"
	exit 1
fi
echo "all passed"
