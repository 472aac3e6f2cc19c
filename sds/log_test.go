package sds_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/sds"
)

// Whatever a client does again and again, the log has the first time, and no line for each of the others.
func TestLogFlood(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	times := rounds.Of(25)
	_, src, _ := withPair(t, "default")
	src.fail("down", errors.New("CA down"))
	var log syncBuffer
	h, c := serving(t, src, &sds.Options{
		Resolve: sds.Allow(func(_ context.Context, name string) error {
			if strings.HasPrefix(name, "denied") {
				return errors.New("not yours")
			}
			return nil
		}),
		MaxPeerStreams: 2, Logger: textLogger(&log),
	})
	for i := range times {
		s := fetchOf(t, c, fmt.Sprint("denied-", i))
		s.ends(codeNotFound)

		s = open(t, c, "StreamSecrets")
		s.send(&envoysds.DiscoveryRequest{TypeUrl: fmt.Sprint("type-", i)})
		s.ends(codeInvalidArgument)
		d := open(t, c, "DeltaSecrets")
		d.send(&envoysds.DeltaDiscoveryRequest{ResourceNamesSubscribe: longNames(i, 70)})
		d.ends(codeResourceExhausted)
	}
	d, s := openDelta(t, c), openSotW(t, c)
	for range times {
		refusal(t, open(t, c, "StreamSecrets"), "this peer")
	}
	for i := range times {
		name := fmt.Sprint(i)
		d.subscribe("denied-"+name, "unknown-"+name, "default")
		for acked := false; !acked; {
			r := d.recv()
			acked = len(r.GetResources()) > 0
			d.send(&envoysds.DeltaDiscoveryRequest{ResponseNonce: r.GetNonce(), ErrorDetail: &envoysds.Status{Message: "bad " + name}})
		}
	}
	s.ask("down", "denied-again", "unknown-again")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "CA down") }, patient, time.Millisecond)
	require.Eventually(t, func() bool { return h.Status().NACKs >= uint64(times) }, patient, time.Millisecond)

	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	counts := map[string]int{}
	for _, line := range lines {
		for _, kind := range []string{
			`resource refused to a client" reason="Resolve says no"`, `no such resource`, `look-up failed`, `client rejected a response`,
			`request refused" reason=invalid_argument`, `request refused" reason=resource_exhausted`, `request refused" reason="sds: this peer has too many streams; try again later"`,
		} {
			if strings.Contains(line, kind) {
				counts[kind]++
				if runtime.GOOS == "linux" && kind != "no such resource" && kind != "look-up failed" {
					assert.Contains(t, line, fmt.Sprintf("uid=%d pid=%d", os.Geteuid(), os.Getpid()))
				}
			}
		}
	}
	assert.Len(t, counts, 7, log.String())
	assert.Len(t, lines, 7, log.String())
	assert.Contains(t, log.String(), `message="bad 0"`, "the first rejection, in full")
	assert.Contains(t, log.String(), "denied-0 ")
	assert.Contains(t, log.String(), "unknown-0\n")
}

// A second client that is refused for the same reason is seen in the log.
func TestRefusedClientsAreNamed(t *testing.T) {
	t.Parallel()
	var log syncBuffer
	h := handler(t, newFakeSource(), &sds.Options{
		Resolve: sds.Allow(func(context.Context, string) error { return errors.New("not yours") }), Logger: textLogger(&log),
	})
	for i := range 20 {
		for _, from := range []string{"127.0.0.1", "127.0.0.2"} {
			for method, m := range map[string]*envoysds.DiscoveryRequest{"FetchSecrets": {ResourceNames: []string{"db"}}, "StreamSecrets": {TypeUrl: "none"}} {
				r := httptest.NewRequest(http.MethodPost, service+method, bytes.NewReader(frame(0, mustMarshal(t, m))))
				r.Header.Set("Content-Type", "application/grpc")
				r.Proto, r.ProtoMajor, r.ProtoMinor, r.RemoteAddr = "HTTP/2.0", 2, 0, fmt.Sprint(from, ":", i+1)
				h.ServeHTTP(httptest.NewRecorder(), r)
			}
		}
	}
	for _, from := range []string{"127.0.0.1:1", "127.0.0.2:1"} {
		assert.Contains(t, log.String(), `reason="Resolve says no" remote=`+from)
		assert.Contains(t, log.String(), `reason=invalid_argument remote=`+from)
	}
	assert.Equal(t, 4, strings.Count(log.String(), "\n"), log.String())
}
