package limit

import (
	"bytes"
	"sync"
	"sync/atomic"
)

// maxTexts is how many texts of a Page slow readers can have.
const maxTexts = 8

// Page is a text that is rendered once for all that ask for it meanwhile, and by one of them at a time. While
// readers are slow to take many of its texts, those that come share the newest, so that they hold no more
// memory. The zero Page is ready.
type Page struct {
	turn atomic.Int64 // of the newest text, from its begin

	mu     sync.Mutex
	held   int // texts that readers have
	newest *text
}

type text struct {
	turn    int64
	bytes   []byte
	err     error
	readers int
}

// Get returns what render has written since the call, or before it if too much is held. It is shared until done
// is called.
func (p *Page) Get(render func(*bytes.Buffer) error) (page []byte, done func(), err error) {
	came := p.turn.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.newest
	if t == nil || t.turn <= came && p.held < maxTexts {
		var b bytes.Buffer
		t = &text{turn: p.turn.Add(1)}
		t.err = render(&b)
		t.bytes = b.Bytes()
		p.newest = t
	}
	if t.readers++; t.readers == 1 {
		p.held++
	}
	return t.bytes, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if t.readers--; t.readers == 0 {
			p.held--
		}
	}, t.err
}
