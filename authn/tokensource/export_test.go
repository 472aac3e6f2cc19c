package tokensource

import (
	"net/http"
	"testing"
	"time"
)

// Client returns the client for metadata servers, or, with proxies, that for token endpoints.
func Client(t *testing.T, proxies bool) *http.Client {
	c, err := newClient(nil, proxies)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Parse reads an answer with each parser, and returns what each gives by its name.
func Parse(data []byte, audience string) map[string]Parsed {
	at := func(tok token, err error) Parsed { return Parsed{tok.text, tok.expires, err} }
	google := http.Header{"Metadata-Flavor": {"Google"}}
	return map[string]Parsed{
		"file":  at(newToken(string(data), time.Time{})),
		"GCE":   at(parseGCE(data, google, audience)),
		"token": at(parseAccessToken(data, time.Now())),
	}
}

// Parsed is a token, or why there is none.
type Parsed struct {
	Text    string
	Expires time.Time
	Err     error
}

// Refusal reads the body of an answer that is no success.
func Refusal(data []byte, secret string) *StatusError { return refusal(400, data, []string{secret}) }
