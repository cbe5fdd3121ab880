"""TLS for REST: the operator's certificate, loaded when the coordinator starts."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from echo2.p2p.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What the server speaks TLS 1.2 and 1.3 with. Raises ConfigurationError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for name, path in (("rest.certificate", certificate), ("rest.key", key)):
        try:
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigurationError(f"{name}: cannot read {path}: {error.strerror}") from error
    try:
        # Without a person at a terminal nobody can type a key's passphrase: the daemon would wait for ever.
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except (ssl.SSLError, ValueError) as error:
        said = getattr(error, "reason", None) or str(error)
        raise ConfigurationError(
            f"rest.certificate {certificate} and rest.key {key} are no PEM certificate with its key: {said}"
        ) from error
    return context


def client_context(certificate: Path) -> ssl.SSLContext:
    """For commands on the coordinator's own machine: it must have this very certificate, whatever name it is for.

    Raises ConfigurationError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is asked at 127.0.0.1, and the certificate names the machine for others
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"rest.certificate: cannot use {certificate}: {error}") from error
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase; write it without: openssl pkey -in KEY -out NEW")
