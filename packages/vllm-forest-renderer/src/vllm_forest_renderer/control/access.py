"""The control token.

Guarantees: control is never open: where no token is configured one is made, in a file that only
the server's user can read; tokens are compared in constant time; a token never appears in a log
or an error.
"""

import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

from forest_schema import Reason
from forest_schema.control import CONTROL_TOKEN_HEADER

from vllm_forest_renderer.errors import ForestError
from vllm_forest_renderer.process import ProcessIdentity
from vllm_forest_renderer.store.files import create_once, refusing

_log = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_SHORTEST = 16


class ControlToken:
    """The secret of the control routes."""

    def __init__(self, token: str) -> None:
        """Raises `ForestError` (`configuration`) for a token that is too short to be a secret."""
        if len(token) < _SHORTEST:
            raise ForestError(
                Reason.CONFIGURATION,
                f"control_token: use at least {_SHORTEST} characters, or leave it unset to have "
                "one generated",
                param="control_token",
            )
        self._digest = _digest(token)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise `ForestError` (`control_token_required`) unless the headers carry the token."""
        given = headers.get(CONTROL_TOKEN_HEADER)
        if given is None:
            scheme, _, credentials = headers.get("authorization", "").partition(" ")
            given = credentials if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(_digest(given), self._digest):
            raise ForestError(
                Reason.CONTROL_TOKEN_REQUIRED,
                f"the control token is missing or wrong: send it as 'Authorization: Bearer TOKEN' "
                f"or, beside an API key, in the header {CONTROL_TOKEN_HEADER}",
                param="authorization",
            )


def load_token(configured: str | None, path: Path) -> ControlToken:
    """The configured token, or the one in the file `path`, which is made where it is missing.

    Several server processes that start together get the same one. Raises `ForestError`
    (`configuration`) for a file that others can read, `StoreUnavailable`.
    """
    if configured is not None:
        return ControlToken(configured)
    with refusing("control token"):
        if not path.exists():
            token = secrets.token_urlsafe(_TOKEN_BYTES)
            create_once(path, f"{token}\n".encode(), ProcessIdentity.current(), mode=0o600)
        if path.stat().st_mode & 0o077:
            raise ForestError(
                Reason.CONFIGURATION,
                f"control token file {path} can be read by others: chmod 600 it, or delete it to "
                "have another one made",
            )
        token = path.read_text().strip()
    _log.info("the control routes need the token in %s", path)
    return ControlToken(token)


def _digest(token: str) -> bytes:
    # Equal lengths for the comparison, whatever was sent.
    return hashlib.sha256(token.encode()).digest()
