package linkerd

// ReadResponse is readResponse for tests and fuzzing.
var ReadResponse = readResponse
