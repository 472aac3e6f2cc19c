package caconfig

import (
	"bytes"
	"context"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki/caserver/linkerd"
)

// TestRecord has a client that has gone before the event is recorded, and more of them than are reported.
func TestRecord(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	r := newRecorder(nil, "linkerd", slog.New(slog.NewTextHandler(&log, nil)))
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	failed := linkerd.Event{Reason: "IssuerValidationFailed", Warning: true, Message: "x"}
	r.record(gone, failed)
	require.Len(t, r.queue, 1)
	assert.Empty(t, log.String())
	for range 100 {
		r.record(t.Context(), failed)
	}
	assert.Len(t, r.queue, 25)
	assert.Contains(t, log.String(), "there are too many")
	r.record(t.Context(), linkerd.Event{Reason: "IssuedLeafCertificate", Namespace: "n", ServiceAccount: "a"})
	assert.Len(t, r.queue, 26, "of another object")
}
