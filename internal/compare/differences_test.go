package compare

// difference is a vector of which the two make different things: the rule that decides it here, and
// what the peer makes of it. The names of the rules are those of the conformance table.
type difference struct{ rule, peer string }

// Limits on the length of names.
var idDifferences = map[string]difference{
	"IV-152": {"ID-13", accepts},
	"IV-156": {"ID-21", accepts},
}

// Here the name of a certificate is read from its bytes, a leaf needs a path, the key usage
// digitalSignature and the role in which it is presented, and an anchor is a CA certificate.
var x509Differences = map[string]difference{
	"XV-09": {"X5-35", accepts},
	"XV-14": {"X5-40", accepts},
	"XV-16": {"X5-40", accepts},
	"XV-19": {"X5-39", accepts},
	"XV-41": {"X5-37", accepts},
	"XV-42": {"X5-34", accepts},
	"XV-47": {"ID-21", accepts},
	"XV-53": {"X5-41", accepts},
}

// Here an entry that cannot be used is skipped, where the peer refuses the document, and the JSON is
// read more strictly than encoding/json does.
var bundleDifferences = map[string]difference{
	"BV-12": {"BND-14", refuses},
	"BV-13": {"BND-14", refuses},
	"BV-14": {"X5-55", refuses},
	"BV-15": {"X5-55", refuses},
	"BV-16": {"X5-56", refuses},
	"BV-18": {"BND-30", refuses},
	"BV-19": {"BND-30", refuses},
	"BV-27": {"BND-29", refuses},
	"BV-30": {"X5-53", refuses},
	"BV-31": {"X5-53", refuses},
	"BV-32": {"X5-59", refuses},
	"BV-33": {"X5-41", "accepts 1 X.509, 0 JWT, 0 WIT"},
	"BV-34": {"BND-28", "accepts 0 X.509, 0 JWT, 0 WIT"},
	"BV-36": {"BND-28", "accepts 0 X.509, 0 JWT, 0 WIT"},
	"BV-38": {"BND-30", "accepts 0 X.509, 1 JWT, 0 WIT"},
	"BV-39": {"BND-32", refuses},
	"BV-40": {"BND-32", "accepts 0 X.509, 2 JWT, 0 WIT"},
	"BV-41": {"BND-15", refuses},
	"BV-45": {"BND-9", "accepts 0 X.509, 0 JWT, 0 WIT"},
	"BV-46": {"BND-30", refuses},
	"BX-03": {"X5-59", refuses},
	"BX-04": {"X5-53", "accepts 1 X.509, 0 JWT, 0 WIT"},
	"BX-05": {"X5-53", refuses},
	"BX-06": {"X5-56", refuses},
	"BX-07": {"X5-55", refuses},
	"BX-08": {"X5-56", refuses},
	"BX-09": {"X5-53", refuses},
	"BX-10": {"X5-59", refuses},
	"BX-11": {"BND-32", refuses},
	"BX-12": {"BND-32", refuses},
	"BX-13": {"BND-14", refuses},
	"BX-16": {"BND-28", "accepts 0 X.509, 0 JWT, 0 WIT"},
	"BX-17": {"BND-28", "accepts 0 X.509, 0 JWT, 0 WIT"},
	"BX-19": {"BND-28", "accepts 0 X.509, 0 JWT, 0 WIT"},
	"BX-26": {"BND-33", "accepts 0 X.509, 0 JWT, 0 WIT"},
	"BX-32": {"BND-29", "accepts 0 X.509, 0 JWT, 0 WIT"},
	"BX-33": {"BND-29", refuses},
	"BX-35": {"BND-29", refuses},
	"BX-40": {"BND-25", refuses},
	"BX-41": {"X5-53", "accepts 1 X.509, 0 JWT, 0 WIT"},
	"BX-43": {"X5-59", refuses},
	"BX-44": {"X5-59", refuses},
	"BX-45": {"X5-59", refuses},
	"BX-46": {"X5-59", refuses},
}

// Here the leeway is the caller's, the time that a token was issued at plays no part, a key ID is
// optional, a header has three members and no more, and base64url has one form. With the peer the
// leeway is a minute and the key ID required.
var jwtDifferences = map[string]difference{
	"JV-13": {"JWT-19", accepts},
	"JV-18": {"JWT-23", refuses},
	"JV-35": {"JWT-7", refuses},
	"JV-38": {"JWT-6", accepts},
	"JV-41": {"JWT-6", accepts},
	"JV-59": {"JWT-10", accepts},
	"JV-61": {"JWT-26", accepts},
	"JV-62": {"JWT-26", accepts},
}

// Here a token comes with a proof that was made for this one request, which is all that the differences from WV-32 on
// are about; the time that a token was issued at plays no part; an audience is refused even if it is empty; and the
// key of the workload fits its algorithm.
var witDifferences = map[string]difference{
	"WV-15": {"WIT-14", accepts},
	"WV-21": {"WIT-20", refuses},
	"WV-23": {"WIT-25", accepts},
	"WV-32": {"WPT-4", accepts},
	"WV-33": {"WPT-10", accepts},
	"WV-34": {"WPT-5", accepts},
	"WV-35": {"WPT-6", accepts},
	"WV-36": {"WPT-2", accepts},
	"WV-37": {"WPT-3", accepts},
	"WV-38": {"WPT-7", accepts},
	"WV-39": {"WPT-8", accepts},
	"WV-40": {"WIT-40", accepts},
	"WV-41": {"WIT-42", accepts},
	"WV-42": {"WPT-9", accepts},
}
