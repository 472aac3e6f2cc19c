package source

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/spiffe"
)

// Candidate is a source that [First] may choose.
type Candidate struct {
	// Name is for logs and errors, such as "agent".
	Name string

	// Start starts the source and waits until it is ready, like the Start functions of the source packages. The source
	// must keep running after ctx ends, which happens after Within.
	Start func(ctx context.Context) (Source, error)

	// Within is how long the source may take to become ready. 0 means 10 seconds or, for the last candidate, until the
	// context of First ends.
	Within time.Duration
}

// usualWithin is the default of Candidate.Within.
const usualWithin = 10 * time.Second

// First starts the candidates one after the other until one is ready, and returns its source, which the program closes.
// It does not start the later ones, and never fails over to them, which may be weaker. It logs the name, at Info for
// the first candidate, otherwise at Warn with the reasons against the earlier ones; a nil log means no logs.
//
// If no candidate is ready, or ctx is done first, the error wraps [spiffe.ErrNotReady] and has the reason for each.
func First(ctx context.Context, log *slog.Logger, candidates ...Candidate) (Source, error) {
	log = ratelog.Patient(log)
	if err := checkCandidates(candidates); err != nil {
		return nil, err
	}
	var passed error
	for i, c := range candidates {
		if c.Within == 0 && i < len(candidates)-1 {
			c.Within = usualWithin
		}
		src, err := c.start(ctx)
		if err == nil {
			level, attrs := slog.LevelInfo, []slog.Attr{slog.String("name", c.Name)}
			if passed != nil {
				level, attrs = slog.LevelWarn, append(attrs, slog.Any("passed", passed))
			}
			log.LogAttrs(ctx, level, "source: chosen", attrs...)
			return src, nil
		}
		err = fmt.Errorf("%s: %w", c.Name, err)
		if passed != nil {
			err = fmt.Errorf("%w; %w", passed, err)
		}
		passed = err
		if ctx.Err() != nil {
			break
		}
	}
	return nil, fmt.Errorf("source: first: %w: %w", spiffe.ErrNotReady, passed)
}

func checkCandidates(candidates []Candidate) error {
	for i, c := range candidates {
		if c.Name == "" || c.Start == nil || c.Within < 0 {
			return fmt.Errorf("source: first: candidate %d, %q: Name and Start are required, and Within must not be "+
				"negative", i+1, c.Name)
		}
	}
	if len(candidates) == 0 {
		return errors.New("source: first: there are no candidates")
	}
	return nil
}

// start returns the source if it is ready in time.
func (c *Candidate) start(ctx context.Context) (Source, error) {
	if c.Within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, c.Within,
			fmt.Errorf("%w within %v", context.DeadlineExceeded, c.Within))
		defer cancel()
	}
	src, err := c.Start(ctx)
	if err == nil && src == nil {
		err = errors.New("its Start has returned neither a source nor an error")
	}
	return src, err
}
