package witsvid

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Structured field values (RFC 8941), as far as message signatures use them: dictionaries of byte
// sequences, and dictionaries of inner lists of strings, with parameters. Items are kept in their one
// canonical spelling, so that the signature base can be written from them.

// Bounds on what is read.
const (
	maxStructured = 8 << 10 // bytes of a field, all its lines together
	maxMembers    = 16      // of a dictionary
	maxItems      = 64      // of an inner list
	maxParams     = 16
)

// The grammar. Decimals and dates do not occur in signatures.
const (
	sfKey    = `[a-z*][a-z0-9_.*-]*`
	sfText   = `"(?:[ !#-\[\]-~]|\\["\\])*"`
	sfItem   = sfText + `|:[A-Za-z0-9+/]*=*:|\?[01]|0|-?[1-9][0-9]{0,14}|[A-Za-z*][A-Za-z0-9!#$%&'*+.^_` + "`" + `|~:/-]*`
	sfParam  = `; *(` + sfKey + `)(?:=(` + sfItem + `))?`
	sfParams = `((?:; *` + sfKey + `(?:=(?:` + sfItem + `))?)*)`
)

var (
	paramPattern  = regexp.MustCompile(sfParam)
	textPattern   = regexp.MustCompile(`^` + sfText + `$`)
	namePattern   = regexp.MustCompile(`^(` + sfText + `)` + sfParams + `( +|\))`)
	listPattern   = regexp.MustCompile(`^(` + sfKey + `)=\( *`)
	memberPattern = regexp.MustCompile(`^(` + sfKey + `)(?:=(` + sfItem + `))?`)
	paramsPattern = regexp.MustCompile(`^` + sfParams)
)

// item is a bare item as it is written: "text", token, :bytes:, 123 or ?1.
type item string

const yes item = "?1"

func textItem(s string) item {
	return item(`"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`)
}

func bytesItem(b []byte) item { return item(":" + base64.StdEncoding.EncodeToString(b) + ":") }

// kind returns '"', ':', '?', '0' for an integer, or 'a' for a token.
func (i item) kind() byte {
	switch c := i[0]; {
	case c == '-' || '0' <= c && c <= '9':
		return '0'
	case c == '"' || c == ':' || c == '?':
		return c
	}
	return 'a'
}

// text returns what a string says, and "" for no item.
func (i item) text() string {
	if i == "" {
		return ""
	}
	return strings.NewReplacer(`\\`, `\`, `\"`, `"`).Replace(string(i[1 : len(i)-1]))
}

// bytes returns the value of a byte sequence.
func (i item) bytes() ([]byte, error) {
	return base64.StdEncoding.Strict().DecodeString(string(i[1 : len(i)-1]))
}

// time returns the time of an integer, in seconds since 1970, and the zero time for no item.
func (i item) time() time.Time {
	n, err := strconv.ParseInt(string(i), 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(n, 0)
}

type param struct {
	key   string
	value item
}

// member is a member of a dictionary: an item, or an inner list. What that has are the components of a
// signature, each as it stands in the signature base: a name in quotes, with parameters.
type member struct {
	key    string
	isList bool
	list   []string
	value  item
	params []param
}

// parseDictionary reads a dictionary in which no key occurs twice. The text of the error names the place.
func parseDictionary(s string) ([]member, error) {
	if len(s) > maxStructured {
		return nil, fmt.Errorf("longer than %d bytes", maxStructured)
	}
	var members []member
	rest := strings.Trim(s, " ")
	fail := func(reason string) ([]member, error) {
		return nil, fmt.Errorf("at byte %d: %s", len(s)-len(rest), reason)
	}
	for {
		var m member
		var fault string
		if m, rest, fault = parseMember(rest); fault != "" {
			return fail(fault)
		}
		if slices.ContainsFunc(members, func(other member) bool { return other.key == m.key }) {
			return fail("a key occurs twice")
		}
		if members = append(members, m); len(members) > maxMembers {
			return fail("too many members")
		}
		if rest = strings.TrimLeft(rest, " \t"); rest == "" {
			return members, nil
		}
		if rest[0] != ',' {
			return fail("a comma is missing here, or the value before it is of a kind that signatures do not have")
		}
		rest = strings.TrimLeft(rest[1:], " \t")
	}
}

// parseMember reads one member and returns what follows it.
func parseMember(s string) (m member, rest, fault string) {
	if at := listPattern.FindStringSubmatch(s); at != nil {
		m.key, m.isList, m.list = at[1], true, []string{}
		for s = s[len(at[0]):]; !strings.HasPrefix(s, ")"); {
			at := namePattern.FindStringSubmatch(s)
			if at == nil || len(m.list) == maxItems {
				return m, s, "a component is missing here, or there are too many"
			}
			params, fault := parseParams(at[2])
			if fault != "" {
				return m, s, fault
			}
			m.list = append(m.list, at[1]+formatParams(params))
			s = s[len(at[0])-len(strings.TrimLeft(at[3], " ")):] // a closing bracket is read above
		}
		s = s[1:]
	} else if at := memberPattern.FindStringSubmatch(s); at != nil {
		m.key, m.value = at[1], itemOr(at[2])
		s = s[len(at[0]):]
		if fault = itemFault(m.value); fault != "" {
			return m, s, fault
		}
	} else {
		return m, s, "a key is missing here"
	}
	at := paramsPattern.FindString(s)
	m.params, fault = parseParams(at)
	return m, s[len(at):], fault
}

// itemOr returns the item, or true if there is none.
func itemOr(s string) item { return cmp.Or(item(s), yes) }

// itemFault refuses a byte sequence that is not canonical base64.
func itemFault(i item) string {
	if i.kind() == ':' {
		if data, err := i.bytes(); err != nil || bytesItem(data) != i {
			return "not base64 with padding"
		}
	}
	return ""
}

// parseParams reads parameters, which match their pattern.
func parseParams(s string) (list []param, fault string) {
	for _, at := range paramPattern.FindAllStringSubmatch(s, maxParams+1) {
		p := param{at[1], itemOr(at[2])}
		if slices.ContainsFunc(list, func(other param) bool { return other.key == p.key }) {
			return nil, "a parameter occurs twice"
		}
		if fault := itemFault(p.value); fault != "" {
			return nil, fault
		}
		list = append(list, p)
	}
	if len(list) > maxParams {
		return nil, "too many parameters"
	}
	return list, ""
}

func formatParams(params []param) string {
	var b strings.Builder
	for _, p := range params {
		b.WriteString(";" + p.key)
		if p.value != yes {
			b.WriteString("=" + string(p.value))
		}
	}
	return b.String()
}

func formatList(list []string, params []param) string {
	return "(" + strings.Join(list, " ") + ")" + formatParams(params)
}

// printable reports whether s can stand in a structured field as a string.
func printable(s string) bool {
	return !strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c > '~' })
}
