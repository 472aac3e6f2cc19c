//go:build !race

package proofs

const raceDetector = false
