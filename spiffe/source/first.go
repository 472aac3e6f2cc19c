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

// Choice is the source that [First] chose. It never fails over to another source, which may be weaker.
type Choice struct {
	// Source is the chosen source. Close closes it.
	Source

	// Name is the name of its Candidate.
	Name string

	// Passed says why each earlier candidate was not chosen, in order.
	Passed []error
}

// First starts the candidates one after the other until one is ready, and returns it. It closes the candidates that
// failed, and does not start the later ones. It logs the choice, at Info for the first candidate, otherwise at Warn
// with the reasons; a nil log means no logs.
//
// If no candidate is ready, or ctx is done first, the error wraps [spiffe.ErrNotReady] and has the reason for each.
func First(ctx context.Context, log *slog.Logger, candidates ...Candidate) (*Choice, error) {
	log = ratelog.Patient(log)
	if err := checkCandidates(candidates); err != nil {
		return nil, err
	}
	choice := &Choice{}
	for i, c := range candidates {
		within := c.Within
		if within == 0 && i < len(candidates)-1 {
			within = usualWithin
		}
		src, err := c.start(ctx, within)
		if err == nil {
			choice.Source, choice.Name = src, c.Name
			level := slog.LevelInfo
			if i > 0 {
				level = slog.LevelWarn
			}
			attrs := []slog.Attr{slog.String("name", choice.Name)}
			if err := choice.passed(); err != nil {
				attrs = append(attrs, slog.Any("passed", err))
			}
			log.LogAttrs(ctx, level, "source: chosen", slog.GroupAttrs("choice", attrs...))
			return choice, nil
		}
		choice.Passed = append(choice.Passed, fmt.Errorf("%s: %w", c.Name, err))
		if ctx.Err() != nil {
			break
		}
	}
	err := fmt.Errorf("source: first: %w: %w", spiffe.ErrNotReady, choice.passed())
	if skipped := len(candidates) - len(choice.Passed); skipped > 0 {
		err = fmt.Errorf("%w; %d more were not tried: %w", err, skipped, context.Cause(ctx))
	}
	return nil, err
}

func checkCandidates(candidates []Candidate) error {
	names := map[string]bool{}
	for i, c := range candidates {
		if c.Name == "" || c.Start == nil || c.Within < 0 || names[c.Name] {
			return fmt.Errorf("source: first: candidate %d, %q: a name of its own and Start are required, "+
				"and Within must not be negative", i+1, c.Name)
		}
		names[c.Name] = true
	}
	if len(candidates) == 0 {
		return errors.New("source: first: there are no candidates")
	}
	return nil
}

// start returns the source if it is ready in time; 0 means no limit.
func (c *Candidate) start(ctx context.Context, within time.Duration) (Source, error) {
	if within > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, within,
			fmt.Errorf("%w within %v", context.DeadlineExceeded, within))
		defer cancel()
	}
	src, err := c.Start(ctx)
	if err != nil {
		return nil, err
	}
	if src == nil {
		return nil, errors.New("its Start has returned neither a source nor an error")
	}
	if err := src.Ready(ctx); err != nil {
		return nil, errors.Join(err, src.Close())
	}
	return src, nil
}

// passed returns the reasons in one line, or nil.
func (c *Choice) passed() (all error) {
	for _, err := range c.Passed {
		if all == nil {
			all = err
		} else {
			all = fmt.Errorf("%w; %w", all, err)
		}
	}
	return all
}
