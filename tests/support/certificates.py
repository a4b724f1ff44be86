"""Certificates of a test's own, made by the openssl command.

What lives here: making them. What may not: servers, assertions.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

MISSING = None if shutil.which("openssl") else "there is no openssl command here to make a certificate with"


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


def create_pair(folder: Path, name: str, signed_by: Pair | None = None) -> Pair:
    """For 127.0.0.1 and localhost; signed by itself unless another is given."""
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    authority = ["-CA", str(signed_by.certificate), "-CAkey", str(signed_by.key)] if signed_by is not None else []
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", *authority,
            "-keyout", str(pair.key), "-out", str(pair.certificate),
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return pair


def trusting(pair: Pair, shown: Pair | None = None) -> ssl.SSLContext:
    """A client that trusts this certificate alone; ``shown``: its own."""
    context = ssl.create_default_context(cafile=str(pair.certificate))
    if shown is not None:
        context.load_cert_chain(shown.certificate, shown.key)
    return context
