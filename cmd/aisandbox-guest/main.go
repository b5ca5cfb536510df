// Command aisandbox-guest is the program that aisandbox puts into a sandbox; see
// package guest/inside.
package main

import (
	"os"

	"github.com/aisandbox-go/aisandbox/guest/inside"
	"github.com/aisandbox-go/aisandbox/harness/scripted/player"
)

func main() {
	os.Exit(inside.Main(os.Args[1:], false, inside.Command{Name: "play", Run: player.Main}))
}
