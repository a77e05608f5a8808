"""The parts of the example: task, transcripts, template and model."""

import itertools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_forest_trainer.harness.compaction import HIDDEN
from toolbox.make_model import make_tokenizer, pretrain
from toolbox.task import TOOLS, BoxTask, tasks
from toolbox.transcripts import Habits, Step, episode

GOOD = Habits(**dict.fromkeys(Habits.__dataclass_fields__, 0.0))


def episodes(habits: Habits, number: int) -> list[list[Step]]:
    rng = random.Random(3)
    return [episode(rng, habits, keep_rounds=1) for _ in range(number)]


@cache
def tokenizer() -> Any:
    return make_tokenizer()


@cache
def parser() -> Any:
    from vllm.parser.parser_manager import ParserManager

    return ParserManager.get_parser("hermes", "qwen3", True, tokenizer=tokenizer())


def parsed(answer: str) -> dict[str, Any]:
    """The message that the server makes of a generated text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS
    )
    ids = tokenizer().encode(answer, add_special_tokens=False)
    reasoning, content, calls = parser()(tokenizer(), tools=request.tools).parse(
        answer, request, enable_auto_tools=True, model_output_token_ids=ids
    )
    return {
        "role": "assistant",
        "reasoning": reasoning,
        "content": content,
        "tool_calls": [
            {
                "id": call.id,
                "type": "function",
                # vLLM hands the template the arguments as a value.
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in calls or ()
        ],
    }


def rendered(messages: list[dict[str, Any]], *, open_turn: bool = False) -> str:
    return tokenizer().apply_chat_template(
        messages, tools=TOOLS, tokenize=False, add_generation_prompt=open_turn
    )


def test_the_same_seed_gives_the_same_tasks() -> None:
    first, again, other = (list(itertools.islice(tasks(s), 5)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_tool_leads_to_the_answer_and_nothing_else_earns_the_reward() -> None:
    for data in itertools.islice(tasks(4), 20):
        world, found, opened = BoxTask(data), data["first"], 0
        while found in data["boxes"]:
            found, opened = world.call("open", {"box": found}), opened + 1
        assert opened >= 3
        assert world.reward(found) == 1.0
        assert world.reward(None) == world.reward("") == world.reward(f"{found} or so") == 0.0
        assert world.call("close", {}).startswith("error")
        assert world.call("open", {"box": "no such"}).startswith("error")


def test_a_scripted_episode_without_bad_habits_hides_results_and_succeeds() -> None:
    for steps in episodes(GOOD, 20):
        results = [m["content"] for m in steps[-1].messages if m["role"] == "tool"]
        assert len(results) == len(steps) - 1
        assert set(results[:-1]) == {HIDDEN}
        assert results[-1] != HIDDEN
        assert results[-1] == parsed(steps[-1].answer)["content"]


@pytest.mark.requirement("A20", "A21")
def test_rendering_a_parsed_answer_gives_back_the_generated_text() -> None:
    for steps in episodes(GOOD, 10) + episodes(Habits(), 20):
        for step in steps:
            turn = rendered([*step.messages, parsed(step.answer)])
            assert turn == f"{rendered(step.messages, open_turn=True)}{step.answer}<|im_end|>\n"


def test_an_appended_result_leaves_the_rendering_before_it_unchanged() -> None:
    (steps,) = episodes(GOOD, 1)
    before = rendered([*steps[0].messages, parsed(steps[0].answer)])
    assert rendered(steps[1].messages, open_turn=True).startswith(before)


def test_a_malformed_call_is_an_answer_that_earns_nothing() -> None:
    message = parsed('<think>open</think><tool_call>{"name": "open", "box": "red"}</tool_call>')
    assert not message["tool_calls"]
    assert BoxTask(next(tasks(0))).reward(message["content"]) == 0.0


def test_making_the_model_again_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made = make_tokenizer()
        model, _ = pretrain(made, steps=3)
        (tmp_path / name).mkdir()
        made.save_pretrained(tmp_path / name)
        model.save(tmp_path / name, 1, 0)
    for file in ("tokenizer.json", "model.safetensors", "config.json", "chat_template.jinja"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_the_checkpoint_is_a_qwen3_of_hugging_face(tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    model, _ = pretrain(tokenizer(), steps=2)
    model.save(tmp_path, 1, 0)
    loaded = Qwen3ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.lm_head(model.hidden(tokens))
        theirs = loaded(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
