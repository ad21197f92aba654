"""Do the policies fit on what the local cluster has?"""

from __future__ import annotations

from flexmarl.cli.errors import CliError
from flexmarl.runtime.run_config import RunConfig


def check_capacity(config: RunConfig, *, max_engines: int) -> None:
    """Every policy that can receive work keeps an instance (invariant I10).

    Args:
        config: The run.
        max_engines: Most instances that the engine host runs; 0 means as many as asked for.

    Raises:
        CliError: With the arithmetic.
    """
    if max_engines == 0:
        return
    wanted = {name: policy.rollout.instances for name, policy in sorted(config.policies.items())}
    if sum(wanted.values()) <= max_engines:
        return
    terms = " + ".join(f"{name} {count}" for name, count in wanted.items())
    fewest = len(wanted)
    remedy = (
        f"raise max_engines to at least {fewest}: every policy keeps one"
        if max_engines < fewest
        else "lower policies.<name>.rollout.instances or raise max_engines"
    )
    raise CliError(
        f"policies.*.rollout.instances: {terms} = {sum(wanted.values())} instances, but the engine "
        f"host runs at most {max_engines} (max_engines); {remedy}"
    )
