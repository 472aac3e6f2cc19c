package gospiffe

var (
	FromID, ToID                   = fromID, toID
	FromTrustDomain, ToTrustDomain = fromTrustDomain, toTrustDomain
)
