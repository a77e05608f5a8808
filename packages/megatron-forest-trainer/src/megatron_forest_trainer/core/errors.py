"""What can be wrong with a rollout's data.

Guarantees: an `EvidenceError` concerns one rollout's returned output and may mask it; a
`SelectionError` is a selection that breaks the policy contract, and an `IntegrityError` is data
that cannot be trusted: both stop the run and never become a mask.
"""

from forest_schema import Reason


class EvidenceError(ValueError):
    """The returned output does not say which captured calls it accepted."""

    reason = Reason.EVIDENCE_ERROR


class SelectionError(ValueError):
    """A selection that is not made of this capture's own, unchanged, distinct records."""


class IntegrityError(ValueError):
    """Captured data that contradicts itself. `reason` is a `Reason` that stops the run."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
