// Package firstuse records the identity documents that the replicas of an Athenz provider have seen, so that each is
// used once.
package firstuse

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/renew"
)

const (
	// The data is JSON: hashes in base64url, each with the time to forget it, in seconds since 1970.
	usedMember  = "documents"
	maxNoted    = 4096             // some 240 KB; a ConfigMap has 1 MiB
	usedMargin  = time.Minute      // for replicas whose clocks differ
	usedTimeout = 10 * time.Second // ZTS waits 30 seconds
	usedPause   = 50 * time.Millisecond
)

// usedDocuments is a ConfigMap in which the replicas of a provider record used documents. Each record replaces the
// version that was read. If several replicas get one document at the same time, the API server accepts one record.
type usedDocuments struct {
	api             *kube.Client
	namespace, name string
	turn            chan struct{} // replicas race; the requests of one replica take turns
}

// InConfigMap returns a FirstUse of package authn/athenz that all replicas of a provider share. It records hashes of at
// most 4,096 documents in a ConfigMap, such as athenz/used-documents, each until a minute after the document has
// expired. An operator creates the ConfigMap without data, and lets the provider get and update it. The address and
// the client are as for athenz.NewAPIServer.
func InConfigMap(address string, client *http.Client,
	object string) (func(ctx context.Context, document [32]byte, expires time.Time) (bool, error), error) {
	namespace, name, _ := strings.Cut(object, "/")
	if !kube.ValidLabel(namespace) || !kube.ValidName(name) {
		return nil, fmt.Errorf("first use: %.300q is not the namespace and the name of a ConfigMap, such as "+
			"athenz/used-documents", object)
	}
	if client == nil && strings.HasPrefix(address, "http://") {
		client = new(http.Client) // presents no token
	}
	api, err := kube.New(kube.Options{URL: address, Client: client})
	if err != nil {
		return nil, fmt.Errorf("first use: %w", err)
	}
	return (&usedDocuments{api, namespace, name, make(chan struct{}, 1)}).first, nil
}

// first reports whether a document is used for the first time. After an error the document may have been recorded: it
// is void, and a new one must be signed.
func (u *usedDocuments) first(ctx context.Context, document [32]byte, expires time.Time) (first bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, usedTimeout)
	defer cancel()
	select {
	case u.turn <- struct{}{}:
		defer func() { <-u.turn }()
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	for again := err == nil; again; {
		if first, err = u.note(ctx, base64.RawURLEncoding.EncodeToString(document[:]), expires); !kube.Conflict(err) {
			break
		}
		again = renew.Sleep(ctx, rand.N(usedPause)) == nil
	}
	if err != nil {
		return false, fmt.Errorf("used documents in the ConfigMap %s/%s: %w", u.namespace, u.name, err)
	}
	return first, nil
}

// configMap has all members of a ConfigMap, because an update replaces them.
type configMap struct {
	APIVersion string            `json:"apiVersion,omitempty"`
	Kind       string            `json:"kind,omitempty"`
	Metadata   map[string]any    `json:"metadata"`
	Data       map[string]string `json:"data"`
	BinaryData map[string]string `json:"binaryData,omitempty"`
}

// note reports whether a document is new, and records it.
func (u *usedDocuments) note(ctx context.Context, document string, expires time.Time) (bool, error) {
	path := kube.Path("api", "v1", "namespaces", u.namespace, "configmaps", u.name)
	object := configMap{Data: map[string]string{}}
	switch err := u.api.Get(ctx, path, nil, &object); {
	case kube.NotFound(err):
		return false, fmt.Errorf("create it, without data: %w", err)
	case kube.Forbidden(err):
		return false, fmt.Errorf("give the service account of the provider the verbs get and update for it: %w", err)
	case err != nil:
		return false, err
	}
	used := map[string]int64{}
	err := json.Unmarshal([]byte(cmp.Or(object.Data[usedMember], "{}")), &used)
	if err != nil || object.Metadata["resourceVersion"] == nil || object.Data == nil || used == nil { // null
		return false, fmt.Errorf("its member %q was not written by this program: create the ConfigMap anew, "+
			"without data, when the documents of now have expired", usedMember)
	}
	if _, there := used[document]; there {
		return false, nil
	}
	now := time.Now().Unix()
	maps.DeleteFunc(used, func(_ string, until int64) bool { return until <= now })
	if len(used) >= maxNoted {
		return false, fmt.Errorf("%d documents were used lately, and no more can be noted: shorten the lifetime "+
			"of documents", maxNoted)
	}
	used[document] = expires.Add(usedMargin).Unix() + 1 // rounds up to a whole second
	text, err := json.Marshal(used)
	if err != nil {
		return false, err // impossible: strings and numbers
	}
	object.Data[usedMember] = string(text)
	if err := u.api.Update(ctx, path, object, nil); err != nil {
		return false, err
	}
	return true, nil
}
