package main

import "github.com/svidkit/svidkit/examples/ca/caconfig"

var custodians = map[string]caconfig.CustodianKind{}
