"""Self-signed certificates, made by openssl."""

import subprocess
from pathlib import Path

EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def self_signed(tmp_path: Path, name: str) -> tuple[str, str]:
    """Return the files of a certificate for 127.0.0.1 and of its key."""
    certificate, key = str(tmp_path / f"{name}.pem"), str(tmp_path / f"{name}.key")
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    openssl("req", "-x509", *EC, *subject, "-keyout", key, "-out", certificate)
    return certificate, key
