package server

import (
	"net/http"
	"slices"
	"strings"
)

// route is one line of the route table, which is also what openapi.yaml is
// compared with.
type route struct {
	method  string
	pattern string
	probe   bool // for machines that look after this one: no name, origin or key is checked
	handle  func(*Server, http.ResponseWriter, *call) error
}

func (s *Server) table() []*route {
	return []*route{
		{"POST", "/v1/chat/{sandbox}", false, (*Server).post},
		{"GET", "/v1/chat/{sandbox}", false, (*Server).get},
		{"POST", "/v1/chat/{sandbox}/cancel", false, (*Server).cancel},
		{"GET", "/v1/runs", false, (*Server).listRuns},
		{"GET", "/v1/runs/{id}", false, (*Server).getRun},
		{"GET", "/v1/runs/{id}/events", false, (*Server).getEvents},
		{"GET", "/v1/threads", false, (*Server).listThreads},
		{"GET", "/v1/threads/{id}", false, (*Server).getThread},
		{"GET", "/v1/instances", false, (*Server).listInstances},
		{"GET", "/metrics", false, (*Server).getMetrics},
		{"GET", "/healthz", true, (*Server).healthz},
		{"GET", "/readyz", true, (*Server).readyz},
	}
}

// routes builds the handler. One entry for each path, which picks by method: so
// that a wrong method, a preflight and an unknown path are answered in our way.
func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	methods := map[string]map[string]*route{}
	for _, rt := range s.table() {
		if methods[rt.pattern] == nil {
			methods[rt.pattern] = map[string]*route{}
		}
		methods[rt.pattern][rt.method] = rt
	}
	for pattern, ms := range methods {
		allow := []string{"OPTIONS"}
		for m := range ms {
			if allow = append(allow, m); m == "GET" {
				allow = append(allow, "HEAD")
			}
		}
		slices.Sort(allow)
		allowed := strings.Join(allow, ", ")
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			method := r.Method
			if method == http.MethodHead {
				method = http.MethodGet
			}
			rt := ms[method]
			switch {
			case rt != nil && r.Method == http.MethodHead && strings.HasPrefix(pattern, "/v1/chat/"):
				rt = refuse(pattern, allowed) // a stream has no end to wait for
			case rt == nil && r.Method == http.MethodOptions:
				rt = preflight(pattern, allowed)
			case rt == nil:
				rt = refuse(pattern, allowed)
			}
			s.serve(rt, w, r)
		})
	}
	none := &route{pattern: "none", handle: func(*Server, http.ResponseWriter, *call) error { return errRoute }}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { s.serve(none, w, r) })
	return mux
}

func refuse(pattern, allowed string) *route {
	return &route{pattern: pattern, handle: func(_ *Server, w http.ResponseWriter, _ *call) error {
		w.Header().Set("Allow", allowed)
		return errMethod
	}}
}

// preflight answers a browser that asks whether it may call. It carries no key.
func preflight(pattern, allowed string) *route {
	return &route{pattern: pattern, probe: true, handle: func(s *Server, w http.ResponseWriter, c *call) error {
		if err := s.checkHost(c.Host); err != nil {
			return err
		}
		h := w.Header()
		foreign, err := s.cors(h, c.Request)
		if err != nil {
			return err
		}
		h.Set("Allow", allowed)
		if foreign {
			h.Set("Access-Control-Allow-Methods", allowed)
			h.Set("Access-Control-Allow-Headers", corsHeaders)
			h.Set("Access-Control-Max-Age", corsMaxAge)
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	}}
}
