"""What this process shows to the services that it calls: certificates and a token.

The process edge sets it, every channel reads it. Neither imports the other: they meet here, as the
ids and deadlines of calls do. Nothing is read from files here, and nothing is ever printed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCredentials:
    """Credentials of a client.

    Attributes:
        ca: Certificates (PEM) that servers' certificates must be signed by; empty: no TLS.
        certificate: Own certificate chain (PEM), for servers that ask for one.
        key: Its private key (PEM).
        token: Bearer token; empty: none is sent.
        insecure: Send the token without TLS to other machines, too.
    """

    ca: bytes = field(default=b"", repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)
    insecure: bool = False

    @property
    def connection(self) -> tuple[bytes, bytes, bytes]:
        """What a connection is made with; the token goes with each call."""
        return self.ca, self.certificate, self.key


_current = PeerCredentials()


def use_credentials(credentials: PeerCredentials) -> None:
    """Make these the credentials of every call that this process starts from now on."""
    global _current
    _current = credentials


def current_credentials() -> PeerCredentials:
    """The process's credentials; empty ones by default."""
    return _current
