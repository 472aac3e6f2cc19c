package sds_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
)

func mustMarshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	require.NoError(t, err)
	return b
}

func http1(t testing.TB, socket string) *http.Client {
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

type answer struct {
	*http.Response
	body []byte
}

func post(t testing.TB, c *http.Client, body string, header map[string]string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/v3/discovery:secrets", strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := c.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return answer{resp, b}
}

func TestFetchGRPC(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, trust := m.pair("default"), m.roots("ROOTCA")
	src.put("default", web)
	src.put("ROOTCA", trust)
	src.fail("down", errors.New("CA down"))
	var log syncBuffer
	h := handler(t, src, &sds.Options{Logger: textLogger(&log)})
	socket, _ := serve(t, h)
	c := dial(t, socket)
	fetch := func(names ...string) (*envoysds.DiscoveryResponse, string) {
		s := open(t, c, "FetchSecrets", func(r *http.Request) {
			r.Body = io.NopCloser(bytes.NewReader(frame(0, mustMarshal(t, &envoysds.DiscoveryRequest{ResourceNames: names}))))
		})
		b, err := s.next()
		if err != nil {
			code, _ := s.status()
			return nil, code
		}
		var r envoysds.DiscoveryResponse
		require.NoError(t, proto.Unmarshal(b, &r))
		code, _ := s.status()
		return &r, code
	}
	r, code := fetch("default")
	assert.Equal(t, codeOK, code)
	want(t, r, web)
	v := r.GetVersionInfo()
	r, _ = fetch("ROOTCA", "default", "unknown", "down", "default")
	want(t, r, web, trust)
	again, _ := fetch("default", "ROOTCA")
	assert.Equal(t, r.GetVersionInfo(), again.GetVersionInfo())
	assert.NotEqual(t, v, r.GetVersionInfo())

	_, code = fetch("unknown")
	assert.Equal(t, codeNotFound, code)
	_, code = fetch("unknown", "down")
	assert.Equal(t, codeUnavailable, code)
	_, code = fetch("", "")
	assert.Equal(t, codeInvalidArgument, code)
	assert.Empty(t, h.Status().Names, "nothing is kept")
	assert.Empty(t, log.String(), "pollers do not fill the log")
}

// A fetch of more than one response may hold is one response all the same.
func TestFetchLarge(t *testing.T) {
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	pem := bytes.Repeat(pki.MarshalCertificatesPEM(m.ca.Root()), 900)
	var names []string
	for _, name := range []string{"a", "b", "c", "d"} {
		s, err := pki.NewSecretPEM(name, nil, nil, pem, time.Time{})
		require.NoError(t, err)
		src.put(name, s)
		names = append(names, name)
	}
	require.Greater(t, len(pem)*len(names), 2<<20)
	socket, _ := serve(t, handler(t, src, nil))
	body, err := json.Marshal(map[string]any{"resource_names": names})
	require.NoError(t, err)
	resp := post(t, dial(t, socket), string(body), nil)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	var got restResponse
	require.NoError(t, json.Unmarshal(resp.body, &got))
	assert.Len(t, got.Resources, 4)
}

type restResponse struct {
	VersionInfo string
	TypeURL     string `json:"typeUrl"`
	Nonce       string
	Resources   []struct {
		Type           string `json:"@type"`
		Name           string
		TLSCertificate struct {
			CertificateChain, PrivateKey struct{ InlineBytes string }
		} `json:"tlsCertificate"`
		ValidationContext struct {
			TrustedCA struct{ InlineBytes string } `json:"trustedCa"`
		}
	}
}

func TestREST(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	m, src := newMint(t), newFakeSource()
	web, trust := m.pair("default"), m.roots("ROOTCA")
	src.put("default", web)
	src.put("ROOTCA", trust)
	src.fail("down", errors.New("CA down, token 1234"))
	socket, _ := serve(t, handler(t, src, &sds.Options{MaxNames: 3}))
	chain, key, _ := web.KeyPair()
	rootsPEM, _ := trust.Roots()
	for name, c := range map[string]*http.Client{"HTTP/1.1": http1(t, socket), "HTTP/2": dial(t, socket)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// As Envoy sends it, with fields that we do not know.
			resp := post(t, c, `{"node":{"id":"n","cluster":"c","metadata":{"a":[1,{"b":null}]},"user_agent_build_version":{"version":{}}},
				"resource_names":["default","ROOTCA"],"type_url":"`+typeURL+`","resource_locators":[{"name":"x"}],
				"error_detail":{"code":13,"message":"m","details":[{"@type":"type.googleapis.com/x.Y","a":1}]}}`, nil)
			require.Equal(t, http.StatusOK, resp.StatusCode, "%s", resp.body)
			assert.Equal(t, "application/json", resp.Header.Get("Content-Type"))
			assert.Equal(t, "no-store", resp.Header.Get("Cache-Control"))
			var got restResponse
			require.NoError(t, json.Unmarshal(resp.body, &got))
			assert.Equal(t, typeURL, got.TypeURL)
			require.Len(t, got.Resources, 2)
			assert.Equal(t, typeURL, got.Resources[0].Type)
			assert.Equal(t, "default", got.Resources[0].Name)
			assert.Equal(t, base64.StdEncoding.EncodeToString(chain), got.Resources[0].TLSCertificate.CertificateChain.InlineBytes)
			assert.Equal(t, base64.StdEncoding.EncodeToString(key), got.Resources[0].TLSCertificate.PrivateKey.InlineBytes)
			assert.Equal(t, base64.StdEncoding.EncodeToString(rootsPEM), got.Resources[1].ValidationContext.TrustedCA.InlineBytes)

			resp = post(t, c, `{"versionInfo":"`+got.VersionInfo+`","resourceNames":["ROOTCA","default"]}`, nil)
			assert.Equal(t, http.StatusNotModified, resp.StatusCode)
			assert.Empty(t, resp.body)
			resp = post(t, c, `{"version_info":"`+got.VersionInfo+`","resource_names":["default"]}`, nil)
			assert.Equal(t, http.StatusOK, resp.StatusCode)

			for _, test := range []struct {
				name, body string
				want       int
			}{
				{"unknown name", `{"resource_names":["x"]}`, http.StatusNotFound},
				{"failed look-up", `{"resource_names":["down","x"]}`, http.StatusServiceUnavailable},
				{"no names", `{}`, http.StatusBadRequest},
				{"everything", `{"resource_names":["*"]}`, http.StatusBadRequest},
				{"no JSON", `default`, http.StatusBadRequest},
				{"empty", ``, http.StatusBadRequest},
				{"other type", `{"resource_names":["default"],"type_url":"type.googleapis.com/envoy.config.cluster.v3.Cluster"}`, http.StatusBadRequest},
				{"too many names", `{"resource_names":["1","2","3","4"]}`, http.StatusRequestEntityTooLarge},
				{"long name", `{"resource_names":["` + strings.Repeat("x", 4097) + `"]}`, http.StatusRequestEntityTooLarge},
				{"large", `{"resource_names":["` + strings.Repeat("x", 256<<10) + `"]}`, http.StatusRequestEntityTooLarge},
				{"large in an unknown member", `{"resource_names":["default"],"x":"` + strings.Repeat("x", 256<<10) + `"}`, http.StatusRequestEntityTooLarge},
			} {
				resp := post(t, c, test.body, nil)
				assert.Equal(t, test.want, resp.StatusCode, test.name)
				var e struct {
					Code    int
					Message string
				}
				require.NoError(t, json.Unmarshal(resp.body, &e), "%s: %s", test.name, resp.body)
				assert.NotZero(t, e.Code, test.name)
				assert.Contains(t, e.Message, "sds: ", test.name)
				assert.NotContains(t, e.Message, "1234", "the source's words stay in our log")
			}
			assert.Equal(t, http.StatusUnsupportedMediaType, post(t, c, `{}`, map[string]string{"Content-Type": "text/plain"}).StatusCode)
			get, err := c.Get("http://localhost/v3/discovery:secrets")
			require.NoError(t, err)
			require.NoError(t, get.Body.Close())
			assert.Equal(t, http.StatusMethodNotAllowed, get.StatusCode)
		})
	}
}
