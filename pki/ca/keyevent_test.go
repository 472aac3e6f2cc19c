package ca_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki/ca"
)

func TestKeyEventInJSON(t *testing.T) {
	t.Parallel()
	b, err := json.Marshal(ca.KeyEvent{Time: time.Unix(0, 0).UTC(), Event: "taint", Key: "root", Serial: "1f", Actor: ca.Actor{UID: "0", Host: "h", Command: "ca -taint 1f"}})
	require.NoError(t, err)
	assert.JSONEq(t, `{"time":"1970-01-01T00:00:00Z","event":"taint","key":"root","serial":"1f","uid":"0","host":"h","command":"ca -taint 1f"}`, string(b))
}
