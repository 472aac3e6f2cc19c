//go:build !race

package workloadapi_test

const raceEnabled = false
