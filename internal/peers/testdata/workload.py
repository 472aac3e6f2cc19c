"""Calls every method of the Workload API, and prints what it got as lines of JSON.

The arguments are the socket, a token of another trust domain, and a number of X.509-SVIDs to wait for."""

import hashlib
import json
import sys
import threading

from cryptography.hazmat.primitives.serialization import Encoding
from spiffe import JwtSource, WorkloadApiClient, X509Source
from spiffe.errors import PySpiffeError

socket, foreign, want = "unix://" + sys.argv[1], sys.argv[2], int(sys.argv[3])


def show(**values):
    print(json.dumps(values, sort_keys=True), flush=True)


def digest(cert):
    return hashlib.sha256(cert.public_bytes(Encoding.DER)).hexdigest()


def x509_bundles(bundles):
    return {b.trust_domain.name: sorted(digest(c) for c in b.x509_authorities) for b in bundles}


def jwt_bundles(bundles):
    return {b.trust_domain.name: sorted(b.jwt_authorities) for b in bundles}


with WorkloadApiClient(socket, default_timeout=20) as client:
    svid = client.fetch_x509_svid()
    assert svid.leaf.public_key() == svid.private_key.public_key()
    show(call="fetch_x509_svid", id=str(svid.spiffe_id))
    show(call="fetch_x509_svids", ids=[str(s.spiffe_id) for s in client.fetch_x509_svids()])
    context = client.fetch_x509_context()
    show(call="fetch_x509_context", id=str(context.default_svid.spiffe_id), bundles=x509_bundles(context.x509_bundle_set.bundles))
    show(call="fetch_x509_bundles", bundles=x509_bundles(client.fetch_x509_bundles().bundles))
    show(call="fetch_jwt_bundles", bundles=jwt_bundles(client.fetch_jwt_bundles().bundles))
    token = client.fetch_jwt_svid({"db"})
    show(call="fetch_jwt_svid", id=str(token.spiffe_id), audience=sorted(token.audience))
    tokens = client.fetch_jwt_svids({"db"})
    show(call="fetch_jwt_svids", ids=[str(s.spiffe_id) for s in tokens])
    show(call="validate_jwt_svid", id=str(client.validate_jwt_svid(token.token, "db").spiffe_id))
    for name, bad, audience in (("audience", token.token, "web"), ("domain", foreign, "db")):
        try:
            client.validate_jwt_svid(bad, audience)
            show(call="validate_jwt_svid", bad=name, refused=False)
        except PySpiffeError as e:
            show(call="validate_jwt_svid", bad=name, refused=True, text=str(e))

    seen, keys, rotated = [], set(), threading.Event()

    def update(leaf=None, bundle=None):
        if leaf and leaf not in seen:
            seen.append(leaf)
        keys.update(bundle or ())
        if len(seen) >= want and len(keys) >= 2:
            rotated.set()

    def failed(e):
        show(call="stream", error=str(e))

    first = threading.Event()

    def on_bundles(bundles):
        update(bundle=jwt_bundles(bundles.bundles)["example.org"])
        first.set()

    streams = [
        client.stream_x509_contexts(lambda c: update(leaf=digest(c.default_svid.leaf)), failed),
        client.stream_jwt_bundles(on_bundles, failed),
    ]
    first.wait(20)
    show(call="streams")
    show(call="rotation", seen=rotated.wait(30), svids=seen, keys=sorted(keys))
    for stream in streams:
        stream.cancel()

with X509Source(socket_path=socket, timeout_in_seconds=20) as source:
    show(call="X509Source", id=str(source.svid.spiffe_id), bundles=x509_bundles(source.bundles))
with JwtSource(socket_path=socket, timeout_in_seconds=20) as source:
    show(call="JwtSource", id=str(source.fetch_svid({"db"}).spiffe_id), bundles=jwt_bundles(source.bundles))
