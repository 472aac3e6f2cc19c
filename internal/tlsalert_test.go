package internal_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// connect returns both ends of a connection over TCP, with the connection below that of the server.
func connect(t *testing.T, first int32, protos ...string) (client, server *tls.Conn, below net.Conn) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	ca := spiffetest.NewCA(t, "example.org")
	var wg sync.WaitGroup
	wg.Go(func() {
		var err error
		if below, err = l.Accept(); assert.NoError(t, err) {
			server = tls.Server(below, &tls.Config{NextProtos: protos, Certificates: []tls.Certificate{*ca.SVID("/db").TLSCertificate()}})
			assert.NoError(t, server.HandshakeContext(context.Background()))
		}
	})
	raw := must.Get(net.Dial("tcp", l.Addr().String()))(t)
	client, err := tlsalert.Client(t.Context(), raw, &tls.Config{InsecureSkipVerify: true, NextProtos: protos}, first) // the server is of this test
	require.NoError(t, err)
	wg.Wait()
	t.Cleanup(func() { _ = client.Close(); _ = below.Close() })
	assert.Same(t, raw, tlsalert.Below(client))
	return client, server, below
}

// writeUntilRefused writes until the connection has ended.
func writeUntilRefused(c *tls.Conn) (err error) {
	for err == nil {
		_, err = c.Write([]byte("hello"))
	}
	return err
}

// What is not an alert reaches the reader, also if it is as long as one, and a write that fails beside it.
func TestTLSAlertData(t *testing.T) {
	t.Parallel()
	for name, sent := range map[string][]string{"a word": {"bye, bye"}, "two bytes, and more": {"OK", "bye"}, "more, and two bytes": {"bye", "OK"}, "nothing": nil} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, server, below := connect(t, 0)
			var all strings.Builder
			for _, s := range sent {
				must.Get(server.Write([]byte(s)))(t)
				all.WriteString(s)
			}
			require.NoError(t, below.Close())
			assert.NotContains(t, writeUntilRefused(client).Error(), "remote error")
			got, err := io.ReadAll(client)
			assert.Equal(t, all.String(), string(got))
			if err != nil {
				assert.NotContains(t, err.Error(), "remote error")
			}
		})
	}
	t.Run("two bytes that were read, and more", func(t *testing.T) {
		t.Parallel()
		client, server, below := connect(t, 0)
		must.Get(server.Write([]byte("OK")))(t)
		must.Get(io.ReadFull(client, make([]byte, 2)))(t)
		must.Get(server.Write([]byte("bye")))(t)
		require.NoError(t, below.Close())
		assert.NotContains(t, writeUntilRefused(client).Error(), "remote error")
		got, _ := io.ReadAll(client)
		assert.Equal(t, "bye", string(got))
	})
	t.Run("a dialogue", func(t *testing.T) {
		t.Parallel()
		client, server, _ := connect(t, 1)
		for range 3 { // of which each answer has two bytes
			must.Get(client.Write([]byte("go on")))(t)
			must.Get(io.ReadFull(server, make([]byte, 5)))(t)
			must.Get(server.Write([]byte("OK")))(t)
			var answer [2]byte
			must.Get(io.ReadFull(client, answer[:]))(t)
			assert.Equal(t, "OK", string(answer[:]))
		}
	})
}

// A reader that finds an alert returns after the writes with which its client begins: 1, or 2 by h2.
func TestTLSAlertFirstWrites(t *testing.T) {
	t.Parallel()
	for proto, first := range map[string]int{"http/1.1": 1, "h2": 2} {
		t.Run(proto, func(t *testing.T) {
			t.Parallel()
			client, server, _ := connect(t, 1, proto)
			require.NoError(t, server.CloseWrite()) // close_notify is an alert
			read := make(chan error, 1)
			go func() {
				_, err := client.Read(make([]byte, 1))
				read <- err
			}()
			for range first {
				select {
				case err := <-read:
					t.Fatal("the reader did not wait: ", err)
				case <-time.After(100 * time.Millisecond):
				}
				must.Get(client.Write([]byte("hello")))(t)
			}
			assert.ErrorIs(t, <-read, io.EOF)
		})
	}
}

// A server that sends what only looks like an alert does not hold up the writer, who would wait for itself when
// crypto/tls answers.
func TestTLSAlertDamaged(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	client, _, below := connect(t, 0)
	must.Get(below.Write(append([]byte{23, 3, 3, 0, 19}, make([]byte, 19)...)))(t)
	require.NoError(t, below.Close())
	assert.Error(t, writeUntilRefused(client))
	_, err := client.Read(make([]byte, 1))
	assert.ErrorContains(t, err, "bad record MAC")
}
