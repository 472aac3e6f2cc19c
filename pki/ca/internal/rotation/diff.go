package rotation

import "time"

// The events of a key.
const (
	Prepared  = "prepared"
	Postponed = "postponed"
	Activated = "activated"
	Retired   = "retired"
	Renewed   = "renewed"
	Tainted   = "tainted"
	Revoked   = "revoked"
	Replaced  = "replaced" // by another program
	Joined    = "trusted"  // from elsewhere
)

// Event is one change of a key.
type Event struct {
	What string // one of the constants above
	At   time.Time
	Key  Key // as it is now, or as it was when it left

	Successor string // ID of the key that signs instead, or replaced it; empty for none
}

// Diff returns the changes of keys between two documents of one CA; after is the state at now.
func Diff(before, after *Document, now time.Time) (all []Event) {
	for _, kind := range Kinds {
		all = append(all, diff(before, after, kind, now)...)
	}
	return all
}

func diff(before, after *Document, kind Kind, now time.Time) (all []Event) {
	add := func(what string, k Key, successor string) { all = append(all, Event{what, now, k, successor}) }
	active, was := after.In(kind, Active), before.In(kind, Active)
	renewed := active != nil && was != nil && active.ID != was.ID && active.SameKey(was)
	for _, old := range before.Keys[kind] {
		switch k := after.Find(old.ID); {
		case k == nil && !(renewed && old.ID == was.ID):
			all = append(all, left(old, active, now))
		case k != nil && k.Tainted && !old.Tainted:
			add(Tainted, *k, "")
		}
	}
	for _, k := range after.Keys[kind] {
		old := before.Find(k.ID)
		isNew, signs := old == nil, k.Phase == Active && (old == nil || old.Phase == Distributing)
		switch {
		case isNew && k.Phase == Trusted:
			add(Joined, k, "")
		case isNew && signs && renewed:
			add(Renewed, k, "")
			signs = false
		case isNew && signs && was != nil && after.Find(was.ID) != nil && k.Prepared.Equal(k.Activates):
			add(Replaced, *after.Find(was.ID), k.ID)
		case isNew:
			add(Prepared, k, "")
		case k.Phase == Distributing && k.Activates.Round(0).After(old.Activates.Round(0)):
			add(Postponed, k, "")
		}
		if signs {
			add(Activated, k, "")
		}
	}
	return all
}

// left returns the event of a key that is out of the document at now, in which active signs.
func left(old Key, active *Key, now time.Time) Event {
	e, end := Event{What: Revoked, At: now, Key: old}, old.Retires
	if old.Phase == Active && active != nil {
		e.Successor, end = active.ID, old.retired(active.Activates).Retires
	}
	if !end.IsZero() && Reached(now, end) {
		e.What = Retired
	}
	return e
}
