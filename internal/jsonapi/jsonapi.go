// Package jsonapi is both sides of a small HTTP API of JSON that carries secrets: no error contains them, no cache
// keeps them.
package jsonapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// MaxAnswer is how many bytes of an answer a client reads at most.
const MaxAnswer = 1 << 20

// StatusError is an answer with a status other than 200.
type StatusError struct {
	Code int
	Text string
}

// Error returns the status and the text.
func (e *StatusError) Error() string { return fmt.Sprintf("the server answers %d: %s", e.Code, e.Text) }

var _ retry.Error = (*StatusError)(nil)

// Retryable reports whether the server may answer differently later: yes, unless it refuses the client's credentials.
func (e *StatusError) Retryable() (after time.Duration, ok bool) {
	return 0, e.Code != http.StatusForbidden && e.Code != http.StatusUnauthorized
}

// Call sends in, or nothing if it is nil, and reads the answer into out. Errors never contain the secrets. An answer
// other than 200 is a [*StatusError].
func Call(ctx context.Context, client *http.Client, method, url string, in, out any, secrets ...string) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	r, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Accept", "application/json")
	r.Header["Accept-Encoding"] = Plain
	answer, err := client.Do(r)
	if err != nil {
		return bearer.RedactError(err, secrets...)
	}
	defer answer.Body.Close() // the answer has been read, or is not needed
	data, err := Read(answer, MaxAnswer)
	switch {
	case err != nil:
		return fmt.Errorf("the answer cannot be read: %w", err)
	case answer.StatusCode != http.StatusOK:
		return &StatusError{answer.StatusCode, strings.TrimSpace(bearer.Redact(string(data), secrets...))}
	}
	if err := json.Unmarshal(data, out); err != nil {
		return errors.New("the answer is not the JSON of this API")
	}
	return nil
}

// Plain are values of the header Accept-Encoding that request a document without a content coding, so that the limit
// counts the bytes as sent.
var Plain = []string{"identity"}

// Read returns the body of an answer to a request with [Plain], of at most limit bytes. An error over the limit wraps
// [certpem.ErrTooLarge]. An unrequested content coding is an error that names it.
func Read(answer *http.Response, limit int) ([]byte, error) {
	if coding := answer.Header.Get("Content-Encoding"); coding != "" && !strings.EqualFold(coding, Plain[0]) {
		return nil, fmt.Errorf("the answer has the content coding %.40q, which was not asked for; switch it off "+
			"at the server, or at the proxy in front of it", coding)
	}
	tooLarge := fmt.Errorf("more than %d bytes: %w", limit, certpem.ErrTooLarge)
	if answer.ContentLength > int64(limit) {
		return nil, tooLarge
	}
	data, err := io.ReadAll(io.LimitReader(answer.Body, int64(limit)+1))
	if err == nil && len(data) > limit {
		return nil, tooLarge
	}
	return data, err
}

// Write answers with JSON and 200.
func Write(w http.ResponseWriter, v any) {
	data, err := json.Marshal(v)
	if err != nil {
		http.Error(w, "the answer could not be written", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(data)
}

// Healthy answers with 200 and "ok".
func Healthy(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, "ok")
}
