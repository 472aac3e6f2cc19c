package main

import (
	"bytes"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// from is a connection that has no descriptor.
type from struct{ net.Conn }

func addressOf(n byte) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, n}) }

// Addresses that take what they can leave room for others.
func TestCrowd(t *testing.T) {
	t.Parallel()
	a := &admitted{total: 120, each: map[netip.Addr]int{}}
	take := func(n byte) (taken int) {
		for a.take(from{}, addressOf(n)) == "" {
			taken++
		}
		return taken
	}
	assert.Equal(t, []int{60, 40, 14, 4, 2, 0}, []int{take(1), take(2), take(3), take(4), take(5), take(6)})
	assert.Equal(t, "there are too many connections", a.take(from{}, addressOf(7)))
	for range 60 {
		a.give(addressOf(1))
	}
	assert.Equal(t, 60, a.held)
	assert.NotContains(t, a.each, addressOf(1))
	assert.Empty(t, a.take(from{}, addressOf(6)))
}

// A connection beyond the limits is closed at once, and the next one is accepted; one that is closed counts no more.
func TestAdmit(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	refused := make(chan string, 10)
	a := admit(l, func(_ net.Conn, why string) { refused <- why })
	a.total = 2 // of which an address may have one
	dial := func() net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	dial()
	first, err := a.Accept()
	require.NoError(t, err)
	beyond := dial()
	accepted := make(chan net.Conn, 1)
	go func() {
		if c, err := a.Accept(); err == nil {
			accepted <- c
		}
	}()
	assert.Equal(t, "the address has too many connections", <-refused)
	require.NoError(t, beyond.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err = beyond.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, first.Close())
	_ = first.Close() // counts once
	dial()
	c := <-accepted
	assert.Equal(t, 1, a.held)
	require.NoError(t, c.Close())
	assert.Zero(t, a.held)

	if _, known := descriptor(first.(*counted).Conn); known || a.last > 0 {
		a.last = 1
		dial()
		go func() { _, _ = a.Accept() }()
		assert.Contains(t, <-refused, "file descriptors are kept")
	}
}

func TestUsableDescriptors(t *testing.T) {
	t.Parallel()
	for most, usable := range map[int]int{0: 0, 64: 32, 256: 192, 512: 384, 1024: 768, 20_000: 18_976} {
		assert.Equal(t, usable, usableOf(most), most)
	}
}

// A flood of events with one reason has one line in a minute.
func TestWarnings(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		w := warnings{log: slog.New(slog.NewTextHandler(&log, nil))}
		for range 100 {
			w.warn("refused", "it is bad")
			w.warn("refused", "it is worse")
		}
		assert.Equal(t, 2, strings.Count(log.String(), "\n"))
		time.Sleep(time.Minute)
		w.warn("refused", "it is bad")
		assert.Equal(t, 3, strings.Count(log.String(), "\n"))
		assert.Contains(t, log.String(), "left_out=99")
	})
}
