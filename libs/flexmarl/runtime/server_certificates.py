"""A server's certificates, which change while it runs."""

from __future__ import annotations

from collections import deque

import grpc

from flexmarl.runtime.config import ServerTlsConfig
from flexmarl.runtime.tls import server_context


class ServerCertificates:
    """What a server shows and asks for, as its files were when they were read last.

    A connection keeps what it was made with.

    Args:
        config: The files; `has_tls` says that they are named.

    Attributes:
        context: Of an HTTP endpoint.

    Raises:
        ConfigError: A file is missing, readable by others, not PEM, or the key is of another one.
    """

    def __init__(self, config: ServerTlsConfig) -> None:
        self._config = config
        self.context = server_context(config)
        self._initial = _configuration(config)
        self._unseen: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks before each handshake whether there is something newer."""
        return grpc.dynamic_ssl_server_credentials(
            self._initial,
            self._take,  # type: ignore[arg-type]  # the stubs forget that None is "no change"
            require_client_authentication=self._config.client_ca is not None,
        )

    def read_again(self) -> None:
        """Read the files for the connections to come.

        Raises:
            ConfigError: As at first; what was read before stays in use.
        """
        self.context = server_context(self._config)
        self._unseen.append(_configuration(self._config))

    def _take(self) -> grpc.ServerCertificateConfiguration | None:
        # In a thread of gRPC's: the one step that takes it out is atomic.
        try:
            return self._unseen.pop()
        except IndexError:
            return None


def _configuration(config: ServerTlsConfig) -> grpc.ServerCertificateConfiguration:
    assert config.cert is not None
    assert config.key is not None
    client_ca = config.client_ca
    return grpc.ssl_server_certificate_configuration(
        [(config.key.read_bytes(), config.cert.read_bytes())],
        root_certificates=None if client_ca is None else client_ca.read_bytes(),
    )
