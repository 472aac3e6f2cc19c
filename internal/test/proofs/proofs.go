// Package proofs has no code. Its tests hold what several packages promise together: that no input from the network
// costs more than a bounded amount of time and memory, and that trust crosses the borders that were configured and no
// others.
package proofs
