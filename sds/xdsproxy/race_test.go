//go:build race

package xdsproxy_test

const raced = true // the race detector makes everything slower
