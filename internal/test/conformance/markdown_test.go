package conformance

import (
	"fmt"
	"slices"
	"strings"
)

const made = `This page is made from the tests by ` + "`go test ./internal/test/conformance -update`" + `
and a test fails when it is stale, or when a rule has neither a test nor a reason for having none.
`

const spiffeIntro = `# Conformance

Which test proves which rule. ` + made + `
The rules are those of the SPIFFE standards at commit 665a28f3253ecdce59f26f3ef29c0d6408b37c3d (1 July 2026), restated in
our words: SPIFFE-ID, X509-SVID, JWT-SVID, Trust Domain and Bundle, Federation, Workload Endpoint and Workload API, which are Stable,
and WIT-SVID, Broker API and Broker Endpoint, which are Incubating. Whatever is built on an Incubating document is off unless asked for.

The level is the word of the standard; † marks a rule of a document that it makes binding (an RFC, or a WIMSE draft). ADVICE is a
recommendation without such a word, REC our reading where the standard leaves room, fact a definition with nothing to demand.
The letters say whose rule it is: **P** producer, issuer or publisher; **V** validator or consumer; **C** client; **S** server; **O** operator.
`

const marksIntro = `
The mark says where a rule comes from. Those that the design states have a test, or a reason for having none: **S** the design, and
the current program agrees (also S=I); **S≠**, **S≠I** the design, and the current program does something else; **S/I**, **S/H** the
thing is in the design, its name or details in the current or an older program. The others are for interoperation, and have tests
where it depends on them: **S-era** published beside the design; **I** only in the current program; **H** only in older ones;
**N** defined nowhere.
`

const istioIntro = `# Istio's agent and CA: conformance

What Istio's agent and its CA do for identity, and which test of ours proves that we do it. ` + made + `
The rules are those of their founding designs and of Istio's master branch of 22 August 2026, restated in our words. Numbers
are those of the sections of our description.
` + marksIntro

const linkerdIntro = `# Linkerd's identity: conformance

What Linkerd's certifier and its workloads do, and which test of ours proves that we do it. ` + made + `
The rules are those of Linkerd's proposal for transparent mutual identity and of its current control plane and proxy, restated in
our words. Numbers are those of the sections of our description.
` + marksIntro

const athenzIntro = `# Athenz on Kubernetes: conformance

What Athenz does to give pods an identity, and which test of ours proves that we do it. ` + made + `
The rules are those of the design for bootstrapping service identities on Kubernetes, and of the programs since, restated in our
words. Numbers are those of the sections of our description.
` + marksIntro

// markdown returns the page.
func (t *table) markdown() string {
	var b strings.Builder
	b.WriteString(t.intro)
	tests := t.tests()
	b.WriteString("\n" + t.summary(tests))
	for _, d := range t.documents {
		fmt.Fprintf(&b, "\n## %s\n\n| row | %s | requirement | tests |\n|---|---|---|---|\n", d.title, t.columns[0])
		for _, r := range t.rows {
			if d.has(r.id) {
				fmt.Fprintf(&b, "| %s | %s | %s |%s |\n", r.id, r.level, r.requirement, t.proof(r.id, tests))
			}
		}
	}
	if len(t.vectors) == 0 {
		return b.String()
	}
	b.WriteString("\n## Test vectors\n\n| vectors | what | tests |\n|---|---|---|\n")
	for _, s := range t.vectors {
		var proofs []string // in order of appearance
		by := map[string][]string{}
		for _, id := range s.ids {
			p := t.proof(id, tests)
			if by[p] == nil {
				proofs = append(proofs, p)
			}
			by[p] = append(by[p], id)
		}
		for _, p := range proofs {
			fmt.Fprintf(&b, "| %s | %s |%s |\n", ranges(by[p], s.ids), s.what, p)
		}
	}
	return b.String()
}

// summary counts the rows that a test proves, by document.
func (t *table) summary(tests map[string][]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| document | rows | with tests | with a reason for none | %s |\n|---|---|---|---|---|\n", t.columns[1])
	for _, d := range t.documents {
		var all, tested, reasoned int
		for _, r := range t.rows {
			if !d.has(r.id) {
				continue
			}
			all++
			switch {
			case len(tests[r.id]) > 0:
				tested++
			case t.reasons[r.id] != "":
				reasoned++
			}
		}
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d |\n", d.title, all, tested, reasoned, all-tested-reasoned)
	}
	return b.String()
}

// proof returns the cell that says what proves the row, with a space in front if there is any.
func (t *table) proof(id string, tests map[string][]string) string {
	if reason := t.reasons[id]; reason != "" {
		return " *" + reason + "*"
	}
	var b strings.Builder
	last := ""
	for _, test := range tests[id] {
		i := strings.LastIndexByte(test, '.')
		pkg, name := test[:i], test[i+1:]
		switch {
		case pkg == last:
			b.WriteString(", " + name)
		case last == "":
			fmt.Fprintf(&b, " `%s` %s", pkg, name)
		default:
			fmt.Fprintf(&b, "; `%s` %s", pkg, name)
		}
		last = pkg
	}
	return b.String()
}

// ranges writes ids, some of all, with runs of three and more as "IV-1 to IV-3".
func ranges(ids, all []string) string {
	var parts []string
	for i := 0; i < len(ids); {
		at, n := slices.Index(all, ids[i]), 1
		for i+n < len(ids) && at+n < len(all) && all[at+n] == ids[i+n] {
			n++
		}
		if n < 3 {
			n = 1
			parts = append(parts, ids[i])
		} else {
			parts = append(parts, ids[i]+" to "+ids[i+n-1])
		}
		i += n
	}
	return strings.Join(parts, ", ")
}
