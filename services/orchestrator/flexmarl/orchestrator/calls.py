"""Patience with services: what is repeated, how long, and when a run was taken over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, TypeVar

from flexmarl.client.errors import DeadlineError, UnavailableError, make_error
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.retry import RetryPolicy, next_delay_s

T = TypeVar("T")

_RETRY: Final = RetryPolicy(max_attempts=1 << 30, initial_s=0.05, max_s=1.0)
_rng: Final = Random()  # noqa: S311 - jitter


class TakenOverError(Exception):
    """Another orchestrator holds a newer term of the run: this one stops acting."""


async def patiently(call: Callable[[], Awaitable[T]], *, patience_s: float, what: str) -> T:
    """Repeats an idempotent call while its service does not answer.

    Raises:
        UnavailableError: After `patience_s`; the message says what was tried.
        TakenOverError: A newer term exists.
        DomainError: Any other failure, at once.
    """
    begun = time.monotonic()
    failed = 0
    while True:
        try:
            return await call()
        except (UnavailableError, DeadlineError) as error:
            failed += 1
            if time.monotonic() - begun > patience_s:
                raise make_error(
                    ErrorReason.UNAVAILABLE,
                    f"{what}: no answer for {patience_s:g} s ({error.message})",
                ) from None
        except DomainError as error:
            raise_if_taken_over(error)
            raise
        await back_off(failed)


async def back_off(failed: int) -> None:
    """Pause before the next try."""
    delay_s = next_delay_s(_RETRY, failed_attempts=min(failed, 32), left_s=None, rng=_rng)
    await asyncio.sleep(delay_s or 0.0)


def raise_if_taken_over(error: DomainError) -> None:
    """Turns a stale term into what it means for an orchestrator.

    Raises:
        TakenOverError: The error says so.
    """
    if error.reason is ErrorReason.TERM_STALE:
        raise TakenOverError(error.message) from error
