"""What a failed call means for an orchestrator: who did not answer, and whether it was replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flexmarl.client.errors import UnavailableError, make_error
from flexmarl.core.errors import DomainError, ErrorReason


class TakenOverError(Exception):
    """Another orchestrator holds a newer term of the run: this one stops acting."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says in the error of a service that does not answer what was waited for.

    Raises:
        UnavailableError: The same, with `what` before it.
    """
    try:
        yield
    except UnavailableError as error:
        raise make_error(error.reason, f"{what}: {error.message}") from None


@contextmanager
def fenced() -> Iterator[None]:
    """Turns a stale term of the run into what it means for its orchestrator.

    Raises:
        TakenOverError: A newer term exists.
    """
    try:
        yield
    except DomainError as error:
        if error.reason is ErrorReason.TERM_STALE:
            raise TakenOverError(error.message) from error
        raise
