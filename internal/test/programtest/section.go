package programtest

import (
	"os"
	"strings"
	"testing"
)

// Section compares text with what is between the marks begin and end in a page, or with update writes it there.
func Section(t testing.TB, update bool, page, begin, end, text string) {
	t.Helper()
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(got), begin)
	is, tail, found := strings.Cut(rest, end)
	switch {
	case !ok || !found:
		t.Fatalf("%s lacks a section from %q to %q", page, begin, end)
	case update:
		if err := os.WriteFile(page, []byte(head+begin+text+end+tail), 0o644); err != nil {
			t.Fatal(err)
		}
	case is != text:
		t.Errorf("%s is stale: run this test with -update\nit has:\n%s\nnot:\n%s", page, is, text)
	}
}
