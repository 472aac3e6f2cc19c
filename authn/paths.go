package authn

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/internal/paths"
)

// ByPath proves each caller by the method for the path of its request. Keys are patterns of [http.ServeMux]: "/admin/" is all
// below, "/admin/{$}" that path alone, "POST /orders/{id}" one method of HTTP, and the most specific decides:
//
//	a, err := authn.ByPath(map[string]authn.Authenticator{
//		"/":        authn.ClientCertificate(verifier),
//		"/public/": anyone,
//	})
//
// Calls of gRPC have their full method as path, so "/billing.Invoices/" is a service and "/billing.Invoices/Delete" a method.
//
// A request for which there is no pattern is refused ([ErrRefused]), and so is one that a ServeMux would redirect, as its path
// is not clean ("//", "/./", "/../", a last slash missing) or is another one when its escapes are decoded ("%2F", "%2E%2E"). The
// map is copied. A pattern that a ServeMux does not take, and a nil method, are errors.
func ByPath(methods map[string]Authenticator) (Authenticator, error) {
	table, err := paths.New(methods, func(a Authenticator) error {
		if a == nil {
			return errors.New("the Authenticator is nil")
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("authn: by path: %w", err)
	}
	return Func(func(r *http.Request) (*Caller, error) {
		a, ok := table.Find(r)
		if !ok {
			return nil, fmt.Errorf("authn: no method is for the path %.200q: %w", r.URL.Path, ErrRefused)
		}
		return a.Authenticate(r)
	}), nil
}
