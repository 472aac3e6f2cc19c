package main

import (
	"os"
	"testing"
)

// asProgram makes this test binary be the program.
const asProgram = "SVIDKIT_EXAMPLE_NODE_PROXY"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	m.Run()
}
