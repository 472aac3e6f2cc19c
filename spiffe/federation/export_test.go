package federation

// For tables of what is arithmetic.
var (
	Jittered   = jittered
	Elapsed    = elapsed
	FileName   = fileName
	UsableETag = usableETag
)
