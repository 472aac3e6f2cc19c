package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// workloads is an [sds.Source] with the certificate of each workload that Envoys ask for, by the workload's name.
type workloads struct {
	ctx    context.Context // ends the sources of all workloads
	client *broker.Client
	most   int // workloads at a time
	log    *slog.Logger
	none   *ratelog.Log // of names without a certificate, which clients of the Envoys choose
	wg     sync.WaitGroup

	mu      sync.Mutex
	running map[string]*workload
	changed func(name string) // the function of Subscribe
}

var _ sds.Source = (*workloads)(nil)

// workload is one that Envoys ask for.
type workload struct {
	*workloadapi.Source
	secrets sds.Source      // over the Source
	ctx     context.Context // is done when the Source is not followed any more
	stop    context.CancelCauseFunc
	served  atomic.Bool // an Envoy has asked for its certificate, and may have it
}

var form = regexp.MustCompile(`^(?:([1-9][0-9]*)\.pid|(.+)\.([^.]+)\.(pod|account))$`)

// reference returns what a name means: PID.pid, NAME.NAMESPACE.pod or NAME.NAMESPACE.account.
func reference(name string) (broker.Reference, error) {
	m := form.FindStringSubmatch(strings.ToLower(name)) // as names of DNS have no case
	if m == nil {
		return broker.Reference{}, errors.New("it is none of PID.pid, NAME.NAMESPACE.pod and NAME.NAMESPACE.account")
	}
	if m[1] != "" {
		pid, err := strconv.ParseInt(m[1], 10, 32)
		return broker.Reference{PID: int32(pid)}, err
	}
	plural := map[string]string{"pod": "pods", "account": "serviceaccounts"}[m[4]]
	return broker.Reference{Object: broker.Object{Plural: plural, Group: "core", Namespace: m[3], Name: m[2]}}, nil
}

// GenerateSecret returns the certificate of a workload. The first call for a name begins to follow the workload.
func (s *workloads) GenerateSecret(ctx context.Context, name string) (secret *pki.Secret, err error) {
	w, err := s.follow(name)
	if err == nil {
		waiting, cancel := context.WithCancel(ctx)
		defer context.AfterFunc(w.ctx, cancel)()
		secret, err = w.secrets.GenerateSecret(waiting, "default")
		switch cause := context.Cause(w.ctx); {
		case err == nil || s.ctx.Err() != nil:
		case cause == errUnused: // by an earlier stream
			return s.GenerateSecret(ctx, name)
		case cause != nil || errors.Is(err, fs.ErrNotExist): // the next request asks again
			_, why := w.SVID()
			s.end(name, w, why)
			err = fmt.Errorf("%w: %w", fs.ErrNotExist, cmp.Or(why, err))
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		s.none.Warn("node-proxy: a name has no certificate", "no workload", slog.String("name", name), slog.Any("err", err))
	} else if err == nil && !w.served.Swap(true) {
		s.log.Info("node-proxy: a workload is served", slog.String("name", name))
	}
	return secret, err
}

// Subscribe implements [sds.Source] for the one handler of this program.
func (s *workloads) Subscribe(f func(name string)) (cancel func()) {
	s.changed = f
	return func() {}
}

// follow returns the workload with a name, and begins to follow it if it is new.
func (s *workloads) follow(name string) (*workload, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.running[name]; w != nil {
		return w, nil
	}
	of, err := reference(name)
	var client *workloadapi.Client
	if err == nil {
		client, err = s.client.For(of)
	}
	switch {
	case err != nil: // there is no such process, or the name is none of Kubernetes
		return nil, fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	case len(s.running) >= s.most || s.ctx.Err() != nil:
		return nil, fmt.Errorf("there are %d workloads already: wait, or raise -max-workloads", len(s.running))
	}
	w := new(workload)
	if w.Source, err = workloadapi.New(workloadapi.Config{Client: client}); err != nil {
		return nil, err
	}
	s.running[name] = w
	w.ctx, w.stop = context.WithCancelCause(s.ctx)
	w.secrets = sdssource.FromIdentity(w.Source)
	context.AfterFunc(w.ctx, w.secrets.Subscribe(func(changed string) {
		if changed == "default" {
			s.changed(name)
		}
	}))
	s.wg.Go(func() {
		err := w.Run(w.ctx)
		s.end(name, w, err)
	})
	return w, nil
}

// end forgets a workload. A stream that has its certificate is told.
func (s *workloads) end(name string, w *workload, why error) {
	s.mu.Lock()
	here := s.running[name] == w && s.ctx.Err() == nil
	if here {
		delete(s.running, name)
	}
	s.mu.Unlock()
	w.stop(why)
	if here && w.served.Load() {
		s.log.Info("node-proxy: a workload is served no more", slog.String("name", name), slog.Any("why", why))
		s.changed(name)
	}
}

// run ends the workloads that no stream asks for, until the context of s ends. asked returns the names that streams
// ask for.
func (s *workloads) run(asked func() map[string]string) {
	for tick := time.Tick(time.Second); s.ctx.Err() == nil; {
		all := s.all() // before asked: each of them began with a request
		names := asked()
		for name, w := range all {
			if _, wanted := names[name]; !wanted {
				s.end(name, w, errUnused)
			}
		}
		select {
		case <-tick:
		case <-s.ctx.Done():
		}
	}
	s.all() // follow begins no source after this
	s.wg.Wait()
}

var errUnused = errors.New("no Envoy asks for it any more")

// all returns the workloads by name.
func (s *workloads) all() map[string]*workload {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.running)
}

// Report implements [report.Reporter] with the identities of the workloads.
func (s *workloads) Report() (r report.Report) {
	all := s.all()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for _, one := range all[name].Report().Identities {
			one.Own, one.Name = false, strings.TrimSpace(name+" "+one.Name)
			r.Identities = append(r.Identities, one)
		}
	}
	return r
}
