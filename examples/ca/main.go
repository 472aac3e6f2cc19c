// Ca is a certificate authority that serves the certificate APIs of Istio and of Linkerd, the bundle endpoint of
// SPIFFE federation, metrics and health.
//
//	go run ./examples/ca
//
// Without flags it runs in development mode: it keeps a self-signed CA for each trust domain in the user's home,
// listens on 127.0.0.1, and trusts the name in any token that begins with the secret in a file there. Certificates
// last an hour at most, even if a request asks for more. An agent becomes spiffe://cluster.local/ns/demo/sa/web with
//
//	go run ./examples/agent
//
// or, if it is Istio's, with the variables in the file agent.env and a token from the printed command.
//
// In a cluster, -kubernetes keeps the CA in the Secret istio-ca-secret, which all replicas share, and lets the API
// server review service account tokens; -istio-addr=:15012 and the like open the ports to others. A plugged-in CA is
// read from -root-ca-dir, as with Istio. With -external-ca the cluster's signers sign instead.
//
// A caller of Istio's API is authenticated by the first of these that it presents, in the order of Istio's CA: a
// certificate of the CA, or of the roots in -client-roots; a token of the OpenID Connect issuer in -jwt-rule; a
// service account token, which the API server reviews; the last element of the header x-forwarded-client-cert from a
// gateway in -trusted-gateway-cidr; a token of the issuer of this server's own token, for a CA outside the cluster.
// With only -jwt-rule the CA needs no cluster, and does not run in development mode; Linkerd's API needs -kubernetes.
// A gateway's own certificate never authenticates the requests that it forwards, and while a root is tainted, the
// gateway's header is ignored.
//
// The first start makes a CA in the default directory. In any other store, including the Secret, that takes -create:
// an empty store may be a volume that is not mounted. Directories and files that other users can change are refused.
//
// -help lists the flags. One with a name in brackets can also be set by that environment variable, as with Istio's
// CA; the flag wins. Other variables are not read. The exit code is 2 if a flag or variable is wrong, and 1 after any
// other failure. -version prints what was built.
//
// # For operators
//
//	ca -status                             print the roots and what becomes of them
//	ca -rotate                             prepare a new root; the other three steps follow by time
//	ca -rotate-jwt                         the same with the key for tokens
//	ca -taint SERIAL                       a key may be stolen: replace it, and drop its root early
//	ca -revoke SERIAL                      drop a root or a token key now, if another one signs
//	ca -revoke SERIAL -now                 drop it although it signs: it is stolen. This costs: see below
//	ca -once csr.pem -id spiffe://…        sign one request
//	ca -jwt AUDIENCE -id spiffe://…        sign one token
//	ca -reseal                             write the store sealed or in the clear, as -seal and -unseal say
//	ca -verify-audit audit.jsonl           see that the audit log is whole, and with -audit-head that its end is
//	ca -install kubernetes                 print what this CA needs in a cluster, as YAML; -with NAME=VALUE edits it
//	ca -install SCHEME -anchor-dir DIR     print what a Linkerd mesh begins with, as YAML
//
// The commands work on the store: they need access to it, and the flags that say where it is, but no running server.
// A server on the same store follows, usually within 30 seconds. After -taint the CA takes nothing that the key
// signed as proof, while workloads go on trusting it until they have renewed. Before -revoke of a root that was
// active, wait until -status says that another one is, or add -now: then its successor signs at once, peers that have
// not fetched the bundle refuse what that signs, and those that have refuse what the revoked root signed. The command
// says until when.
//
// Istio's API takes certificates of the CA as proof, so that a virtual machine can renew without a token, for
// -default-ttl at most each time. -renew-by-certificate=720h ends that 720 hours after the last token, and
// -renew-by-certificate=off forbids it; without the flag there is no end, as with Istio.
//
// A backup is a copy of the store: of the directory -state-dir/ca, or of the Secret. It holds the private keys, unless
// -custodian keeps them elsewhere or -seal encrypts them. To restore it, stop all replicas, put it back, and start
// them.
//
// # Where the keys are
//
// -custodian openbao:FILE makes the next keys in the transit engine of OpenBao or Vault, which signs with them and
// does not give them away; FILE has its address and the file of its token. Keys that are made already move by -rotate
// and -rotate-jwt, and back without the flag, while -former-custodian names where they are. -seal encrypts the store
// with a key of the custodian. The program examples/ca-full is this one with PKCS #11, TPM, and databases as stores of
// replicas; examples/CUSTODY.md and examples/REPLICAS.md go through both.
//
// The audit log gets a line for each signature before it leaves, by the server or by a command, and for each change
// of keys; package auditlog documents the lines. A full or slow disk stops the CA from signing, and /ready says so.
//
// # For Linkerd
//
// With a SCHEME, -install takes the trust anchor in -anchor-dir, or makes one, makes an issuer of -issuer-ttl below
// it, and prints for kubectl apply a ConfigMap, a Secret, and the identity service with its account. SCHEME is
// kubernetes.io/tls or linkerd.io/tls, the two forms that Linkerd's identity service reads, or design, with the names
// of the first design and a key in DER. The anchor's key stays in the directory, which belongs outside the cluster. A
// CA whose -root-ca-dir is the volume of that Secret signs with the issuer, and takes over the next one without a
// restart.
//
// With -kubernetes, issued certificates, new issuers and refused files are recorded as Kubernetes Events of the
// service account, or of the Deployment linkerd-identity. The CA's service account needs the verb create for events;
// -linkerd-events=false turns them off.
//
// # For pods of Kubernetes 1.37
//
// With -pod-signer=cluster.local/spiffe, and -kubernetes, the CA signs for pods that name this signer in a volume
// (podCertificate), and keeps its roots in a ClusterTrustBundle that such a volume has beside the certificate
// (clusterTrustBundle): no agent is needed. Package podcert says which identity a pod gets.
//
// # For systems that do not know SPIFFE
//
// With -oidc-issuer=https://oidc.example.org all tokens name this issuer, and -oidc-addr serves its discovery
// document and keys, so that verifiers of OpenID Connect take the tokens: clouds, API servers, vaults. A key is
// published for a day before it signs.
//
// -demo shows a server at work in a few seconds.
package main

import "github.com/svidkit/svidkit/examples/ca/caprogram"

func main() { caprogram.Main(caprogram.Program{Name: "ca"}) }
