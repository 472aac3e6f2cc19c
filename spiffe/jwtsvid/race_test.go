//go:build race

package jwtsvid_test

// raceDetector says that allocations cannot be counted.
const raceDetector = true
