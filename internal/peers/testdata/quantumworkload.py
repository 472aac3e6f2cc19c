"""Calls the Workload API at a socket, and prints a line of JSON for each call: the authorities of each trust domain, or the
error."""

import json
import signal
import sys

from spiffe import JwtSource, WorkloadApiClient, X509Source

socket = "unix://" + sys.argv[1]
signal.alarm(60)  # which ends this program, as some calls repeat what fails


def show(call, ask):
    try:
        print(json.dumps({"call": call, "got": ask()}, sort_keys=True), flush=True)
    except Exception as e:
        print(json.dumps({"call": call, "error": f"{type(e).__name__}: {e}"}), flush=True)


def x509(bundles):
    return {b.trust_domain.name: sorted(type(c.public_key()).__name__ for c in b.x509_authorities) for b in bundles}


def jwt(bundles):
    return {b.trust_domain.name: sorted(b.jwt_authorities) for b in bundles}


def sources(kind, read):
    with kind(socket_path=socket, timeout_in_seconds=10) as source:
        return read(source.bundles)


with WorkloadApiClient(socket, default_timeout=20) as client:
    show("x509 context", lambda: x509(client.fetch_x509_context().x509_bundle_set.bundles))
    show("x509 bundles", lambda: x509(client.fetch_x509_bundles().bundles))
    show("jwt bundles", lambda: jwt(client.fetch_jwt_bundles().bundles))
    show("jwt svid", lambda: str(client.fetch_jwt_svid({"db"}).spiffe_id))
show("X509Source", lambda: sources(X509Source, x509))
show("JwtSource", lambda: sources(JwtSource, jwt))
