package proofs

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	istiocaserver "github.com/svidkit/svidkit/pki/caserver/istioca"
	linkerdserver "github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// The bar for what faces the network: what any input of a MiB may cost.
const (
	inputSize = 1 << 20
	maxMemory = 4 << 20
	maxTime   = 50 * time.Millisecond
)

// hostile are inputs of a MiB that cost more than others where a parser is careless.
func hostile(t testing.TB) map[string][]byte {
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/web")
	key, err := pki.NewKey(pki.ECDSAP256)
	require.NoError(t, err)
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(svid.ID())}})
	require.NoError(t, err)
	certPEM, keyPEM, err := svid.MarshalPEM()
	require.NoError(t, err)
	doc, err := ca.Bundle().Marshal()
	require.NoError(t, err)
	certKey := string(doc[bytes.IndexByte(doc, '[')+1 : bytes.LastIndexByte(doc, ']')])
	// fill repeats a text between two others.
	fill := func(head, body, tail string) []byte {
		n := (inputSize - len(head) - len(tail)) / len(body)
		return []byte(head + strings.Repeat(body, n) + tail)
	}
	// count repeats a text with a number in it.
	count := func(head, format, tail string) []byte {
		b := append(make([]byte, 0, inputSize), head...)
		for i := 0; len(b) < inputSize-len(tail)-64; i++ {
			b = fmt.Appendf(b, format, i)
		}
		return append(b, tail...)
	}
	// field is a field of a protobuf message that fills the input with others.
	field := func(number int, body []byte) []byte {
		return append(binary.AppendUvarint([]byte{byte(number<<3 | 2)}, uint64(len(body))), body...)
	}
	// nested is a message within a message, as deep as fits.
	nested := func(number int) []byte {
		depth := 4000
		b := []byte{}
		for range depth {
			b = field(number, b)
		}
		return b
	}
	base64url := base64.RawURLEncoding.EncodeToString
	token := func(header string, payload []byte) []byte {
		return []byte(base64url([]byte(header)) + "." + base64url(payload) + "." + base64url(make([]byte, 64)))
	}
	sequence := func(inner []byte) []byte { // a SEQUENCE in DER
		return append([]byte{0x30, 0x83, byte(len(inner) >> 16), byte(len(inner) >> 8), byte(len(inner))}, inner...)
	}
	deepDER := bytes.Repeat([]byte{0x30, 0x80}, inputSize/2)
	all := map[string][]byte{
		"zeros":                      make([]byte, inputSize),
		"ones":                       bytes.Repeat([]byte{0xff}, inputSize),
		"spaces":                     fill("", " ", ""),
		"lines":                      fill("", "\n", ""),
		"dots":                       fill("", ".", ""),
		"slashes":                    fill("spiffe://example.org", "/a", ""),
		"a long ID":                  fill("spiffe://example.org/", "a", ""),
		"a long trust domain":        fill("spiffe://", "a.", "a/x"),
		"not UTF-8":                  fill(`{"keys":["`, "\xc3", `"]}`),
		"arrays in arrays":           fill("", "[", ""),
		"objects in objects":         fill("", `{"a":`, ""),
		"arrays in keys":             fill(`{"keys":`, "[", ""),
		"empty keys":                 fill(`{"keys":[{}`, `,{}`, `]}`),
		"numbers for keys":           fill(`{"keys":[1`, `,1`, `]}`),
		"wide objects":               count(`{"keys":[]`, `,"n%d":1`, `}`),
		"escaped names":              count(`{"keys":[]`, `,"\u006e%d":1`, `}`),
		"one name":                   fill(`{"keys":[]`, `,"a":1`, `}`),
		"a long number":              fill(`{"keys":[],"spiffe_sequence":1`, "0", `}`),
		"a long text":                fill(`{"keys":[],"a":"`, `\u00e9`, `"}`),
		"surrogates":                 fill(`{"keys":[],"a":"`, `\ud83d\ude00`, `"}`),
		"certificates in keys":       fill(`{"keys":[`+certKey, ","+certKey, `]}`),
		"many x5c":                   fill(`{"keys":[{"use":"x509-svid","kty":"EC","x5c":["AAAA"`, `,"AAAA"`, `]}]}`),
		"a long x5c":                 fill(`{"keys":[{"use":"x509-svid","kty":"EC","x5c":["`, `AAAA`, `"]}]}`),
		"a long modulus":             fill(`{"keys":[{"use":"jwt-svid","kid":"k","kty":"RSA","e":"AQAB","n":"`, "A", `"}]}`),
		"tokens' keys":               count(`{"keys":[{}`, `,{"use":"jwt-svid","kid":"%d","kty":"EC","crv":"P-256","x":"AA","y":"AA"}`, `]}`),
		"trust domains":              count(`{"trust_domains":{"a.test":{"keys":[]}`, `,"d%d.test":{"keys":[]}`, `}}`),
		"trust domains without keys": count(`{"trust_domains":{"a.test":{}`, `,"d%d.test":{}`, `}}`),
		"a review":                   fill(`{"status":{"authenticated":true,"audiences":["a"`, `,"a"`, `]}}`),
		"a review's extra":           count(`{"status":{"authenticated":true,"user":{"username":"u","extra":{"a":[]`, `,"e%d":["x"]`, `}}}}`),
		"a review's groups":          count(`{"status":{"authenticated":true,"user":{"username":"system:serviceaccount:a:b","groups":["g"`, `,"g%d"`, `]}}}`),
		"names in JSON":              count(`{"resource_names":["a"`, `,"n%d"`, `]}`),
		"PEM":                        fill("", string(certPEM), ""),
		"keys in PEM":                fill("", string(keyPEM), ""),
		"empty blocks":               fill("", "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n", ""),
		"headers in PEM":             count("-----BEGIN CERTIFICATE-----\n", "h%d: v\n", "\nAAAA\n-----END CERTIFICATE-----\n"),
		"dashes":                     fill("", "-----BEGIN ", ""),
		"a long block":               fill("-----BEGIN CERTIFICATE-----\n", "AAAA", "\n-----END CERTIFICATE-----\n"),
		"certificates":               fill("", string(svid.Leaf().Raw), ""),
		"requests":                   fill("", string(csr.DER()), ""),
		"a request":                  append(bytes.Clone(csr.DER()), make([]byte, inputSize-len(csr.DER()))...),
		"a request in PEM":           fill(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: csr.DER()})), "\n", ""),
		"a sequence":                 sequence(make([]byte, inputSize-5)),
		"a sequence of nulls":        sequence(bytes.Repeat([]byte{5, 0}, inputSize/2-3)),
		"a sequence of sequences":    sequence(bytes.Repeat([]byte{0x30, 0}, inputSize/2-3)),
		"deep DER":                   deepDER,
		"a token's header":           token(`{"alg":"ES256","kid":"k","typ":"JWT","x":"`+strings.Repeat("a", inputSize*3/4-1024)+`"}`, []byte("{}")),
		"a token's payload":          token(`{"alg":"ES256","kid":"k","typ":"JWT"}`, fill(`{"sub":"spiffe://example.org/web","aud":["a"`, `,"a"`, `]}`)[:inputSize*3/4-1024]),
		"a token with many dots":     fill("a.b", ".c", ""),
		"fields 1":                   fill("", "\x0a\x00", ""),
		"fields 2":                   fill("", "\x12\x00", ""),
		"fields 3":                   fill("", "\x1a\x00", ""),
		"fields 4":                   fill("", "\x22\x00", ""),
		"fields 5":                   fill("", "\x2a\x00", ""),
		"numbers":                    fill("", "\x08\x01", ""),
		"many field numbers":         fill("", "\xf8\xff\xff\xff\x0f\x01", ""),
		"groups":                     fill("", "\x0b", ""),
		"empty names":                fill("", "\x1a\x01a", ""),
		"names":                      count("", "\x1a\x08%08d", ""),
		"messages in messages 1":     nested(1),
		"messages in messages 4":     nested(4),
		"a field of fields":          field(1, bytes.Repeat([]byte{0x0a, 0}, inputSize/2-8)),
		"a field of certificates":    field(1, field(2, fill("", string(svid.Leaf().Raw), "")[:inputSize-1024])),
		"metadata":                   field(4, bytes.Repeat([]byte("\x0a\x06\x0a\x02ab\x12\x00"), inputSize/8-8)),
		"a map":                      bytes.Repeat([]byte("\x12\x06\x0a\x02ab\x12\x00"), inputSize/8),
		"bundles in a map":           bytes.Repeat(append([]byte("\x12\x1e\x0a\x14spiffe://example.org\x12\x06"), []byte("abcdef")...), inputSize/32),
	}
	for name, in := range all {
		require.LessOrEqual(t, len(in), inputSize, name)
		if name != "messages in messages 1" && name != "messages in messages 4" {
			require.Greater(t, len(in), inputSize*9/10-4096, name)
		}
	}
	return all
}

// sending gives a handler a request with one message of gRPC, as a client would that sends nothing more.
func sending(h http.Handler, path string) func([]byte) {
	return func(in []byte) {
		r := httptest.NewRequest(http.MethodPost, path, io.NopCloser(prefixed(in)()))
		r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
		r.Header.Set("Content-Type", "application/grpc")
		r.Header.Set("Authorization", "Bearer token")
		r.Header.Set("Workload.spiffe.io", "true")
		r.RemoteAddr = "127.0.0.1:1"
		// A stream waits for more.
		ctx, cancel := context.WithTimeout(r.Context(), 10*time.Millisecond)
		defer cancel()
		h.ServeHTTP(httptest.NewRecorder(), r.WithContext(ctx))
	}
}

// answering is an HTTP client of a server that answers every request with the same bytes.
type answering struct {
	body        func() io.Reader
	contentType string
	trailer     http.Header
}

func (a *answering) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_ = r.Body.Close()
	}
	return &http.Response{
		StatusCode: http.StatusOK, Proto: "HTTP/2.0", ProtoMajor: 2, Header: http.Header{"Content-Type": {a.contentType}},
		Trailer: a.trailer, Body: io.NopCloser(a.body()), ContentLength: -1, Request: r,
	}, nil
}

// receiving calls a client whose server answers with one message of gRPC.
func receiving(call func(c *http.Client)) func([]byte) {
	return func(in []byte) {
		call(&http.Client{Transport: &answering{prefixed(in), "application/grpc", http.Header{"Grpc-Status": {"0"}}}})
	}
}

// prefixed reads as a message of gRPC, without a copy of it.
func prefixed(message []byte) func() io.Reader {
	prefix := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	return func() io.Reader { return io.MultiReader(bytes.NewReader(prefix), bytes.NewReader(message)) }
}

// noSecrets is a source without names.
type noSecrets struct{}

func (noSecrets) GenerateSecret(context.Context, string) (*pki.Secret, error) {
	return nil, fs.ErrNotExist
}
func (noSecrets) Subscribe(func(string)) func() { return func() {} }

// TestHostileInput: no input of a MiB costs a parser that faces the network more than 50 ms and 4 MiB.
func TestHostileInput(t *testing.T) { // not parallel: it counts what is allocated
	rounds.Slow(t)
	if rounds.Race {
		t.Skip("the race detector takes time and memory of its own")
	}
	ctx := t.Context()
	td := spiffe.MustParseTrustDomain("example.org")
	fixture := spiffetest.NewCA(t, "example.org")
	web := fixture.SVID("/web")
	key, err := pki.NewKey(pki.ECDSAP256)
	require.NoError(t, err)
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(web.ID())}})
	require.NoError(t, err)
	certDER, keyDER, err := web.MarshalDER()
	require.NoError(t, err)
	certPEM, keyPEM, err := web.MarshalPEM()
	require.NoError(t, err)

	jwtValidator, err := jwtsvid.NewValidator(fixture.Bundle(), []string{"a"}, nil)
	require.NoError(t, err)
	witValidator, err := witsvid.NewValidator(fixture.Bundle(), spiffe.AllowAnyPeer(), nil)
	require.NoError(t, err)
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")})
	require.NoError(t, err)
	caller := authn.Func(func(*http.Request) (*authn.Caller, error) { return &authn.Caller{ID: web.ID()}, nil })
	istioServer, err := istiocaserver.New(istiocaserver.Options{Signer: authority, Authenticator: caller, AllowPlaintext: true})
	require.NoError(t, err)
	linkerdServer, err := linkerdserver.New(linkerdserver.Options{
		Mesh: linkerdname.Mesh{TrustDomain: "cluster.local", ControlNamespace: "linkerd"}, Signer: authority,
		Review: func(context.Context, string, []string) (*spiffe.Pod, error) {
			return nil, kube.ErrNotAuthenticated
		},
		AllowPlaintext: true,
	})
	require.NoError(t, err)
	sdsHandler, err := sds.NewHandler(noSecrets{}, nil)
	require.NoError(t, err)
	workload, err := workloadserver.NewHandler(fixed{spiffe.NewSnapshot(web, fixture.Bundles())}, &workloadserver.Options{
		IssueJWTSVID:    func(context.Context, spiffe.ID, []string) (string, error) { return "", workloadserver.ErrDenied },
		ValidateJWTSVID: jwtValidator.ValidateJWTSVID,
	})
	require.NoError(t, err)
	workloadClient := func(call func(*workloadapi.Client)) func([]byte) {
		return receiving(func(c *http.Client) {
			client, err := workloadapi.NewClient("", c)
			require.NoError(t, err)
			call(client)
		})
	}
	const api = "/SpiffeWorkloadAPI/"

	parsers := map[string]func([]byte){
		"spiffe.ParseID":           func(in []byte) { _, _ = spiffe.ParseID(string(in)) },
		"spiffe.ParseTrustDomain":  func(in []byte) { _, _ = spiffe.ParseTrustDomain(string(in)) },
		"spiffe.ParsePolicy":       func(in []byte) { _, _ = spiffe.ParsePolicy(string(in)) },
		"spiffe.ParseBundle":       func(in []byte) { _, _ = spiffe.ParseBundle(td, in) },
		"spiffe.ParseBundleWIT":    func(in []byte) { _, _ = spiffe.ParseBundleWIT(td, in) },
		"spiffe.ParseBundleMap":    func(in []byte) { _, _ = spiffe.ParseBundleMap(in) },
		"spiffe.ParseBundlePEM":    func(in []byte) { _, _ = spiffe.ParseBundlePEM(td, in) },
		"spiffe.ParseSVID":         func(in []byte) { _, _ = spiffe.ParseSVID(in, keyDER) },
		"spiffe.ParseSVID, key":    func(in []byte) { _, _ = spiffe.ParseSVID(certDER, in) },
		"spiffe.ParseSVIDPEM":      func(in []byte) { _, _ = spiffe.ParseSVIDPEM(in, keyPEM) },
		"spiffe.ParseSVIDPEM, key": func(in []byte) { _, _ = spiffe.ParseSVIDPEM(certPEM, in) },
		"pki.ParseCSR":             func(in []byte) { _, _ = pki.ParseCSR(in) },
		"pki.ParseCSRPEM":          func(in []byte) { _, _ = pki.ParseCSRPEM(in) },
		"pki.ParseCertificatesPEM": func(in []byte) { _, _ = pki.ParseCertificatesPEM(in) },
		"pki.ParsePrivateKeyPEM":   func(in []byte) { _, _ = pki.ParsePrivateKeyPEM(in) },
		"jws.Parse":                func(in []byte) { _, _ = jws.Parse(string(in)) },
		"strictjson":               func(in []byte) { strictjson.NewReader(in).Skip() },
		"protofield": func(in []byte) {
			_ = protofield.Read(in, func(f *protofield.Field) { f.Message(func(*protofield.Field) {}) })
		},
		"jwtsvid.ParseUnverified": func(in []byte) { _, _ = jwtsvid.ParseUnverified(string(in)) },
		"jwtsvid.Validate":        func(in []byte) { _, _ = jwtValidator.Validate(string(in)) },
		"witsvid.Validate":        func(in []byte) { _, _ = witValidator.Validate(string(in), string(in), witsvid.Call{}) },
		"authn.Bearer": func(in []byte) {
			_, _ = authn.BearerOverPlaintext(&http.Request{Header: http.Header{"Authorization": {string(in)}}})
		},
		"Istio's CA":             sending(istioServer, istiocaserver.CreateCertificate),
		"Linkerd's identity":     sending(linkerdServer, linkerdserver.Certify),
		"SDS":                    sending(sdsHandler, "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"),
		"SDS delta":              sending(sdsHandler, "/envoy.service.secret.v3.SecretDiscoveryService/DeltaSecrets"),
		"SDS fetch":              sending(sdsHandler, "/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets"),
		"Workload API, token":    sending(workload, api+"FetchJWTSVID"),
		"Workload API, validate": sending(workload, api+"ValidateJWTSVID"),
		"Workload API, X.509":    sending(workload, api+"FetchX509Bundles"),
		"a Workload API, SVIDs": workloadClient(func(c *workloadapi.Client) {
			for range c.WatchX509SVIDs(ctx) {
				break
			}
		}),
		"a Workload API, bundles": workloadClient(func(c *workloadapi.Client) {
			for range c.WatchX509Bundles(ctx) {
				break
			}
		}),
		"a Workload API, token bundles": workloadClient(func(c *workloadapi.Client) {
			for range c.WatchJWTBundles(ctx) {
				break
			}
		}),
		"a Workload API, tokens": workloadClient(func(c *workloadapi.Client) { _, _ = c.FetchJWTSVIDs(ctx, spiffe.ID{}, "a") }),
		"a Workload API, claims": workloadClient(func(c *workloadapi.Client) { _, _, _ = c.ValidateJWTSVID(ctx, "a", "t") }),
		"an Istio CA": receiving(func(c *http.Client) {
			client, err := istioca.New(istioca.Options{Endpoint: caclient.Endpoint{URL: "https://ca.test", HTTPClient: c, TrustDomain: td, Roots: fixture.Bundle()}})
			require.NoError(t, err)
			_, _ = client.Sign(ctx, csr, 0)
		}),
		"an SDS server": receiving(func(c *http.Client) {
			for range sds.NewClient(c, "https://sds.test").Watch(ctx, "default") {
				break
			}
		}),
		"an API server": func(in []byte) {
			c := &http.Client{Transport: &answering{func() io.Reader { return bytes.NewReader(in) }, "application/json", nil}}
			reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: "https://kube.test", HTTPClient: c})
			require.NoError(t, err)
			_, _ = reviewer.Review(ctx, "token", []string{"a"})
		},
	}
	inputs := hostile(t)
	var worst struct {
		time   time.Duration
		memory uint64
	}
	for what, parse := range parsers {
		parse(inputs["zeros"]) // what is made once
		for name, in := range inputs {
			var before, after runtime.MemStats
			least, memory := time.Hour, uint64(1<<63)
			for range 10 { // the machine may be busy
				runtime.ReadMemStats(&before)
				start := processTime()
				parse(in)
				least = min(least, processTime()-start)
				runtime.ReadMemStats(&after)
				if memory = min(memory, after.TotalAlloc-before.TotalAlloc); memory <= maxMemory && least <= maxTime {
					break
				}
			}
			assert.LessOrEqual(t, memory, uint64(maxMemory), "%s: %s", what, name)
			assert.LessOrEqual(t, least, maxTime, "%s: %s", what, name)
			worst.time, worst.memory = max(worst.time, least), max(worst.memory, memory)
		}
	}
	t.Logf("%d parsers, %d inputs, at worst %v and %d bytes", len(parsers), len(inputs), worst.time, worst.memory)
}

// fixed is a Provider that always has the same snapshot.
type fixed struct{ snap *spiffe.Snapshot }

func (f fixed) Snapshot() (*spiffe.Snapshot, error) { return f.snap, nil }
func (f fixed) Changed() <-chan struct{}            { return nil }
