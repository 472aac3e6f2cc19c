package sds_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
)

func mustMarshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	return must.Get(proto.Marshal(m))(t)
}

func http1(t testing.TB, socket string) *http.Client {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// fetch is a call of FetchSecrets, with its code; the answer is nil if that is not OK.
func fetch(t testing.TB, c *http.Client, names ...string) (*envoysds.DiscoveryResponse, string) {
	t.Helper()
	s := fetchOf(t, c, names...)
	b, err := s.next()
	code, _ := s.status()
	if err != nil {
		return nil, code
	}
	var r envoysds.DiscoveryResponse
	require.NoError(t, proto.Unmarshal(b, &r))
	return &r, code
}

func TestFetchGRPC(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, trust := m.pair("default"), m.roots("ROOTCA")
	src.put("default", web)
	src.put("ROOTCA", trust)
	src.fail("down", errors.New("CA down"))
	var log syncBuffer
	h, c := serving(t, src, &sds.Options{Logger: textLogger(&log)})
	r, code := fetch(t, c, "default")
	assert.Equal(t, codeOK, code)
	want(t, r, web)
	v := r.GetVersionInfo()
	r, _ = fetch(t, c, "ROOTCA", "default", "unknown", "down", "default")
	want(t, r, web, trust)
	again, _ := fetch(t, c, "default", "ROOTCA")
	assert.Equal(t, r.GetVersionInfo(), again.GetVersionInfo())
	assert.NotEqual(t, v, r.GetVersionInfo())

	_, code = fetch(t, c, "unknown")
	assert.Equal(t, codeNotFound, code)
	_, code = fetch(t, c, "unknown", "down")
	assert.Equal(t, codeUnavailable, code)
	_, code = fetch(t, c, "", "")
	assert.Equal(t, codeInvalidArgument, code)
	assert.Empty(t, h.Status().Names, "nothing is kept")
	assert.Empty(t, log.String(), "pollers do not fill the log")
}

// A fetch of more than one response may hold is one response all the same.
func TestFetchLarge(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	pem := bytes.Repeat(pki.MarshalCertificatesPEM(m.ca.Root()), 900)
	var names []string
	for _, name := range []string{"a", "b", "c", "d"} {
		src.put(name, must.Get(pki.NewSecretPEM(name, nil, nil, pem, time.Time{}))(t))
		names = append(names, name)
	}
	require.Greater(t, len(pem)*len(names), 2<<20)
	socket, _ := serve(t, handler(t, src, nil))
	r, code := fetch(t, dial(t, socket), names...)
	require.Equal(t, codeOK, code)
	assert.Len(t, r.GetResources(), 4)
}
