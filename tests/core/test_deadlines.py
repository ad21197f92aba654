"""The table of deadlines names methods that exist, and just the streams that never end."""

import importlib

from flexmarl.core.deadlines import DEADLINES_S, LONG_LIVED

SERVICES = {
    "meg_store": "MegStoreService",
    "orchestrator": "OrchestratorService",
    "rollout": "RolloutService",
    "trainer": "TrainerService",
}
# Server streams that end by themselves.
FINITE = {
    "/flexmarl.api.meg_store.v1.MegStoreService/GetObject",
    "/flexmarl.api.meg_store.v1.MegStoreService/HoldWrites",
    "/flexmarl.api.meg_store.v1.MegStoreService/ReadSegment",
}


def methods():
    for package, service in SERVICES.items():
        module = importlib.import_module(f"flexmarl.api.{package}.v1.{package}_pb2")
        for method in module.DESCRIPTOR.services_by_name[service].methods:
            yield f"/{method.containing_service.full_name}/{method.name}", method


def test_every_named_method_exists():
    assert set(DEADLINES_S) | LONG_LIVED <= {name for name, _ in methods()}


def test_every_endless_stream_is_long_lived_and_nothing_else():
    streams = {name for name, method in methods() if method.server_streaming}
    assert streams - FINITE == LONG_LIVED
    assert {name for name, limit_s in DEADLINES_S.items() if limit_s is None} == LONG_LIVED
