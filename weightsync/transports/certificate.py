"""TLS between the pull server and its workers, without a certificate authority.

The learner makes a certificate when it starts. Workers get it in the manifest, through the broker, and trust no other:
a process between them, or one that listens at the learner's address later, cannot prove that it has the key.
"""

import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from tempfile import NamedTemporaryFile

_NAME = "headway-learner"
_BEGIN, _END = datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
"""The validity of certificates, so long that they are valid on hosts with wrong clocks."""


def new_identity() -> tuple[ssl.SSLContext, str]:
    """Return a server's side of TLS, with a key that only this process knows, and its certificate (PEM)."""
    key, certificate = self_signed(_NAME)
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


def self_signed(name: str, hosts: Sequence[str] = ()) -> tuple[bytes, bytes]:
    """Return a new private key and a certificate of it for a server at these hosts, both PEM. A client that trusts this
    certificate trusts no other server."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    if hosts:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False
        )
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem, builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
