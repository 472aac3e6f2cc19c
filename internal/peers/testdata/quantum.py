"""Does with ML-DSA what it is asked, by lines of JSON, with Python's cryptography.

Each line is an object whose member "do" names a function below, and whose other members are its arguments. The answer is
what the function returns, or {"error": text}. Certificates and requests are PEM."""

import base64
import datetime
import json
import sys
import traceback

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.backends.openssl import backend
from cryptography.hazmat.primitives.asymmetric import mldsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.verification import PolicyBuilder, Store

private = {"ML-DSA-44": mldsa.MLDSA44PrivateKey, "ML-DSA-65": mldsa.MLDSA65PrivateKey}
public = {"ML-DSA-44": mldsa.MLDSA44PublicKey, "ML-DSA-65": mldsa.MLDSA65PublicKey}
keys = {}  # of this side, by algorithm


def unb64(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def b64(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def key_of(alg):
    return keys.setdefault(alg, private[alg].generate())


def algorithm(key):
    return next((alg for alg, kind in public.items() if isinstance(key, kind)), type(key).__name__)


def uris(names):
    return names.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.UniformResourceIdentifier)


def version():
    return {"openssl": backend.openssl_version_text()}


def read_csr(csr):
    c = x509.load_pem_x509_csr(csr.encode())
    c.public_key().verify(c.signature, c.tbs_certrequest_bytes)
    return {"algorithm": algorithm(c.public_key()), "valid": c.is_signature_valid, "uris": uris(c)}


def make_csr(alg, uri):
    name = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    c = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).add_extension(name, critical=True)
    return {"csr": c.sign(key_of(alg), None).public_bytes(Encoding.PEM).decode()}


def read_chain(chain, root, now):
    """Verifies each signature by itself, and the chain by the verifier for clients."""
    certs = x509.load_pem_x509_certificates(chain.encode())
    roots = x509.load_pem_x509_certificates(root.encode())
    for cert, issuer in zip(certs, certs[1:] + roots):
        cert.verify_directly_issued_by(issuer)
        issuer.public_key().verify(cert.signature, cert.tbs_certificate_bytes)
    at = datetime.datetime.fromtimestamp(now, datetime.timezone.utc)
    verifier = PolicyBuilder().store(Store(roots)).time(at).build_client_verifier()
    path = verifier.verify(certs[0], certs[1:])
    spki = certs[0].public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    mine = [alg for alg, k in keys.items() if spki == k.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)]
    return {"algorithm": algorithm(certs[0].public_key()), "uris": [n.value for n in path.subjects or []], "mine": mine,
            "path": len(path.chain)}


def make_chain(alg, domain, uri):
    """Makes a root and a leaf, by the rules of SPIFFE."""
    ca_key, leaf_key = private[alg].generate(), key_of(alg)
    now = datetime.datetime.now(datetime.timezone.utc)

    def cert(key, name, issuer, is_ca):
        b = x509.CertificateBuilder(issuer, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), key.public_key(),
                                    x509.random_serial_number(), now - datetime.timedelta(minutes=1), now + datetime.timedelta(hours=1))
        b = b.add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        b = b.add_extension(x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False), critical=True)
        b = b.add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(domain if is_ca else uri)]), critical=False)
        if not is_ca:
            usages = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
            b = b.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        return b.sign(ca_key, None)

    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "root")])
    root, leaf = cert(ca_key, "root", name, True), cert(leaf_key, "leaf", name, False)
    return {"root": root.public_bytes(Encoding.PEM).decode(), "chain": leaf.public_bytes(Encoding.PEM).decode()}


def jwks(document):
    return {k.get("kid"): k for k in json.loads(document)["keys"] if k["use"] == "jwt-svid"}


def read_token(token, bundle):
    """Verifies a token by the key of a bundle document that it names."""
    signed, signature = token.rsplit(".", 1)
    header, payload = (json.loads(unb64(part)) for part in signed.split("."))
    key = jwks(bundle)[header["kid"]]
    assert key["kty"] == "AKP" and key["alg"] == header["alg"], key
    public[key["alg"]].from_public_bytes(unb64(key["pub"])).verify(unb64(signature), signed.encode())
    return {"algorithm": header["alg"], "subject": payload["sub"]}


def make_token(alg, claims):
    header = {"alg": alg, "typ": "JWT", "kid": "theirs"}
    signed = ".".join(b64(json.dumps(part).encode()) for part in (header, claims))
    key = {"use": "jwt-svid", "kty": "AKP", "kid": "theirs", "alg": alg, "pub": b64(key_of(alg).public_key().public_bytes_raw())}
    return {"token": signed + "." + b64(key_of(alg).sign(signed.encode())), "bundle": json.dumps({"keys": [key]})}


def read_bundle(bundle):
    """Compares the members of each key of a bundle document with its certificate, and returns the algorithms."""
    found = []
    for key in json.loads(bundle)["keys"]:
        name = key.get("alg", key["kty"])
        if key["kty"] == "AKP":
            k = public[key["alg"]].from_public_bytes(unb64(key["pub"]))
            if key["use"] == "x509-svid":
                cert = x509.load_der_x509_certificate(base64.b64decode(key["x5c"][0]))
                assert cert.public_key() == k and len(key["x5c"]) == 1
        found.append(key["use"] + " " + name)
    return {"keys": found}


for line in sys.stdin:
    request = json.loads(line)
    try:
        answer = globals()[request.pop("do")](**request)
    except InvalidSignature:
        answer = {"error": "InvalidSignature"}
    except Exception as e:
        traceback.print_exc()
        answer = {"error": f"{type(e).__name__}: {e}"}
    print(json.dumps(answer), flush=True)
