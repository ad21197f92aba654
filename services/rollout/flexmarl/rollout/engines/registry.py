"""Engines by name. A factory is named, not imported: only the engine's own process imports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final, cast

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.engines.base import Engine, EngineSettings

Wake = Callable[[], None]
Factory = Callable[[EngineSettings, Wake], Engine]

FACTORIES: Final[Mapping[str, str]] = {
    "transformers": "flexmarl.rollout.engines.transformers_engine:build",
    "instant": "flexmarl.rollout.engines.instant_engine:build",
    "simulated": "flexmarl.rollout.engines.simulated_engine:build",
    "vllm": "flexmarl.rollout.engines.vllm_engine:build",
    "external": "flexmarl.rollout.engines.external_engine:build",
}
"""Name of an engine -> "module:function" that builds it from its settings and a wake."""

PRELOAD: Final = (
    "flexmarl.rollout.engines.transformers_engine",
    "transformers.models.llama.modeling_llama",
)
"""Modules worth importing once per host: torch and transformers cost seconds of CPU."""


def check_engine(name: str) -> str:
    """Return the name of a known engine.

    Raises:
        DomainError: NOT_BUILT.
    """
    if name not in FACTORIES:
        known = ", ".join(sorted(FACTORIES))
        raise DomainError(
            ErrorReason.NOT_BUILT, f"engine {name!r} is not built; built: {known}", {"engine": name}
        )
    return name


def build_engine(settings: EngineSettings, *, wake: Wake) -> Engine:
    """Build the engine that the settings name.

    Args:
        settings: As it is started.
        wake: What it may call, from any thread, when its `step` has something to hand over.

    Raises:
        DomainError: NOT_BUILT, MODEL_INVALID.
    """
    module, _, function = FACTORIES[check_engine(settings.engine)].partition(":")
    factory = cast("Factory", getattr(import_module(module), function))
    return factory(settings, wake)
