"""Fixtures of the ledger, store and control tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.capture import Capture


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def capture(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Capture]:
    capture = await Capture.open(tmp_path)
    yield capture
    await capture.shutdown()
