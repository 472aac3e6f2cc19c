package limit

import (
	"bytes"
	"sync"
	"sync/atomic"
)

// maxTexts is how many texts of a Page slow readers can hold.
const maxTexts = 8

// Page is a text that is rendered by one request at a time; all requests that arrive meanwhile share the next text.
// While slow readers hold many texts, new readers share the newest, so that memory is bounded. The zero Page is
// ready.
type Page struct {
	turn atomic.Int64 // of the newest text, set before it is rendered

	mu     sync.Mutex
	held   int // texts that readers hold
	newest *text
}

type text struct {
	turn    int64
	bytes   []byte
	err     error
	readers int
}

// Get returns a text that was rendered after the call, or an older one if readers hold too many. The text is shared
// until done is called.
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
