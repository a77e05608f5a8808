"""Which control requests are tried again, against a server that fails on the wire."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from forest_schema import Receipt, SchemaError
from forest_schema.control import AttemptOpened, EngineState, ErrorBody, OpenAttempt, WeightUpdate
from megatron_forest_trainer.controller.client import (
    ControlClient,
    ControlError,
    TransportFailure,
)

OPEN = OpenAttempt(rollout_id="r0", group_id="g", partition="p")
OPENED = msgspec.json.encode(AttemptOpened(attempt_id="att_1", base_path="/v1/forest/att_1"))
RECEIPT = msgspec.json.encode(
    Receipt(
        store="s",
        partition="p",
        attempt_id="att_1",
        rollout_id="r0",
        group_id="g",
        closed=True,
        calls=(),
    )
)
DROP = None
"""The server reads the request and hangs up."""


def error(status: int, reason: str) -> tuple[int, bytes]:
    body = ErrorBody(error=ErrorBody.Error(message="told", type=reason, param="x", code=status))
    return status, msgspec.json.encode(body)


class Wire:
    """A server that answers each request with the next scripted answer."""

    def __init__(self, answers: list[tuple[int, bytes] | None]) -> None:
        self.answers = answers
        self.requests: list[str] = []
        self.headers: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        self.requests.append(" ".join(head.split(" ")[:2]))
        for line in head.lower().splitlines():
            if line.startswith("content-length:"):
                await reader.readexactly(int(line.split(":")[1]))
        answer = self.answers.pop(0)
        if answer is not DROP:
            status, body = answer
            writer.write(
                f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n"
                "connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(*answers: tuple[int, bytes] | None) -> AsyncIterator[tuple[Wire, ControlClient]]:
    wire = Wire(list(answers))
    server = await asyncio.start_server(wire.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        ControlClient(f"http://127.0.0.1:{port}", "secret", backoff_s=0.001) as client,
    ):
        yield wire, client


@pytest.mark.requirement("C27")
def test_the_control_token_goes_along_and_the_answer_is_typed() -> None:
    async def body() -> None:
        async with serving((200, OPENED)) as (wire, client):
            assert (await client.open_attempt(OPEN)).attempt_id == "att_1"
            assert wire.requests == ["POST /v1/forest/control/attempts"]
            assert "authorization: bearer secret" in wire.headers[0].lower()

    asyncio.run(body())


@pytest.mark.requirement("I16")
@pytest.mark.parametrize(
    "send",
    [
        lambda client: client.open_attempt(OPEN),
        lambda client: client.update_weights(WeightUpdate(path="/w", version="step-1")),
        lambda client: client.pause(),
        lambda client: client.resume(),
    ],
)
def test_an_ambiguous_request_is_sent_once(send: Callable[[ControlClient], object]) -> None:
    async def body() -> None:
        async with serving(DROP, (200, OPENED)) as (wire, client):
            with pytest.raises(TransportFailure, match="may have arrived"):
                await send(client)  # type: ignore[misc]
            assert len(wire.requests) == 1

    asyncio.run(body())


@pytest.mark.requirement("I16")
def test_reads_closes_and_deletions_are_tried_again() -> None:
    async def body() -> None:
        async with serving(DROP, DROP, (200, RECEIPT)) as (wire, client):
            assert (await client.close_attempt("att_1", wait_s=0)).attempt_id == "att_1"
            assert wire.requests == ["POST /v1/forest/control/attempts/att_1/close"] * 3
        async with serving(DROP, (200, RECEIPT)) as (wire, client):
            await client.receipt("att_1")
            assert len(wire.requests) == 2

    asyncio.run(body())


@pytest.mark.requirement("I16")
def test_a_503_wrote_nothing_and_is_tried_again_even_for_open() -> None:
    async def body() -> None:
        busy = error(503, "store_unavailable")
        async with serving(busy, busy, (200, OPENED)) as (wire, client):
            await client.open_attempt(OPEN)
            assert len(wire.requests) == 3

    asyncio.run(body())


@pytest.mark.requirement("I16")
def test_a_definite_refusal_is_not_tried_again_and_names_its_reason() -> None:
    async def body() -> None:
        async with serving(error(404, "attempt_unknown"), (200, RECEIPT)) as (wire, client):
            with pytest.raises(ControlError, match="attempt_unknown") as caught:
                await client.close_attempt("att_1", wait_s=0)
            assert (caught.value.status, caught.value.param) == (404, "x")
            assert len(wire.requests) == 1
        async with serving((502, b"<html>")) as (_, client):
            with pytest.raises(ControlError, match="http_502"):
                await client.handshake()

    asyncio.run(body())


def test_a_server_that_is_not_there_is_said_not_to_have_seen_the_request() -> None:
    async def body() -> None:
        async with ControlClient("http://127.0.0.1:9", "t", attempts=2, backoff_s=0.001) as client:
            with pytest.raises(TransportFailure, match="did not arrive"):
                await client.open_attempt(OPEN)

    asyncio.run(body())


@pytest.mark.requirement("C20")
def test_an_answer_of_another_schema_version_is_refused_by_name() -> None:
    async def body() -> None:
        old = msgspec.json.encode(EngineState(schema=2, paused=False, weight_version="w"))
        async with serving((200, old)) as (_, client):
            with pytest.raises(SchemaError, match="answer to POST /pause: schema version 2"):
                await client.pause()

    asyncio.run(body())
