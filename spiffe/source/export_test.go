package source

import "context"

// Load loads what l has stored.
func Load(ctx context.Context, l *LastGood) { l.load(ctx) }

// Status returns the state of l.
func (l *LastGood) Status() lastGoodStatus { return l.status() }
