"""The door of a service: who calls, and may they.

The decision is `core.access`; here are the token of a call, its peer and what its request names.
A caller whose token is not known is told that and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import grpc

from flexmarl.core.access import Grant, Role, Rule, refusal, rule_of
from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.core.rate_limit import RateLimit
from flexmarl.runtime.logging import get_logger
from flexmarl.runtime.tokens import Tokens

AUTHORIZATION_KEY: Final = "authorization"
_SCHEME: Final = "Bearer "

_MAX_TOKEN_LENGTH: Final = 512

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_log = get_logger(__name__)


class Gate:
    """Admits calls by their token.

    Args:
        tokens: Those that are known.
        max_requests_per_s: Bound of one host's calls, an administrator's aside: the services' own
            calls are many and bounded by their queues.
    """

    def __init__(self, tokens: Tokens, *, max_requests_per_s: float) -> None:
        self._tokens = tokens
        self._limit = RateLimit(max_requests_per_s)

    def use(self, tokens: Tokens) -> None:
        """Know these tokens from now on."""
        self._tokens = tokens

    def admit(self, method: str, request: Any, context: Context) -> Callable[[], None]:  # noqa: ANN401
        """Let a call pass, or refuse it.

        Args:
            method: Full name.
            request: Its message; an iterator of messages where the caller streams.
            context: Of the call.

        Returns:
            To be called at each message of a stream: raises as well where other tokens are known by
            then, and the caller's is not among them.

        Raises:
            DomainError: UNAUTHENTICATED, PERMISSION_DENIED, RATE_LIMITED.
        """
        rule = rule_of(method)
        if rule is None:
            return _pass
        grant = self._grant_of(context)
        if grant is None or grant.role is not Role.ADMIN:
            self._check_rate(context)
        self._check(method, rule, grant, request, context)
        admitted_by = self._tokens

        def check_again() -> None:
            nonlocal admitted_by
            if self._tokens is not admitted_by:
                self._check(method, rule, self._grant_of(context), request, context)
                admitted_by = self._tokens

        return check_again

    def _grant_of(self, context: Context) -> Grant | None:
        return self._tokens.grant_of(_token_in(context.invocation_metadata() or ()))

    def _check(
        self,
        method: str,
        rule: Rule,
        grant: Grant | None,
        request: Any,  # noqa: ANN401
        context: Context,
    ) -> None:
        if grant is None:
            _log.warning("caller_unknown", method=method, peer=context.peer())
            raise _unauthenticated()
        # A service that keeps a request's bytes hands on a pair, with the parsed message in it.
        message = getattr(request, "message", request)
        refused = refusal(
            method,
            rule,
            grant,
            run_id=getattr(message, "run_id", ""),
            object_key=getattr(message, "key", ""),
        )
        if refused is not None:
            _log.warning("call_refused", method=method, caller=grant.name, peer=context.peer())
            raise refused

    def admits_reader(self, authorization: str) -> bool:
        """Whether the `Authorization` header of an HTTP request allows to look at everything."""
        grant = self._tokens.grant_of(_bearer(authorization))
        return grant is not None and not grant.run_id

    def _check_rate(self, context: Context) -> None:
        host = context.peer().rpartition(":")[0]
        if not self._limit.admits(host, now=time.monotonic()):
            raise DomainError(ErrorReason.RATE_LIMITED, "too many calls from this host")


def _pass() -> None:
    """Whom no rule binds needs no token later either."""


def _token_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for key, value in metadata:
        if key == AUTHORIZATION_KEY:
            return _bearer(value if isinstance(value, str) else value.decode("utf-8", "replace"))
    return ""


def _bearer(value: str) -> str:
    return value.removeprefix(_SCHEME) if len(value) <= _MAX_TOKEN_LENGTH else ""


def _unauthenticated() -> DomainError:
    return DomainError(ErrorReason.UNAUTHENTICATED, "no token, or not one that is known here")
