package kubesecrets

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/pki"
)

// document is a Secret as the API server sends it.
type document struct {
	Metadata kube.ObjectMeta   `json:"metadata"`
	Data     map[string][]byte `json:"data"`
}

// object is the part of a Secret that is kept.
type object struct {
	uid         string // of the Secret; a recreated Secret of the same name has another
	version     string // the resourceVersion that was read
	pair, roots content
	size        int
	round       int // the last list that contained it
}

// content is a key pair, or roots. The zero content is empty.
type content struct {
	secret *pki.Secret // the last good secret
	err    error       // why the Secret's current content is not in use
	note   error       // about the content in use
}

// end returns when the secret in use ends; zero if there is none, or it has no end.
func (c *content) end() (end time.Time) {
	if c.secret != nil {
		end = c.secret.NotAfter()
	}
	return end
}

// bytes returns the size of c.
func (c *content) bytes() (n int) {
	if c.secret != nil {
		for _, b := range parts(c.secret) {
			n += len(b)
		}
	}
	return n
}

// parts returns the PEM in s.
func parts(s *pki.Secret) [][]byte {
	chain, key, _ := s.KeyPair()
	roots, _ := s.Roots()
	crls, _ := s.CRLs()
	return [][]byte{chain, key, roots, crls}
}

// renamed returns s under another name.
func renamed(name string, s *pki.Secret) (*pki.Secret, error) {
	if s.Name() == name {
		return s, nil
	}
	chain, key, _ := s.KeyPair()
	roots, _ := s.Roots()
	other, err := pki.NewSecretPEM(name, chain, key, roots, time.Time{})
	if crls, leafOnly := s.CRLs(); err == nil && crls != nil {
		other, err = other.WithCRLs(crls, leafOnly)
	}
	return other, err
}

// with returns c updated with now, the content just read, and reports whether the secret in use has changed.
func (c content) with(now content) (content, bool) {
	switch {
	case now.secret != nil && c.secret != nil && slices.EqualFunc(parts(now.secret), parts(c.secret), bytes.Equal):
		now.secret = c.secret
		return now, false
	case now.secret != nil:
		return now, true
	case now.err == nil && c.secret != nil:
		now.err = errTakenOut
	}
	now.secret, now.note = c.secret, c.note
	return now, false
}

var errTakenOut = errors.New("it was taken out of the Secret; to withdraw it, delete the Secret")

// related reports whether a Secret is kept: because some of its data is served, even in part, or because of its name.
func related(k key, data map[string][]byte) bool {
	names := []string{"cert", "tls.crt", "tls.key", "cacert", "ca.crt"}
	return strings.HasSuffix(k.name, caSuffix) ||
		slices.ContainsFunc(names, func(name string) bool { return len(data[name]) > 0 })
}

// pairOf returns the key pair of a Secret.
func pairOf(k key, data map[string][]byte) (c content) {
	for _, form := range [][2]string{{"cert", "key"}, {"tls.crt", "tls.key"}} {
		certs, keyPEM := data[form[0]], data[form[1]]
		switch {
		case len(certs) > 0 && len(keyPEM) > 0:
			if c.secret, c.err = secretset.KeyPair(k.String(), certs, keyPEM); c.err != nil {
				c.err = fmt.Errorf("%s and %s: %w", form[0], form[1], c.err)
			}
			return c
		case len(certs) > 0:
			c.err = fmt.Errorf("the Secret has %s without %s, and a key pair needs both", form[0], form[1])
		case len(keyPEM) > 0 && c.err == nil:
			c.err = fmt.Errorf("the Secret has %s without %s, and a key pair needs both", form[1], form[0])
		}
	}
	return c
}

// rootsOf returns the roots of a Secret.
func rootsOf(k key, data map[string][]byte) content {
	forms := [][2]string{{"cacert", "crl"}, {"ca.crt", "ca.crl"}}
	if len(data["cacert"]) == 0 {
		slices.Reverse(forms)
	}
	roots, crls := forms[0][0], forms[0][1]
	if len(data[roots]) == 0 {
		return content{}
	}
	if len(data[crls]) == 0 { // a list under the other name must not be passed over
		crls = forms[1][1]
	}
	name := k.String()
	if !strings.HasSuffix(name, caSuffix) {
		name += caSuffix
	}
	secret, note, err := secretset.Roots(name, data[roots])
	if err != nil {
		return content{err: fmt.Errorf("%s: %w", roots, err)}
	}
	if lists := data[crls]; len(lists) > 0 {
		if secret, err = secret.WithCRLs(lists, false); err == nil && secretset.Expired(secret) {
			err = fmt.Errorf("a revocation list has ended at %s", secret.NotAfter().UTC().Format(time.RFC3339))
		}
		if err != nil {
			return content{err: fmt.Errorf("%s: %w", crls, err)}
		}
	}
	return content{secret: secret, note: note}
}

// changes are the names whose secrets have changed.
type changes struct{ roots, pairs []string }

// tell notifies the subscribers, of roots first.
func (s *Source) tell(c changes) {
	s.news.Notify()
	<-s.subs.Tell(func() []string { return append(c.roots, c.pairs...) })
}

// add adds the changed names of k.
func (s *Source) add(c *changes, k key, roots, pair bool) {
	names := func(name string) (all []string) {
		if all = append(all, key{k.namespace, name}.String()); k.namespace == s.cfg.Namespace {
			all = append(all, scheme+name)
		}
		return all
	}
	isCA := strings.HasSuffix(k.name, caSuffix)
	if roots {
		c.roots = append(c.roots, names(k.name+caSuffix)...)
		if isCA {
			c.roots = append(c.roots, names(k.name)...)
		}
	}
	if pair && !isCA {
		c.pairs = append(c.pairs, names(k.name)...)
	}
}

// take puts the good content of a Secret into use. Only the goroutine that follows the API server calls it.
func (s *Source) take(ctx context.Context, d *document, c *changes) {
	k := key{d.Metadata.Namespace, d.Metadata.Name}
	s.mu.Lock()
	old := s.objects[k]
	if old != nil {
		old.round = s.round
	}
	s.mu.Unlock()
	replaced := old != nil && old.uid != d.Metadata.UID // deleted and recreated while the watch was down
	switch isRelated := related(k, d.Data); {
	case replaced && !isRelated:
		s.withdraw(ctx, k, c)
		return
	case old == nil && !isRelated, old != nil && old.version == d.Metadata.ResourceVersion:
		return
	}
	now := object{uid: d.Metadata.UID, version: d.Metadata.ResourceVersion, roots: rootsOf(k, d.Data)}
	if !strings.HasSuffix(k.name, caSuffix) { // otherwise its name means roots only
		now.pair = pairOf(k, d.Data)
	}
	var before object
	hadPair := replaced && old.pair.secret != nil
	s.mu.Lock()
	switch {
	case replaced: // the old Secret's content is not the last good content of the new one
		s.used -= old.size
		delete(s.objects, k)
		old = nil
	case old != nil:
		before = *old
	}
	now, pair, roots := s.keep(k, before, now, old == nil)
	s.mu.Unlock()
	s.add(c, k, roots || replaced, pair || hadPair)
	s.report(ctx, k, before.pair, now.pair, pair)
	s.report(ctx, k, before.roots, now.roots, roots)
}

// keep stores the good content of a Secret, new or earlier, within the size limit. It returns the object, and whether
// the pair and the roots have changed. The lock is held.
func (s *Source) keep(k key, before, now object, isNew bool) (kept object, pair, roots bool) {
	now.pair, pair = before.pair.with(now.pair)
	now.roots, roots = before.roots.with(now.roots)
	if strings.HasSuffix(k.name, caSuffix) && now.roots.secret == nil {
		now.roots.err = cmp.Or(now.roots.err, errNothing)
	}
	if now.pair.err != nil {
		now.version = "" // read it again with the next list: the certificate may have become valid
	}
	now.size, now.round = overhead+now.pair.bytes()+now.roots.bytes(), s.round
	switch {
	case s.used-before.size+now.size <= s.cfg.maxBytes:
		s.used += now.size - before.size
		delete(s.crowded, k)
	case isNew:
		s.crowded[k] = s.round
		return object{pair: content{err: errRoom}}, false, false
	default: // keep the earlier content, and read the Secret again with the next list
		now = before
		s.crowded[k] = s.round
		now.version, now.pair.err, now.roots.err = "", errRoom, errRoom
		pair, roots = false, false
	}
	stored := now // a copy, which changes under the lock
	s.objects[k] = &stored
	return now, pair, roots
}

var errRoom = errors.New("there is no room for it: select less by Config.LabelSelector or Config.Type")

// report logs the outcome for one content of a Secret.
func (s *Source) report(ctx context.Context, k key, before, now content, changed bool) {
	name := slog.String("name", k.String())
	if changed {
		attrs := []slog.Attr{name}
		if end := now.secret.NotAfter(); !end.IsZero() {
			attrs = append(attrs, slog.Time("not_after", end))
		}
		s.log.LogAttrs(ctx, slog.LevelInfo, "kubesecrets: update", attrs...)
		if now.note != nil {
			s.log.LogAttrs(ctx, slog.LevelWarn, "kubesecrets: needs attention", name, slog.Any("err", now.note))
		}
	}
	if now.err != nil && (before.err == nil || before.err.Error() != now.err.Error()) {
		message := "kubesecrets: Secret refused"
		if now.secret != nil {
			message = "kubesecrets: Secret refused, the last good content stays in use"
		}
		s.log.LogAttrs(ctx, slog.LevelWarn, message, name, slog.Any("err", now.err))
	}
}

// withdraw removes a Secret that no longer exists.
func (s *Source) withdraw(ctx context.Context, k key, c *changes) {
	s.mu.Lock()
	o := s.objects[k]
	delete(s.crowded, k)
	if o != nil {
		s.used -= o.size
		delete(s.objects, k)
	}
	s.mu.Unlock()
	if o != nil {
		s.add(c, k, true, o.pair.secret != nil)
		s.log.LogAttrs(ctx, slog.LevelInfo, "kubesecrets: withdrawn, as there is no such Secret any more",
			slog.String("name", k.String()))
	}
}

// sweep withdraws the Secrets that the last list did not contain.
func (s *Source) sweep(ctx context.Context, c *changes) {
	s.mu.Lock()
	var gone []key
	for k, o := range s.objects {
		if o.round != s.round {
			gone = append(gone, k)
		}
	}
	maps.DeleteFunc(s.crowded, func(_ key, round int) bool { return round != s.round })
	s.mu.Unlock()
	for _, k := range gone {
		s.withdraw(ctx, k, c)
	}
}
