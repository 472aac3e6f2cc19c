package athenzname

// ErrName is in every error of this package.
var ErrName = errName
