package istioagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxYAML      = 256 << 10 // bytes
	maxYAMLDepth = 16
)

// readYAML reads a mapping in JSON, or in the part of YAML in which the configuration of a proxy is written: mappings and lists
// of scalars by indentation, scalars that are plain, in single or in double quotes, and comments. In one line there are lists
// and mappings of scalars, and JSON. Everything else is an error with its line, as is a scalar that readers of YAML do
// not agree about. The values are those of package json.
func readYAML(text string) (map[string]any, error) {
	if len(text) > maxYAML {
		return nil, fmt.Errorf("it has %d bytes, and may have %d", len(text), maxYAML)
	}
	if !utf8.ValidString(text) || strings.ContainsFunc(text, func(c rune) bool { return unicode.IsControl(c) && !strings.ContainsRune("\t\r\n", c) }) {
		return nil, errors.New("it is no text in UTF-8, or has control characters")
	}
	if strings.HasPrefix(strings.TrimSpace(text), "{") {
		var object map[string]any
		if err := json.Unmarshal([]byte(text), &object); err == nil {
			return object, nil
		} else if strings.Contains(strings.TrimSpace(text), "\n") {
			return nil, err
		}
	}
	r := new(yamlReader)
	for i, raw := range strings.Split(text, "\n") {
		line := yamlLine{number: i + 1, text: strings.TrimRight(uncommented(strings.TrimSuffix(raw, "\r")), " \t")}
		body := strings.TrimLeft(line.text, " ")
		line.indent, line.text = len(line.text)-len(body), body
		switch {
		case body == "", body == "---" && line.indent == 0 && r.lines == nil:
		case body[0] == '\t':
			return nil, line.wrong("it is indented by a tab; use spaces")
		case strings.HasPrefix(body, "---"), strings.HasPrefix(body, "..."), body[0] == '%':
			return nil, line.wrong("one document is read, without directives")
		default:
			r.lines = append(r.lines, line)
		}
	}
	if len(r.lines) == 0 {
		return nil, nil
	}
	if strings.HasPrefix(r.lines[0].text, "{") && len(r.lines) == 1 {
		value, err := r.lines[0].scalar(r.lines[0].text)
		object, _ := value.(map[string]any)
		return object, err
	}
	object, err := r.mapping(r.lines[0].indent, 1)
	if err == nil && len(r.lines) > 0 {
		err = r.lines[0].wrong("its indentation fits no line above")
	}
	return object, err
}

type yamlLine struct {
	number, indent int
	text           string // without indentation and comment
}

func (l yamlLine) wrong(format string, args ...any) error {
	return fmt.Errorf("line %d: %s", l.number, fmt.Sprintf(format, args...))
}

func (l yamlLine) isItem() bool { return l.text == "-" || strings.HasPrefix(l.text, "- ") }

// yamlReader has the lines that are still to be read.
type yamlReader struct{ lines []yamlLine }

// at reports whether the next line has this indentation.
func (r *yamlReader) at(indent int) bool { return len(r.lines) > 0 && r.lines[0].indent == indent }

func (r *yamlReader) mapping(indent, depth int) (map[string]any, error) {
	m := make(map[string]any)
	for r.at(indent) {
		l := r.lines[0]
		r.lines = r.lines[1:]
		key, rest, err := l.key(l.text)
		if err != nil {
			return nil, err
		}
		if _, twice := m[key]; twice {
			return nil, l.wrong("%.80q is there twice", key)
		}
		switch {
		case rest != "":
			m[key], err = l.scalar(rest)
		case len(r.lines) > 0 && r.lines[0].isItem() && r.lines[0].indent >= indent:
			m[key], err = r.list(r.lines[0].indent)
		case len(r.lines) > 0 && r.lines[0].indent > indent && depth == maxYAMLDepth:
			err = r.lines[0].wrong("it is in too many mappings")
		case len(r.lines) > 0 && r.lines[0].indent > indent:
			m[key], err = r.mapping(r.lines[0].indent, depth+1)
		default:
			m[key] = nil
		}
		if err != nil {
			return nil, err
		}
		if len(r.lines) > 0 && r.lines[0].indent > indent {
			return nil, r.lines[0].wrong("it is indented more than the lines that it belongs to")
		}
	}
	return m, nil
}

func (r *yamlReader) list(indent int) ([]any, error) {
	list := []any{}
	for r.at(indent) && r.lines[0].isItem() {
		l := r.lines[0]
		r.lines = r.lines[1:]
		value, err := l.scalar(strings.TrimLeft(l.text[1:], " "))
		if err != nil {
			return nil, err
		}
		list = append(list, value)
	}
	return list, nil
}

// key cuts a line, or an entry of a mapping in one line, behind its key.
func (l yamlLine) key(text string) (key, rest string, err error) {
	if text[0] == '"' || text[0] == '\'' {
		end := quoted(text)
		if !strings.HasPrefix(text[end:], ":") {
			return "", "", l.wrong("there is no colon behind the key in quotes")
		}
		value, err := l.scalar(text[:end])
		key, _ := value.(string)
		if rest = text[end+1:]; err == nil && rest != "" && rest[0] != ' ' {
			err = l.wrong("there is no space behind the colon")
		}
		return key, strings.TrimLeft(rest, " "), err
	}
	at := strings.Index(text+" ", ": ")
	if at < 0 {
		return "", "", l.wrong("it is not KEY: VALUE")
	}
	value, err := l.scalar(strings.TrimRight(text[:at], " "))
	key, ok := value.(string)
	if err == nil && (!ok || key == "<<" || text[0] == '[' || text[0] == '{') {
		err = l.wrong("the key %.80q is no text; put it into quotes", text[:at])
	}
	return key, strings.TrimLeft(text[min(at+1, len(text)):], " "), err
}

// ambiguous is what some readers of YAML take for a number, a time or a truth value.
var ambiguous = regexp.MustCompile(`^(?i:[-+]?(\.?[0-9][0-9_]*(\.[0-9_]*)?(e[-+]?[0-9]+)?|0[xob][0-9a-f_]+|\.inf|\.nan|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)|[0-9]{4}-[0-9]+-[0-9].*|yes|no|on|off|y|n|=)$`)

// scalar reads what stands in one line.
func (l yamlLine) scalar(text string) (value any, err error) {
	switch {
	case text == "" || text == "~" || text == "null" || text == "Null" || text == "NULL":
		return nil, nil
	case text[0] == '"':
		var s string
		if quoted(text) != len(text) || json.Unmarshal([]byte(text), &s) != nil {
			return nil, l.wrong("%.80s is not a text in double quotes", text)
		}
		return s, nil
	case text[0] == '\'':
		if quoted(text) != len(text) {
			return nil, l.wrong("%.80s is not a text in single quotes", text)
		}
		return strings.ReplaceAll(text[1:len(text)-1], "''", "'"), nil
	case text[0] == '[', text[0] == '{':
		if json.Unmarshal([]byte(text), &value) == nil {
			return value, nil
		}
		return l.flow(text)
	case strings.ContainsRune("|>&*!%@`,]}#?", rune(text[0])), strings.HasPrefix(text, "- "), text == "-", strings.HasPrefix(text, ":"):
		return nil, l.wrong("%.80q is of a part of YAML that is not read here; put a text into quotes, and write a list of lists or mappings in JSON", text)
	case strings.Contains(text, ": "), strings.HasSuffix(text, ":"), strings.ContainsAny(text, "\t\r"):
		return nil, l.wrong("%.80q has a colon or a tab; put it into quotes, and a mapping into lines of its own", text)
	case json.Unmarshal([]byte(text), &value) == nil: // a number, true or false
		return value, nil
	case text == "True" || text == "TRUE" || text == "False" || text == "FALSE":
		return strconv.ParseBool(text)
	case ambiguous.MatchString(text):
		return nil, l.wrong("%.80q is a text for some readers and none for others; put it into quotes", text)
	}
	for _, c := range text {
		if !strconv.IsPrint(c) || c == '\ufeff' {
			return nil, l.wrong("%.80q has a character that cannot be printed; put it into double quotes", text)
		}
	}
	return text, nil
}

// flow reads a list or a mapping of scalars in one line.
func (l yamlLine) flow(text string) (any, error) {
	end := map[byte]byte{'[': ']', '{': '}'}[text[0]]
	if len(text) < 2 || text[len(text)-1] != end {
		return nil, l.wrong("there is no %q at its end", end)
	}
	list, object := []any{}, make(map[string]any)
	for rest := strings.TrimSpace(text[1 : len(text)-1]); rest != ""; {
		i := 0
		for i < len(rest) && rest[i] != ',' {
			switch n := quoted(rest[i:]); {
			case n > 0 && (i == 0 || rest[i-1] == ' '):
				i += n
			case strings.ContainsRune("[]{}", rune(rest[i])):
				return nil, l.wrong("write lists and mappings in others as JSON")
			default:
				i++
			}
		}
		entry := strings.TrimSpace(rest[:i])
		rest = strings.TrimSpace(rest[min(i+1, len(rest)):])
		if entry == "" {
			return nil, l.wrong("an entry is empty")
		}
		if end == ']' {
			value, err := l.scalar(entry)
			if err != nil {
				return nil, err
			}
			list = append(list, value)
			continue
		}
		key, value, err := l.key(entry)
		if err != nil {
			return nil, err
		}
		if _, twice := object[key]; twice {
			return nil, l.wrong("%.80q is there twice", key)
		}
		if object[key], err = l.scalar(value); err != nil {
			return nil, err
		}
	}
	if end == ']' {
		return list, nil
	}
	return object, nil
}

// quoted returns the length of the text in quotes at the beginning of text, or 0.
func quoted(text string) int {
	if text == "" || text[0] != '"' && text[0] != '\'' {
		return 0
	}
	for i := 1; i < len(text); i++ {
		switch {
		case text[i] == '\\' && text[0] == '"':
			i++
		case text[i] == text[0] && text[0] == '\'' && i+1 < len(text) && text[i+1] == '\'':
			i++
		case text[i] == text[0]:
			return i + 1
		}
	}
	return 0
}

// uncommented returns a line without the comment at its end.
func uncommented(line string) string {
	for i := 0; i < len(line); i++ {
		begins := i == 0 || strings.ContainsRune(" \t[{,", rune(line[i-1]))
		if begins && line[i] == '#' {
			return line[:i]
		}
		if begins {
			if n := quoted(line[i:]); n > 0 {
				i += n - 1
			}
		}
	}
	return line
}
