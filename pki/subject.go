package pki

import (
	"cmp"
	"crypto/x509/pkix"
	"fmt"
	"unicode"
	"unicode/utf8"
)

const (
	maxCommonName   = 64 // bytes; RFC 5280 calls it ub-common-name
	maxOrganization = 64 // bytes; RFC 5280 calls it ub-organization-name
)

// subject returns a name with an organization and a common name, either of which may be empty.
func subject(organization, commonName string) (name pkix.Name, err error) {
	name.CommonName = commonName
	if organization != "" {
		name.Organization = []string{organization}
	}
	return name, cmp.Or(checkText("organization", organization, maxOrganization),
		checkText("common name", commonName, maxCommonName))
}

// checkText applies the rules for text in a subject, which may be empty.
func checkText(what, s string, limit int) error {
	if len(s) > limit {
		return fmt.Errorf("the %s has %d bytes, the limit is %d", what, len(s), limit)
	}
	if !utf8.ValidString(s) {
		return fmt.Errorf("the %s is not UTF-8", what)
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return fmt.Errorf("the %s has a character that does not print", what)
		}
	}
	return nil
}
