//go:build go1.27

package main

import (
	"bufio"
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func configure(state string, config *secretcache.Config, tlsConfig *spiffetls.Config) (err error) {
	mldsa := func(name string) func() (crypto.Signer, error) {
		return func() (crypto.Signer, error) { return pki.NewKey(name) }
	}
	tlsConfig.Algorithms = spiffe.AnyAlgorithm()
	switch state {
	case "default":
		tlsConfig.Algorithms = spiffe.Algorithms{}
	case "verifies":
	case "both":
		config.NewAlternative = mldsa("ml-dsa-44")
	case "new":
		config.NewKey = mldsa("ml-dsa-65")
		tlsConfig.Algorithms, err = spiffe.ParseAlgorithms("ml-dsa-44,ml-dsa-65")
	default:
		return fmt.Errorf("unknown state %q", state)
	}
	return err
}

func leaves(s *spiffe.SVID) []*x509.Certificate {
	all := []*x509.Certificate{s.Leaf()}
	if other := s.Alternative(); other != nil {
		all = append(all, other.Leaf())
	}
	return all
}

// root is one of the roots of the CA.
type root struct{ Algorithm, Phase string }

// authority is a CA of two replicas, with their record in the working directory, which take turns. A line is an order:
// "keys NAMES" ends one after the other and opens it again with these kinds of roots, as a new configuration does, "rotate"
// rotates them, "status" says what there is.
func authority(in *bufio.Scanner, life time.Duration) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	store, err := ca.NewDirStore("ca")
	if err != nil {
		return err
	}
	var replicas [2]atomic.Pointer[ca.Authority]
	ends := [2]func(){func() {}, func() {}}
	open := func(keys string) error {
		for i := range replicas {
			a, err := ca.Open(ctx, ca.Config{
				TrustDomain: td, Create: true, DefaultTTL: life, MaxTTL: life, Backdate: 2 * time.Second, RefreshHint: time.Second,
				Algorithms: spiffe.AnyAlgorithm(), Rotation: ca.Rotation{KeyAlgorithm: keys, RootTTL: 13 * life / 2, Propagation: life / 3},
				Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)).With("replica", i),
			}, store)
			if err != nil {
				return err
			}
			ends[i]() // the one before has signed until now
			ctx, cancel := context.WithCancel(ctx)
			done := make(chan struct{})
			go func() {
				defer close(done)
				if err := a.Run(ctx); err != nil {
					fmt.Fprintln(os.Stderr, "CA:", err)
				}
			}()
			replicas[i].Store(a)
			ends[i] = func() { cancel(); <-done }
			time.Sleep(time.Second) // with other settings than the other
		}
		return nil
	}
	if err := open("ecdsa-p256"); err != nil {
		return err
	}
	var turn atomic.Uint32
	now := func() *ca.Authority { return replicas[turn.Add(1)%2].Load() }
	mux := http.NewServeMux()
	mux.HandleFunc("POST /sign", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var chain []*x509.Certificate
		if err == nil {
			var csr *pki.CSR
			if csr, err = pki.ParseCSR(body); err == nil {
				chain, err = now().Sign(r.Context(), ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://example.org" + r.FormValue("path"))})
			}
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		for _, c := range chain {
			_, _ = w.Write(c.Raw)
		}
	})
	mux.HandleFunc("GET /bundle", func(w http.ResponseWriter, r *http.Request) {
		b := now().Bundle()
		if r.FormValue("form") == "der" {
			for c := range b.X509Authorities() {
				_, _ = w.Write(c.Raw)
			}
			return
		}
		document, err := b.Marshal()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write(document)
	})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: mux}
	defer server.Close()
	go func() { _ = server.Serve(l) }()
	say("http://" + l.Addr().String())
	for in.Scan() {
		first := replicas[0].Load()
		order, keys, _ := strings.Cut(in.Text(), " ")
		switch order {
		case "keys":
			err = open(keys)
		case "rotate":
			_, err = first.Rotate(ctx)
		}
		var roots []root
		for _, k := range replicas[0].Load().Status().Roots {
			roots = append(roots, root{k.Certificate.PublicKeyAlgorithm.String(), k.Phase})
		}
		text := ""
		if err != nil {
			text = err.Error()
		}
		say(map[string]any{"Roots": slices.Clip(roots), "Err": text, "Stood": stood()})
	}
	for _, end := range ends {
		end()
	}
	return nil
}
