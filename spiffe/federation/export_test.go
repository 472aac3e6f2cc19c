package federation

import "time"

// For tables of what is arithmetic.
var (
	FileName = fileName
)

// For tables of failures: the reasons, which programs see as text.
type FetchError = fetchError

var (
	ErrNotAuthenticated = errNotAuthenticated
	ErrRedirect         = errRedirect
	ErrSequence         = errSequence
)

// Unhurried has m notice a suspension within a minute and not within a second, which makes days of virtual time
// cheap.
func Unhurried(m *Manager) { m.loop.Tick = time.Minute }
