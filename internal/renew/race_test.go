//go:build race

package renew_test

const raceDetector = true
