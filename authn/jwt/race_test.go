//go:build race

package jwt_test

// raceDetector says that allocations cannot be counted.
const raceDetector = true
