"""Certificates and tokens from the files that a configuration names, checked before they are used.

gRPC says little about a wrong certificate, and says it late; the standard library's `ssl` reads the
same files first, so that a service refuses to start with the name of the file.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from flexmarl.core.peer_credentials import PeerCredentials
from flexmarl.runtime.config import ClientConfig, ConfigError, ServerTlsConfig
from flexmarl.runtime.secret_files import read_file, read_secret


def has_tls(config: ServerTlsConfig) -> bool:
    """Whether a server encrypts.

    Raises:
        ConfigError: Its settings are there in part only.
    """
    if config.cert is not None and config.key is not None:
        return True
    if config.cert is None and config.key is None and config.client_ca is None:
        return False
    missing = "server.tls.cert" if config.cert is None else "server.tls.key"
    raise ConfigError(f"{missing} is not set: server.tls needs cert and key")


def server_context(config: ServerTlsConfig) -> ssl.SSLContext:
    """The same certificates for an HTTP endpoint.

    Raises:
        ConfigError: A file is missing, readable by others, not PEM, or the key is of another one.
    """
    assert config.cert is not None
    assert config.key is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, config.cert, config.key, section="server.tls")
    if config.client_ca is not None:
        _load_ca(context, config.client_ca, what="server.tls.client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_credentials(config: ClientConfig) -> PeerCredentials:
    """What a process shows to the services that it calls.

    Raises:
        ConfigError: A file is missing, readable by others or not PEM; or a setting lacks another.
    """
    certificate = key = ca = b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if config.ca is not None:
        ca = read_file(config.ca, what="client.ca")
        _load_ca(context, config.ca, what="client.ca")
    if config.cert is not None or config.key is not None:
        if config.cert is None or config.key is None or config.ca is None:
            raise ConfigError("client.cert, client.key and client.ca go together: set all three")
        _load_pair(context, config.cert, config.key, section="client")
        certificate, key = config.cert.read_bytes(), config.key.read_bytes()
    token = ""
    if config.token_file is not None:
        token = _read_token(config.token_file)
    return PeerCredentials(
        ca=ca, certificate=certificate, key=key, token=token, insecure=config.insecure
    )


def _read_token(path: Path) -> str:
    text = read_secret(path, what="client.token_file").strip()
    if not text.isascii() or len(text.split()) != 1:
        raise ConfigError(f"client.token_file: {path} does not hold one token")
    return text.decode()


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path, *, section: str) -> None:
    read_file(cert, what=f"{section}.cert")
    read_secret(key, what=f"{section}.key")
    try:
        # An empty password: a key that has one must not make a service ask at a terminal.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError, OSError) as error:
        why = getattr(error, "reason", None) or "not PEM"
        raise ConfigError(
            f"{section}.cert and {section}.key: {cert} and {key} are not a certificate and its "
            f"private key in PEM ({why})"
        ) from None


def _load_ca(context: ssl.SSLContext, path: Path, *, what: str) -> None:
    read_file(path, what=what)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, ValueError, OSError):
        raise ConfigError(f"{what}: {path} holds no certificate in PEM") from None
