package kube

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// The types of an [Event].
const (
	Added    = "ADDED"
	Modified = "MODIFIED"
	Deleted  = "DELETED"
	Bookmark = "BOOKMARK" // only a newer ResourceVersion
)

// Event is one change that a watch reports.
type Event struct {
	Type            string          // Added, Modified, Deleted or Bookmark
	ResourceVersion string          // of the object: the next watch starts here
	Object          json.RawMessage // the object; after a deletion, its last state. The caller may keep it
}

// errSilent is the error for a watch that the server should have ended.
var errSilent = fmt.Errorf("%w: the server did not answer, or did not end the watch", context.DeadlineExceeded)

// Watch reports the changes of the collection at path. The query says where to start (resourceVersion, else the
// server chooses) and what to watch (fieldSelector, labelSelector, allowWatchBookmarks); Watch adds watch to it.
//
// The loop ends without an error when the server ends the watch, which it does after timeoutSeconds (added if
// missing: 300). Otherwise its last round has an error: [Gone] holds for it if the server no longer knows the changes
// since resourceVersion. A watch never hangs: Watch gives up a server that is silent for ten seconds longer than
// allowed. After either end the caller watches again from the ResourceVersion of the last event, or lists again after
// Gone. Leaving the loop ends the watch.
func (c *Client) Watch(ctx context.Context, path string, query url.Values) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		x := &exchange{method: http.MethodGet, path: path}
		limit := 300
		if n, err := strconv.Atoi(query.Get("timeoutSeconds")); err == nil {
			limit = n
		}
		asked := url.Values{"watch": {"true"}, "timeoutSeconds": {strconv.Itoa(limit)}}
		maps.Copy(asked, query)
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		patience := time.AfterFunc(requestTimeout, func() { cancel(errSilent) })
		defer patience.Stop()
		response, err := c.send(ctx, c.watch, x, asked)
		if err != nil {
			yield(Event{}, err)
			return
		}
		defer response.Body.Close() // ends the watch
		patience.Reset(time.Duration(limit)*time.Second + requestTimeout)
		for event, err := range events(response.Body) {
			if err != nil {
				err = x.fail(true, fmt.Errorf("watch: %w", x.transportError(ctx, err)))
			}
			if !yield(event, err) || err != nil {
				return
			}
		}
	}
}

// events reads a stream with one event on each line, until its end or the first error.
func events(r io.Reader) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(nil, maxAnswer)
		for lines.Scan() {
			line := bytes.TrimSpace(lines.Bytes())
			if len(line) == 0 {
				continue
			}
			event, err := parseEvent(line)
			if !yield(event, err) || err != nil {
				return
			}
		}
		err := lines.Err()
		if errors.Is(err, bufio.ErrTooLong) {
			err = fmt.Errorf("an event is larger than %d MiB", maxAnswer>>20)
		}
		if err != nil {
			yield(Event{}, err)
		}
	}
}

func parseEvent(line []byte) (Event, error) {
	var e struct {
		Type   string          `json:"type"`
		Object json.RawMessage `json:"object"`
	}
	if err := json.Unmarshal(line, &e); err != nil {
		return Event{}, fmt.Errorf("an event is not JSON: %s", describe(err))
	}
	switch e.Type {
	case Added, Modified, Deleted, Bookmark:
	case "ERROR":
		s := &StatusError{}
		s.fill(e.Object, &exchange{})
		return Event{}, s
	default:
		return Event{}, fmt.Errorf("an event has the unknown type %q", OneLine(e.Type, 64))
	}
	var object struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if json.Unmarshal(e.Object, &object) != nil || object.Metadata.ResourceVersion == "" {
		return Event{}, errors.New("an event has no object that can be read and has a resourceVersion")
	}
	return Event{Type: e.Type, ResourceVersion: object.Metadata.ResourceVersion, Object: e.Object}, nil
}
