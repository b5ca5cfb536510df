package provider

// The scripts of ExecFS. They are plain POSIX (dash, bash and busybox ash are
// tested) and constant: names, modes and sizes come as arguments.
//
// Arguments that are paths are encoded by execArg: one path element or link
// target each, because a shell keeps its own current directory honest element by
// element. After every `cd -P` the shell's PWD is physical, so a link that leaves
// the root is seen before anything is done in the directory it leads to.
//
// A script that refuses says why in one line on stderr that begins with a
// sentinel made for that call alone, so nothing a file is named can be mistaken
// for a verdict.

// execPrelude sets S (the sentinel) and T (the physical root, "" for /), leaves
// the shell in the root, and defines:
//
//	x WHY      end with a verdict
//	dec ARG    v = the decoded argument
//	gone PATH  true if it is proven that PATH does not exist: only an ENOENT in
//	           words proves it, because test -e fails for many reasons
//	into NAME  enter a directory of the current one, beneath the root
//	mk NAME    into, after making it where it is missing
//	mvt A B    rename A to B, never into B; an existing directory is not replaced
const execPrelude = `set +f; unset CDPATH; S=$1
x() { printf '%s %s\n' "$S" "$1" >&2; exit 9; }
dec() { case $1 in b*) v=$(printf '%b.' "${1#?}"); v=${v%.} ;; *) v=${1#?} ;; esac; }
gone() {
	if [ -e "$1" ] || [ -L "$1" ]; then return 1; fi
	m=$(ls -d "$1" 2>&1 >/dev/null)
	case $m in *": No such file or directory") return 0 ;; esac
	return 1
}
into() {
	if cd -P "./$1" 2>/dev/null; then
		case $PWD/ in "$T"/*) return 0 ;; esac
		x outside
	fi
	if gone "./$1"; then x noent; fi
	[ -d "./$1" ] || x parent
	x perm
}
mk() {
	[ -d "./$1" ] || [ -L "./$1" ] || {
		if [ -e "./$1" ]; then x parent; fi
		mkdir "./$1" || [ -d "./$1" ] || exit 8
	}
	into "$1"
}
mvt() {
	if [ -d "$2" ] && [ ! -L "$2" ]; then x exist; fi
	mv -fT -- "$1" "$2" 2>/dev/null && return 0
	if [ -L "$2" ]; then rm -f "$2" || return 1; fi
	mv -f -- "$1" "$2"
}
dec "$2"; shift 2
cd -P "$v" || x root
T=${PWD%/}
`

// Arguments after the root: base, then the elements of its directory.
const execLstat = `dec "$1"; b=$v; shift
for c do dec "$c"; into "$v"; done
if o=$(stat -c '%f %s %Y' "./$b" 2>/dev/null); then printf '%s s %s\n' "$S" "$o"; exit 0; fi
if gone "./$b"; then x noent; fi
o=$(ls -ldn "./$b") || exit 8
printf '%s l %s\n' "$S" "$o"
`

// The link at the end of the name is followed step by step, each checked. The
// sentinel line comes first on stdout, then the content.
const execOpen = `dec "$1"; b=$v; shift
for c do dec "$c"; into "$v"; done
n=0
while [ -L "./$b" ]; do
	n=$((n+1))
	[ "$n" -le 40 ] || x loop
	t=$(readlink "./$b" && printf .) || exit 8
	t=${t%.}; t=${t%?}
	while :; do case $t in ?*/) t=${t%/} ;; *) break ;; esac; done
	case $t in */*) d=${t%/*}; b=${t##*/}; [ -n "$d" ] || d=/ ;; *) d=.; b=$t ;; esac
	case $d in /*) ;; *) d=./$d ;; esac
	if cd -P "$d" 2>/dev/null; then
		case $PWD/ in "$T"/*) ;; *) x outside ;; esac
	else
		case $d in /*) x outside ;; esac
		if gone "$d"; then x noent; fi
		[ -d "$d" ] || x parent
		x perm
	fi
done
if [ -d "./$b" ]; then x isdir; fi
if [ ! -f "./$b" ]; then
	if gone "./$b"; then x noent; fi
	if [ -e "./$b" ]; then x irregular; fi
	ls -d "./$b" >&2
	exit 8
fi
exec 3<"./$b" || exit 8
printf '%s\n' "$S"
exec cat <&3
`

// Entries come as a type letter, the name and a NUL; the sentinel is the last.
// A glob loop needs no find and costs no process per entry.
const execReadDir = `dec "$1"; b=$v; shift
for c do dec "$c"; into "$v"; done
if [ ! -d "./$b" ]; then
	if gone "./$b"; then x noent; fi
	x notdir
fi
into "$b"
[ -r . ] || x perm
for f in * .*; do
	case $f in .|..) continue ;; esac
	if [ -L "./$f" ]; then k=l
	elif [ -d "./$f" ]; then k=d
	elif [ -f "./$f" ]; then k=f
	elif [ -p "./$f" ]; then k=p
	elif [ -S "./$f" ]; then k=s
	elif [ -b "./$f" ]; then k=b
	elif [ -c "./$f" ]; then k=c
	elif [ -e "./$f" ]; then k=x
	else continue
	fi
	printf '%s%s\000' "$k" "$f"
done
printf '%s\000' "$S"
`

const execMkdir = `dec "$1"; b=$v; shift
for c do dec "$c"; mk "$v"; done
mk "$b"
`

const execRemove = `dec "$1"; b=$v; shift
for c do dec "$c"; into "$v"; done
rm -rf "./$b" || exit 8
`

// Arguments: the two bases, the elements of the first directory, a dash, the
// elements of the second.
const execRename = `dec "$1"; fb=$v; dec "$2"; tb=$v; shift 2; F=
for c do
	if [ "$c" = - ]; then
		if gone "./$fb"; then x noent; fi
		F=${PWD%/}
		cd -P "$T/" || x root
	else
		dec "$c"; into "$v"
	fi
done
mvt "$F/$fb" "./$tb" || exit 8
`

// Arguments: temporary name, mode, size or a dash, base, elements. With a dash
// the content is only staged; execCommit goes on once the host knows that all of
// it was sent. noclobber makes the shell open the new file with O_EXCL.
const execPut = `p=$1; mode=$2; size=$3; dec "$4"; b=$v; shift 4
for c do dec "$c"; mk "$v"; done
if [ -d "./$b" ] && [ ! -L "./$b" ]; then x isdir; fi
umask 077
set -C
cat >"./$p" || { rm -f "./$p"; exit 8; }
set +C
[ "$size" != - ] || exit 0
` + execPlace

const execCommit = `p=$1; mode=$2; size=$3; dec "$4"; b=$v; shift 4
for c do dec "$c"; into "$v"; done
` + execPlace

const execPlace = `n=$(wc -c <"./$p") || exit 8
[ $n -eq "$size" ] || { rm -f "./$p"; x short; }
chmod "$mode" "./$p" && mvt "./$p" "./$b" || { rm -f "./$p"; exit 8; }
`

// Arguments: temporary name, elements. Missing is success.
const execDiscard = `p=$1; shift
for c do dec "$c"; into "$v"; done
rm -rf "./$p"
`

const execSymlink = `dec "$1"; t=$v; dec "$2"; b=$v; shift 2
for c do dec "$c"; into "$v"; done
if [ -e "./$b" ] || [ -L "./$b" ]; then x exist; fi
ln -s -- "$t" "./$b" || exit 8
`

const execReadlink = `dec "$1"; b=$v; shift
for c do dec "$c"; into "$v"; done
if [ ! -L "./$b" ]; then
	if gone "./$b"; then x noent; fi
	x notlink
fi
readlink "./$b" || exit 8
`

// Arguments: the name of a staging directory, elements. The archive is unpacked
// where nobody has planted a link, and moved by execMerge.
const execUntar = `command -v tar >/dev/null 2>&1 || x notar
p=$1; shift
for c do dec "$c"; mk "$v"; done
(umask 077; mkdir "./$p") || exit 8
cd -P "./$p" || exit 8
umask 022
exec tar -x -p -o -f -
`

// merge moves the content of the staged directory $1 into the current one. A
// directory that is new moves whole; a link in the way of a directory is refused.
const execMerge = `merge() (
	src=$1
	set --
	for f in "$src"/* "$src"/.*; do
		n=${f##*/}
		case $n in .|..) continue ;; esac
		[ -e "$f" ] || [ -L "$f" ] || continue
		if [ -d "$f" ] && [ ! -L "$f" ]; then
			if [ -L "./$n" ]; then x outside; fi
			if [ -d "./$n" ]; then
				(into "$n"; merge "$f") || exit $?
				continue
			fi
			if [ -e "./$n" ]; then x exist; fi
		elif [ -d "./$n" ] && [ ! -L "./$n" ]; then
			x isdir
		fi
		set -- "$@" "$f"
		if [ $# -ge 200 ]; then mv -f -- "$@" ./ || exit 8; set --; fi
	done
	[ $# -eq 0 ] || mv -f -- "$@" ./ || exit 8
)
p=$1; shift
for c do dec "$c"; into "$v"; done
merge "${PWD%/}/$p" || { r=$?; rm -rf "./$p"; exit $r; }
rm -rf "./$p"
`

// Arguments: the number of exclude patterns, the patterns, base, elements.
const execTar = `command -v tar >/dev/null 2>&1 || x notar
k=$1; shift; e=
case $(tar --help 2>&1) in *--exclude*) e=1 ;; esac
i=0
while [ "$i" -lt "$k" ]; do
	[ -z "$e" ] || set -- "$@" "--exclude=$1"
	shift; i=$((i+1))
done
` + `dec "$1"; b=$v; shift
while [ $# -gt 0 ]; do
	case $1 in --exclude=*) break ;; esac
	dec "$1"; shift; into "$v"
done
if [ ! -d "./$b" ]; then
	if gone "./$b"; then x noent; fi
	x notdir
fi
into "$b"
exec tar "$@" -c -f - .
`
