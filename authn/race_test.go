//go:build race

package authn_test

// raceDetector says that allocations cannot be counted.
const raceDetector = true
