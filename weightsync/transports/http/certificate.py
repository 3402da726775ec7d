"""TLS between the pull server and its workers, without a certificate authority.

The learner makes a certificate when it starts. Workers get it in the manifest, through the broker, and trust no other:
a process between them, or one that listens at the learner's address later, cannot prove that it has the key.
"""

import ssl
from datetime import UTC, datetime
from functools import lru_cache
from tempfile import NamedTemporaryFile

_NAME = "headway-learner"
_BEGIN, _END = datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
"""The certificate's validity, so long that it is valid on hosts with wrong clocks; it is used only as long as its
process lives."""


def new_identity() -> tuple[ssl.SSLContext, str]:
    """Return a server's side of TLS, with a key that only this process knows, and its certificate (PEM)."""
    key, certificate = _self_signed()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no client uses a session ticket
    with NamedTemporaryFile() as file:  # ssl reads files only; only this user can read this one
        file.write(key + certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.decode()


@lru_cache(maxsize=4)
def trusting(certificate: str) -> ssl.SSLContext:
    """Return a client's side of TLS, for a server that has the key to this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate names no address
    context.load_verify_locations(cadata=certificate)
    return context


def _self_signed() -> tuple[bytes, bytes]:
    """Return a private key and its certificate, both PEM."""
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
