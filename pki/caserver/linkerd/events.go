package linkerd

// Event tells an operator what happened. Its fields are those of an event in Kubernetes.
type Event struct {
	// Reason is one of
	//
	//   - IssuedLeafCertificate: a certificate was issued and is being sent.
	//   - IssuerUpdated: another certificate signs than before.
	//   - IssuerValidationFailed, a warning: nothing was issued, as the certificate that signs does not verify
	//     against the trust anchors.
	Reason  string
	Warning bool
	Message string

	// The service account that the event belongs to. Both are empty for an event of the certifier.
	Namespace, ServiceAccount string
}
