"""What keeps strangers out of a server: certificates and tokens, and reading them again."""

from __future__ import annotations

from dataclasses import dataclass

from flexmarl.core.access import exposure_refusal, is_loopback
from flexmarl.runtime.config import ConfigError, ServerConfig
from flexmarl.runtime.gate import Gate
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.server_certificates import ServerCertificates
from flexmarl.runtime.tls import has_tls
from flexmarl.runtime.tokens import read_tokens

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Locks:
    """The locks of one server, as configured.

    Attributes:
        config: Of the server.
        certificates: None: connections are not encrypted.
        gate: None: everybody may call.
    """

    config: ServerConfig
    certificates: ServerCertificates | None = None
    gate: Gate | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> Locks:
        """Read the files that a configuration names.

        Raises:
            ConfigError: The address takes locks that are not set, or a file of them is wrong.
        """
        encrypted = has_tls(config.tls)
        refused = exposure_refusal(
            host=config.host,
            has_tls=encrypted,
            has_tokens=config.tokens is not None,
            insecure=config.insecure,
        )
        if refused is not None:
            raise ConfigError(refused)
        gate = None
        if config.tokens is not None:
            gate = Gate(read_tokens(config.tokens), max_requests_per_s=config.max_requests_per_s)
        return cls(config, ServerCertificates(config.tls) if encrypted else None, gate)

    def any_set(self) -> bool:
        """Whether there is a file to read again."""
        return self.certificates is not None or self.gate is not None

    def read_again(self) -> None:
        """Take what the files hold now; one that is broken changes nothing.

        Tokens count at once, on open streams too; certificates for the connections to come.
        """
        if self.gate is not None:
            self._read_tokens(self.gate)
        if self.certificates is not None:
            self._read_certificates(self.certificates)

    def tell(self) -> None:
        """Say what stands open, and to whom."""
        locks = {"tls": self.certificates, "tokens": self.gate}
        missing = [name for name, lock in locks.items() if lock is None]
        if not missing:
            return
        if is_loopback(self.config.host):
            _log.info("loopback_only", without=missing, meaning="users of this machine may call")
        else:
            _log.warning("not_locked", without=missing, meaning="all who reach the port may call")

    def _read_tokens(self, gate: Gate) -> None:
        assert self.config.tokens is not None
        try:
            tokens = read_tokens(self.config.tokens)
        except ConfigError as error:
            _log.error("tokens_kept", reason=str(error))
            return
        gate.use(tokens)
        _log.info("tokens_read", known=sorted(grant.name for _, grant in tokens.grants))

    def _read_certificates(self, certificates: ServerCertificates) -> None:
        try:
            certificates.read_again()
        except ConfigError as error:
            _log.error("certificates_kept", reason=str(error))
            return
        _log.info("certificates_read", certificate=str(self.config.tls.cert))
