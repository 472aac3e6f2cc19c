package main

import (
	"testing"

	"github.com/svidkit/svidkit/internal/test/watchtest"
)

// TestDashboard: each metric, label and value in it is one that the parts write.
func TestDashboard(t *testing.T) {
	t.Parallel()
	watchtest.Dashboard(t, "dashboard.json", watchtest.Labels(watchtest.Written(t)))
}
