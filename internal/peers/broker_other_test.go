//go:build !linux

package peers_test

import "testing"

func testBrokers(t *testing.T, _ *cluster) { t.Skip("a pod is simulated by namespaces of Linux") }
