package federation

// For tables of what is arithmetic.
var (
	FileName   = fileName
	UsableETag = usableETag
)
