// Package meshdemo shows a Linkerd mesh at work: examples/linkerd-proxy beside two applications, through the life of their
// certificates. It is one test, which draws what has happened, and holds the README of the program against it:
//
//	go test -v ./internal/test/meshdemo
package meshdemo
