package event

import (
	"encoding/json"
	"testing"
)

func TestFingerprint(t *testing.T) {
	base := Custom{Name: "n", Value: json.RawMessage(`{"b":1,"a":[{"timestamp":5}]}`), Common: Common{Timestamp: 1, Metadata: json.RawMessage(`{"tanstack":{"model":"x"}}`)}}
	want := Fingerprint(base)
	with := func(f func(*Custom)) Custom { e := base; f(&e); return e }
	for _, c := range []struct {
		name string
		ev   Event
		same bool
	}{
		{"another time", with(func(e *Custom) { e.Timestamp = 2 }), true},
		{"no time", with(func(e *Custom) { e.Timestamp = 0 }), true},
		{"another model", with(func(e *Custom) { e.Metadata = json.RawMessage(`{"tanstack":{"model":"y"}}`) }), true},
		{"no metadata", with(func(e *Custom) { e.Metadata = nil }), true},
		{"empty metadata left", with(func(e *Custom) { e.Metadata = json.RawMessage(`{}`) }), true},
		{"other order", with(func(e *Custom) { e.Value = json.RawMessage(`{"a":[{"timestamp":5}], "b":1.0}`) }), true},
		{"foreign metadata", with(func(e *Custom) { e.Metadata = json.RawMessage(`{"x":1}`) }), false},
		{"inner time", with(func(e *Custom) { e.Value = json.RawMessage(`{"b":1,"a":[{"timestamp":6}]}`) }), false},
		{"null is not absent", with(func(e *Custom) { e.Value = json.RawMessage(`{"b":1,"a":[{"timestamp":5}],"c":null}`) }), false},
		{"another name", with(func(e *Custom) { e.Name = "m" }), false},
		{"another type", StateSnapshot{Snapshot: base.Value}, false},
	} {
		if got := Fingerprint(c.ev) == want; got != c.same {
			t.Errorf("%s: same = %v, want %v", c.name, got, c.same)
		}
	}
	if Fingerprint(StateSnapshot{}) != [32]byte{} {
		t.Error("an event that can't be encoded has a fingerprint")
	}
}

// The expected values are those of RFC 8785.
func TestCanonical(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{`{"numbers":[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001,-0,1e-7,123456789012345680000,1e21,1.5e300]}`,
			`{"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27,0,1e-7,123456789012345680000,1e+21,1.5e+300]}`},
		{`{"string":"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/"}`, `{"string":"€$\u000f\nA'B\"\\\\\"/"}`},
		{`{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7}`,
			"{\"\\r\":2,\"1\":4,\"\u0080\":6,\"ö\":7,\"€\":1,\"😀\":5,\"\ufb33\":3}"},
		{`{"a":"\u2028","b":"\\u2028"}`, "{\"a\":\"\u2028\",\"b\":\"\\\\u2028\"}"},
		{`{"a":1,"a":[true,false,null,{ }]}`, `{"a":[true,false,null,{}]}`},
	} {
		if got := string(canonicalObject(nil, []byte(c.in), false)); got != c.want {
			t.Errorf("canonical of %s\n got %s\nwant %s", c.in, got, c.want)
		}
	}
}

func TestIDs(t *testing.T) {
	a, b := NewIDs("run-1"), NewIDs("run-1")
	for i, want := range []string{"run-1-0", "run-1-1", "run-1-2"} {
		if x, y := a(), b(); x != want || y != want {
			t.Errorf("id %d is %q and %q, want %q", i, x, y, want)
		}
	}
}

func BenchmarkFingerprint(b *testing.B) {
	ev := TextMessageContent{MessageID: "msg_0123456789", Delta: "a few words of an answer ", Common: Common{Timestamp: 1764460800000}}
	b.ReportAllocs()
	for b.Loop() {
		Fingerprint(ev)
	}
}

func TestCustomOf(t *testing.T) {
	ev, err := NewCustom(NameFile, File{Type: "change", Path: "/workspace/a<b>", Timestamp: 7})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := string(ev.Value), `{"type":"change","path":"/workspace/a<b>","timestamp":7}`; got != want {
		t.Errorf("value %s, want %s", got, want)
	}
	if f, ok := CustomOf[File](ev, NameFile); !ok || f.Path != "/workspace/a<b>" {
		t.Errorf("CustomOf = %v, %v", f, ok)
	}
	if _, ok := CustomOf[File](ev, NameFileDiff); ok {
		t.Error("CustomOf takes another name")
	}
	if f, ok := CustomOf[File](Custom{Name: NameFile, Value: json.RawMessage(`{"type":1,"path":"x"}`)}, NameFile); ok || f != (File{}) {
		t.Errorf("CustomOf of another shape = %v, %v", f, ok)
	}
	if _, ok := CustomOf[File](RunError{}, NameFile); ok {
		t.Error("CustomOf takes another event")
	}
	if ev, err := NewCustom(NameRunAccepted, nil); err != nil || string(ev.Value) != "{}" {
		t.Errorf("NewCustom without a value = %s, %v", ev.Value, err)
	}
	if _, err := NewCustom("x", func() {}); err == nil {
		t.Error("NewCustom takes a function")
	}
}

func TestTanStack(t *testing.T) {
	in := TanStack{Model: "m", FinishReason: "stop", Usage: json.RawMessage(`{"a":1}`)}
	got := TanStackOf(RunFinished{Common: Common{Metadata: in.Metadata()}})
	if got.Model != "m" || got.FinishReason != "stop" || string(got.Usage) != `{"a":1}` {
		t.Errorf("TanStackOf = %+v", got)
	}
	if m := (TanStack{}).Metadata(); m != nil {
		t.Errorf("empty metadata is %s", m)
	}
	if got := TanStackOf(RunError{Common: Common{Metadata: json.RawMessage(`{"tanstack":[]}`)}}); got.Model != "" {
		t.Errorf("TanStackOf of another shape = %+v", got)
	}
}
