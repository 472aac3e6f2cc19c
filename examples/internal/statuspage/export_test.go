package statuspage

import "time"

func init() { // for pages that are compared
	host, version = "host-1", "v0.1.0 go1.26"
	started = time.Date(1999, 12, 31, 22, 0, 0, 0, time.UTC)
}
