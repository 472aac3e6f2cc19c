// Package testkey has an RSA key for tests, as one takes long to make.
package testkey

import (
	"crypto/rsa"
	"math/big"
	"sync"
)

// RSA returns an RSA key of 2048 bits, which is always the same.
var RSA = sync.OnceValue(func() *rsa.PrivateKey {
	p, _ := new(big.Int).SetString("JM8mF0WUklIdpN1F19jL9rT60KQK0A5CzPNMx7549loplrKaA2EkNRPlT6ulLTewkR4uSuLoiV1NWtobqJ33qk0jCp"+
		"7EuzaNMSWu0txpd9p2Mkz057G7wX67TC2NJJRdAXnhVkr12qjr9VdVIfJ6H9GR3FQeXsCn3Ih7JKjwoSeB", 62)
	q, _ := new(big.Int).SetString("HStFbyAC8PU2QxWIp024HyuPx4bWtGjCYNJfhiCLh2vNVeERZHCNfGgZLt2ZGyAUQFHFKeaZ0B5xfOMI5zYK6HvvBn"+
		"4MKGCyVwsRPEm1v12WVIj2jx3eFzSNKAYBL7D2jsuOGU7MPlaTF1dpP9qSFsXrPgDb2d8ZIC8eRnlWIQqN", 62)
	one, key := big.NewInt(1), &rsa.PrivateKey{PublicKey: rsa.PublicKey{N: new(big.Int).Mul(p, q), E: 65537}, Primes: []*big.Int{p, q}}
	key.D = new(big.Int).ModInverse(big.NewInt(65537), new(big.Int).Mul(new(big.Int).Sub(p, one), new(big.Int).Sub(q, one)))
	key.Precompute()
	return key
})
