package kubesecrets_test

import (
	"flag"
	"os"
	"testing"
)

// TestMain has more tests run at once than there are processors, as they mostly wait.
func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "8") // -parallel, if it is given, is parsed after this
	os.Exit(m.Run())
}
