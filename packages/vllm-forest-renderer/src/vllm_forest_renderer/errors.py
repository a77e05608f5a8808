"""Errors of the capture side.

Guarantees: every error carries a `Reason` and a message that names the field, what is wrong and
what to change, and never content of a request or of another attempt.
"""

from forest_schema import Reason


class ForestError(Exception):
    """Base of the capture side's errors."""

    def __init__(self, reason: Reason, message: str, *, param: str | None = None) -> None:
        """`param` names the request field that is wrong, where there is one."""
        super().__init__(message)
        self.reason = reason
        self.param = param


class AttemptError(ForestError):
    """The attempt is unknown (`attempt_unknown`) or admits nothing more (`attempt_closed`)."""


class CoordinateError(ForestError):
    """A record whose coordinates contradict the ledger or the store (`staging_failed`)."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.STAGING_FAILED, message)


class StoreUnavailable(ForestError):
    """The disk refuses (full, read-only, failing) or the store is shut down.

    Nothing that was acknowledged is lost; what was asked for did not happen.
    """

    def __init__(self, message: str) -> None:
        super().__init__(Reason.STORE_UNAVAILABLE, message)
