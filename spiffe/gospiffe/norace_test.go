//go:build !race

package gospiffe_test

const raceEnabled = false
