//go:build race

package istioca_test

const raceEnabled = true
