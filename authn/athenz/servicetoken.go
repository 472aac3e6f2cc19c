package athenz

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/internal/tokens/token"
)

const (
	maxServiceToken  = 16 << 10            // bytes
	tokenLeeway      = 5 * time.Minute     // for the time of issue
	maxTokenLife     = 30 * 24 * time.Hour // from now
	serviceTokenHead = "Athenz-Principal-Auth"
)

// ServiceToken is the content of a service token, an "ntoken". [SignServiceToken] makes the token's text.
type ServiceToken struct {
	Version string             // "S1" for a service, "U1" for a user
	Service athenzname.Service // whom the token names: the domain of a user is "user"
	KeyID   string             // ID of the signing key; "0" if the token has none

	// KeyService is "zms" or "zts" if one of these servers signed the token, with a key of sys.auth.zms or
	// sys.auth.zts. It is empty if the service itself signed. ZMS signs the tokens of users.
	KeyService string

	Host, IP        string // of the instance, unverified; may be empty
	Issued, Expires time.Time
}

// keyOwner returns the service whose public key, named by KeyID, verifies the token.
func (t *ServiceToken) keyOwner() athenzname.Service {
	switch {
	case t.KeyService == "zts":
		return athenzname.Service{Domain: "sys.auth", Name: "zts"}
	case t.KeyService == "zms", strings.HasPrefix(t.Version, "U"):
		return athenzname.Service{Domain: "sys.auth", Name: "zms"}
	}
	return t.Service
}

func badToken(format string, args ...any) error {
	return fmt.Errorf("athenz: service token: %w: "+format, append([]any{ErrServiceToken}, args...)...)
}

// check reports what is wrong with the token at the time now.
func (t *ServiceToken) check(now time.Time) error {
	if err := t.Service.Check(); err != nil {
		return badToken("%w", err)
	}
	switch {
	case t.Version != "S1" && t.Version != "U1":
		return badToken("the version %q is neither S1 nor U1", token.Clip(t.Version, token.MaxQuoted))
	case t.KeyService != "" && t.KeyService != "zms" && t.KeyService != "zts":
		return badToken("the key service %q is neither zms nor zts", token.Clip(t.KeyService, token.MaxQuoted))
	case t.KeyID == "" || !isTokenText(t.KeyID):
		return badToken("the ID of the key is missing, or has a character that it cannot have")
	case t.Issued.After(now.Add(tokenLeeway)):
		return badToken("it was issued at %s, which is in the future", token.Stamp(t.Issued))
	case !now.Before(t.Expires):
		return badToken("it expired at %s", token.Stamp(t.Expires))
	case t.Expires.After(now.Add(maxTokenLife + tokenLeeway)):
		return badToken("it expires at %s, and may be valid for 30 days", token.Stamp(t.Expires))
	}
	return nil
}

// SignServiceToken returns a token signed with key, whose ID is t.KeyID. A zero Issued means now, a zero Expires an
// hour later. The token is a secret.
func SignServiceToken(t ServiceToken, key crypto.Signer) (string, error) {
	now := time.Now()
	t.Version = cmp.Or(t.Version, "S1")
	if t.Issued.IsZero() {
		t.Issued = now
	}
	if t.Expires.IsZero() {
		t.Expires = t.Issued.Add(time.Hour)
	}
	if err := t.check(now); err != nil {
		return "", err
	}
	if !isTokenText(t.Host) || !isTokenText(strings.ReplaceAll(t.IP, ":", "")) {
		return "", badToken("the Host or the IP has a character that a token cannot have")
	}
	if key == nil {
		return "", badToken("the key is missing")
	}
	err := certpem.CheckKey(key.Public())
	switch key.Public().(type) {
	case *rsa.PublicKey, *ecdsa.PublicKey:
	default:
		err = errors.New("the key is neither for RSA nor for ECDSA")
	}
	if err != nil {
		return "", badToken("%w", err)
	}
	text := t.signedText()
	sum := sha256.Sum256([]byte(text))
	sig, err := key.Sign(rand.Reader, sum[:], crypto.SHA256)
	if err != nil {
		return "", fmt.Errorf("athenz: service token: sign: %w", err)
	}
	return text + ";s=" + y64.EncodeToString(sig), nil
}

// signedText returns the token without its signature, with a new salt.
func (t *ServiceToken) signedText() string {
	salt := make([]byte, 8)
	_, _ = rand.Read(salt) // never fails
	var parts []string
	for _, tag := range [][2]string{
		{"v", t.Version}, {"d", t.Service.Domain}, {"n", t.Service.Name}, {"k", t.KeyID},
		{"z", t.KeyService}, {"h", t.Host}, {"i", t.IP}, {"a", hex.EncodeToString(salt)},
		{"t", strconv.FormatInt(t.Issued.Unix(), 10)}, {"e", strconv.FormatInt(t.Expires.Unix(), 10)},
	} {
		if tag[1] != "" {
			parts = append(parts, tag[0]+"="+tag[1])
		}
	}
	return strings.Join(parts, ";")
}

// isTokenText reports whether s contains no separator of the token format.
func isTokenText(s string) bool {
	return len(s) <= 255 && !strings.ContainsFunc(s, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' ||
			strings.ContainsRune("._-%", r))
	})
}

// VerifyServiceToken verifies a token with the public key of the service or server that signed it, and checks its
// times: issued at most five minutes ahead, not expired, and valid for at most 30 days. The error wraps
// [ErrServiceToken], or comes from keys.
func VerifyServiceToken(ctx context.Context, text string, keys PublicKeys) (*ServiceToken, error) {
	t, signed, sig, err := parseServiceToken(text)
	if err == nil {
		err = t.check(time.Now())
	}
	if err != nil {
		return nil, err
	}
	pub, err := keys(ctx, t.keyOwner(), t.KeyID)
	if err == nil {
		err = certpem.CheckKey(pub)
	}
	if err != nil {
		return nil, fmt.Errorf("athenz: service token: public key %q of %q: %w",
			token.Clip(t.KeyID, token.MaxQuoted), t.keyOwner(), err)
	}
	sum, good := sha256.Sum256([]byte(signed)), false
	switch k := pub.(type) {
	case *rsa.PublicKey:
		good = rsa.VerifyPKCS1v15(k, crypto.SHA256, sum[:], sig) == nil
	case *ecdsa.PublicKey:
		good = ecdsa.VerifyASN1(k, sum[:], sig)
	}
	if !good {
		return nil, badToken("the signature does not match the key")
	}
	return t, nil
}

// parseServiceToken parses a token, and returns the signed bytes and the signature. Tags may be in any order, and
// unknown tags are ignored. A duplicate tag is refused.
func parseServiceToken(text string) (t *ServiceToken, signed string, sig []byte, err error) {
	if len(text) > maxServiceToken {
		return nil, "", nil, badToken("it has %d bytes, the limit is %d", len(text), maxServiceToken)
	}
	signed, tail, _ := strings.Cut(text, ";s=")
	tail, _, _ = strings.Cut(tail, ";") // ignores the additions of an authorized service
	sig, ok := decodeY64(tail)
	if !ok || len(sig) == 0 {
		return nil, "", nil, badToken("it has no signature in the base64 of Athenz")
	}
	tags := map[string]string{}
	for part := range strings.SplitSeq(signed, ";") {
		name, value, ok := strings.Cut(part, "=")
		if _, twice := tags[name]; !ok || twice {
			return nil, "", nil, badToken("a part of it is not NAME=VALUE, or is there twice")
		}
		tags[name] = value
	}
	t = &ServiceToken{
		Service: athenzname.Service{Domain: strings.ToLower(tags["d"]), Name: strings.ToLower(tags["n"])},
		Version: tags["v"], KeyID: cmp.Or(tags["k"], "0"), KeyService: tags["z"], Host: tags["h"], IP: tags["i"],
	}
	for tag, at := range map[string]*time.Time{"t": &t.Issued, "e": &t.Expires} {
		n, err := strconv.ParseInt(tags[tag], 10, 64)
		if err != nil || n < 0 || n > 1<<40 {
			return nil, "", nil, badToken(`its "t" or "e" is missing or not a time in seconds`)
		}
		*at = time.Unix(n, 0).UTC()
	}
	return t, signed, sig, nil
}

// ServiceTokenAuthenticator proves a caller by the service token in the header Athenz-Principal-Auth, sent over TLS
// or a Unix socket. The Name of the Caller is the principal, and the method "athenz-service-token". If an error of
// keys wraps [ErrServiceToken], the token is refused; any other error means that it cannot be judged now.
func ServiceTokenAuthenticator(keys PublicKeys) authn.Authenticator {
	return authn.Func(func(r *http.Request) (*authn.Caller, error) {
		fields := r.Header.Values(serviceTokenHead)
		switch {
		case len(fields) == 0:
			return nil, fmt.Errorf("athenz: service token: %w", authn.ErrNoCredential)
		case len(fields) > 1:
			return nil, fmt.Errorf("athenz: service token: %w: the header is there %d times", authn.ErrRefused,
				len(fields))
		case !bearer.Confidential(r):
			return nil, fmt.Errorf("athenz: service token: %w: the connection is neither TLS nor a Unix "+
				"socket", authn.ErrRefused)
		}
		t, err := VerifyServiceToken(r.Context(), fields[0], keys)
		if errors.Is(err, ErrServiceToken) {
			return nil, fmt.Errorf("%w: %w", authn.ErrRefused, err)
		}
		if err != nil {
			return nil, err
		}
		return &authn.Caller{Name: t.Service.String(), Method: "athenz-service-token", NotAfter: t.Expires}, nil
	})
}

// y64 is Athenz's base64, which replaces +, / and =.
var y64 = base64.NewEncoding("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._").WithPadding('-')

// decodeY64 decodes the one encoding of data in [y64].
func decodeY64(text string) ([]byte, bool) {
	data, err := y64.Strict().DecodeString(text)
	return data, err == nil && !strings.ContainsAny(text, "\r\n")
}
