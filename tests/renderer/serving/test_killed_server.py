"""SIGKILL of a serving process under load: what was answered is captured, the next one goes on."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from forest_schema import CallRecord, Reason, Receipt, decode_receipt
from forest_schema.digests import EMPTY_CHAIN, chain_digest
from forest_schema.shards import TOKENS, ShardReader

from tests.support.engine import CONTROL_TOKEN, wait_until
from tests.support.http_shard import HttpShard

AGENTS = 4


@dataclass
class Agent:
    """One attempt whose client notes what it was answered."""

    attempt: str
    stream: bool
    messages: list[Any] = field(default_factory=lambda: [{"role": "user", "content": "begin"}])
    answered: list[str] = field(default_factory=list)
    """Response ids of finished answers, in order."""

    def call(self, url: str) -> None:
        """One more turn. Raises `httpx.TransportError` or `openai.APIConnectionError`."""
        client = openai.OpenAI(
            base_url=f"{url}/v1/forest/{self.attempt}", api_key="unused", max_retries=0
        )
        options: dict[str, Any] = {
            "model": "tiny", "messages": self.messages, "max_tokens": 12,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        if self.stream:
            text = answer_id = ""
            with client.chat.completions.create(stream=True, **options) as chunks:
                finished = False
                for chunk in chunks:
                    answer_id = chunk.id
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        finished = finished or choice.finish_reason is not None
            if not finished:
                raise httpx.RemoteProtocolError("the stream was cut")
            message: Any = {"role": "assistant", "content": text}
        else:
            answer = client.chat.completions.create(**options)
            answer_id, message = answer.id, answer.choices[0].message
        self.answered.append(answer_id)
        self.messages += [message, {"role": "user", "content": f"go on {len(self.answered)}"}]


class Servers:
    """Serving processes over one state directory, one at a time."""

    def __init__(self, model: Path, state: Path) -> None:
        self._log = state / "servers.log"
        with self._log.open("w") as log:
            self._forker = subprocess.Popen(
                [sys.executable, "-m", "tests.support.server_process", str(model), str(state)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parents[3],
            )
        self.url = ""
        self._pid = 0

    def start(self) -> httpx.Client:
        """A client of the control routes of the next server.

        An engine that does not come up is tried once more, unless the plugin had a part in it.
        """
        assert self._forker.stdin is not None
        for last in (False, True):
            logged = self._log.stat().st_size
            self._forker.stdin.write("start\n")
            self._forker.stdin.flush()
            fact = self._fact("pid", "dead")
            if "pid" in fact:
                break
            told = self._log.read_bytes()[logged:].decode(errors="replace")
            assert not last, told
            assert "vllm_forest_renderer" not in told, told
        self._pid, self.url = fact["pid"], fact["url"]
        return httpx.Client(
            base_url=f"{self.url}/v1/forest/control",
            headers={"Authorization": f"Bearer {CONTROL_TOKEN}"},
            timeout=60,
        )

    def kill(self) -> None:
        """SIGKILL the server; its engine core would live on, and goes too."""
        children = psutil.Process(self._pid).children(recursive=True)
        os.kill(self._pid, signal.SIGKILL)
        self._pid = 0
        self._fact("dead")
        for child in children:
            child.kill()

    def close(self) -> None:
        """End all processes."""
        if self._pid:
            self.kill()
        assert self._forker.stdin is not None
        self._forker.stdin.close()
        self._forker.wait(30)

    def _fact(self, *keys: str) -> Any:
        assert self._forker.stdout is not None
        for line in self._forker.stdout:
            if line.startswith("{"):  # vLLM prints, too
                fact = json.loads(line)
                assert not fact.keys().isdisjoint(keys), self._log.read_text()[-4000:]
                return fact
        raise AssertionError(self._log.read_text()[-4000:])


@pytest.fixture
def servers(qwen3_dir: Path, tmp_path: Path) -> Iterator[Servers]:
    running = Servers(qwen3_dir, tmp_path)
    try:
        yield running
    finally:
        running.close()


def open_attempt(control: httpx.Client, number: int) -> str:
    body = {"rollout_id": f"r{number}", "group_id": "g", "partition": "run-step0"}
    attempt: str = control.post("/attempts", json=body).raise_for_status().json()["attempt_id"]
    return attempt


def load_and_kill(servers: Servers, agents: list[Agent], choose: random.Random) -> None:
    """All agents at once, until the server is dead."""

    def work(agent: Agent) -> None:
        with contextlib.suppress(httpx.TransportError, openai.APIConnectionError):
            while True:
                agent.call(servers.url)

    before = sum(len(agent.answered) for agent in agents)
    threads = [threading.Thread(target=work, args=(agent,)) for agent in agents]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(len(agent.answered) for agent in agents) > before)
    time.sleep(choose.uniform(0.0, 0.6))
    servers.kill()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def check(control: httpx.Client, agent: Agent) -> Receipt:
    """What the agent was answered is in the ledger and the store, and nothing pends."""
    receipt = decode_receipt(
        control.get(f"/attempts/{agent.attempt}/receipt").raise_for_status().content
    )
    calls = {call.output.response_id: call for call in receipt.calls}
    assert set(agent.answered) <= set(calls)
    assert receipt.pending == ()
    assert {failure.reason for failure in receipt.failures} <= {Reason.PROCESS_LOST}
    by_id = {call.call_id: call for call in receipt.calls}
    for call in receipt.calls:
        check_delta(control, call, by_id)
    # Each answered call continues the one before: its captured tokens were its prompt.
    chain = [calls[answer] for answer in agent.answered]
    before = [None, *(call.call_id for call in chain)]
    assert [call.parent_call_id for call in chain] == before[: len(chain)]
    return receipt


def check_delta(control: httpx.Client, call: CallRecord, by_id: dict[str, CallRecord]) -> None:
    source = HttpShard(control, f"/shards/{call.delta.partition}/{call.delta.shard}")
    delta = ShardReader(source, shard=call.delta.shard).read(call.delta)
    parent = by_id[call.parent_call_id].chain_digest if call.parent_call_id else EMPTY_CHAIN
    assert chain_digest(parent, delta[TOKENS]) == call.chain_digest


def kill_again_and_again(servers: Servers, state: Path, kills: int) -> None:
    choose = random.Random(0)
    control = servers.start()
    lost = 0
    for kill in range(kills):
        agents = [
            Agent(open_attempt(control, AGENTS * kill + n), stream=n % 2 == 1)
            for n in range(AGENTS)
        ]
        load_and_kill(servers, agents, choose)
        control = servers.start()
        folder = state / "store" / "run-step0"
        assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]
        for agent in agents:
            receipt = check(control, agent)
            lost += len(receipt.failures)
            # The request that was under way may have been captured without being answered.
            assert len(receipt.calls) + len(receipt.failures) - len(agent.answered) <= 1
            agent.call(servers.url)
            control.post(f"/attempts/{agent.attempt}/close").raise_for_status()
            closed = check(control, agent)
            assert closed.closed
            assert len({call.delta.shard for call in closed.calls}) == 1
    servers.kill()
    assert lost, "no kill met a call under way"


@pytest.mark.timeout(600)
@pytest.mark.requirement("C14", "C25", "A24", "C4", "A16")
def test_nothing_answered_is_lost_when_the_server_is_killed(
    servers: Servers, tmp_path: Path
) -> None:
    kill_again_and_again(servers, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.requirement("C14", "C25", "A24", "C4", "A16")
def test_nothing_answered_is_lost_in_many_kills(servers: Servers, tmp_path: Path) -> None:
    kill_again_and_again(servers, tmp_path, 40)
