// Package sealtest shows that no exported type of the module prints a private key, and that no zero value of one keeps a caller
// waiting. There is no code to import
// here, only tests.
package sealtest
