package ca_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// cloud stands for the client of a key management service, whose keys have names and sign digests.
type cloud struct {
	mu   sync.Mutex
	keys map[string]crypto.Signer
}

// Errors of the service that are certain.
var (
	errNoSuchKey = errors.New("NotFoundException")
	errKeyExists = errors.New("AlreadyExistsException")
)

func (k *cloud) CreateKey(_ context.Context, name, spec string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.keys[name] != nil {
		return errKeyExists
	}
	key, err := pki.NewKey(map[string]string{"ECC_NIST_P256": "ecdsa-p256", "RSA_3072": "rsa-3072"}[spec])
	if err == nil {
		k.keys[name] = key
	}
	return err
}

func (k *cloud) key(name string) (crypto.Signer, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.keys[name] == nil {
		return nil, errNoSuchKey
	}
	return k.keys[name], nil
}

func (k *cloud) GetPublicKey(_ context.Context, name string) (der []byte, err error) {
	key, err := k.key(name)
	if err != nil {
		return nil, err
	}
	return x509.MarshalPKIXPublicKey(key.Public())
}

func (k *cloud) Sign(_ context.Context, name string, digest []byte, algorithm string) ([]byte, error) {
	key, err := k.key(name)
	if err != nil {
		return nil, err
	}
	var opts crypto.SignerOpts = map[string]crypto.Hash{"SHA_256": crypto.SHA256, "SHA_384": crypto.SHA384,
		"SHA_512": crypto.SHA512}[algorithm[len(algorithm)-len("SHA_256"):]]
	if strings.HasPrefix(algorithm, "RSASSA_PSS") {
		opts = &rsa.PSSOptions{SaltLength: rsa.PSSSaltLengthEqualsHash, Hash: opts.HashFunc()}
	}
	return key.Sign(rand.Reader, digest, opts)
}

func (k *cloud) DeleteKey(_ context.Context, name string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.keys[name] == nil {
		return errNoSuchKey
	}
	delete(k.keys, name)
	return nil
}

func (k *cloud) ListKeys(context.Context) (names []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name := range k.keys {
		names = append(names, name)
	}
	return names
}

// kmsCustodian is a [ca.Custodian] over the service. It turns only those errors into fs.ErrNotExist and fs.ErrExist that
// are certain: a refusal or a timeout must stay one.
type kmsCustodian struct{ client *cloud }

func (c kmsCustodian) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	spec := map[string]string{"ecdsa-p256": "ECC_NIST_P256", "rsa-3072": "RSA_3072"}[algorithm]
	if spec == "" {
		return nil, fmt.Errorf("%w: a key for %s", errors.ErrUnsupported, algorithm)
	}
	switch err := c.client.CreateKey(ctx, name, spec); {
	case errors.Is(err, errKeyExists):
		return nil, fmt.Errorf("%s: %w", name, fs.ErrExist)
	case err != nil:
		return nil, err
	}
	return c.Key(ctx, name)
}

func (c kmsCustodian) Key(ctx context.Context, name string) (crypto.Signer, error) {
	der, err := c.client.GetPublicKey(ctx, name)
	if errors.Is(err, errNoSuchKey) {
		return nil, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	if err != nil {
		return nil, err
	}
	public, err := x509.ParsePKIXPublicKey(der)
	if err != nil {
		return nil, err
	}
	return kmsKey{c.client, name, public}, nil
}

func (c kmsCustodian) Destroy(ctx context.Context, name string) error {
	if err := c.client.DeleteKey(ctx, name); !errors.Is(err, errNoSuchKey) {
		return err
	}
	return nil
}

func (c kmsCustodian) Keys(ctx context.Context, prefix string) ([]string, error) {
	return slices.DeleteFunc(c.client.ListKeys(ctx), func(name string) bool {
		return !strings.HasPrefix(name, prefix)
	}), nil
}

// kmsKey is a private key of the service.
type kmsKey struct {
	client *cloud
	name   string
	public crypto.PublicKey
}

func (k kmsKey) Public() crypto.PublicKey { return k.public }

// Sign bounds the call, as a crypto.Signer gets no context. The CA verifies the signature.
func (k kmsKey) Sign(_ io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	algorithm := "ECDSA_"
	if _, ok := k.public.(*rsa.PublicKey); ok {
		algorithm = "RSASSA_PKCS1_V1_5_"
		if _, ok := opts.(*rsa.PSSOptions); ok {
			algorithm = "RSASSA_PSS_"
		}
	}
	switch hash := opts.HashFunc(); hash {
	case crypto.SHA256, crypto.SHA384, crypto.SHA512:
		algorithm += strings.ReplaceAll(hash.String(), "-", "_")
	default:
		return nil, fmt.Errorf("%w: digests of %v", errors.ErrUnsupported, hash)
	}
	return k.client.Sign(ctx, k.name, digest, algorithm)
}

// A CA whose keys are in a key management service: its store has their names, and no private key.
func ExampleCustodian() {
	ctx := context.Background()
	service := &cloud{keys: map[string]crypto.Signer{}} // in a program, the client of a cloud
	dir, err := os.MkdirTemp("", "ca")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	store, err := ca.NewDirStore(dir)
	if err != nil {
		panic(err)
	}
	td := spiffe.MustParseTrustDomain("example.org")
	authority, err := ca.Open(ctx, ca.Config{TrustDomain: td, Create: true,
		Custody: ca.Custody{Keys: kmsCustodian{service}}}, store)
	if err != nil {
		panic(err)
	}

	key, err := pki.NewKey("ecdsa-p256") // a workload's
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		panic(err)
	}
	web := spiffe.MustParseID("spiffe://example.org/web")
	chain, err := authority.Sign(ctx, ca.Request{CSR: csr, ID: web})
	if err != nil {
		panic(err)
	}
	record, err := store.Load(ctx)
	if err != nil {
		panic(err)
	}
	secrets := 0
	for _, item := range record.Data() {
		secrets += bytes.Count(item, []byte("PRIVATE KEY"))
	}
	fmt.Println(chain[0].URIs[0], "is signed by a key of the service:", strings.HasPrefix(authority.Status().Roots[0].Custody, "svidkit-"))
	fmt.Println("private keys in the store:", secrets, "and in the service:", len(service.ListKeys(ctx)))
	// Output:
	// spiffe://example.org/web is signed by a key of the service: true
	// private keys in the store: 0 and in the service: 1
}
