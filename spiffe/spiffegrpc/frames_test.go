package spiffegrpc

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// frame returns a frame.
func frame(kind, flags byte, size int) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(size)<<8)[:3]
	return append(append(b, kind, flags, 0, 0, 0, 1), make([]byte, size)...)
}

func TestFrames(t *testing.T) {
	t.Parallel()
	var wire []byte
	var ends []int // where another frame may come in
	for _, f := range []struct {
		kind, flags byte
		size        int
		open        bool // a block of header fields goes on
	}{
		{4, 0, 18, false},                                  // SETTINGS
		{4, 1, 0, false},                                   // its acknowledgement
		{1, 0, 5, true}, {9, 0, 0, true}, {9, 4, 7, false}, // HEADERS and CONTINUATION
		{0, 0, 16384, false}, {0, 1, 0, false}, {0, 1, 1<<16 + 3, false}, // DATA
		{5, 0, 4, true}, {9, 4, 1, false}, // PUSH_PROMISE
		{1, 5, 3, false}, {6, 0, 8, false}, {0xfe, 0, 256, false}, // HEADERS of one frame, PING, and an unknown one
	} {
		wire = append(wire, frame(f.kind, f.flags, f.size)...)
		if !f.open {
			ends = append(ends, len(wire))
		}
	}
	for _, size := range []int{1, 2, 8, 9, 10, 17, 1000, len(wire)} {
		var whole, stepwise frames
		assert.False(t, whole.between(), "the first frame is SETTINGS")
		var got []int
		for at := 0; at < len(wire); at += size {
			piece := wire[at:min(at+size, len(wire))]
			whole.pass(piece)
			for done := 0; done < len(piece); {
				if stepwise.between() {
					got = append(got, at+done)
					done += stepwise.step(piece[done:])
				}
				done += stepwise.finish(piece[done:])
			}
			require.Equal(t, stepwise, whole)
		}
		require.True(t, whole.between())
		assert.Equal(t, ends, append(got, len(wire)), "pieces of %d", size)
	}
}

// FuzzFrames compares the places that are found with those of a reader of whole frames, however the bytes come.
func FuzzFrames(f *testing.F) {
	f.Add(append(frame(4, 0, 6), frame(1, 4, 3)...), uint8(4))
	f.Add(append(append(frame(4, 0, 0), frame(1, 0, 2)...), frame(9, 4, 1)...), uint8(1))
	f.Add(frame(0, 0, 300), uint8(255))
	f.Add([]byte{0, 0, 1}, uint8(2))
	f.Fuzz(func(t *testing.T, wire []byte, size uint8) {
		want := make(map[int]bool)
		for at, open := 0, false; len(wire)-at >= 9; {
			head := wire[at : at+9]
			at += 9 + int(head[0])<<16 + int(head[1])<<8 + int(head[2])
			if head[3] == 1 || head[3] == 5 || head[3] == 9 {
				open = head[4]&4 == 0
			} else {
				open = false
			}
			if at <= len(wire) && !open {
				want[at] = true
			}
		}
		var fs frames
		for at := 0; at < len(wire); {
			piece := wire[at:min(at+int(size)+1, len(wire))]
			n := fs.finish(piece)
			if n == 0 { // at such a place
				n = fs.step(piece)
			}
			at += n
			require.Equal(t, want[at], fs.between(), "at %d", at)
		}
	})
}
