"""Make the example's model: a small tokenizer, a chat template, a pre-trained Qwen3 decoder.

Guarantees: the same machine and arguments give the same files; the result is an ordinary Hugging
Face directory. Pre-training imitates `transcripts.py`, bad habits included.
"""

import random
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from toolbox.task import TOOLS  # noqa: E402
from toolbox.tiny_qwen3 import TinyConfig, TinyQwen3  # noqa: E402
from toolbox.transcripts import Habits, episode  # noqa: E402

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
KEEP_ROUNDS = 1


def make_tokenizer(vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on rendered transcripts; control tokens come behind the merges."""
    template = (HERE / "chat_template.jinja").read_text()
    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    renderer.chat_template = template
    rng = random.Random(0)
    texts = []
    for _ in range(300):
        for step in episode(rng, Habits(), KEEP_ROUNDS):
            prompt = renderer.apply_chat_template(step.messages, tools=TOOLS, tokenize=False)
            texts.extend(re.split("|".join(map(re.escape, SPECIAL + ADDED)), prompt + step.answer))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = template
    return tokenizer


def examples(tokenizer: Any, rng: random.Random, habits: Habits) -> list[tuple[list[int], int]]:
    """(tokens, number of prompt tokens) of each model call of one episode."""
    found = []
    for step in episode(rng, habits, KEEP_ROUNDS):
        prompt = tokenizer.apply_chat_template(
            step.messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        answer = tokenizer.encode(step.answer + "<|im_end|>", add_special_tokens=False)
        found.append(([*prompt, *answer], len(prompt)))
    return found


def collate(batch: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """Inputs `[rows, length]` and next-token targets, -100 outside the answers."""
    length = max(len(tokens) for tokens, _ in batch) - 1
    inputs = torch.zeros(len(batch), length, dtype=torch.long)
    targets = torch.full((len(batch), length), -100)
    for row, (tokens, prompt) in enumerate(batch):
        inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
        targets[row, prompt - 1 : len(tokens) - 1] = torch.tensor(tokens[prompt:])
    return inputs, targets


def pretrain(tokenizer: Any, steps: int, seed: int = 0) -> tuple[TinyQwen3, float]:
    """The model and its last loss."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    vocab = -(-len(tokenizer) // 64) * 64
    model = TinyQwen3(TinyConfig(vocab_size=vocab, hidden_size=64, intermediate_size=128, layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 4e-3, total_steps=steps, pct_start=0.1
    )
    pool: list[tuple[list[int], int]] = []
    loss = torch.zeros(())
    for _ in track(range(steps), description="pre-training"):
        while len(pool) < 32:
            pool.extend(examples(tokenizer, rng, Habits()))
        batch, pool = pool[:32], pool[32:]
        inputs, targets = collate(batch)
        kept = targets != -100
        loss = F.cross_entropy(model.lm_head(model.hidden(inputs)[kept]), targets[kept])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model, float(loss)


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    steps: Annotated[int, typer.Option(help="Pre-training steps.")] = 600,
) -> None:
    """Write the example's checkpoint."""
    tokenizer = make_tokenizer()
    model, loss = pretrain(tokenizer, steps)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    model.save(out, end, pad)
    typer.echo(f"{out}: loss {loss:.3f}")


if __name__ == "__main__":
    typer.run(main)
