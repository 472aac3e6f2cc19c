package sealtest

import (
	"fmt"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// walk is a program that calls each method of zero values, twice, and prints what panics and what does not return. %s are the
// imports and the values.
const walk = `package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strconv"
	"strings"
	"time"
%s)

var values = []any{
%s}

var args = map[reflect.Type]func() any{
	reflect.TypeFor[context.Context](): func() any {
		ctx, _ := context.WithTimeout(context.Background(), 20*time.Millisecond)
		return ctx
	},
	reflect.TypeFor[io.Writer]():           func() any { return io.Discard },
	reflect.TypeFor[http.ResponseWriter](): func() any { return httptest.NewRecorder() },
	reflect.TypeFor[*http.Request]():       func() any { return httptest.NewRequest("GET", "/", nil) },
}

// call calls a method and says what went wrong.
func call(m reflect.Value) string {
	t := m.Type()
	in := make([]reflect.Value, 0, t.NumIn())
	for i := range t.NumIn() {
		if t.IsVariadic() && i == t.NumIn()-1 {
			break
		}
		v := reflect.Zero(t.In(i))
		if make := args[t.In(i)]; make != nil {
			v = reflect.ValueOf(make())
		}
		in = append(in, v)
	}
	done := make(chan string, 1)
	go func() {
		defer func() {
			if r := recover(); r != nil {
				done <- fmt.Sprint("panics: ", strings.ReplaceAll(fmt.Sprint(r), "\n", " "))
			}
		}()
		m.Call(in)
		done <- ""
	}()
	select {
	case text := <-done:
		return text
	case <-time.After(5 * time.Second):
		return "hangs"
	}
}

func main() {
	from, _ := strconv.Atoi(os.Args[1])
	for at, v := range values[from:] {
		t := reflect.TypeOf(v)
		fmt.Println("at", from+at, t) // what is printed last has ended the program
		for i := range t.NumMethod() {
			zero := reflect.New(t.Elem())
			for range 2 {
				if text := call(zero.Method(i)); text != "" {
					fmt.Printf("%%s.%%s %%s\n", strings.TrimPrefix(t.String(), "*"), t.Method(i).Name, text)
				}
			}
		}
	}
}
`

// TestZeroValues calls each method of a zero value of each exported struct, and again. Many are of use only as a constructor has
// made them, and panic: but none keeps a caller waiting, such as by a lock that a panic has left, and none ends the program by a
// panic that no caller can recover from.
func TestZeroValues(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	var imports, values strings.Builder
	n := 0
	for i, p := range packages(t) {
		scope, name, used := p.Scope(), fmt.Sprintf("p%d", i), false
		for _, id := range scope.Names() {
			o, ok := scope.Lookup(id).(*types.TypeName)
			if !ok || !o.Exported() || o.IsAlias() {
				continue
			}
			named, ok := o.Type().(*types.Named)
			if !ok || named.TypeParams().Len() > 0 {
				continue
			}
			if _, ok := named.Underlying().(*types.Struct); ok {
				fmt.Fprintf(&values, "\tnew(%s.%s),\n", name, id)
				used = true
				n++
			}
		}
		if used {
			fmt.Fprintf(&imports, "\t%s %q\n", name, p.Path())
		}
	}
	require.Greater(t, n, 100)
	file := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, walk, imports.String(), values.String()), 0o600))
	program := filepath.Join(filepath.Dir(file), "walk")
	build := exec.Command("go", "build", "-o", program, file)
	build.Dir = "../../.."
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for from := 0; from < n; {
		out, err := exec.Command(program, strconv.Itoa(from)).CombinedOutput()
		at := ""
		for line := range strings.Lines(string(out)) {
			if text, ok := strings.CutPrefix(line, "at "); ok {
				at = strings.TrimSpace(text)
			}
			assert.NotContains(t, line, " hangs")
		}
		if err == nil {
			break
		}
		t.Errorf("a zero value ends the program by a goroutine of its own: %s\n%s", at, out[max(0, len(out)-2000):])
		number, _, _ := strings.Cut(at, " ")
		from = must.Get(strconv.Atoi(number))(t)
		from++
	}
}
