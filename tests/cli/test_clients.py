"""A running cluster keeps what a run asks for, or the run is refused."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from flexmarl.api.common.v1 import common_pb2
from flexmarl.cli.clients import Clients
from flexmarl.cli.errors import CliError


def clients(durability: str) -> Clients:
    home = common_pb2.ShardAddress(name="s0", address="127.0.0.1:7001")
    return Clients(Mock(), Mock(), home, durability)


@pytest.mark.parametrize("asked", ["process", "fsync"])
def test_a_store_may_keep_more_than_was_asked(asked: str) -> None:
    clients("fsync").check_durability(asked)
    clients("process").check_durability("process")


def test_a_store_that_keeps_less_is_named() -> None:
    with pytest.raises(CliError, match=r"store at .* runs with"):
        clients("process").check_durability("fsync")
