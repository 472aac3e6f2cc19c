package sdstest

import (
	"embed"
	"fmt"
	"slices"
)

// The cases of the suite, by method. Where a change of the source must have no effect, another stream shows that the
// server has seen the change.
//
//go:embed cases/*.txt
var files embed.FS

// cases returns the cases of the suite.
func cases() (all []testCase) {
	for _, method := range []string{"sotw", "delta", "fetch"} {
		text, err := files.ReadFile("cases/" + method + ".txt")
		if err != nil {
			panic(fmt.Sprintf("sdstest: %v", err)) // it is part of the program
		}
		all = slices.Concat(all, parseCases(string(text)))
	}
	return all
}
