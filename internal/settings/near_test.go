package settings_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/settings"
)

func TestNear(t *testing.T) {
	t.Parallel()
	known := []string{
		"PROXY_CONFIG", "TRUST_DOMAIN", "MAX_WORKLOAD_CERT_TTL", "CLUSTER_ID", "INSTANCE_IP", "CA_ADDR", "SECRET_TTL", "TTL", "ISTIO_META_*",
		"KUBERNETES_SERVICE_HOST", "SEND_POST", "POD_NAME",
	}
	for name, want := range map[string]string{
		"PROXY_CONFG": "PROXY_CONFIG", "PROXY_CONFFIG": "PROXY_CONFIG", "PROXY_CONIFG": "PROXY_CONFIG", "PROXY_CONFIGS": "PROXY_CONFIG",
		"proxy-config": "PROXY_CONFIG", "PRXY_CONFIG": "PROXY_CONFIG", "PROXI_CONFIG": "PROXY_CONFIG", "PORXY_CONFIG": "PROXY_CONFIG",
		"TRUSTDOMAIN": "TRUST_DOMAIN", "MAX_WORKLOD_CERT_TTL": "MAX_WORKLOAD_CERT_TTL", "CLUSTERID": "CLUSTER_ID", "CLUTSER_ID": "CLUSTER_ID",
		"CA_ADR": "CA_ADDR", "SECERT_TTL": "SECRET_TTL", "SECRET_TLT": "SECRET_TTL", "INSTANC_IP": "INSTANCE_IP",

		"PROXY_CONFIG": "", "CLUSTER_IP": "", "INSTANCE_ID": "", "TT": "", "ISTIO_META_": "", "KUBERNETES_SERVICE_PORT": "", "SEND_PORT": "",
		"PROXY_CFG": "", "XPROXY_CONFIGX": "", "": "", "_": "", "HOST_IP": "", "POD_NAMESPACE": "", "PATH": "", "SECRET_TTX": "",
	} {
		got, ok := settings.Near(name, known)
		assert.Equal(t, want, got, name)
		assert.Equal(t, want != "", ok, name)
	}
}
