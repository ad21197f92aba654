"""What an advantage estimator of the run's own returned, checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.training_rows import MAX_REWARD, is_usable


def to_advantages(returned: Any, *, count: int, what: str) -> list[float]:  # noqa: ANN401
    """Returns the advantages as numbers.

    Args:
        returned: What the user's function returned: as many numbers as it was given rewards, as a
            list, a tuple, or an array.
        count: How many it was given.
        what: Names the function, such as "estimator team:advantages".

    Raises:
        DomainError: ADVANTAGE_RAISED.
    """
    if not isinstance(returned, Iterable):
        raise _invalid(what, f"{type(returned).__name__}, not a list of numbers")
    try:
        numbers = [float(value) for value in returned]
    except (OverflowError, TypeError, ValueError) as error:
        raise _invalid(what, f"a list with something else than numbers: {error}") from None
    if len(numbers) != count:
        raise _invalid(what, f"{len(numbers)} advantages for {count} rewards")
    bad = next((number for number in numbers if not is_usable(number)), None)
    if bad is not None:
        raise _invalid(what, f"{bad}, not a finite number of at most {MAX_REWARD:g}")
    return numbers


def _invalid(what: str, problem: str) -> DomainError:
    return DomainError(ErrorReason.ADVANTAGE_RAISED, f"{what} returned {problem}", {"what": what})
