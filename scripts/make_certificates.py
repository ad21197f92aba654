"""Makes certificates for a cluster: an authority, and a pair for each host or person.

Usage: python scripts/make_certificates.py --out DIR [--host NAME ...] [--client NAME ...]

Writes DIR/ca.pem and DIR/ca.key once, then DIR/NAME.pem and DIR/NAME.key of each host and client
that is asked for. Keep ca.key away from the cluster: who has it can make certificates. Needs the
`openssl` command.
"""

from __future__ import annotations

import argparse
import ipaddress
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CA_DAYS = 3650
PAIR_DAYS = 365
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its private key, both PEM files."""

    cert: Path
    key: Path


def make_authority(folder: Path, *, name: str = "ca") -> Pair:
    """An authority; one that is there already is kept."""
    pair = _pair(folder, name)
    if not pair.cert.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", pair.key, "-out", pair.cert,
            "-days", CA_DAYS, "-subj", f"/CN=flexmarl {name}",
            "-addext", "basicConstraints=critical,CA:TRUE",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip
        pair.key.chmod(0o600)
    return pair


def make_pair(
    folder: Path, authority: Pair, *, name: str, hosts: Sequence[str] = (), days: int = PAIR_DAYS
) -> Pair:
    """A certificate that an authority signs, for a server and for a client.

    Args:
        folder: Where it goes.
        authority: Signs it.
        name: Of the files, and its common name.
        hosts: Names and addresses that a server of it is reached by.
        days: How long it is valid; less than 0: it has expired.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pair = _pair(folder, name)
    extensions = ["extendedKeyUsage=serverAuth,clientAuth", "basicConstraints=critical,CA:FALSE"]
    if hosts:
        extensions.append("subjectAltName=" + ",".join(map(_alternative, hosts)))
    with tempfile.TemporaryDirectory() as scratch:
        request, asked = Path(scratch) / "request.pem", Path(scratch) / "extensions"
        asked.write_text("\n".join(extensions) + "\n", encoding="utf-8")
        _openssl("req", *_NEW_KEY, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", authority.cert, "-CAkey", authority.key,
            "-CAcreateserial", "-CAserial", Path(scratch) / "serial", "-days", days,
            "-extfile", asked, "-out", pair.cert,
        )  # fmt: skip
    pair.key.chmod(0o600)
    return pair


def _pair(folder: Path, name: str) -> Pair:
    return Pair(folder / f"{name}.pem", folder / f"{name}.key")


def _alternative(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return f"DNS:{host}"
    return f"IP:{host}"


def _openssl(*arguments: object) -> None:
    done = subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        raise SystemExit(f"openssl {arguments[0]}: {done.stderr.strip().splitlines()[-1]}")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Makes certificates for a cluster.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--host", action="append", default=[], help="name or address of a host")
    parser.add_argument("--client", action="append", default=[], help="name of a person or program")
    args = parser.parse_args()
    authority = make_authority(args.out)
    for host in args.host:
        # Services of one host call each other by loopback, too.
        make_pair(args.out, authority, name=host, hosts=(host, "localhost", "127.0.0.1"))
    for name in args.client:
        make_pair(args.out, authority, name=name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
