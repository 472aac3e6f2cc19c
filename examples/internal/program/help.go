package program

import (
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// Columns is the width of the help text.
const Columns = 80

// Help is the text of -h besides the flags. The zero Help is for a program with few flags.
type Help struct {
	Args   string                // after the flags, such as "METHOD PATH"
	Doc    string                // what the program or command does
	Groups []FlagGroup           // of flags; the rest has the title Flags
	More   func(io.Writer) error // writes the environment variables; may be nil
	Exit   string                // the exit codes, if they differ from those of [Main]
}

// FlagGroup is a group of flags with a title.
type FlagGroup struct {
	Title string
	Flags string // names, separated by spaces
}

// common are flags that several programs have.
var common = FlagGroup{"The program itself", "install with demo for log-format v json no-color version"}

// Write writes the help with the flags, in lines of up to [Columns] characters where the words allow it.
func (h Help) Write(w io.Writer, flags *flag.FlagSet) error {
	var b strings.Builder
	fmt.Fprintln(&b, strings.TrimSpace("Usage: "+flags.Name()+" [flags] "+h.Args))
	if h.Doc != "" {
		fmt.Fprintf(&b, "\n%s\n", h.Doc)
	}
	left := FlagGroup{Title: "Flags"}
	flags.VisitAll(func(f *flag.Flag) {
		if !slices.ContainsFunc(append(h.Groups, common),
			func(g FlagGroup) bool { return slices.Contains(strings.Fields(g.Flags), f.Name) }) {
			left.Flags += " " + f.Name
		}
	})
	placed := map[string]bool{}
	for _, g := range slices.Concat(h.Groups, []FlagGroup{left, common}) {
		some := flag.NewFlagSet("", flag.ContinueOnError)
		for name := range strings.FieldsSeq(g.Flags) {
			if f := flags.Lookup(name); f != nil && !placed[name] {
				placed[name] = true
				some.Var(f.Value, name, f.Usage)
				some.Lookup(name).DefValue = f.DefValue
			}
		}
		var list strings.Builder
		some.SetOutput(&list)
		if some.PrintDefaults(); list.Len() > 0 {
			fmt.Fprintf(&b, "\n%s:\n\n%s", g.Title, strings.NewReplacer("    \t", "      ", "\t",
				"  ").Replace(list.String()))
		}
	}
	var err error
	if h.More != nil {
		fmt.Fprint(&b, "\nEnvironment variables:\n\n")
		err = h.More(&b)
	}
	if h.Exit == "" {
		h.Exit = "The exit code is 0 after a clean end, 2 if a flag, an argument or a variable is wrong, and 1 " +
			"after any other failure."
	}
	fmt.Fprintf(&b, "\n%s\n", h.Exit)
	for line := range strings.Lines(b.String()) {
		text := strings.TrimLeft(line, " ")
		indent := line[:len(line)-len(text)]
		if utf8.RuneCountInString(line) > Columns+1 { // with its newline
			text = strings.ReplaceAll(Fold(text, Columns-len(indent), Columns-len(indent)), "\n", "\n"+indent)
			line = strings.TrimRight(indent+text, " ")
		}
		if _, bad := io.WriteString(w, line); err == nil {
			err = bad
		}
	}
	return err
}

// Fold breaks text between words: first is the width of its first line, others the width of the rest. A word that is
// longer than a line stays whole.
func Fold(text string, first, others int) string {
	var b strings.Builder
	room, used := first, 0
	for i, word := range strings.Split(text, " ") {
		n := utf8.RuneCountInString(word)
		switch {
		case i > 0 && used+1+n <= room:
			b.WriteByte(' ')
			used++
		case i > 0, n > first && n <= others:
			b.WriteByte('\n')
			room, used = others, 0
		}
		b.WriteString(word)
		used += n
	}
	return b.String()
}
