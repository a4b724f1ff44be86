"""HTTPS: the server's certificate, and which clients' certificates it asks for.

What lives here: files to an ssl context, and what is wrong with them. What may not: sockets and handshakes
(connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import Iterator

from headrace.config import ServerConfig
from headrace.errors import ConfigError

LOOK_SECONDS = 10.0  # at the certificate's files, which may be renewed

log = logging.getLogger("headrace.server")


def create_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None where plain HTTP is spoken. Raises ConfigError for settings and files that cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and later
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
    if config.ssl_ca_certs is not None:
        context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
        _load_authorities(context, config.ssl_ca_certs)
    return context


async def follow_files(context: ssl.SSLContext | None, config: ServerConfig) -> None:
    """For as long as the server runs: a renewed certificate serves new connections; an unusable one is logged."""
    if context is None or config.ssl_certfile is None:
        return
    paths = [path for path in (config.ssl_certfile, config.ssl_keyfile) if path is not None]
    seen = [*map(_stamp, paths)]
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = [*map(_stamp, paths)]
        if now == seen:
            continue
        seen = now
        try:
            create_context(config)  # tried apart: a context that takes half of a pair cannot serve
            _load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
            log.info("The certificate's files have changed; new connections get the new one.")
        except ConfigError as error:
            log.error("The certificate's files have changed and cannot be used; the old one goes on. %s", error.message)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    def refuse() -> str:
        told = "is encrypted; give the key without a passphrase, readable by the server alone."
        raise ConfigError(f"--ssl-keyfile {key or certificate} {told}")

    files = f"--ssl-certfile {certificate}" + (f" --ssl-keyfile {key}" if key is not None else "")
    remedy = "give the certificate with its chain, and the key that it was made for"
    with _explained(files, "no certificate and private key in PEM", remedy, certificate, key or certificate):
        context.load_cert_chain(certificate, key, refuse)


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    remedy = "give those that clients' certificates were signed with"
    with _explained(f"--ssl-ca-certs {path}", "no certificates in PEM", remedy, path):
        context.load_verify_locations(path)


@contextlib.contextmanager
def _explained(files: str, wrong: str, remedy: str, *paths: str) -> Iterator[None]:
    """What OpenSSL has against these files, in words: a ConfigError."""
    try:
        yield
    except ssl.SSLError as error:
        reason = "they do not belong together" if "MISMATCH" in (error.reason or "") else f"{wrong} ({error.reason})"
        raise ConfigError(f"{files}: {reason}; {remedy}.") from None
    except OSError as error:
        unreadable = next((path for path in paths if not (os.path.isfile(path) and os.access(path, os.R_OK))), paths[0])
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{files}: {unreadable}: {reason}; give files that the server can read.") from None
