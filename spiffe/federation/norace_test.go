//go:build !race

package federation_test

const raceDetector = false
