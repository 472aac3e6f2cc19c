package filesource_test

import (
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesource"
)

var long = flag.Bool("long", false, "wait for each of the 200 steps of the rotation")

// The volume of a Secret is swapped again and again, with a new leaf each time and a new root every fourth time, while
// readers spin: none ever sees a missing snapshot, a key without its certificate, or a leaf that the bundle of its
// snapshot does not verify. They rest between two looks in a default run.
func TestRotation(t *testing.T) { // not in parallel, as readers that spin slow the others down
	rounds.NotShort(t)
	onlyUnix(t)
	steps := rounds.Of(16)
	pause := time.Duration(max(0, 2-rounds.Of(1))) * 100 * time.Microsecond
	ca := newCA(t)
	v := &volume{dir: t.TempDir()}
	last := ca.SVID("/web")
	v.swap(t, 0o644, secret(t, last, ca.Bundle()))
	s := start(t, layout(v.dir))

	var reads atomic.Int64
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			var before *spiffe.Snapshot
			for {
				select {
				case <-stop:
					return
				default:
				}
				reads.Add(1)
				if fault := look(s, &before); fault != "" && !assert.Empty(t, fault) {
					return
				}
				time.Sleep(pause)
			}
		})
	}
	taken := map[string]bool{}
	for n := range steps {
		if n%4 == 3 {
			ca.Rotate()
			if n%8 == 7 {
				ca.DropOldRoots()
			}
		}
		last = ca.SVID("/web")
		v.swap(t, 0o644, secret(t, last, ca.Bundle()))
		if *long || n%25 == 0 || n == steps-1 {
			awaitSVID(t, s, last)
		} else {
			time.Sleep(time.Duration(n%5) * time.Millisecond)
		}
		taken[serial(t, s)] = true
	}
	close(stop)
	readers.Wait()
	st := s.Status()
	assert.NoError(t, st.Err)
	assert.Empty(t, st.Notes)
	assert.GreaterOrEqual(t, len(taken), 1+steps/25)
	t.Logf("%d reads, %d identities taken over", reads.Load(), len(taken))
}

// look reads everything once, and says what is wrong.
func look(s *filesource.Source, before **spiffe.Snapshot) string {
	snap, err := s.Snapshot()
	switch {
	case err != nil:
		return err.Error()
	case snap == *before:
		return ""
	}
	*before = snap
	svid, err := snap.SVID()
	if err != nil {
		return err.Error()
	}
	if _, err := spiffe.NewSVID(svid.Chain(), svid.Signer()); err != nil {
		return fmt.Sprint("the key: ", err)
	}
	verifier, err := spiffe.NewVerifier(snap, spiffe.AllowIDs(svid.ID()), nil)
	if err != nil {
		return err.Error()
	}
	if _, err := verifier.VerifyChain(svid.Chain(), spiffe.BothRoles); err != nil {
		return fmt.Sprint("the bundle: ", err)
	}
	if _, err := s.Bundle(td); err != nil {
		return err.Error()
	}
	return ""
}
