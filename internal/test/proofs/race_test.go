//go:build race

package proofs

const raceDetector = true
