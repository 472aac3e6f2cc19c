// Package jsonapi is both sides of a small HTTP API of JSON that carries secrets: no error has one of them, and no cache
// keeps one.
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

// Retryable reports whether the server may answer otherwise later, which it may unless it does not let the client in.
func (e *StatusError) Retryable() (after time.Duration, ok bool) {
	return 0, e.Code != http.StatusForbidden && e.Code != http.StatusUnauthorized
}

// Post sends in, or nothing if it is nil, and reads the answer into out. No error has any of the secrets. An answer other than
// 200 is a [*StatusError].
func Post(ctx context.Context, client *http.Client, url string, in, out any, secrets ...string) error {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return err
		}
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := client.Do(r)
	if err != nil {
		return bearer.RedactError(err, secrets...)
	}
	defer answer.Body.Close() // the answer is read or given up
	data, err := io.ReadAll(io.LimitReader(answer.Body, MaxAnswer+1))
	switch {
	case err != nil:
		return err
	case len(data) > MaxAnswer:
		return fmt.Errorf("the answer has more than %d bytes", MaxAnswer)
	case answer.StatusCode != http.StatusOK:
		return &StatusError{answer.StatusCode, strings.TrimSpace(bearer.Redact(string(data), secrets...))}
	}
	if err := json.Unmarshal(data, out); err != nil {
		return errors.New("the answer is not the JSON of this API")
	}
	return nil
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
