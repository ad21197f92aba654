"""What user code may take of its machine, and as whom it runs.

A child confines itself once, after its link and log are open and before it imports user code; what
it starts later inherits the limits. None of it can be undone from within: hard limits only fall,
and a process that gave root up does not get it back.
"""

from __future__ import annotations

import os
import pwd
import resource
from typing import Any

from flexmarl.rollout.config import UserCodeConfig
from flexmarl.runtime.config import ConfigError

_ROOT = 0


def check_confinement(config: UserCodeConfig) -> None:
    """Refuses at start what no child could do.

    Raises:
        ConfigError: The user does not exist, or this process may not become it.
    """
    if not config.user:
        return
    entry = _find_user(config.user)
    if os.geteuid() not in (_ROOT, entry.pw_uid):
        raise ConfigError(
            f"user_code.user = {config.user!r}: only a service that root started can run user "
            "code as another user"
        )


def own_by_user(config: UserCodeConfig, folder: os.PathLike[str]) -> None:
    """Gives a folder that user code's processes write to, to their user."""
    if config.user and os.geteuid() == _ROOT:
        entry = _find_user(config.user)
        os.chown(folder, entry.pw_uid, entry.pw_gid)


def confine(limits: dict[str, Any]) -> None:
    """Confines the calling process.

    Args:
        limits: The service's section `user_code`.
    """
    config = UserCodeConfig.model_validate(limits)
    for kind, value in (
        (resource.RLIMIT_AS, config.address_space_mib << 20),
        (resource.RLIMIT_CPU, config.cpu_s),
        (resource.RLIMIT_NOFILE, config.open_files),
    ):
        if value:
            _, hard = resource.getrlimit(kind)
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))
    if config.user and os.geteuid() == _ROOT:
        entry = _find_user(config.user)
        # Groups first: a process that is not root any more cannot leave them.
        os.initgroups(config.user, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
        os.environ.update(HOME=entry.pw_dir, USER=config.user, LOGNAME=config.user)


def _find_user(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"user_code.user = {name!r}: this machine has no such user") from None
