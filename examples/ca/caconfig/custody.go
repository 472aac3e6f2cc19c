package caconfig

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/strictjson"
	"github.com/svidkit/svidkit/pki/ca"
)

// Kinds are the kinds of stores and custodians that a program has beside those of this package, so that only the
// program links their modules. The zero value is for a program that has no others.
type Kinds struct {
	// Stores are the stores that -store names, by the scheme of its URL.
	Stores map[string]StoreKind

	// Custodians are the custodians that -custodian and the other flags name.
	Custodians map[string]CustodianKind

	// Flags defines the flags of these stores; nil for none.
	Flags func(*flag.FlagSet)
}

// StoreKind is a kind of store.
type StoreKind struct {
	// Open returns the store at a URL, in which the record has that name, and what closes it with the Authority.
	Open func(ctx context.Context, at *url.URL, record string, log *slog.Logger) (store ca.Store, closes func(),
		err error)

	// Schema returns what an administrator of the database has to run once.
	Schema func() (string, error)
}

// CustodianKind is a kind of custodian, whose options are in a file: one object of JSON whose members are strings.
type CustodianKind struct {
	Required, Optional []string // names of the members

	// New returns the custodian, which can be named in -seal and -unseal if it is a [ca.Sealer], and what closes it with
	// the Authority.
	New func(ctx context.Context, options map[string]string, log *slog.Logger) (custodian ca.Custodian, closes func(),
		err error)
}

// openBao is the kind of custodian of this package: the transit engine of OpenBao or of HashiCorp Vault.
var openBao = CustodianKind{
	Required: []string{"url"},
	Optional: []string{"roots_file", "namespace", "mount", "seal_key", "token_file", "login_role", "login_mount",
		"cert_file", "key_file"},
	New: func(_ context.Context, o map[string]string, log *slog.Logger) (ca.Custodian, func(), error) {
		at := caclient.Endpoint{URL: o["url"], RootsFile: o["roots_file"], TokenFile: o["token_file"], Logger: log}
		if o["cert_file"]+o["key_file"] != "" {
			client, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: at.RootsFile,
				CertificateFile: o["cert_file"], KeyFile: o["key_file"], Logger: log})
			if err != nil {
				return nil, nil, err
			}
			at.HTTPClient, at.RootsFile = client, ""
		}
		transit, err := vault.NewTransit(vault.TransitOptions{Endpoint: at, Mount: o["mount"],
			Namespace: o["namespace"], LoginRole: o["login_role"], LoginMount: o["login_mount"], SealKey: o["seal_key"]})
		return transit, func() {}, err
	},
}

// Custody names custodians of private keys, as -custodian, -former-custodian, -seal and -unseal do: each is KIND:FILE.
type Custody struct {
	Keys         string
	Former       []string
	Seal, Unseal string

	kinds    Kinds // with openbao
	storeURL string
	store    *url.URL // nil: a directory, or a Secret
}

func (c *Custody) define(fs *flag.FlagSet) {
	fs.StringVar(&c.storeURL, "store", "", "`URL` of the database in which replicas share the CA, such as "+
		"postgres://ca@db.example.org/ca; "+
		"-state-dir has the audit log and the roots in PEM (default: a directory in -state-dir, or a Secret)")
	kinds := strings.Join(slices.Sorted(maps.Keys(c.kinds.Custodians)), ", ")
	spec := func(name, usage string, set func(string)) {
		fs.Func(name, usage, func(text string) error {
			kind, file, _ := strings.Cut(text, ":")
			if _, ok := c.kinds.Custodians[kind]; !ok || file == "" {
				return fmt.Errorf("it is not KIND:FILE with one of these kinds: %s", kinds)
			}
			set(text)
			return nil
		})
	}
	spec("custodian", "`KIND:FILE` of the custodian that makes and keeps the next keys, outside of the store; KIND is "+
		kinds+", and FILE has its options, in JSON (default none: the store has the keys)",
		func(text string) { c.Keys = text })
	spec("former-custodian", "`KIND:FILE` of a custodian that has keys from before; may be repeated",
		func(text string) { c.Former = append(c.Former, text) })
	spec("seal", "`KIND:FILE` of the custodian whose key seals what is in the store",
		func(text string) { c.Seal = text })
	spec("unseal", "`KIND:FILE` of the custodian whose key sealed it before",
		func(text string) { c.Unseal = text })
}

// setStore sets -store. It returns why the URL is refused, without quoting it.
func (c *Custody) setStore(text string) string {
	schemes := strings.Join(slices.Sorted(maps.Keys(c.kinds.Stores)), " and ")
	at, err := url.Parse(text)
	switch {
	case schemes == "":
		return "this program has no databases; examples/ca-full is the same program with them"
	case err != nil:
		return "it is not a URL"
	case c.kinds.Stores[at.Scheme].Open == nil:
		return "it is not a URL of " + schemes
	}
	if _, ok := at.User.Password(); ok || at.Query().Has("password") {
		return "it has a password, which each user of this machine sees in the list of processes; put it into the " +
			"file of -store-password-file"
	}
	c.store = at
	return ""
}

// StoreSchema returns what an administrator of the database in -store has to run once.
func (c *Config) StoreSchema() (string, error) {
	return c.Custody.kinds.Stores[c.Custody.store.Scheme].Schema()
}

// Any reports whether a flag names a custodian.
func (c *Custody) Any() bool { return c.Keys+c.Seal+c.Unseal != "" || len(c.Former) > 0 }

// openCustody opens the custodians that flags name, one of each text, and keeps them to be closed.
func (a *Authority) openCustody(ctx context.Context, c *Custody, log *slog.Logger) (out ca.Custody, err error) {
	opened, keyless := map[string]ca.Custodian{}, map[string]bool{} // keyless: the file has no seal_key
	open := func(name, text string) (custodian ca.Custodian) {
		if custodian = opened[text]; text == "" || custodian != nil || err != nil {
			return custodian
		}
		kind, file, _ := strings.Cut(text, ":")
		of := c.kinds.Custodians[kind]
		options, bad := of.read(file)
		var closes func()
		if bad == nil {
			custodian, closes, bad = of.New(ctx, options, log)
		}
		if bad != nil {
			err = fmt.Errorf("-%s: %s: %w", name, file, bad)
			return nil
		}
		a.closes = append(a.closes, closes)
		opened[text] = custodian
		keyless[text] = slices.Contains(of.Optional, "seal_key") && options["seal_key"] == ""
		return custodian
	}
	sealer := func(name, text string) ca.Sealer {
		custodian := open(name, text)
		s, ok := custodian.(ca.Sealer)
		if custodian != nil && !ok && err == nil {
			err = misused("-%s: a custodian of this kind does not seal", name)
		} else if keyless[text] && err == nil {
			err = misused("-%s: %s has no seal_key, the name of the key that seals", name, text)
		}
		return s
	}
	out = ca.Custody{Keys: open("custodian", c.Keys), Seal: sealer("seal", c.Seal), Unseal: sealer("unseal", c.Unseal)}
	for _, text := range c.Former {
		out.Former = append(out.Former, open("former-custodian", text))
	}
	return out, err
}

// read reads the options in a file, which other users must not be able to change.
func (k CustodianKind) read(file string) (options map[string]string, err error) {
	text, err := readSafe(file)
	if err != nil {
		return nil, err
	}
	options = map[string]string{}
	names := slices.Concat(k.Required, k.Optional)
	bad := strictjson.ReadObject(text, func(name string, r *strictjson.Reader) {
		value, ok := r.Text()
		switch {
		case !slices.Contains(names, name):
			err = cmp.Or(err, fmt.Errorf("%.64q is none of its members: %s", name, strings.Join(names, ", ")))
		case !ok || len(value) == 0:
			err = cmp.Or(err, fmt.Errorf("%s is not a text, or an empty one", name))
		}
		options[name] = string(value)
	})
	for _, name := range k.Required {
		if options[name] == "" {
			err = cmp.Or(err, fmt.Errorf("it has no %s; its members are %s", name, strings.Join(names, ", ")))
		}
	}
	return options, cmp.Or(bad, err)
}
