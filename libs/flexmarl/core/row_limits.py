"""How large a row of the graph may be.

The store refuses a write whole, whatever other rows are in it, and nobody can mend it then. So
whoever makes a row sees to it that it fits, and what wants more than that ends by name, alone.
"""

from __future__ import annotations

from typing import Final

from flexmarl.core.errors import DomainError, ErrorReason

MAX_META_BYTES: Final = 256 << 10
"""Meta columns of a vertex."""

MAX_PAYLOAD_BYTES: Final = 8 << 20
"""Data columns of a vertex: prompt, response and log-probs, or a tool's arguments and value."""

MAX_SAMPLE_BYTES: Final = 4 << 20
"""A sample."""

MAX_GROUP_BYTES: Final = 1 << 20
"""A group, with its query."""

MAX_QUERY_BYTES: Final = MAX_GROUP_BYTES - (4 << 10)
"""A query, as JSON."""

MAX_VALUE_BYTES: Final = 3 << 20
"""A tool's arguments, its value, or what a workflow returns, as JSON: two fit a vertex, and one a
sample beside its rewards."""

MAX_UPSTREAM_BYTES: Final = 192 << 10
"""Ids of the outputs that a call depends on: those of about 6,000."""

MAX_PROMPT_BYTES: Final = MAX_PAYLOAD_BYTES - (64 << 10)
"""A prompt: what ends without a response fits, too."""

MAX_TEXT_CHARS: Final = 4096
"""A message, or one of the facts beside it; what is beyond is left out."""

MAX_FACTS_BYTES: Final = 16 << 10
"""The facts beside a message; those beyond are left out."""

_TOKEN_BYTES: Final = 5
_SAMPLED_BYTES: Final = _TOKEN_BYTES + 8


def may_exceed(*, num_prompt_tokens: int, num_response_tokens: int = 0) -> bool:
    """Says whether so many tokens may not fit a row: most are known to fit without a look."""
    most = num_prompt_tokens * _TOKEN_BYTES + num_response_tokens * _SAMPLED_BYTES
    return most > MAX_PROMPT_BYTES


def too_large(what: str, *, size_bytes: int, max_bytes: int, remedy: str) -> DomainError:
    """The refusal of what does not fit a row.

    Args:
        what: What it is, and whose.
        size_bytes: Its size.
        max_bytes: What fits.
        remedy: What the user can do.
    """
    return DomainError(
        ErrorReason.ROW_TOO_LARGE,
        f"{what}: {size_bytes} bytes, more than {max_bytes}; {remedy}",
        {"size_bytes": str(size_bytes), "max_bytes": str(max_bytes)},
    )


def clipped(text: str) -> str:
    """A text as a row takes it; what protobuf cannot carry (lone surrogates) is replaced."""
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}... ({len(text)} characters)"
    return text.encode("utf-8", "replace").decode("utf-8")
