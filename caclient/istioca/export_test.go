package istioca

// ReadChain reads the texts of an answer.
var ReadChain = readChain
