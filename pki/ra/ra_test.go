package ra_test

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

func TestSign(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.8-5")
	root := newAuthority(t, "root", nil)
	c := start(t, bubble(t), certifying(t, root))
	a := c.ra(trust(t, root))
	r := web(t)
	r.TTL = time.Hour + time.Second/2
	chain := must.Get(a.Sign(t.Context(), r))(t)
	require.Len(t, chain, 1)
	assert.True(t, pki.PublicKeysEqual(chain[0].PublicKey, r.CSR.PublicKey()))
	id := must.Get(spiffe.IDFromCertificate(chain[0]))(t)
	assert.Equal(t, webID, id)
	must.Get(chain[0].Verify(x509.VerifyOptions{Roots: a.Bundle().CertPool()}))(t)

	// what the signer saw
	seen := c.approved()
	require.Len(t, seen, 1)
	o := seen[0]
	assert.Equal(t, "certificates.k8s.io/v1", o.APIVersion)
	assert.Equal(t, "CertificateSigningRequest", o.Kind)
	assert.Regexp(t, `^csr-workload-[a-z2-7]{26}$`, o.Metadata["name"])
	assert.Equal(t, r.CSR.PEM(), o.Spec.Request)
	assert.Equal(t, signerName, o.Spec.SignerName)
	assert.Equal(t, []string{"digital signature", "key encipherment", "server auth", "client auth"}, o.Spec.Usages)
	require.NotNil(t, o.Spec.ExpirationSeconds)
	assert.EqualValues(t, 3600, *o.Spec.ExpirationSeconds)
	require.Len(t, o.Status.Conditions, 1)
	assert.Equal(t, "True", o.Status.Conditions[0]["status"])
	assert.NotEmpty(t, o.Status.Conditions[0]["reason"])

	// and what is left
	assert.Equal(t, 1, c.Count(http.MethodPost, csrs))
	assert.Equal(t, 1, c.Count(http.MethodPut, csrs))
	assert.Equal(t, 1, c.Count(http.MethodDelete, csrs))
	assert.Zero(t, c.left())
	assert.Equal(t, td, a.Bundle().TrustDomain())
}

// Without a lifetime the signer has the choice. The shortest that Kubernetes allows is allowed.
func TestSignTTL(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	c := start(t, bubble(t), certifying(t, root))
	for n, ttl := range []time.Duration{0, -time.Hour, 10 * time.Minute} {
		r := web(t)
		r.TTL = ttl
		must.Get(c.ra(trust(t, root)).Sign(t.Context(), r))(t)
		require.Len(t, c.approved(), n+1)
	}
	seconds := 0
	for _, o := range c.approved() {
		if o.Spec.ExpirationSeconds != nil {
			seconds += int(*o.Spec.ExpirationSeconds)
		}
	}
	assert.Equal(t, 600, seconds)
}

func TestSignMany(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	c := start(t, kubetest.Start(t), certifying(t, root))
	a := c.ra(trust(t, root))
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			r := web(t)
			chain, err := a.Sign(t.Context(), r)
			if assert.NoError(t, err) {
				assert.True(t, pki.PublicKeysEqual(chain[0].PublicKey, r.CSR.PublicKey()), "the certificate of another request")
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 20, c.Count(http.MethodDelete, csrs))
	assert.Zero(t, c.left())
}

// A signer that does nothing: the deadline, and the object is deleted.
func TestSignNeverAnswered(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.8-5")
	synctest.Test(t, func(t *testing.T) {
		root := newAuthority(t, "root", nil)
		c := start(t, bubble(t), nil)
		began := time.Now()
		_, err := c.ra(trust(t, root)).Sign(t.Context(), web(t))
		signError(t, err, spiffe.ErrNotReady, "no certificate within 1m0s", `does the signer "example.com/mesh" run?`)
		assert.Equal(t, time.Minute, time.Since(began))
		assert.Equal(t, 1, c.Count(http.MethodDelete, csrs))
		assert.Zero(t, c.left())
	})
}

func TestSignDenied(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	fails := func(condition string, status string) func(o *object) {
		return func(o *object) {
			o.Status.Conditions = append(o.Status.Conditions, map[string]any{"type": condition, "status": status, "reason": "Policy", "message": "not\ntoday"})
		}
	}
	for _, c := range []struct {
		name   string
		answer func(o *object)
		text   string
	}{
		{"failed", fails("Failed", "True"), "the request was failed: Policy: not today"},
		{"denied after all", fails("Denied", "True"), "the request was denied: Policy: not today"},
		{"failed with a certificate", func(o *object) {
			fails("Failed", "True")(o)
			certifying(t, root)(o)
		}, "the request was failed"},
		{"without a reason", func(o *object) {
			o.Status.Conditions = append(o.Status.Conditions, map[string]any{"type": "Failed", "status": "True"})
		}, "no reason given: no reason given"},
		{"a long reason", func(o *object) {
			o.Status.Conditions = append(o.Status.Conditions, map[string]any{"type": "Failed", "status": "True", "message": strings.Repeat("ö\x00", 10_000)})
		}, "ö ö ö"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			k := start(t, bubble(t), c.answer)
			_, err := k.ra(trust(t, root)).Sign(t.Context(), web(t))
			signError(t, err, ca.ErrGeneration, c.text)
			assert.Equal(t, 1, k.Count(http.MethodDelete, csrs))
			assert.Zero(t, k.left())
		})
	}
	t.Run("a condition that does not hold", func(t *testing.T) {
		t.Parallel()
		k := start(t, bubble(t), func(o *object) {
			fails("Failed", "False")(o)
			fails("Other", "True")(o)
			certifying(t, root)(o)
		})
		must.Get(k.ra(trust(t, root)).Sign(t.Context(), web(t)))(t)
	})
}

// on runs f once, just before the server carries out the first request that matches.
func on(c *cluster, match func(*http.Request) bool, f func(name string)) {
	done := false
	c.Faults(func(r *http.Request) *kubetest.Fault {
		if !done && match(r) {
			done = true
			name, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, csrs+"/"), "/")
			f(name)
		}
		return nil
	})
}

func approval(r *http.Request) bool {
	return r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/approval")
}

// reading recognizes our question for the object.
func reading(r *http.Request) bool {
	return r.Method == http.MethodGet && strings.HasPrefix(r.URL.Path, csrs+"/")
}

// Another client writes the object between our steps.
func TestSignConflicts(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	change := func(c *cluster, name string, edit func(*object)) {
		o := &object{}
		if assert.True(t, c.Get(csrs+"/"+name, o)) {
			edit(o)
			c.Put(csrs+"/"+name, o)
		}
	}
	condition := func(typ string) map[string]any {
		return map[string]any{"type": typ, "status": "True", "reason": "ByHand"}
	}
	for _, x := range []struct {
		name  string
		edit  func(*object)
		kind  error // nil for a certificate
		texts []string
		puts  int
	}{
		{"an annotation", func(o *object) { o.Metadata["annotations"] = map[string]string{"a": "b"} }, nil, nil, 2},
		{"another condition", func(o *object) { o.Status.Conditions = append(o.Status.Conditions, condition("Seen")) }, nil, nil, 2},
		{"approved by hand", func(o *object) { o.Status.Conditions = append(o.Status.Conditions, condition("Approved")) }, nil, nil, 1},
		{"denied by hand", func(o *object) { o.Status.Conditions = append(o.Status.Conditions, condition("Denied")) }, ca.ErrGeneration, []string{"denied: ByHand"}, 1},
		{"another key", func(o *object) { o.Spec.Request = newCSR(t, pki.IDSAN(webID)).PEM() }, ca.ErrGeneration, []string{"the request is not as we sent it", "webhook"}, 1},
		{"another signer", func(o *object) { o.Spec.SignerName = "example.com/other" }, ca.ErrGeneration, []string{"not as we sent it"}, 1},
		{"another usage", func(o *object) { o.Spec.Usages = append(o.Spec.Usages, "cert sign") }, ca.ErrGeneration, []string{"not as we sent it"}, 1},
		{"another life", func(o *object) { o.Spec.ExpirationSeconds = new(int64(86400 * 365)) }, ca.ErrGeneration, []string{"not as we sent it"}, 1},
		{"replaced", func(o *object) { o.Metadata["uid"] = "another" }, ca.ErrGeneration, []string{"the request was replaced"}, 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			c := start(t, bubble(t), certifying(t, root))
			on(c, approval, func(name string) { change(c, name, x.edit) })
			_, err := c.ra(trust(t, root)).Sign(t.Context(), web(t))
			if x.kind == nil {
				require.NoError(t, err)
				require.Len(t, c.approved(), 1)
				want := &object{Metadata: map[string]any{}}
				x.edit(want)
				for _, kept := range want.Status.Conditions {
					assert.True(t, c.approved()[0].has(kept["type"].(string)), "the condition %s got lost", kept["type"])
				}
				assert.Equal(t, len(want.Metadata), btoi(c.approved()[0].Metadata["annotations"] != nil), "annotations")
			} else {
				signError(t, err, x.kind, x.texts...)
				assert.Empty(t, c.approved(), "something that we did not send was approved")
			}
			assert.Equal(t, x.puts, c.Count(http.MethodPut, csrs))
			assert.Equal(t, 1, c.Count(http.MethodDelete, csrs))
			assert.Zero(t, c.left())
		})
	}
	t.Run("changed on creation", func(t *testing.T) {
		t.Parallel()
		c := start(t, bubble(t), certifying(t, root))
		transport := c.Client().Transport
		for _, head := range []string{
			`"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"name":"other","uid":"u","resourceVersion":"1"}`,
			`"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"name":"NAME","resourceVersion":"1"}`,
			`"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"name":"NAME","uid":"u"}`,
			`"apiVersion":"certificates.k8s.io/v1","kind":"Secret","metadata":{"name":"NAME","uid":"u","resourceVersion":"1"}`,
			`"apiVersion":"certificates.k8s.io/v1beta1","kind":"CertificateSigningRequest","metadata":{"name":"NAME","uid":"u","resourceVersion":"1"}`,
		} {
			edited := &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
				if r.Method != http.MethodPost {
					return transport.RoundTrip(r)
				}
				defer r.Body.Close()
				var sent struct {
					Metadata struct{ Name string }
					Spec     json.RawMessage
				}
				if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
					return nil, err
				}
				body := "{" + strings.ReplaceAll(head, "NAME", sent.Metadata.Name) + `,"spec":` + string(sent.Spec) + "}"
				return &http.Response{StatusCode: 201, Header: http.Header{"Content-Type": {"application/json"}}, Body: readCloser(body), Request: r}, nil
			})}
			_, err := c.ra(trust(t, root), func(c *ra.Config) { c.HTTPClient = edited }).Sign(t.Context(), web(t))
			signError(t, err, ca.ErrGeneration, "another object")
		}
		assert.Zero(t, c.Count(http.MethodPut, csrs))
	})
	t.Run("deleted before the approval", func(t *testing.T) {
		t.Parallel()
		c := start(t, bubble(t), certifying(t, root))
		on(c, approval, func(name string) { c.Remove(csrs + "/" + name) })
		_, err := c.ra(trust(t, root)).Sign(t.Context(), web(t))
		signError(t, err, ca.ErrGeneration, "approve the request", "404")
	})
	t.Run("deleted while we wait", func(t *testing.T) {
		t.Parallel()
		c := start(t, bubble(t), nil)
		on(c, reading, func(name string) { c.Remove(csrs + "/" + name) })
		_, err := c.ra(trust(t, root)).Sign(t.Context(), web(t))
		signError(t, err, ca.ErrGeneration, "read the request", "404")
	})
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

type body struct{ *strings.Reader }

func readCloser(s string) body { return body{strings.NewReader(s)} }
func (body) Close() error      { return nil }

// Questions for the object fail; nothing is missed, and no caller waits longer than needed.
func TestSignReads(t *testing.T) {
	t.Parallel()
	for name, disturb := range map[string]func(c *cluster){
		"cut":    func(c *cluster) { c.FailNext(2, kubetest.Fault{}, reading) },
		"broken": func(c *cluster) { c.FailNext(3, kubetest.Fault{Code: 500}, reading) },
		"busy":   func(c *cluster) { c.FailNext(3, kubetest.Fault{Code: 429, RetryAfter: time.Second}, reading) },
		"hangs":  func(c *cluster) { c.FailNext(1, kubetest.Fault{Hang: true}, reading) },
		"all down for a while": func(c *cluster) {
			on(c, reading, func(string) {
				until := time.Now().Add(2 * time.Second)
				time.AfterFunc(0, func() {
					c.Faults(func(*http.Request) *kubetest.Fault {
						if time.Now().Before(until) {
							return &kubetest.Fault{Code: 503}
						}
						return nil
					})
				})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				root := newAuthority(t, "root", nil)
				c := start(t, bubble(t), func(o *object) {
					time.Sleep(3 * time.Second)
					certifying(t, root)(o)
				})
				disturb(c)
				began := time.Now()
				must.Get(c.ra(trust(t, root)).Sign(t.Context(), web(t)))(t)
				limit := 6 * time.Second
				if name == "hangs" {
					limit = 14 * time.Second
				}
				assert.Less(t, time.Since(began), limit)
				assert.Equal(t, 1, c.Count(http.MethodDelete, csrs))
				assert.Zero(t, c.left())
			})
		})
	}
}

// An API server that does not do as it is told.
func TestSignAPIFails(t *testing.T) {
	t.Parallel()
	creation := func(r *http.Request) bool { return r.Method == http.MethodPost }
	deletion := func(r *http.Request) bool { return r.Method == http.MethodDelete }
	for _, x := range []struct {
		name    string
		n       int
		fault   kubetest.Fault
		at      func(*http.Request) bool
		kind    error // nil for a certificate
		texts   []string
		retry   time.Duration
		deletes int
	}{
		{"creation forbidden", 1, kubetest.Fault{Code: 403, Reason: "Forbidden"}, creation, ca.ErrGeneration, []string{"create the request", "let the service account of this program create", "approve signers named example.com/mesh"}, 0, 0},
		{"creation unauthorized", 1, kubetest.Fault{Code: 401}, creation, spiffe.ErrNotReady, []string{"401"}, 0, 0},
		{"creation invalid", 1, kubetest.Fault{Code: 422, Reason: "Invalid", Message: "spec.signerName"}, creation, ca.ErrGeneration, []string{"422 Invalid: spec.signerName"}, 0, 0},
		{"no such API", 1, kubetest.Fault{Code: 404}, creation, ca.ErrGeneration, []string{"404"}, 0, 0},
		{"creation busy", 1, kubetest.Fault{Code: 429, RetryAfter: 7 * time.Second}, creation, ca.ErrLimit, []string{"429"}, 7 * time.Second, 0},
		{"creation broken", 1, kubetest.Fault{Code: 500}, creation, spiffe.ErrNotReady, []string{"500"}, 0, 4},
		{"creation unavailable", 1, kubetest.Fault{Code: 503, RetryAfter: 2 * time.Second}, creation, spiffe.ErrNotReady, []string{"503"}, 2 * time.Second, 4},
		{"creation landed, and the answer is lost", 1, kubetest.Fault{Landed: true}, creation, spiffe.ErrNotReady, []string{"create the request"}, 0, 1},
		{"creation landed, and the server fails", 1, kubetest.Fault{Code: 500, Landed: true}, creation, spiffe.ErrNotReady, []string{"500"}, 0, 1},
		{"creation is sent twice", 1, kubetest.Fault{Code: 409, Reason: "AlreadyExists", Landed: true}, creation, ca.ErrGeneration, []string{"409 AlreadyExists"}, 0, 1},
		{"approval forbidden", 1, kubetest.Fault{Code: 403, Reason: "Forbidden"}, approval, ca.ErrGeneration, []string{"approve the request", "certificatesigningrequests/approval"}, 0, 1},
		{"approval invalid", 1, kubetest.Fault{Code: 422}, approval, ca.ErrGeneration, []string{"422"}, 0, 1},
		{"approval broken", 3, kubetest.Fault{Code: 500}, approval, nil, nil, 0, 1},
		{"approval busy", 3, kubetest.Fault{Code: 429}, approval, nil, nil, 0, 1},
		{"approval cut", 2, kubetest.Fault{}, approval, nil, nil, 0, 1},
		{"approval landed, and the answer is lost", 1, kubetest.Fault{Landed: true}, approval, nil, nil, 0, 1},
		{"approval conflicts", 4, kubetest.Fault{Code: 409, Reason: "Conflict"}, approval, nil, nil, 0, 1},
		{"read forbidden", 1, kubetest.Fault{Code: 403}, reading, ca.ErrGeneration, []string{"read the request", "get and delete"}, 0, 1},
		{"deletion broken", 2, kubetest.Fault{Code: 500}, deletion, nil, nil, 0, 3},
		{"deletion landed, and the answer is lost", 1, kubetest.Fault{Landed: true}, deletion, nil, nil, 0, 5},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				root := newAuthority(t, "root", nil)
				c := start(t, bubble(t), certifying(t, root))
				c.FailNext(x.n, x.fault, x.at)
				_, err := c.ra(trust(t, root)).Sign(t.Context(), web(t))
				if x.kind == nil {
					require.NoError(t, err)
				} else {
					assert.Equal(t, x.retry, signError(t, err, x.kind, x.texts...).RetryAfter)
				}
				assert.Equal(t, x.deletes, c.Count(http.MethodDelete, csrs))
				assert.Zero(t, c.left())
			})
		})
	}
	t.Run("no server listens", func(t *testing.T) {
		t.Parallel()
		l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
		require.NoError(t, l.Close())
		root := newAuthority(t, "root", nil)
		a, err := ra.New(ra.Config{TrustDomain: td, Signer: signerName, Roots: bundle(t, root), APIServer: "http://" + l.Addr().String(), HTTPClient: &http.Client{}})
		require.NoError(t, err)
		_, err = a.Sign(t.Context(), web(t))
		signError(t, err, spiffe.ErrNotReady, "create the request")
	})
}

// An API server whose every answer is well formed and leads nowhere is asked now and then until the
// deadline, and not as fast as it answers.
func TestSignLeadsNowhere(t *testing.T) {
	t.Parallel()
	answers := func(status int, body []byte) *http.Response {
		return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: readCloser(string(body))}
	}
	for name, lie := range map[string]func(c *cluster, r *http.Request) (*http.Response, error){
		"approvals are not kept": func(c *cluster, r *http.Request) (*http.Response, error) {
			if !approval(r) {
				return nil, nil
			}
			o := json.RawMessage{}
			c.Get(strings.TrimSuffix(r.URL.Path, "/approval"), &o)
			return answers(200, o), nil
		},
		"nothing new": func(c *cluster, r *http.Request) (*http.Response, error) {
			name, ok := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
			if !ok {
				return nil, nil
			}
			o := json.RawMessage{}
			c.Get(csrs+"/"+name, &o)
			line, err := json.Marshal(map[string]any{"type": "MODIFIED", "object": o})
			return answers(200, append(line, '\n')), err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := start(t, bubble(t), nil)
				transport, asked := c.Client().Transport, 0
				liar := &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
					if asked++; asked > 1000 { // in a bubble the deadline does not come before there is a pause
						return nil, errors.New("asked too often")
					}
					if answer, err := lie(c, r); answer != nil || err != nil {
						return answer, err
					}
					return transport.RoundTrip(r)
				})}
				began := time.Now()
				_, err := c.ra(trust(t, newAuthority(t, "root", nil)), func(c *ra.Config) { c.HTTPClient = liar }).Sign(t.Context(), web(t))
				signError(t, err, spiffe.ErrNotReady, "no certificate within 1m0s")
				assert.Equal(t, time.Minute, time.Since(began))
				assert.Less(t, asked, 80)
				if asked < 1000 {
					assert.Zero(t, c.left())
				}
			})
		})
	}
}

// What cannot be deleted is logged, and does not cost the certificate.
func TestSignNotDeleted(t *testing.T) {
	t.Parallel()
	for _, fault := range []kubetest.Fault{{Code: 403, Reason: "Forbidden"}, {Code: 503}, {Hang: true}} {
		synctest.Test(t, func(t *testing.T) {
			root := newAuthority(t, "root", nil)
			c := start(t, bubble(t), certifying(t, root))
			c.FailNext(1000, fault, func(r *http.Request) bool { return r.Method == http.MethodDelete })
			var log strings.Builder
			a := c.ra(trust(t, root), func(c *ra.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			began := time.Now()
			must.Get(a.Sign(t.Context(), web(t)))(t)
			assert.LessOrEqual(t, time.Since(began), 5100*time.Millisecond)
			assert.Contains(t, log.String(), "level=WARN")
			assert.Contains(t, log.String(), "name=csr-workload-")
			assert.Equal(t, 1, strings.Count(log.String(), "\n"))
			assert.Equal(t, 1, c.left())
		})
	}
}

// The caller leaves at each of the steps: its reason is in the error, and the object goes.
func TestSignCanceled(t *testing.T) {
	t.Parallel()
	gone := errors.New("the caller has gone")
	for _, x := range []struct {
		name   string
		at     func(*http.Request) bool
		landed bool
		answer bool
	}{
		{"at the creation", func(r *http.Request) bool { return r.Method == http.MethodPost }, false, true},
		{"at the creation, which lands", func(r *http.Request) bool { return r.Method == http.MethodPost }, true, true},
		{"at the approval", approval, false, true},
		{"while it waits", reading, false, true},
		{"while it waits", nil, false, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				root := newAuthority(t, "root", nil)
				answer := certifying(t, root)
				if !x.answer {
					answer = nil
				}
				c := start(t, bubble(t), answer)
				if x.at != nil {
					c.FailNext(1, kubetest.Fault{Hang: true, Landed: x.landed}, x.at)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				time.AfterFunc(time.Second, func() { cancel(gone) })
				began := time.Now()
				_, err := c.ra(trust(t, root)).Sign(ctx, web(t))
				require.ErrorIs(t, err, gone)
				_, is := errors.AsType[*ca.SignError](err)
				assert.False(t, is, "%v", err)
				assert.True(t, strings.HasPrefix(err.Error(), `ra: sign "spiffe://example.org/ns/prod/sa/web": `), err)
				assert.Less(t, time.Since(began), 2*time.Second)
				assert.NotZero(t, c.Count(http.MethodDelete, csrs))
				assert.Zero(t, c.left())
			})
		})
	}
	t.Run("before", func(t *testing.T) {
		t.Parallel()
		c := start(t, bubble(t), nil)
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(gone)
		_, err := c.ra(trust(t, newAuthority(t, "root", nil))).Sign(ctx, web(t))
		require.ErrorIs(t, err, gone)
		assert.Empty(t, c.Requests())
	})
}

// A caller that leaves while we clean up behind an answer gets the answer.
func TestSignCanceledAfterwards(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	for _, answer := range []func(*object){certifying(t, root), func(o *object) {
		o.Status.Conditions = append(o.Status.Conditions, map[string]any{"type": "Failed", "status": "True"})
	}} {
		c := start(t, bubble(t), answer)
		ctx, cancel := context.WithCancel(t.Context())
		on(c, func(r *http.Request) bool { return r.Method == http.MethodDelete }, func(string) { cancel() })
		chain, err := c.ra(trust(t, root)).Sign(ctx, web(t))
		require.Error(t, ctx.Err())
		if err != nil {
			signError(t, err, ca.ErrGeneration, "failed")
		} else {
			assert.Len(t, chain, 1)
		}
		assert.Zero(t, c.left())
	}
}

// auditor keeps the records, or fails.
type auditor struct {
	mu      sync.Mutex
	records []*ca.Issuance
	err     error
	wait    func(context.Context) error
}

func (a *auditor) Record(ctx context.Context, i *ca.Issuance) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.records = append(a.records, i)
	if a.wait != nil {
		return a.wait(ctx)
	}
	return a.err
}

func TestAudit(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	between := newAuthority(t, "between", root)
	c := start(t, bubble(t), func(o *object) {
		o.Status.Certificate = encode(between.leaf(t, o.csr(t), o.life()), between.cert)
	})
	sink := &auditor{}
	a := c.ra(trust(t, root), func(c *ra.Config) { c.Auditor = sink })
	r := web(t)
	r.CSR = newCSR(t, pki.IDSAN(webID), pki.DNSSAN("web.prod.svc"), pki.SAN{Type: pki.IP, Value: "\xc0\x00\x02\x01"})
	r.DNSNames, r.IPs = []string{"web.prod.svc"}, []net.IP{ip("192.0.2.1")}
	r.Caller, r.Method = "the caller", "client-certificate"
	before := time.Now()
	chain := must.Get(a.Sign(t.Context(), r))(t)
	require.Len(t, sink.records, 1)
	leaf, i := chain[0], *sink.records[0]
	assert.WithinRange(t, i.Time, before.Round(0), time.Now())
	i.Time = time.Time{}
	der, key := sha256.Sum256(leaf.Raw), sha256.Sum256(leaf.RawSubjectPublicKeyInfo)
	assert.Equal(t, ca.Issuance{
		Kind: "x509-svid", Serial: leaf.SerialNumber.Text(16), ID: webID, DNSNames: []string{"web.prod.svc"}, IPs: leaf.IPAddresses,
		NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter, Issuer: between.cert.SerialNumber.Text(16),
		Fingerprint: hex.EncodeToString(der[:]), PublicKey: hex.EncodeToString(key[:]), Caller: "the caller", Method: "client-certificate",
	}, i)

	r = ca.Request{CSR: newCSR(t, pki.DNSSAN("web.prod.svc")), Profile: ca.DNSOnly, DNSNames: []string{"web.prod.svc"}}
	must.Get(a.Sign(t.Context(), r))(t)
	i = *sink.records[1]
	assert.Equal(t, "dns", i.Kind)
	assert.True(t, i.ID.IsZero())
	assert.Equal(t, "web.prod.svc", i.Caller)

	must.Get(a.Sign(t.Context(), web(t)))(t)
	assert.Equal(t, webID.String(), sink.records[2].Caller)

	sink.err = errors.New("disk full")
	chain, err := a.Sign(t.Context(), web(t))
	signError(t, err, ca.ErrAudit, "disk full")
	assert.Nil(t, chain)

	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("gone")
	sink.wait = func(ctx context.Context) error { cancel(gone); <-ctx.Done(); return context.Cause(ctx) }
	chain, err = a.Sign(ctx, web(t))
	require.ErrorIs(t, err, gone)
	assert.Nil(t, chain)
	_, is := errors.AsType[*ca.SignError](err)
	assert.False(t, is)
	assert.Zero(t, c.left())
}

// What is refused leaves no record.
func TestAuditOnlyWhatIsSigned(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	c := start(t, bubble(t), certifying(t, newAuthority(t, "root", nil)))
	sink := &auditor{}
	_, err := c.ra(trust(t, root), func(c *ra.Config) { c.Auditor = sink }).Sign(t.Context(), web(t))
	signError(t, err, ca.ErrGeneration)
	assert.Empty(t, sink.records)
}

func TestLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		root := newAuthority(t, "root", nil)
		c := start(t, bubble(t), func(o *object) {
			time.Sleep(time.Second)
			certifying(t, root)(o)
		})
		a := c.ra(trust(t, root), func(c *ra.Config) { c.Limits = ca.Limits{Concurrent: 1} })
		var wg sync.WaitGroup
		wg.Go(func() { _, err := a.Sign(t.Context(), web(t)); assert.NoError(t, err) })
		time.Sleep(time.Second / 2)
		_, err := a.Sign(t.Context(), web(t))
		signError(t, err, ca.ErrLimit)
		wg.Wait()
		_, err = a.Sign(t.Context(), web(t))
		require.NoError(t, err, "the place is free again")

		a = c.ra(trust(t, root), func(c *ra.Config) { c.Limits = ca.Limits{CallerRate: 0.1} })
		must.Get(a.Sign(t.Context(), web(t)))(t)
		_, err = a.Sign(t.Context(), web(t))
		assert.Positive(t, signError(t, err, ca.ErrLimit).RetryAfter)
		other := web(t)
		other.Caller = "another"
		must.Get(a.Sign(t.Context(), other))(t)

		// a caller that waits for a place stops with its context
		a = c.ra(trust(t, root), func(c *ra.Config) { c.Limits = ca.Limits{Concurrent: 1, Queue: 1} })
		wg.Go(func() { _, err := a.Sign(t.Context(), web(t)); assert.NoError(t, err) })
		time.Sleep(time.Second / 2)
		gone := errors.New("gone")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second/10, gone)
		defer cancel()
		_, err = a.Sign(ctx, web(t))
		require.ErrorIs(t, err, gone)
		wg.Wait()
	})
}

// A signer of the cluster says neither which of its keys are tainted, nor when a leaf's holder was last proven.
func TestCallers(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	a := start(t, bubble(t), nil).ra(trust(t, root))
	assert.Same(t, a.Bundle(), a.CallerBundle())
	assert.Zero(t, a.Proven(root.cert))
}

// Health says what keeps certificates from being signed, until they are again.
func TestHealth(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		root, sink := newAuthority(t, "root", nil), &auditor{}
		c := start(t, bubble(t), nil)
		a := c.ra(trust(t, root), func(c *ra.Config) { c.Auditor = sink })
		assert.Equal(t, ca.Health{}, a.Health())
		_, err := a.Sign(t.Context(), web(t))
		signError(t, err, spiffe.ErrNotReady)
		require.ErrorIs(t, a.Health().Store, spiffe.ErrNotReady)
		require.NoError(t, a.Health().Signing)
		time.Sleep(11 * time.Second)
		assert.Equal(t, ca.Health{}, a.Health())

		a = start(t, bubble(t), certifying(t, root)).ra(trust(t, root), func(c *ra.Config) { c.Auditor = sink })
		sink.err = errors.New("disk full")
		_, err = a.Sign(t.Context(), web(t))
		signError(t, err, ca.ErrAudit)
		require.ErrorIs(t, a.Health().Signing, sink.err)
		require.ErrorIs(t, a.Health().Audit, sink.err)
		sink.err = nil
		must.Get(a.Sign(t.Context(), web(t)))(t)
		assert.Equal(t, ca.Health{}, a.Health())

		a = c.ra(func(c *ra.Config) { c.Roots = noRoots{} })
		require.ErrorContains(t, a.Health().Signing, `the roots of the signers: none yet`)
	})
}

type noRoots struct{}

func (noRoots) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, errors.New("none yet") }
