// Package workloadwire has the messages of the SPIFFE Workload API, for its client and its server. The responses of
// the three profiles differ in little more than their field numbers, so each kind of response is one type, read and
// written by a [Profile].
package workloadwire

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/spiffe"
)

// Service begins the paths of all methods. It has no package on the wire.
const Service = "/SpiffeWorkloadAPI/"

// The methods of the service.
const (
	FetchX509SVID    = "FetchX509SVID"
	FetchX509Bundles = "FetchX509Bundles"
	FetchJWTSVID     = "FetchJWTSVID"
	FetchJWTBundles  = "FetchJWTBundles"
	ValidateJWTSVID  = "ValidateJWTSVID"
	FetchWITSVID     = "FetchWITSVID"
	FetchWITBundles  = "FetchWITBundles"
)

// Header is the metadata that every request must have with the value "true".
const Header = "workload.spiffe.io"

// Alternatives is the metadata, with the value "true", of clients that want each SVID followed by its alternative. It is
// ours: other clients refuse a whole response if they cannot read one of its keys.
const Alternatives = "svidkit-alternatives"

// The errors that both sides know, so that a server can pass on the error of a client.
var (
	ErrDenied  error = denied{}
	ErrNoToken error = noToken{} // is ErrDenied, too
	ErrEnded   error = ended{}   // is ErrDenied, too
	ErrRefused       = errors.New("the server refuses the request")
)

// denied marks an error, by its method, as a denial that withdraws everything received before.
type denied struct{}

func (denied) Error() string   { return "no identity for this caller" }
func (denied) Withdrawn() bool { return true }

// ended is a denial for good: the workload is not there any more.
type ended struct{ denied }

func (ended) Error() string        { return "the server knows of no such workload" }
func (ended) Is(target error) bool { return target == ErrDenied } // itself

// noToken is a denial for a token only: the caller may have identities that get no token.
type noToken struct{ denied }

func (noToken) Error() string        { return "no token for this caller" }
func (noToken) Is(target error) bool { return target == ErrDenied } // itself

// API is an API with the responses of the Workload API, as a client sees it. A client of the Workload API becomes one
// of the Broker API if its transport is an API.
type API interface {
	String() string // names the server, for errors and logs

	// Request returns the URL, the metadata and the message of a call, made from the name and the message that it
	// has in the Workload API. An error that is a [*grpchttp.Error] counts as an answer of the server.
	Request(name string, message []byte) (url string, metadata http.Header, request []byte, err error)

	// Failed gets the status with which a call ended. It may set RetryAfter, and returns the error for a code that
	// the Workload API does not have, or nil.
	Failed(status *grpchttp.Error) error
}

// Front stands in a server between the callers of another API and a handler of the Workload API, which gets their
// requests under its own paths, in a context of [WithFront]. Its errors are the answers.
type Front interface {
	// Admit judges the caller, before anything of the request is read.
	Admit() *grpchttp.Error

	// Workload returns the context for everything that is done for a request, and its message in the Workload API.
	Workload(ctx context.Context, request []byte) (context.Context, []byte, *grpchttp.Error)

	// Permits reports whether the caller may have an identity.
	Permits(spiffe.ID) bool

	// Descriptors describes the other API for server reflection.
	Descriptors() []byte

	// Tell changes an answer of the handler to one of the other API.
	Tell(*grpchttp.Error)
}

type frontKey struct{}

// WithFront returns a copy of ctx with f.
func WithFront(ctx context.Context, f Front) context.Context {
	return context.WithValue(ctx, frontKey{}, f)
}

// FrontOf returns the Front in ctx, or nil.
func FrontOf(ctx context.Context) Front {
	f, _ := ctx.Value(frontKey{}).(Front)
	return f
}

// Profile describes the layout of a profile's responses.
type Profile struct {
	Parts []string // the names of an SVID's fields after its ID and before its hint

	texts           bool // the parts are texts, which are UTF-8
	textBundles     bool
	crl, federated  protofield.Number
	bundles, listed protofield.Number // of a response with bundles; listed are its CRLs
}

// The profiles.
var (
	X509 = &Profile{Parts: []string{"x509_svid", "x509_svid_key", "bundle"}, crl: 2, federated: 3, listed: 1,
		bundles: 2}
	JWT = &Profile{Parts: []string{"svid"}, texts: true, bundles: 1}
	WIT = &Profile{Parts: []string{"wit_svid", "wit_svid_key"}, texts: true, textBundles: true, bundles: 1}
)

// SVID is one element of [SVIDs].
type SVID struct {
	ID, Hint string
	Parts    [3][]byte // X.509: certificates, key, bundle; JWT: token; WIT: token, key
}

// SVIDs is the response of FetchX509SVID, FetchJWTSVID or FetchWITSVID.
type SVIDs struct {
	SVIDs     []SVID
	CRLs      [][]byte          // X.509 only
	Federated map[string][]byte // X.509 only: bundles by the ID of their trust domain
}

// Bundles is the response of FetchX509Bundles, FetchJWTBundles or FetchWITBundles.
type Bundles struct {
	CRLs    [][]byte          // X.509 only
	Bundles map[string][]byte // by the ID of their trust domain
}

// read calls take for each field of a message. All fields of this API are length-delimited. It refuses a message
// with more than limit fields: an element takes two bytes on the wire and a hundred in memory.
func read(data []byte, limit int, take func(*protofield.Field)) error {
	n := 0
	return protofield.Read(data, func(f *protofield.Field) {
		if n++; n > limit {
			f.Fail(fmt.Errorf("it has more than %d elements", limit))
		} else if f.Type == protowire.BytesType {
			take(f)
		}
	})
}

// maxSVIDs is how many SVIDs a response may have, each of which takes a hundred bytes even if it is empty.
const maxSVIDs = 4096

// ReadSVIDs reads a response with at most limit elements, 4,096 of which may be SVIDs.
func (p *Profile) ReadSVIDs(data []byte, limit int) (*SVIDs, error) {
	m := &SVIDs{}
	err := read(data, limit, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			if len(m.SVIDs) == min(limit, maxSVIDs) {
				f.Fail(fmt.Errorf("it has more than %d SVIDs", maxSVIDs))
				return
			}
			m.SVIDs = append(m.SVIDs, SVID{})
			s := &m.SVIDs[len(m.SVIDs)-1]
			f.Message(func(f *protofield.Field) { p.readSVID(f, s) })
		case p.crl:
			m.CRLs = append(m.CRLs, bytes.Clone(f.Data))
		case p.federated:
			p.readEntry(f, &m.Federated)
		}
	})
	return m, err
}

func (p *Profile) readSVID(f *protofield.Field, s *SVID) {
	switch n := int(f.Number); {
	case n == 1:
		f.Text(&s.ID)
	case n == len(p.Parts)+2:
		f.Text(&s.Hint)
	case n < len(p.Parts)+2:
		readBytes(f, &s.Parts[n-2], p.texts)
	}
}

// readBytes reads a field that must be UTF-8 if text is set.
func readBytes(f *protofield.Field, to *[]byte, text bool) {
	if text && f.Type == protowire.BytesType && !utf8.Valid(f.Data) {
		f.Fail(protofield.ErrMalformed)
	}
	f.Bytes(to)
}

func (p *Profile) readEntry(f *protofield.Field, to *map[string][]byte) {
	var value []byte
	key := f.Entry(func(f *protofield.Field) { readBytes(f, &value, p.textBundles) })
	if *to == nil {
		*to = make(map[string][]byte)
	}
	(*to)[key] = value
}

// WriteSVIDs returns the encoded response. Equal responses have equal bytes.
func (p *Profile) WriteSVIDs(m *SVIDs) ([]byte, error) {
	return protofield.Write(func(w *protofield.Writer) {
		for i := range m.SVIDs {
			s := &m.SVIDs[i]
			w.Message(1, func(w *protofield.Writer) {
				w.Text(1, s.ID)
				for i, part := range s.Parts[:len(p.Parts)] {
					check(w, part, p.texts)
					w.Bytes(protofield.Number(i+2), part)
				}
				w.Text(protofield.Number(len(p.Parts)+2), s.Hint)
			})
		}
		p.writeShared(w, p.crl, m.CRLs, p.federated, m.Federated)
	})
}

// check refuses to write a text that is not UTF-8.
func check(w *protofield.Writer, v []byte, text bool) {
	if text && !utf8.Valid(v) {
		w.Fail(errNotUTF8)
	}
}

var errNotUTF8 = errors.New("the message cannot be encoded: a text is not UTF-8")

func (p *Profile) writeShared(w *protofield.Writer, crl protofield.Number, crls [][]byte, entry protofield.Number,
	bundles map[string][]byte) {
	for _, v := range crls {
		w.AddBytes(crl, v)
	}
	for _, key := range slices.Sorted(maps.Keys(bundles)) {
		check(w, bundles[key], p.textBundles)
		w.Entry(entry, key, bundles[key])
	}
}

// ReadBundles reads a response with at most limit elements.
func (p *Profile) ReadBundles(data []byte, limit int) (*Bundles, error) {
	m := &Bundles{}
	err := read(data, limit, func(f *protofield.Field) {
		switch f.Number {
		case p.listed:
			m.CRLs = append(m.CRLs, bytes.Clone(f.Data))
		case p.bundles:
			p.readEntry(f, &m.Bundles)
		}
	})
	return m, err
}

// WriteBundles returns the encoded response. Equal responses have equal bytes.
func (p *Profile) WriteBundles(m *Bundles) ([]byte, error) {
	return protofield.Write(func(w *protofield.Writer) { p.writeShared(w, p.listed, m.CRLs, p.bundles, m.Bundles) })
}

// ReadJWTSVIDRequest reads a request of FetchJWTSVID, with at most limit fields.
func ReadJWTSVIDRequest(data []byte, limit int) (audience []string, id string, err error) {
	err = read(data, limit, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			audience = append(audience, "")
			f.Text(&audience[len(audience)-1])
		case 2:
			f.Text(&id)
		}
	})
	return audience, id, err
}

// WriteJWTSVIDRequest returns an encoded request of FetchJWTSVID.
func WriteJWTSVIDRequest(audience []string, id string) ([]byte, error) {
	return protofield.Write(func(w *protofield.Writer) {
		for _, a := range audience {
			w.AddText(1, a)
		}
		w.Text(2, id)
	})
}

// ReadTexts reads a message whose fields, from 1, are single texts: a request of ValidateJWTSVID has an audience and
// a token, a request of FetchWITSVID an ID.
func ReadTexts(data []byte, to ...*string) error {
	return read(data, 16, protofield.Texts(to...))
}

// WriteTexts returns a message that [ReadTexts] reads.
func WriteTexts(texts ...string) ([]byte, error) {
	return protofield.Write(func(w *protofield.Writer) { w.Texts(texts...) })
}
