"""A run that this trainer works for: its config, models and store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from flexmarl.api.common.v1 import common_pb2
from flexmarl.client.bundle import materialise
from flexmarl.client.run_store import RunStore
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.runtime.run_config import RunConfig
from flexmarl.trainer.config import TrainerConfig
from flexmarl.trainer.rank_group import RankGroup


@dataclass(slots=True, kw_only=True)
class OpenRun:
    """See the module's text.

    `term` is the newest orchestrator's; `ranks` are the groups of workers that were told to do
    something for the run.
    """

    run_id: str
    created_unix_ns: int
    term: int
    config: RunConfig
    models: dict[str, Path]
    model_hashes: dict[str, str]
    package: Path | None
    store: RunStore
    ranks: WeakSet[RankGroup] = field(default_factory=WeakSet)

    def package_path(self, policy: str) -> str:
        """Folder of the workflow package where a policy needs its code, else ""."""
        return str(self.package) if ":" in self.config.policies[policy].loss.kind else ""

    def check_policy(self, policy: str, *, world_size: int) -> None:
        """Checks that a policy can be bound to this many slots.

        Raises:
            DomainError: INVALID_ARGUMENT.
        """
        config = self.config.policies.get(policy)
        if config is None or policy not in self.models:
            known = ", ".join(sorted(self.config.policies))
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"run {self.run_id} has no policy {policy!r}; it has: {known}",
                {"policy": policy},
            )
        if config.kind == "frozen" and world_size != 1:
            raise DomainError(
                ErrorReason.INVALID_ARGUMENT,
                f"policy {policy} is frozen: bind it to one slot, not {world_size}",
                {"policy": policy},
            )

    def check_term(self, term: int) -> None:
        """Checks that a caller is not an orchestrator of earlier times.

        Raises:
            DomainError: TERM_STALE.
        """
        if term < self.term:
            raise DomainError(
                ErrorReason.TERM_STALE,
                f"run {self.run_id}: orchestrator term {term} is older than {self.term}",
                {"term": str(term), "current": str(self.term)},
            )


async def read_run(
    run_id: str,
    *,
    term: int,
    shards: Sequence[common_pb2.ShardAddress],
    config: TrainerConfig,
) -> OpenRun:
    """Reads a run's config from its store and brings its models here.

    Raises:
        DomainError: INVALID_ARGUMENT without shards, and what the store answers.
    """
    store = RunStore.over(
        shards,
        patience_s=config.store_patience_s,
        shard_patience_s=config.shard_patience_s,
    )
    try:
        stored = await store.get_run(run_id)
        run_config = RunConfig.model_validate_json(stored.config_json)
        models = {
            name: await materialise(store, ref, config.data_dir / "models")
            for name, ref in sorted(stored.models.items())
        }
        package = None
        if any(":" in policy.loss.kind for policy in run_config.policies.values()):
            package = await materialise(store, stored.workflow_bundle, config.data_dir / "packages")
    except BaseException:
        await store.close()
        raise
    return OpenRun(
        run_id=run_id,
        created_unix_ns=stored.created_unix_ns,
        term=term,
        config=run_config,
        models=models,
        model_hashes={name: ref.content_hash for name, ref in stored.models.items()},
        package=package,
        store=store,
    )
