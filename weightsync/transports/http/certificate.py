"""TLS between the pull server and those who pull, without an authority.

The learner makes a certificate when it starts. Workers learn it from the manifest, through the broker, and trust that
one and no other: whoever stands between them, or listens at the learner's address after it, cannot show it.
"""

import ssl
from datetime import UTC, datetime
from functools import lru_cache
from tempfile import NamedTemporaryFile

_NAME = "headway-learner"
_BEGIN, _END = datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
"""It lives as long as its process; hosts whose clocks differ are to agree that it is valid."""


def new_identity() -> tuple[ssl.SSLContext, str]:
    """A server's side of TLS, with a key that only this process knows, and its certificate (PEM)."""
    key, certificate = _self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody comes back with one
    with NamedTemporaryFile() as file:  # ssl reads files only; this one is its owner's
        file.write(key + certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.decode()


@lru_cache(maxsize=4)
def trusting(certificate: str) -> ssl.SSLContext:
    """A client's side of TLS, for a server that has the key to this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # this certificate is the learner's, at whichever address
    context.load_verify_locations(cadata=certificate)
    return context


def _self_signed() -> tuple[bytes, bytes]:
    """(private key, certificate), PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem, certificate.public_bytes(Encoding.PEM)
