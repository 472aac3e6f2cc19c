package auditlog_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"

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

	key, err := pki.NewKey("ecdsa-p256")
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
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var i ca.Issuance // or a ca.KeyEvent, if the line has an event
		if err := json.Unmarshal(lines.Bytes(), &i); err != nil {
			log.Fatal(err)
		}
		if i.Kind != "" {
			fmt.Println(i.Kind, i.ID, "for", i.Caller, "by", i.Method)
			fmt.Println("it is ours:", i.Serial == chain[0].SerialNumber.Text(16))
		}
	}
	// Output:
	// x509-svid spiffe://example.org/web for spiffe://example.org/node by client-certificate
	// it is ours: true
}
