package ca

import (
	"context"
	"time"
)

// KeyEvent is the record of one change of a CA's keys, or of how far they are trusted. It holds no secret. An
// [Auditor] may keep it: it never changes. Its JSON form is a line of package auditlog without the last member.
type KeyEvent struct {
	Time time.Time `json:"time"`

	// Event is what happened: at a start "created", "loaded", or "adopted" for another program's CA; "prepared" for a
	// successor that is being distributed, "postponed" if that takes longer, "activated", "retired", "renewed" for a
	// new certificate of the same key, "tainted", "revoked"; "replaced" for an active root that another program
	// replaced, or for new files of a plugged-in CA; "trusted" for a root from elsewhere; and "recovered" for a
	// record, or a store's pointer, that was written again.
	Event string `json:"event"`

	Key      string    `json:"key,omitempty"`      // "root" or "jwt"; empty for all keys
	Serial   string    `json:"serial,omitempty"`   // of a root, in hexadecimal; the ID of a JWT key
	NotAfter time.Time `json:"not_after,omitzero"` // of a root
	// Fingerprint is the SHA-256, in hexadecimal, of a root's certificate (DER), or as in package auditlog.
	Fingerprint string `json:"fingerprint,omitempty"`

	// Successor is the serial number or ID of the key that takes over.
	Successor string `json:"successor,omitempty"`

	Detail string `json:"detail,omitempty"` // for operators, such as the reason and where the CA is

	Actor
}

// Actor is the process that caused a [KeyEvent]. Empty fields are left out.
type Actor struct {
	UID     string `json:"uid,omitempty"`     // of the user; empty on Windows
	Host    string `json:"host,omitempty"`    // the name of the machine or pod
	Command string `json:"command,omitempty"` // the command line, in which no argument may be a secret
}

// keyAuditor is an [Auditor] that also records key events.
type keyAuditor interface {
	RecordKeyEvent(ctx context.Context, e *KeyEvent) error
}
