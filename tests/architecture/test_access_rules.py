"""Every method of every service has its row in the table of who may call it."""

from __future__ import annotations

import importlib

import pytest

from flexmarl.core.access import RULES, Reach

SERVICES = ["meg_store", "orchestrator", "rollout", "trainer"]


def methods_of(service: str):
    """Full name and descriptor of each method of a service's contract."""
    module = importlib.import_module(f"flexmarl.api.{service}.v1.{service}_pb2")
    for found in module.DESCRIPTOR.services_by_name.values():
        for method in found.methods:
            yield f"/{found.full_name}/{method.name}", method


@pytest.mark.parametrize("service", SERVICES)
def test_every_method_has_a_rule(service: str) -> None:
    names = {name for name, _ in methods_of(service)}
    assert names
    assert names - RULES.keys() == set()


def test_no_rule_is_of_a_method_that_is_gone() -> None:
    known = {name for service in SERVICES for name, _ in methods_of(service)}
    ours = {name for name in RULES if name.startswith("/flexmarl.")}
    assert ours - known == set()


@pytest.mark.parametrize("service", SERVICES)
def test_a_rule_about_runs_finds_the_run_in_the_request(service: str) -> None:
    """The interceptor reads `run_id`: without the field a run's key would open nothing, or all."""
    for name, method in methods_of(service):
        rule, fields = RULES[name], set(method.input_type.fields_by_name)
        assert rule is not None, name
        if rule.reach is Reach.RUN:
            assert "run_id" in fields, name
        if rule.reach is Reach.CONTENT:
            assert "key" in fields, name
            assert "run_id" not in fields, name
        if rule.reach is Reach.ANY:
            assert "run_id" not in fields, name
