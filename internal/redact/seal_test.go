package redact_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/redact"
)

func TestSeal(t *testing.T) {
	t.Parallel()
	type secret struct{ text string }
	sealed := struct{ in any }{&struct{ key func() secret }{redact.Seal(secret{"xyzzy"})}}
	assert.Equal(t, "xyzzy", sealed.in.(*struct{ key func() secret }).key().text)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%d", "%q"} {
		assert.NotContains(t, fmt.Sprintf(verb, sealed), "xyzzy", verb)
		assert.NotContains(t, fmt.Sprintf(verb, sealed), "78797a7a79", verb)
	}
}
