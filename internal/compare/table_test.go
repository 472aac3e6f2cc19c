package compare

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

var table = flag.Bool("table", false, "measure, and print the tables of BENCHMARKS.md")

// row is an operation, as three do it: here, the peer, and the bare work that no library can avoid, done by
// the standard library. The peer is nil where it does not have the operation.
type row struct {
	name             string
	ours, peer, bare func() error
}

// TestTable prints the tables of BENCHMARKS.md with -table; without, it does everything once.
func TestTable(t *testing.T) {
	rows := slices.Concat(idRows(), bundleRows(t), svidRows(t), jwtRows(t))
	for _, r := range rows {
		for _, f := range []func() error{r.ours, r.peer, r.bare} {
			if f != nil {
				require.NoError(t, f(), r.name)
			}
		}
	}
	if !*table {
		printFeatures(io.Discard)
		return
	}
	fmt.Printf("Measured on %s with %d cores, %s/%s, %s.\n\n", time.Now().UTC().Format(time.DateOnly), runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, strings.Replace(runtime.Version(), "go", "Go ", 1))
	fmt.Println("| operation | svidkit | go-spiffe | bare | go-spiffe ÷ svidkit | svidkit ÷ bare | allocations, svidkit | allocations, go-spiffe |")
	fmt.Println("|---|--:|--:|--:|--:|--:|--:|--:|")
	for _, m := range measure(t, rows) {
		fmt.Println(m)
	}
	fmt.Println()
	printPrograms(t)
	fmt.Println()
	printFeatures(os.Stdout)
}

const (
	rounds = 201
	slice  = time.Millisecond // of one contender in one round
)

// measured is a row with what its three contenders took.
type measured struct {
	row
	n    [3]int       // how often each is called in a round
	took [3][]float64 // nanoseconds for one call, by round
}

func (m *measured) contenders() [3]func() error { return [3]func() error{m.ours, m.peer, m.bare} }

func (m *measured) run(t *testing.T, i, n int) time.Duration {
	f := m.contenders()[i]
	start := time.Now()
	for range n {
		if err := f(); err != nil {
			t.Fatal(m.name, err)
		}
	}
	return time.Since(start)
}

// measure goes through all rows in each round. In a row the three take turns, and the next round begins
// with another, so that what disturbs the machine disturbs all.
func measure(t *testing.T, rows []row) []*measured {
	t.Helper()
	var all []*measured
	for _, r := range rows {
		m := &measured{row: r}
		for i, f := range m.contenders() {
			if f == nil {
				continue
			}
			for n := 1; m.n[i] == 0; n *= 2 {
				if d := m.run(t, i, n); d > slice/4 {
					m.n[i] = max(1, int(float64(n)*float64(slice)/float64(d)))
				}
			}
		}
		all = append(all, m)
	}
	for round := range rounds {
		for _, m := range all {
			for i := range m.n {
				if k := (round + i) % len(m.n); m.n[k] > 0 {
					m.took[k] = append(m.took[k], float64(m.run(t, k, m.n[k]).Nanoseconds())/float64(m.n[k]))
				}
			}
		}
	}
	return all
}

func (m *measured) String() string {
	ours, peer, bare := median(m.took[0]), median(m.took[1]), median(m.took[2])
	allocs := func(f func() error) string {
		if f == nil {
			return "—"
		}
		return fmt.Sprintf("%.0f", testing.AllocsPerRun(20, func() { _ = f() }))
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s | %s | %s |", m.name, short(ours), short(peer), short(bare),
		ratio(peer, ours), ratio(ours, bare), allocs(m.ours), allocs(m.peer))
}

func median(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)/2]
}

func short(ns float64) string {
	switch {
	case ns == 0:
		return "—"
	case ns < 1e3:
		return fmt.Sprintf("%.3g ns", ns)
	case ns < 1e6:
		return fmt.Sprintf("%.3g µs", ns/1e3)
	}
	return fmt.Sprintf("%.3g ms", ns/1e6)
}

func ratio(a, b float64) string {
	if a == 0 || b == 0 {
		return "—"
	}
	if a/b >= 100 {
		return fmt.Sprintf("%.0f", a/b)
	}
	return fmt.Sprintf("%.2g", a/b)
}

var sink byte // what the bare work comes to, so that it is not left out

func idRows() []row {
	var rows []row
	for _, c := range []struct{ name, id string }{
		{"ID, 37 bytes, parse", "spiffe://example.org/ns/default/sa/db"},
		{"ID, 2,048 bytes, parse", "spiffe://example.org" + strings.Repeat("/abcdefg", 253) + "/ab"},
	} {
		rows = append(rows, row{
			c.name,
			func() error { _, err := spiffe.ParseID(c.id); return err },
			func() error { _, err := spiffeid.FromString(c.id); return err },
			func() error {
				var all byte
				for i := range len(c.id) {
					all |= c.id[i]
				}
				sink = all
				return nil
			},
		})
	}
	return rows
}

// bareDoc is a bundle document for encoding/json.
type bareDoc struct {
	Keys []bareKey `json:"keys"`
}

type bareKey struct {
	Use string   `json:"use"`
	Kid string   `json:"kid,omitempty"`
	Kty string   `json:"kty"`
	Crv string   `json:"crv"`
	X   string   `json:"x"`
	Y   string   `json:"y"`
	X5c []string `json:"x5c,omitempty"`
}

func (d *bareDoc) parse(doc []byte) error {
	*d = bareDoc{}
	if err := json.Unmarshal(doc, d); err != nil {
		return err
	}
	for _, k := range d.Keys {
		if len(k.X5c) > 0 {
			der, err := base64.StdEncoding.DecodeString(k.X5c[0])
			if err == nil {
				_, err = x509.ParseCertificate(der)
			}
			if err != nil {
				return err
			}
			continue
		}
		x, err := base64.RawURLEncoding.DecodeString(k.X)
		if err != nil {
			return err
		}
		y, err := base64.RawURLEncoding.DecodeString(k.Y)
		if err != nil {
			return err
		}
		if _, err = ecdsa.ParseUncompressedPublicKey(elliptic.P256(), slices.Concat([]byte{4}, x, y)); err != nil {
			return err
		}
	}
	return nil
}

func bareMarshal(certs []*x509.Certificate, kids []string, keys []*ecdsa.PublicKey) error {
	var d bareDoc
	add := func(key *ecdsa.PublicKey, k bareKey) error {
		point, err := key.Bytes()
		if err != nil {
			return err
		}
		k.Kty, k.Crv = "EC", "P-256"
		k.X, k.Y = base64.RawURLEncoding.EncodeToString(point[1:33]), base64.RawURLEncoding.EncodeToString(point[33:])
		d.Keys = append(d.Keys, k)
		return nil
	}
	for _, c := range certs {
		if err := add(c.PublicKey.(*ecdsa.PublicKey), bareKey{Use: "x509-svid", X5c: []string{base64.StdEncoding.EncodeToString(c.Raw)}}); err != nil {
			return err
		}
	}
	for i, key := range keys {
		if err := add(key, bareKey{Use: "jwt-svid", Kid: kids[i]}); err != nil {
			return err
		}
	}
	_, err := json.Marshal(d)
	return err
}

// bundleRows has bundles of which half of the keys are certificates.
func bundleRows(t *testing.T) []row {
	t.Helper()
	var parse, marshal []row
	td := spiffe.MustParseTrustDomain("example.org")
	for _, n := range []int{1, 10, 100} {
		a := newAuthority(t, "example.org")
		c := spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{}}
		var kids []string
		var keys []*ecdsa.PublicKey
		for i := range n {
			if i%2 == 0 {
				c.X509Authorities = append(c.X509Authorities, a.ca.Root())
				a.ca.Rotate()
				continue
			}
			key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
			kids, keys = append(kids, fmt.Sprint("jwt-", i)), append(keys, &key.PublicKey)
			c.JWTAuthorities[kids[len(kids)-1]] = &key.PublicKey
		}
		b := must.Get(spiffe.NewBundle(td, c))(t)
		doc := must.Get(b.Marshal())(t)
		peer := must.Get(spiffebundle.Parse(peerDomain(td), doc))(t)
		name := fmt.Sprintf("bundle, %d keys", n)
		if n == 1 {
			name = "bundle, 1 key"
		}
		parse = append(parse, row{
			name + ", parse",
			func() error { _, err := spiffe.ParseBundle(td, doc); return err },
			func() error { _, err := spiffebundle.Parse(peer.TrustDomain(), doc); return err },
			func() error { return new(bareDoc).parse(doc) },
		})
		marshal = append(marshal, row{
			name + ", marshal",
			func() error { _, err := b.Marshal(); return err },
			func() error { _, err := peer.Marshal(); return err },
			func() error { return bareMarshal(c.X509Authorities, kids, keys) },
		})
	}
	return slices.Concat(parse, marshal, keySetRows(t))
}

// keySetRows has the key sets of other issuers, as an OpenID Connect provider publishes them.
func keySetRows(t *testing.T) []row {
	t.Helper()
	var rows []row
	td := spiffe.MustParseTrustDomain("example.org")
	for _, n := range []int{1, 100} {
		c := spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{}}
		for i := range n {
			key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
			c.JWTAuthorities[fmt.Sprint("jwt-", i)] = &key.PublicKey
		}
		b := must.Get(spiffe.NewBundle(td, c))(t)
		doc := must.Get(b.Marshal())(t)
		doc = bytes.ReplaceAll(doc, []byte(`"jwt-svid"`), []byte(`"sig"`))
		ours := must.Get(spiffe.ParseJWKS(td, doc))(t)
		require.Len(t, ours.Contents().JWTAuthorities, n)
		name := fmt.Sprintf("JWK Set, %d keys, parse", n)
		if n == 1 {
			name = "JWK Set, 1 key, parse"
		}
		rows = append(rows, row{
			name,
			func() error { _, err := spiffe.ParseJWKS(td, doc); return err },
			func() error { _, err := jwtbundle.Parse(peerDomain(td), doc); return err },
			func() error { return new(bareDoc).parse(doc) },
		})
	}
	return rows
}

func bareVerify(key crypto.PublicKey, input, sig []byte) error {
	sum := sha256.Sum256(input)
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		if !ecdsa.VerifyASN1(k, sum[:], sig) {
			return rsa.ErrVerification
		}
	case *rsa.PublicKey:
		return rsa.VerifyPKCS1v15(k, crypto.SHA256, sum[:], sig)
	}
	return nil
}

func svidRows(t *testing.T) []row {
	t.Helper()
	a := newAuthority(t, "example.org")
	direct, below := a.ca.SVID("/web"), a.ca.Intermediate().SVID("/web")
	certs, key := must.Get2(direct.MarshalDER())(t)
	rows := []row{{
		"X.509-SVID with its key, parse",
		func() error { _, err := spiffe.ParseSVID(certs, key); return err },
		func() error { _, err := x509svid.ParseRaw(certs, key); return err },
		func() error {
			_, err := x509.ParseCertificates(certs)
			if err == nil {
				_, err = x509.ParsePKCS8PrivateKey(key)
			}
			return err
		},
	}}
	bundle := a.ca.Bundle()
	peers := peerBundle(t, bundle).X509Bundle()
	for _, c := range []struct {
		name  string
		svid  *spiffe.SVID
		again bool
	}{
		{"X.509-SVID below a root, verify", direct, false},
		{"X.509-SVID below an intermediate, verify", below, false},
		{"X.509-SVID below an intermediate, verify again", below, true},
	} {
		v := must.Get(spiffe.NewVerifier(sourceOf(t, bundle, c.again), spiffe.AllowAnyPeer(), nil))(t)
		chain := c.svid.Chain()
		issuers := append(chain[1:], a.ca.Root())
		rows = append(rows, row{
			c.name,
			func() error { _, err := v.VerifyChain(chain, spiffe.ClientRole); return err },
			func() error { _, _, err := x509svid.Verify(chain, peers); return err },
			func() error {
				for i, c := range chain {
					if err := bareVerify(issuers[i].PublicKey, c.RawTBSCertificate, c.Signature); err != nil {
						return err
					}
				}
				return nil
			},
		})
	}
	return rows
}

// sourceOf returns b as a source or, unless it is to be remembered, a source that returns another one each time.
func sourceOf(t *testing.T, b *spiffe.Bundle, again bool) spiffe.BundleSource {
	t.Helper()
	if again {
		return b
	}
	return &turns{b, must.Get(spiffe.NewBundle(b.TrustDomain(), b.Contents()))(t)}
}

type turns [2]*spiffe.Bundle

func (s *turns) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) {
	s[0], s[1] = s[1], s[0]
	return s[0], nil
}

func jwtRows(t *testing.T) []row {
	t.Helper()
	td := spiffe.MustParseTrustDomain("example.org")
	request := jwtsvid.Request{ID: spiffe.MustParseID("spiffe://example.org/ns/default/sa/web"), Audience: []string{"db"}, Lifetime: time.Hour}
	ec := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	rs := must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	var rows []row
	for _, c := range []struct {
		alg string
		key crypto.Signer
	}{{"ES256", ec}, {"RS256", rs}} {
		issuer := must.Get(jwtsvid.NewIssuer(td, keyID, c.key, nil))(t)
		token := must.Get(issuer.Issue(request))(t)
		b, err := spiffe.NewBundle(td, spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{keyID: c.key.Public()}})
		require.NoError(t, err)
		peers := peerBundle(t, b).JWTBundle()

		dot := strings.LastIndexByte(token, '.')
		input := []byte(token[:dot])
		sig, err := base64.RawURLEncoding.DecodeString(token[dot+1:])
		require.NoError(t, err)
		if c.alg == "ES256" {
			sig, err = asn1.Marshal(struct{ R, S *big.Int }{new(big.Int).SetBytes(sig[:32]), new(big.Int).SetBytes(sig[32:])})
			require.NoError(t, err)
		}
		for _, m := range []struct {
			name  string
			again bool
		}{{"validate", false}, {"validate again", true}} {
			v := must.Get(jwtsvid.NewValidator(sourceOf(t, b, m.again), request.Audience, nil))(t)
			rows = append(rows, row{
				"JWT-SVID, " + c.alg + ", " + m.name,
				func() error { _, err := v.Validate(token); return err },
				func() error { _, err := peerjwt.ParseAndValidate(token, peers, request.Audience); return err },
				func() error { return bareVerify(c.key.Public(), input, sig) },
			})
		}
		rows = append(rows, row{
			"JWT-SVID, " + c.alg + ", issue",
			func() error { _, err := issuer.Issue(request); return err },
			nil,
			func() error {
				sum := sha256.Sum256(input)
				_, err := c.key.Sign(rand.Reader, sum[:], crypto.SHA256)
				return err
			},
		})
	}
	return rows
}

// programs do the same with either library.
var programs = []string{"./programs/svidkit", "./programs/gospiffe"}

func goCommand(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	require.NoError(t, err, args)
	return string(out)
}

func build(t *testing.T, program string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "program")
	goCommand(t, "build", "-trimpath", "-ldflags=-s -w", "-o", path, program)
	return path
}

// What is weighed works.
func TestPrograms(t *testing.T) {
	t.Parallel()
	address := serveOurs(t, newLive(newAuthority(t, "example.org").snapshot(t, "/web")), nil)
	for _, p := range programs {
		program := build(t, p) // which takes its time
		out, err := exec.CommandContext(timeout(t), program, address).CombinedOutput()
		require.NoError(t, err, "%s: %s", p, out)
		assert.Equal(t, "spiffe://example.org/web <nil>\n", string(out), p)
	}
}

func printPrograms(t *testing.T) {
	t.Helper()
	fmt.Println("| a program that keeps an X.509 identity by the Workload API | svidkit | go-spiffe |")
	fmt.Println("|---|--:|--:|")
	var size, packages, modules []any
	for _, p := range programs {
		fi := must.Get(os.Stat(build(t, p)))(t)
		size = append(size, float64(fi.Size())/1e6)
		packages = append(packages, len(strings.Fields(goCommand(t, "list", "-deps", p))))
		linked := map[string]bool{}
		for m := range strings.FieldsSeq(goCommand(t, "list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", p)) {
			linked[m] = true
		}
		modules = append(modules, len(linked)-1) // without this one
	}
	fmt.Printf("| stripped size, without cgo | %.1f MB | %.1f MB |\n", size...)
	fmt.Printf("| packages linked, those of the standard library included | %d | %d |\n", packages...)
	fmt.Printf("| modules linked, that of the library included | %d | %d |\n", modules...)
}
