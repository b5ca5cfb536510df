package sqlitestore

import (
	"testing"

	"github.com/aisandbox-go/aisandbox/store/storetest"
)

func BenchmarkAppend(b *testing.B) {
	storetest.BenchAppend(b, open(b, temp(b), Options{}).Set, 64, 1)
}

func BenchmarkAppendAlone(b *testing.B) {
	storetest.BenchAppend(b, open(b, temp(b), Options{}).Set, 1, 1)
}

func BenchmarkTail(b *testing.B) {
	storetest.BenchTail(b, open(b, temp(b), Options{}).Set, 1000)
}
