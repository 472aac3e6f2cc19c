package private_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/files/private"
)

func TestPodVolume(t *testing.T) {
	const (
		head  = "1207 1186 0:325 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/l\n"
		disk  = "1235 1207 259:1 /var/lib/kubelet/pods/6f9c/volumes/kubernetes.io~empty-dir/creds /run/creds rw,relatime - ext4 /dev/vda rw\n"
		mem   = "1236 1207 0:55 / /run/creds rw,relatime shared:7 - tmpfs tmpfs rw,size=64k\n"
		host  = "1237 1207 259:1 /srv/creds /run/creds rw,relatime - ext4 /dev/vda rw\n"
		other = "1238 1207 0:55 / /run/creds2 rw,relatime - tmpfs tmpfs rw\n"
	)
	for name, c := range map[string]struct {
		mounts string
		want   bool
	}{
		"on the disk":              {head + disk, true},
		"in memory":                {head + mem, true},
		"a directory of the host":  {head + host, false},
		"another mount":            {head + other, false},
		"no mount":                 {head, false},
		"a line that is too short": {"1 2 - tmpfs tmpfs rw\n" + head, false},
		"nothing":                  {"", false},
	} {
		assert.Equal(t, c.want, private.EmptyDir(c.mounts, "/run/creds"), name)
	}
	assert.False(t, private.PodVolume(t.TempDir()), "in no pod")
	t.Setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
	assert.False(t, private.PodVolume(t.TempDir()), "a directory that is no mount")
}
