package event

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"

	"github.com/aisandbox-go/aisandbox/internal/rawjson"
)

// FieldError says which field of an event can't be read or written, and why.
type FieldError struct {
	Type  Type
	Field string // empty: the whole event
	Why   string
}

func (e *FieldError) Error() string {
	s := "event: "
	if e.Type != "" {
		s += string(e.Type)
	}
	if e.Field != "" {
		if e.Type != "" {
			s += "."
		}
		s += e.Field
	}
	return s + ": " + e.Why
}

// maxTimestamp is the largest integer that a JavaScript client reads exactly.
const maxTimestamp = 1<<53 - 1

// Encode returns ev as one line of JSON without a line end: "type" first, then
// "timestamp", then the fields of spec 07 §5.2. Nothing is HTML-escaped. A [Raw]
// comes out byte for byte unless it holds line breaks, which are taken out. A
// value that no client would accept (metadata that is no object, a state without
// a snapshot) is a [*FieldError].
func Encode(ev Event) ([]byte, error) { return Append(nil, ev) }

// Append is [Encode] into dst's spare capacity. On an error dst is returned as
// it was.
func Append(dst []byte, ev Event) ([]byte, error) {
	c := codec{out: dst}
	switch e := ev.(type) {
	case TextMessageContent:
		e.fields(&c)
	case ToolCallArgs:
		e.fields(&c)
	case ReasoningMessageContent:
		e.fields(&c)
	case RunStarted:
		e.fields(&c)
	case RunFinished:
		e.fields(&c)
	case RunError:
		e.fields(&c)
	case StepStarted:
		e.fields(&c)
	case StepFinished:
		e.fields(&c)
	case TextMessageStart:
		e.fields(&c)
	case TextMessageEnd:
		e.fields(&c)
	case ReasoningStart:
		e.fields(&c)
	case ReasoningMessageStart:
		e.fields(&c)
	case ReasoningMessageEnd:
		e.fields(&c)
	case ReasoningEnd:
		e.fields(&c)
	case ReasoningEncryptedValue:
		e.fields(&c)
	case ToolCallStart:
		e.fields(&c)
	case ToolCallEnd:
		e.fields(&c)
	case ToolCallResult:
		e.fields(&c)
	case StateSnapshot:
		e.fields(&c)
	case StateDelta:
		e.fields(&c)
	case MessagesSnapshot:
		e.fields(&c)
	case Custom:
		e.fields(&c)
	case Raw:
		return appendRaw(dst, e)
	case nil:
		return dst, &FieldError{Why: "there is no event"}
	default:
		return dst, &FieldError{Type: ev.Type(), Why: fmt.Sprintf("%T is not an event of this package", ev)}
	}
	if c.err != nil {
		return dst, c.err
	}
	return append(c.out, '}'), nil
}

func appendRaw(dst []byte, e Raw) ([]byte, error) {
	var name string
	err := rawjson.Object(e.JSON, func(k, v []byte) bool {
		if string(k) == "type" {
			name, _ = rawjson.String(v)
		}
		return true
	})
	switch {
	case err != nil:
		return dst, &FieldError{Type: e.Name, Why: err.Error()}
	case name != string(e.Name) || name == "":
		return dst, &FieldError{Type: e.Name, Field: "type", Why: fmt.Sprintf("the object's type is %q", name)}
	case bytes.ContainsAny(e.JSON, "\r\n"):
		return rawjson.AppendCompact(dst, e.JSON), nil
	}
	return append(dst, e.JSON...), nil
}

// Decode reads one event, a JSON object with nothing after it. A type that this
// package does not know becomes a [Raw] of the same bytes. Of a known type,
// top-level names that are not of spec 07 §5.2 are dropped, as AG-UI 1.0 does;
// metadata and rawEvent are kept whole. null stands for an absent optional field.
// Everything else that is not as the spec says is a [*FieldError]. The event does
// not keep b.
func Decode(b []byte) (Event, error) {
	if !utf8.Valid(b) {
		return nil, &FieldError{Why: "not valid UTF-8"}
	}
	c := codec{decode: true, members: make([]member, 0, 8)}
	var typ []byte
	err := rawjson.Object(b, func(k, v []byte) bool {
		if bytes.IndexByte(k, '\\') >= 0 {
			s, _ := rawjson.String(append(append([]byte{'"'}, k...), '"'))
			k = []byte(s)
		}
		if string(k) == "type" {
			typ = v
		}
		c.members = append(c.members, member{k, v})
		return true
	})
	var syn *rawjson.SyntaxError
	if errors.As(err, &syn) {
		return nil, &FieldError{Why: err.Error()}
	}
	name, ok := rawjson.String(typ)
	if !ok || name == "" {
		return nil, &FieldError{Field: "type", Why: "must be a string that is not empty"}
	}
	c.typ = Type(name)
	read, ok := readers[c.typ]
	if !ok {
		return Raw{Name: c.typ, JSON: bytes.Clone(bytes.TrimSpace(b))}, nil
	}
	ev := read(&c)
	if c.err != nil {
		return nil, c.err
	}
	return ev, nil
}

// readers makes an event of each known type.
var readers = map[Type]func(*codec) Event{
	TypeRunStarted:            read[RunStarted],
	TypeRunFinished:           read[RunFinished],
	TypeRunError:              read[RunError],
	TypeStepStarted:           read[StepStarted],
	TypeStepFinished:          read[StepFinished],
	TypeTextMessageStart:      read[TextMessageStart],
	TypeTextMessageContent:    read[TextMessageContent],
	TypeTextMessageEnd:        read[TextMessageEnd],
	TypeReasoningStart:        read[ReasoningStart],
	TypeReasoningMessageStart: read[ReasoningMessageStart],
	TypeReasoningContent:      read[ReasoningMessageContent],
	TypeReasoningMessageEnd:   read[ReasoningMessageEnd],
	TypeReasoningEnd:          read[ReasoningEnd],
	TypeReasoningEncrypted:    read[ReasoningEncryptedValue],
	TypeToolCallStart:         read[ToolCallStart],
	TypeToolCallArgs:          read[ToolCallArgs],
	TypeToolCallEnd:           read[ToolCallEnd],
	TypeToolCallResult:        read[ToolCallResult],
	TypeStateSnapshot:         read[StateSnapshot],
	TypeStateDelta:            read[StateDelta],
	TypeMessagesSnapshot:      read[MessagesSnapshot],
	TypeCustom:                read[Custom],
}

func read[T Event, P interface {
	*T
	fields(*codec)
}](c *codec) Event {
	var e T
	P(&e).fields(c)
	return e
}

// codec writes or reads one event. Each event names its fields once, in fields,
// for both directions.
type codec struct {
	typ     Type
	err     error
	out     []byte
	decode  bool
	members []member
}

type member struct{ name, value []byte }

func (c *codec) fail(field, why string) {
	if c.err == nil {
		c.err = &FieldError{Type: c.typ, Field: field, Why: why}
	}
}

// get finds a field to read; the last of two with one name wins.
func (c *codec) get(name string, required bool) ([]byte, bool) {
	for i := len(c.members) - 1; i >= 0; i-- {
		if m := &c.members[i]; string(m.name) == name {
			if !required && rawjson.IsNull(m.value) {
				return nil, false
			}
			return m.value, true
		}
	}
	if required {
		c.fail(name, "is missing")
	}
	return nil, false
}

func (c *codec) key(name string) {
	c.out = append(c.out, ',', '"')
	c.out = append(c.out, name...)
	c.out = append(c.out, '"', ':')
}

// head opens an event: its type and its time.
func (c *codec) head(t Type, common *Common) {
	c.typ = t
	if !c.decode {
		c.out = append(c.out, `{"type":"`...)
		c.out = append(c.out, t...)
		c.out = append(c.out, '"')
		if ts := common.Timestamp; ts != 0 {
			if ts < 0 || ts > maxTimestamp {
				c.fail("timestamp", fmt.Sprintf("%d is not a time in milliseconds", ts))
			}
			c.key("timestamp")
			c.out = strconv.AppendInt(c.out, ts, 10)
		}
		return
	}
	if v, ok := c.get("timestamp", false); ok {
		n, err := strconv.ParseInt(string(v), 10, 64)
		if err != nil || n < 0 || n > maxTimestamp {
			c.fail("timestamp", fmt.Sprintf("want a whole number of milliseconds, got %.40s", v))
		}
		common.Timestamp = n
	}
}

// tail ends an event with what any event may have.
func (c *codec) tail(common *Common) {
	c.rest("rawEvent", &common.RawEvent, "")
	c.rest("metadata", &common.Metadata, "object")
}

func (c *codec) str(name string, s *string, required bool) {
	if !c.decode {
		if required || *s != "" {
			c.key(name)
			c.out = rawjson.AppendQuoted(c.out, *s)
		}
		return
	}
	if v, ok := c.get(name, required); ok {
		if *s, ok = rawjson.String(v); !ok {
			c.fail(name, fmt.Sprintf("want a string, got %.40s", v))
		}
	}
}

// must is a field that every event of its type has.
func (c *codec) must(name string, s *string) { c.str(name, s, true) }

// may is a field that is absent when empty.
func (c *codec) may(name string, s *string) { c.str(name, s, false) }

// rest is an optional field with any JSON; kind narrows it. null is absent.
func (c *codec) rest(name string, v *json.RawMessage, kind string) {
	if c.decode {
		if b, ok := c.get(name, false); ok {
			*v = bytes.Clone(b)
			c.kind(name, b, kind)
		}
		return
	}
	if len(*v) == 0 || string(*v) == "null" {
		return
	}
	c.any(name, v, kind)
}

// any is a required field with any JSON; kind narrows it.
func (c *codec) any(name string, v *json.RawMessage, kind string) {
	if c.decode {
		if b, ok := c.get(name, true); ok {
			*v = bytes.Clone(b)
			c.kind(name, b, kind)
		}
		return
	}
	if err := rawjson.Check(*v); err != nil {
		c.fail(name, err.Error())
		return
	}
	c.key(name)
	from := len(c.out)
	c.out = rawjson.AppendCompact(c.out, *v)
	c.kind(name, c.out[from:], kind)
}

func (c *codec) kind(name string, v []byte, kind string) {
	if len(v) == 0 || (kind == "object" && v[0] != '{') || (kind == "array" && v[0] != '[') {
		c.fail(name, fmt.Sprintf("want an %s, got %.40s", kind, v))
	}
}

// value is a field with a Go shape of its own. Absent when empty says so.
func (c *codec) value(name string, v any, required, empty bool) {
	if !c.decode {
		if !required && empty {
			return
		}
		b, err := marshal(v)
		if err != nil {
			c.fail(name, err.Error())
			return
		}
		c.key(name)
		// Compacted: values may carry raw JSON with line breaks.
		c.out = rawjson.AppendCompact(c.out, b)
		return
	}
	b, ok := c.get(name, required)
	if !ok {
		return
	}
	if err := json.Unmarshal(b, v); err != nil {
		var te *json.UnmarshalTypeError
		if errors.As(err, &te) && te.Field != "" {
			name += "." + te.Field
		}
		c.fail(name, err.Error())
	}
}
