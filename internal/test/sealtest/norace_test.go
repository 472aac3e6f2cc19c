//go:build !race

package sealtest

const raceEnabled = false
