"""The stream of tasks."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron_forest_trainer.controller.tasks import TaskSourceError, TaskStream, load_tasks


@given(st.integers(1, 20), st.integers(0, 5), st.booleans())
def test_every_epoch_visits_every_task_once(count: int, seed: int, shuffle: bool) -> None:
    stream = TaskStream([{"n": n} for n in range(count)], seed=seed, shuffle=shuffle)
    for epoch in range(3):
        visited = [stream.at(epoch * count + offset).data["n"] for offset in range(count)]
        assert sorted(visited) == list(range(count))


@pytest.mark.requirement("J1")
@given(st.integers(0, 60))
def test_a_resumed_stream_continues_the_same_order(position: int) -> None:
    tasks = [{"n": n} for n in range(7)]
    original = TaskStream(tasks, seed=3)
    walked = [original.at(p) for p in range(61)]
    assert TaskStream(tasks, seed=3).at(position) == walked[position]


def test_tasks_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"q": 1}\n\n{"q": 2}\n')
    assert load_tasks(path) == [{"q": 1}, {"q": 2}]


@pytest.mark.parametrize(("text", "told"), [("[1]\n", ":1: "), ('{}\n{"a"\n', ":2: not JSON")])
def test_a_bad_line_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(TaskSourceError, match=told):
        load_tasks(path)


def test_no_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskSourceError, match="is no file"):
        load_tasks(tmp_path / "missing.jsonl")
    with pytest.raises(TaskSourceError, match="holds no task"):
        TaskStream([], seed=0)
