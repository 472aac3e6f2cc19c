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

// Events returns the events of steps.
func Events(steps []Step) (all []Event) {
	for _, s := range steps {
		if s.Activated != nil {
			all = append(all, Event{What: Activated, At: s.At, Key: *s.Activated})
		}
		for _, k := range s.Retired {
			all = append(all, Event{What: Retired, At: s.At, Key: k})
		}
	}
	return all
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
	signer := ""
	if active != nil {
		signer = active.ID
	}
	renewed := active != nil && was != nil && active.ID != was.ID && active.sameKey(was)
	var gone []Key
	for _, old := range before.Keys[kind] {
		k := after.Find(old.ID)
		switch {
		case k == nil && renewed && old.ID == was.ID:
		case k == nil:
			gone = append(gone, old)
		case k.Tainted && !old.Tainted:
			add(Tainted, *k, "")
		}
	}
	for _, old := range gone {
		what, end := Revoked, old.Retires
		if old.Phase == Active && active != nil {
			end = old.retired(active.Activates).Retires
		}
		if !end.IsZero() && Reached(now, end) {
			what = Retired
		}
		if old.Phase != Active {
			add(what, old, "")
		} else {
			add(what, old, signer)
		}
	}
	for _, k := range after.Keys[kind] {
		old := before.Find(k.ID)
		switch {
		case old == nil && k.Phase == Active && renewed:
			add(Renewed, k, "")
		case old == nil && k.Phase == Active && was != nil && after.Find(was.ID) != nil &&
			k.Prepared.Equal(k.Activates):
			add(Replaced, *after.Find(was.ID), k.ID)
			add(Activated, k, "")
		case old == nil && k.Phase == Active:
			add(Prepared, k, "")
			add(Activated, k, "")
		case old == nil && k.Phase == Distributing:
			add(Prepared, k, "")
		case old == nil && k.Phase == Trusted:
			add(Joined, k, "")
		case old == nil: // prepared and replaced between two looks of this process
			add(Prepared, k, "")
		case old.Phase == Distributing && k.Phase == Active:
			add(Activated, k, "")
		case old.Phase == Distributing && k.Phase == Distributing &&
			k.Activates.Round(0).After(old.Activates.Round(0)):
			add(Postponed, k, "")
		}
	}
	return all
}
