package caconfig

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/must"
)

func TestCommandHasNoSecrets(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, ""},
		{[]string{"/usr/bin/ca"}, "ca"},
		{[]string{"ca", "-taint", "1f", "-state-dir=/x"}, "ca -taint 1f -state-dir=/x"},
		{[]string{"ca", "-api-token", "hunter2", "-rotate"}, "ca -api-token … -rotate"},
		{[]string{"ca", "--API-Token=hunter2", "-rotate"}, "ca --API-Token=… -rotate"},
		{[]string{"ca", "-password=", "-v"}, "ca -password=… -v"},
		{[]string{"ca", "-client-secret", "-rotate"}, "ca -client-secret -rotate"},
		{[]string{"ca", "-credentials", "hunter2", "hunter"}, "ca -credentials … hunter"},
		{[]string{"ca", "-server", "https://me:hunter2@host/x"}, "ca -server https://…@host/x"},
		{[]string{"ca", "-server=https://hunter2@host"}, "ca -server=https://…@host"},
		{[]string{"ca", "-a=https://x:y@h/1,http://b@h,ftp://h/p@q,://@"}, "ca -a=https://…@h/1,http://…@h,ftp://h/p@q,://…@"},
		{[]string{"ca", "bad\xff"}, "ca bad\uFFFD"},
		{[]string{"ca", strings.Repeat("ä", 2000)}, "ca " + strings.Repeat("ä", 510) + "…"},
	} {
		assert.Equal(t, tc.want, command(tc.args))
	}
}

func TestCurrentActor(t *testing.T) {
	t.Parallel()
	a := currentActor()
	assert.Equal(t, must.Get(os.Hostname())(t), a.Host)
	if runtime.GOOS != "windows" {
		assert.Equal(t, strconv.Itoa(os.Getuid()), a.UID)
	}
	assert.True(t, strings.HasPrefix(a.Command, filepath.Base(os.Args[0])), a.Command)
}
