"""HTTPS: the server's certificate, and which clients' certificates it asks for.

What lives here: files to an ssl context, and what is wrong with them. What may not: sockets and handshakes (accept.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from headrace.config import ServerConfig
from headrace.errors import ConfigError

LOOK_SECONDS = 10.0  # at the certificate's files, which may be renewed

log = logging.getLogger("headrace.server")


def create_context(config: ServerConfig) -> ssl.SSLContext | None:
    """None where plain HTTP is spoken. Raises ConfigError for settings and files that cannot be used."""
    _check(config)
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
    """For as long as the server runs: a renewed certificate serves new connections; one that cannot be used is logged."""
    if context is None or config.ssl_certfile is None:
        return
    paths = [path for path in (config.ssl_certfile, config.ssl_keyfile) if path is not None]
    seen = _stamps(paths)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        now = _stamps(paths)
        if now == seen:
            continue
        seen = now
        try:
            create_context(config)  # tried apart: a context that takes half of a pair serves nobody
            _load_certificate(context, config.ssl_certfile, config.ssl_keyfile)
            log.info("The certificate's files have changed; new connections get the new one.")
        except ConfigError as error:
            log.error("The certificate's files have changed and cannot be used; the old one goes on. %s", error.message)


def _stamps(paths: list[str]) -> list[tuple[int, int] | None]:
    return [_stamp(path) for path in paths]


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _check(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        given = next((name for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs") if getattr(config, name)), None)
        if given is not None:
            raise ConfigError(f"{given} is given, but no certificate to serve HTTPS with; add --ssl-certfile.")
    elif bool(config.ssl_ca_certs) != bool(config.ssl_cert_reqs):
        given, missing = (
            ("ssl_ca_certs", "--ssl-cert-reqs 2 (or 1)")
            if config.ssl_ca_certs
            else ("ssl_cert_reqs", "--ssl-ca-certs FILE")
        )
        raise ConfigError(
            f"{given} alone asks no client for a certificate that could be judged; add {missing}, or leave it out."
        )


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    def refuse() -> str:
        raise ConfigError(
            f"--ssl-keyfile {key or certificate} is encrypted; give the key without a passphrase, readable by the server alone."
        )

    files = f"--ssl-certfile {certificate}" + (f" --ssl-keyfile {key}" if key is not None else "")
    try:
        context.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        reason = (
            "they do not belong together"
            if "MISMATCH" in (error.reason or "")
            else f"no certificate and private key in PEM ({error.reason})"
        )
        raise ConfigError(
            f"{files}: {reason}; give the certificate with its chain, and the key that it was made for."
        ) from None
    except OSError as error:
        unreadable = next((path for path in (certificate, key or certificate) if not _can_read(path)), certificate)
        raise ConfigError(
            f"{files}: {unreadable}: {(error.strerror or str(error)).lower()}; give files that the server can read."
        ) from None


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        reason = f"no certificates in PEM ({error.reason}); give those that clients' certificates were signed with"
        raise ConfigError(f"--ssl-ca-certs {path}: {reason}.") from None
    except OSError as error:
        raise ConfigError(
            f"--ssl-ca-certs {path}: {(error.strerror or str(error)).lower()}; give a file that the server can read."
        ) from None


def _can_read(path: str) -> bool:
    try:
        with open(path, "rb"):
            return True
    except OSError:
        return False
