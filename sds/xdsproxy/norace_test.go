//go:build !race

package xdsproxy_test

const raced = false
