package server

// Routes is the route table as "METHOD /path".
func Routes() []string {
	var out []string
	for _, rt := range (*Server)(nil).table() {
		out = append(out, rt.method+" "+rt.pattern)
	}
	return out
}
