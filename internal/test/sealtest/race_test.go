//go:build race

package sealtest

const raceEnabled = true
