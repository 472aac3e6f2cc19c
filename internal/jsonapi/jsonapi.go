// Package jsonapi is both sides of a small HTTP API of JSON that carries secrets: no error has one of them, and
// no cache keeps one.
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

// MaxAnswer is the most bytes that a client reads of an answer.
const MaxAnswer = 1 << 20

// StatusError is an answer that is not 200.
type StatusError struct {
	Code int
	Text string
}

// Error has the status and the text.
func (e *StatusError) Error() string { return fmt.Sprintf("the server answers %d: %s", e.Code, e.Text) }

var _ retry.Error = (*StatusError)(nil)

// Retryable reports whether the server may answer otherwise later, which it may unless it does not let the client in.
func (e *StatusError) Retryable() (after time.Duration, ok bool) {
	return 0, e.Code != http.StatusForbidden && e.Code != http.StatusUnauthorized
}

// Call sends in, or nothing if it is nil, and reads the answer into out. No error has any of the secrets. An
// answer other than 200 is a [*StatusError].
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
	r.Header["Accept-Encoding"] = Plain
	answer, err := client.Do(r)
	if err != nil {
		return bearer.RedactError(err, secrets...)
	}
	defer answer.Body.Close() // the answer is read or given up
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

// Plain are the values of the header Accept-Encoding with which a document is asked for as it is: what is
// counted is what was sent.
var Plain = []string{"identity"}

// Read returns the body of an answer to a request with [Plain], which has at most limit bytes. An error over
// the limit wraps [certpem.ErrTooLarge]. A content coding, which was not asked for, is named.
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
