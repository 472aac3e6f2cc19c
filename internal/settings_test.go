package internal_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/internal/test/must"
)

var settingsTable = settings.Table{
	Prefixes: []string{"SECRET_", "CA_"},
	Variables: []settings.Variable{
		{Name: "NAME", Default: "web", Doc: "name", Origin: "document"},
		{Name: "KIND", Choices: []string{"one", "two"}, Doc: "kind", Origin: "implied"},
		{Name: "FILE", Form: settings.Path, Doc: "a | b"},
		{Name: "SECRET_TTL", Form: settings.Duration, Default: "24h", Doc: "lifetime"},
		{Name: "SIZE", Form: settings.Integer, Default: "2048", Doc: "bits", Check: func(value string) error {
			if value == "1" {
				return errors.New("1 is too small; set it to 2048")
			}
			return nil
		}},
		{Name: "SECRET_RATIO", Form: settings.Ratio, Default: "0.5", Doc: "part"},
		{Name: "ON", Form: settings.Bool, Default: "true", Doc: "switch"},
		{Name: "ITEMS", Form: settings.List, Doc: "items"},
		{Name: "PASSWORD", Form: settings.Integer, Secret: true, Doc: "password"},
		{Name: "CA_HEADER_*", Doc: "metadata"},
		{Name: "CA_HEADER_OF", Doc: "one with a row of its own"},
		{Name: "GONE", Form: settings.Bool, Unused: true, Doc: "it is always on"},
		{Name: "GONE_*", Unused: true, Doc: "they are gone"},
	},
}

func TestSettingsRead(t *testing.T) {
	t.Parallel()
	v := must.Get(settingsTable.Read(nil))(t)
	assert.Equal(t, "web", v.Text("NAME"))
	assert.Equal(t, 24*time.Hour, v.Duration("SECRET_TTL"))
	assert.Equal(t, 2048, v.Int("SIZE"))
	assert.InDelta(t, 0.5, v.Ratio("SECRET_RATIO"), 0)
	assert.True(t, v.Bool("ON"))
	assert.Empty(t, v.List("ITEMS"))
	assert.Empty(t, v.Prefixed("CA_HEADER_*"))
	assert.Empty(t, v.Unknown())
	assert.Empty(t, v.Unused())
	assert.False(t, v.Set("NAME"))

	v = must.Get(settingsTable.Read([]string{
		"NAME=db=2", "KIND=two", "FILE=/etc/x", "SECRET_TTL=90s", "SIZE=0", "SECRET_RATIO=1", "ON=F", "ITEMS= a,,b ,", "PASSWORD=7",
		"CA_HEADER_x-Key=1", "CA_HEADER_OF=2", "CA_HEADER_=3", "SECRET_TLL=1s", "CA_X=y", "GONE=what", "GONE_B=1", "GONE_A=1", "OTHER=1", "NO", "EMPTY=",
	}))(t)
	assert.Equal(t, "db=2", v.Text("NAME"))
	assert.Equal(t, "/etc/x", v.Text("FILE"))
	assert.Equal(t, 90*time.Second, v.Duration("SECRET_TTL"))
	assert.Zero(t, v.Int("SIZE"))
	assert.InDelta(t, 1, v.Ratio("SECRET_RATIO"), 0)
	assert.False(t, v.Bool("ON"))
	assert.Equal(t, []string{"a", "b"}, v.List("ITEMS"))
	assert.Equal(t, map[string]string{"x-Key": "1"}, v.Prefixed("CA_HEADER_*"))
	assert.Equal(t, "2", v.Text("CA_HEADER_OF"))
	assert.Equal(t, []string{"CA_HEADER_", "CA_X", "SECRET_TLL"}, v.Unknown())
	var unused []string
	for _, row := range v.Unused() {
		unused = append(unused, row.Name+": "+row.Doc)
	}
	assert.Equal(t, []string{"GONE: it is always on", "GONE_A: they are gone", "GONE_B: they are gone"}, unused)
	assert.True(t, v.Set("NAME"))

	v = must.Get(settingsTable.Read([]string{"NAME=", "SECRET_TTL="}))(t)
	assert.Equal(t, "web", v.Text("NAME"), "an empty text is like none")
	assert.Equal(t, 24*time.Hour, v.Duration("SECRET_TTL"))
}

// What Kubernetes says of a Service is like a variable that is not set, and looks like no slip.
func TestSettingsServiceLink(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"SIZE_PORT=tcp://10.0.0.1:80", "SIZE_PORT=udp://10.0.0.1:53", "SIZE_PORT=sctp://[fd00::1]:80", "SIZE_SERVICE_HOST=10.0.0.1", "SIZE_SERVICE_PORT=80",
		"SIZE_SERVICE_PORT_HTTP_2=80", "SIZE_PORT_80_TCP=tcp://10.0.0.1:80", "SIZE_PORT_53_UDP_PROTO=udp", "SIZE_PORT_80_TCP_PORT=80", "SIZE_PORT_80_SCTP_ADDR=10.0.0.1",
	} {
		assert.True(t, settings.ServiceLink(line), line)
	}
	for _, line := range []string{
		"SIZE_PORT=15021", "SIZE_PORT=tcp", "SIZE_PORT=http://10.0.0.1:80", "SIZE=tcp://10.0.0.1:80", "SIZE_PORT_NAME=a", "SIZE_PORT_80_HTTP=x", "SIZE_PORT_80=1",
		"KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443", "_SERVICE_HOST=x", "OTHER=A_SERVICE_HOST=x", "",
	} {
		assert.False(t, settings.ServiceLink(line), line)
	}
	port := settings.Table{Prefixes: []string{"A_"}, Variables: []settings.Variable{{Name: "A_PORT", Form: settings.Integer, Default: "1"}, {Name: "A_*", Unused: true}}}
	v := must.Get(port.Read([]string{"A_PORT=tcp://10.0.0.1:80", "A_SERVICE_HOST=10.0.0.1"}))(t)
	assert.Equal(t, 1, v.Int("A_PORT"))
	assert.Empty(t, v.Unused())
	v = must.Get(port.Read([]string{"A_PORT=2", "A_SERVICE_HOST=10.0.0.1"}))(t)
	assert.Equal(t, 2, v.Int("A_PORT"))
}

func TestSettingsBad(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"KIND=three", "FILE=a\x00b", "SECRET_TTL=1 day", "SECRET_TTL=24", "SECRET_TTL=-1s", "SIZE=-1", "SIZE=2k", "SIZE=99999999999", "SIZE=1",
		"SECRET_RATIO=1.1", "SECRET_RATIO=-0.1", "SECRET_RATIO=NaN", "SECRET_RATIO=50%", "ON=yes", "ON=2",
	} {
		_, err := settingsTable.Read([]string{line})
		name, value, _ := strings.Cut(line, "=")
		require.ErrorContains(t, err, fmt.Sprintf("environment variable %s=%q: ", name, value))
		require.ErrorContains(t, err, "set it to ", "the remedy")
	}

	_, err := settingsTable.Read([]string{"ON=yes", "PASSWORD=hunter2", "KIND=" + strings.Repeat("x", 1000)})
	require.Error(t, err)
	lines := strings.Split(err.Error(), "\n")
	require.Len(t, lines, 3, "all that is bad, in the order of the table")
	assert.Contains(t, lines[0], "KIND=")
	assert.Less(t, len(lines[0]), 200)
	assert.Contains(t, lines[1], "ON=")
	assert.Contains(t, lines[2], "PASSWORD: ")
	assert.NotContains(t, err.Error(), "hunter2")
}

func TestSettingsValuesPrintNothing(t *testing.T) {
	t.Parallel()
	v := must.Get(settingsTable.Read([]string{"PASSWORD=4711"}))(t)
	assert.NotContains(t, fmt.Sprintf("%v %+v %#v %s", v, v, v, v), "4711")
}

func TestSettingsNear(t *testing.T) {
	t.Parallel()
	known := []string{"PROXY_CONFIG", "TRUST_DOMAIN", "CLUSTER_ID", "INSTANCE_IP", "TTL", "ISTIO_META_*"}
	for name, want := range map[string]string{
		"proxy-config": "PROXY_CONFIG", "TRUSTDOMAIN": "TRUST_DOMAIN", "PROXY_CONFG": "PROXY_CONFIG", "PROXY_CONFFIG": "PROXY_CONFIG",
		"PROXY_CONIFG": "PROXY_CONFIG", "PORXY_CONFIG": "PROXY_CONFIG", "CLUTSER_ID": "CLUSTER_ID",
		"PROXY_CONFIG": "", "PROXY_CFG": "", "CLUSTER_IP": "", "INSTANCE_ID": "", "TT": "", "ISTIO_META_": "", "": "",
	} {
		got, ok := settings.Near(name, known)
		assert.Equal(t, want, got, name)
		assert.Equal(t, want != "", ok, name)
	}
}

func TestSettingsPanics(t *testing.T) {
	t.Parallel()
	v := must.Get(settingsTable.Read(nil))(t)
	assert.Panics(t, func() { v.Text("NAMES") })
	assert.Panics(t, func() { v.Text("SIZE") })
}

func TestSettingsDocumentation(t *testing.T) {
	t.Parallel()
	var help, page strings.Builder
	require.NoError(t, settingsTable.Write(&help, false))
	require.NoError(t, settingsTable.Write(&page, true))
	assert.Contains(t, help.String(), "  NAME  (text, default web)\n        name\n")
	assert.Contains(t, page.String(), "| `NAME` | text | `web` | name | document |\n")
	assert.Contains(t, page.String(), "| `KIND` | text |  | kind: one, two | implied |\n")
	assert.Contains(t, page.String(), `a \| b`)
	assert.Contains(t, page.String(), "| `GONE` | bool |  | not used: it is always on |  |\n")
	assert.Contains(t, help.String(), "  KIND  (text)\n")
	assert.Contains(t, help.String(), "  GONE  (bool)\n        not used: it is always on\n")
	for _, row := range settingsTable.Variables {
		assert.Contains(t, help.String(), row.Name)
		assert.Contains(t, page.String(), row.Name)
	}
}

func FuzzSettings(f *testing.F) {
	f.Add("SECRET_TTL=1h", "SECRET_RATIO=1e-3")
	f.Add("ON=yes", "CA_HEADER_=x")
	f.Add("=", "ITEMS=,,")
	f.Add("SIZE=0x10", "GONE")
	f.Fuzz(func(t *testing.T, one, two string) {
		v, err := settingsTable.Read([]string{one, two})
		if err != nil {
			require.Nil(t, v)
			require.ErrorContains(t, err, "environment variable ")
			return
		}
		require.GreaterOrEqual(t, v.Duration("SECRET_TTL"), time.Duration(0))
		require.GreaterOrEqual(t, v.Int("SIZE"), 0)
		require.True(t, v.Ratio("SECRET_RATIO") >= 0 && v.Ratio("SECRET_RATIO") <= 1)
	})
}
