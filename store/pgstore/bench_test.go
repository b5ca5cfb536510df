package pgstore

import (
	"testing"

	"github.com/aisandbox-go/aisandbox/internal/testenv"
	"github.com/aisandbox-go/aisandbox/store/storetest"
)

func BenchmarkAppend32(b *testing.B) {
	storetest.BenchAppend(b, open(b, testenv.Postgres(b), Options{}).Set, 16, 32)
}

func BenchmarkAppend1(b *testing.B) {
	storetest.BenchAppend(b, open(b, testenv.Postgres(b), Options{}).Set, 16, 1)
}

func BenchmarkTail(b *testing.B) {
	storetest.BenchTail(b, open(b, testenv.Postgres(b), Options{}).Set, 1000)
}
