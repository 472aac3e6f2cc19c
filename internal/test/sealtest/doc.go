// Package sealtest shows that no exported type of the module prints a private key. There is no code to import
// here, only tests.
package sealtest
