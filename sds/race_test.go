//go:build race

package sds_test

const raceDetector = true
