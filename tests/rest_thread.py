"""REST on a real socket, served from a thread of its own, for clients that block; and certificates."""

from __future__ import annotations

import datetime
import threading
from contextlib import contextmanager
from queue import Queue

import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from echo2.coordinator.rest_server import open_listener, serve_rest, url_of


@contextmanager
def served(stage, tls=None):
    """The URL at which `stage` is served, its feed running."""
    listener = open_listener("127.0.0.1", 0)
    url = url_of(listener, "http" if tls is None else "https")
    scope, ended, token = trio.CancelScope(), threading.Event(), Queue()

    async def main():
        token.put(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stage.rooms.feed.run)
                await serve_rest(stage.app, listener, tls=tls)

    def run():
        try:
            trio.run(main)
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield url
    finally:
        trio.from_thread.run_sync(scope.cancel, trio_token=token.get())
        assert ended.wait(30)


def make_certificate(folder, name="pool.example.org"):
    """A self-made certificate and its key, PEM: their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths
