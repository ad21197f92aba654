"""What this process shows to the services that it calls: from files, at start and when told to.

One process has one set, as in `flexmarl.core.peer_credentials`: its edge names the files, a signal
has them read again.
"""

from __future__ import annotations

from flexmarl.core.peer_credentials import use_credentials
from flexmarl.runtime.config import ClientConfig, ConfigError
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.tls import client_credentials

_log = get_logger(__name__)
_config = ClientConfig()


def show(config: ClientConfig) -> None:
    """Read the files and show what they hold to whoever is called from now on.

    Raises:
        ConfigError: A file is missing, readable by others or not PEM; or a setting lacks another.
    """
    global _config
    use_credentials(client_credentials(config))
    _config = config


def has_files() -> bool:
    """Whether there is anything to read again."""
    return any(file is not None for file in (_config.ca, _config.cert, _config.token_file))


def read_again() -> None:
    """Show what the files hold now; where one is broken, what was read before stays in use."""
    if not has_files():
        return
    try:
        show(_config)
    except ConfigError as error:
        _log.error("own_credentials_kept", reason=str(error))
        return
    _log.info("own_credentials_read")
