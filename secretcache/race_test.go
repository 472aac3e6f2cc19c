//go:build race

package secretcache_test

const raceDetector = true
