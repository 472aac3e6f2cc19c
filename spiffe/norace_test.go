//go:build !race

package spiffe_test

const raceEnabled = false
