//go:build race

package spiffe_test

const raceEnabled = true
