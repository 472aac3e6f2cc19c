package auditlog_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/spiffe"
)

func ExampleOpen() {
	dir, err := os.MkdirTemp("", "auditlog")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "audit.jsonl")

	audit, err := auditlog.Open(path, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer audit.Close()
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Auditor: audit})
	if err != nil {
		log.Fatal(err)
	}

	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		log.Fatal(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		log.Fatal(err)
	}
	chain, err := authority.Sign(context.Background(), ca.Request{
		CSR: csr, ID: spiffe.MustParseID("spiffe://example.org/web"), Caller: "spiffe://example.org/node", Method: "client-certificate",
	})
	if err != nil {
		log.Fatal(err)
	}

	f, err := os.Open(path)
	if err != nil {
		log.Fatal(err)
	}
	defer f.Close()
	for e, err := range auditlog.Read(f) {
		switch {
		case err != nil:
			log.Fatal(err)
		case e.KeyEvent != nil:
			fmt.Println(e.KeyEvent.Key, e.KeyEvent.Event)
		default:
			i := e.Issuance
			fmt.Println(i.Kind, i.ID, "for", i.Caller, "by", i.Method)
			fmt.Println("it is ours:", i.Serial == chain[0].SerialNumber.Text(16))
		}
	}
	// Output:
	// root created
	// x509-svid spiffe://example.org/web for spiffe://example.org/node by client-certificate
	// it is ours: true
}

func ExampleRead() {
	// In the shell: cat audit.jsonl
	lines := `{"time":"2026-01-02T03:04:05Z","kind":"x509-svid","serial":"5d1c","id":"spiffe://example.org/web","prev":"` + strings.Repeat("0", 64) + `"}` + "\n" +
		`{"time":"2026-01-02T03:04:06Z","kind":"x50`
	for e, err := range auditlog.Read(strings.NewReader(lines)) {
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(e.Issuance.Serial, e.Issuance.ID)
	}
	// Output:
	// 5d1c spiffe://example.org/web
	// auditlog: line 2: an unfinished line, as a crash leaves it
}
