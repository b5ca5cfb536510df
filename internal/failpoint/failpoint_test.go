package failpoint_test

import (
	"testing"

	"github.com/aisandbox-go/aisandbox/internal/failpoint"
)

func TestArm(t *testing.T) {
	failpoint.Hit(failpoint.RunCreated, "a") // nothing happens
	var got []string
	disarm := failpoint.Arm(func(point, host string) { got = append(got, point+" "+host) })
	failpoint.Hit(failpoint.RunCreated, "a")
	disarm()
	disarm()
	failpoint.Hit(failpoint.RunCreated, "b")
	if len(got) != 1 || got[0] != "run.created a" {
		t.Errorf("got %q", got)
	}
	failpoint.Arm(func(string, string) {})()
}

func TestOffCostsNothing(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() { failpoint.Hit(failpoint.BeforeAppend, "a") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
