"""Certificates and tokens of a test's own cluster."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from flexmarl.core.access import Role
from flexmarl.core.peer_credentials import PeerCredentials
from flexmarl.runtime.config import ClientConfig, ServerConfig
from flexmarl.runtime.secret_files import write_secret
from flexmarl.runtime.tls import client_credentials
from flexmarl.runtime.tokens import hash_token, make_run_key
from scripts.make_certificates import Pair, make_authority, make_pair

SECRET = "0123456789abcdef" * 4
TOKENS = {"read": "token-of-reader", "submit": "token-of-submitter", "admin": "token-of-admin"}


@dataclass(frozen=True, slots=True)
class Locks:
    """Files of a locked server, and what its friends and others show."""

    folder: Path
    authority: Pair
    server: Pair
    client: Pair

    @classmethod
    def made_in(cls, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        authority = make_authority(folder)
        hosts = ("localhost", "127.0.0.1")
        locks = cls(
            folder,
            authority,
            make_pair(folder, authority, name="server", hosts=hosts),
            make_pair(folder, authority, name="client"),
        )
        text = f'[run_keys]\nsecret = "{SECRET}"\n'
        for role, token in TOKENS.items():
            text += f'[tokens.{role}er]\nrole = "{role}"\nsha256 = "{hash_token(token)}"\n'
            write_secret(folder / f"{role}.token", token.encode())
        write_secret(locks.tokens, text.encode())
        return locks

    @property
    def tokens(self):
        return self.folder / "tokens.toml"

    def server_config(self, **more):
        """Of a server that takes a client's certificate and a token."""
        return ServerConfig(
            tls={
                "cert": self.server.cert,
                "key": self.server.key,
                "client_ca": self.authority.cert,
            },
            tokens=self.tokens,
            grace_s=0.1,
            **more,
        )

    def shown(self, token, *, pair=None, ca=None):
        """Credentials with a token."""
        pair = pair or self.client
        files = client_credentials(
            ClientConfig(ca=ca or self.authority.cert, cert=pair.cert, key=pair.key)
        )
        return PeerCredentials(
            ca=files.ca, certificate=files.certificate, key=files.key, token=token
        )

    def key_of(self, run_id, role=Role.READ):
        return make_run_key(SECRET, run_id, role)


def has_openssl():
    try:
        subprocess.run(["openssl", "version"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
