// Package sh builds POSIX shell text. Nothing that comes from outside enters a
// script but through [Quote].
package sh

import "strings"

// Quote returns s as one shell word, single-quoted; an inner quote is put between
// the words, behind a backslash.
func Quote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// Join quotes each argument and joins them with spaces.
func Join(argv ...string) string {
	q := make([]string, len(argv))
	for i, a := range argv {
		q[i] = Quote(a)
	}
	return strings.Join(q, " ")
}
