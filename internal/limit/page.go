package limit

import (
	"bytes"
	"sync"
	"time"
)

// maxTexts is how many texts of a Page slow readers can have.
const maxTexts = 8

// Page is a text that is rendered once for all that ask for it meanwhile, and by one of them at a time. While readers are slow
// to take many of its texts, those that come share the newest, so that they hold no more memory. The zero Page is ready.
type Page struct {
	mu     sync.Mutex
	held   int // texts that readers have
	newest *text
}

type text struct {
	begun   time.Time
	bytes   []byte
	err     error
	readers int
}

// Get returns what render writes, or has written for a reader that has not called done. Readers share it.
func (p *Page) Get(render func(*bytes.Buffer) error) (page []byte, done func(), err error) {
	came := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.newest
	if t == nil || t.begun.Before(came) && p.held < maxTexts {
		var b bytes.Buffer
		t = &text{begun: time.Now()}
		t.err = render(&b)
		t.bytes = b.Bytes()
		p.newest = t
		p.held++
	}
	t.readers++
	return t.bytes, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if t.readers--; t.readers > 0 {
			return
		}
		if p.held--; p.newest == t {
			p.newest = nil
		}
	}, t.err
}
