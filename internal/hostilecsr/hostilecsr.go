// Package hostilecsr has certificate signing requests that mean harm, for the tests of everything
// that reads one. [Cases] returns them.
//
// Each is a good request but for one thing. The good request is for a P-256 key, is signed with it,
// has no common name, and asks for one alternative name, the DNS name [Name]. So a server that wants
// to see that name gets to the one thing that is bad, and must not sign it.
package hostilecsr

import (
	"bytes"
	"crypto"
	"encoding/pem"
	"slices"
	"sync"
	"testing"
)

// Name is the DNS name that every request asks for, unless that is what is bad about it.
const Name = "web.emojivoto.serviceaccount.identity.linkerd.cluster.local"

// A Case is one request.
type Case struct {
	Name string // unique; a word for the group, a slash, and what is bad

	// DER is the request; nil if what is bad is in the PEM.
	DER []byte

	// PEM is the request in PEM; never nil.
	PEM []byte

	// Signable says that the form is DER, the key strong and the signature good, so that a careful
	// certificate authority may certify Key for the names that it has from elsewhere, without
	// anything else that the request asks for. It may also refuse. What is not signable must be
	// refused.
	Signable bool

	// Key is the one key that a certificate may be for; nil if the request is not signable.
	Key crypto.PublicKey
}

// Cases returns all cases, in the same order at every call. The slice is the caller's; what it refers
// to is shared and must not be changed. The keys are made at the first call in a process.
func Cases(t testing.TB) []Case {
	t.Helper()
	return slices.Clone(all())
}

var all = sync.OnceValue(func() []Case {
	var l list
	l.sans()
	l.extensions()
	l.attributes()
	l.subjects()
	l.keys()
	l.signatures()
	l.forms()
	l.encodings()
	l.pems()
	return l.cases
})

type list struct{ cases []Case }

// may adds a request that a certificate authority may sign.
func (l *list) may(name string, edit func(r *request)) { l.request(name, true, edit) }

// not adds a request that it must not sign.
func (l *list) not(name string, edit func(r *request)) { l.request(name, false, edit) }

func (l *list) request(name string, signable bool, edit func(r *request)) {
	r := base()
	edit(&r)
	c := Case{Name: name, DER: r.der(), Signable: signable}
	if signable {
		c.Key = r.key
	}
	c.PEM = block("CERTIFICATE REQUEST", c.DER)
	l.cases = append(l.cases, c)
}

// raw adds bytes that are no request in DER.
func (l *list) raw(name string, der []byte) {
	l.cases = append(l.cases, Case{Name: name, DER: bytes.Clone(append([]byte{}, der...)), PEM: block("CERTIFICATE REQUEST", der)})
}

// pem adds a text around a good request.
func (l *list) pem(name string, signable bool, text []byte) {
	c := Case{Name: "pem/" + name, PEM: append([]byte{}, text...), Signable: signable}
	if signable {
		c.Key = p256().Public()
	}
	l.cases = append(l.cases, c)
}

func block(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
