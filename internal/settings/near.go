package settings

import (
	"slices"
	"strings"
)

// Near returns the known name that name is a slip for, if it is not known itself: one letter is missing, too many or another,
// or two have changed places, and case, underscores and hyphens do not count. Known names of fewer than six letters are no
// candidates, nor are those that end with "*". In the last word no letter may be another, as ID is no slip for IP, and PORT
// is none for POST.
func Near(name string, known []string) (right string, ok bool) {
	if slices.Contains(known, name) {
		return "", false
	}
	for _, k := range known {
		got, want, last := letters(name), letters(k), letters(k[strings.LastIndexByte(k, '_')+1:])
		if len(want) < 6 || strings.HasSuffix(k, "*") {
			continue
		}
		for got != "" && want != "" && got[0] == want[0] {
			got, want = got[1:], want[1:]
		}
		before := len(want) > len(last)
		for got != "" && want != "" && got[len(got)-1] == want[len(want)-1] {
			got, want = got[:len(got)-1], want[:len(want)-1]
		}
		one := len(got)+len(want) < 2
		other := before && len(got) == 1 && len(want) == 1
		swapped := len(got) == 2 && len(want) == 2 && got[0] == want[1] && got[1] == want[0]
		if one || other || swapped {
			return k, true
		}
	}
	return "", false
}

// letters returns the letters and digits of a name, in upper case.
func letters(name string) string {
	return strings.ToUpper(strings.NewReplacer("_", "", "-", "").Replace(name))
}
