"""Make the image example's model: a small tokenizer and a pre-trained tiny Qwen2.5-VL.

Guarantees: the same machine and arguments give the same files; the result is an ordinary Hugging
Face directory. Pre-training imitates answers of which some name a wrong colour: what the
reinforcement learning has to take away.
"""

import random
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from pictures.task import AGAIN, COLOURS, QUESTION, contexts, make_task, paint, truth  # noqa: E402
from pictures.tiny_vision import (  # noqa: E402
    CELL,
    CHAT_TEMPLATE,
    VISION_TOKENS,
    TinyVision,
    save_vision_model,
    vision_model,
)

WRONG = 0.3
"""Share of answers that name a colour at random."""
MAX_CELLS = 16


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each word of the task is one token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    words = [*COLOURS, QUESTION, AGAIN, "user\n", "assistant\n"]
    bpe.train_from_iterator(words * 10, trainer)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    return tokenizer


class Example:
    """One call of an episode: its tokens, its images and where the answer starts."""

    def __init__(
        self, tokenizer: Any, images: Any, messages: Any, pictures: Any, said: str
    ) -> None:
        shown = [
            {
                **m,
                "content": [{"type": "image"} if p["type"] != "text" else p for p in m["content"]],
            }
            if isinstance(m["content"], list)
            else m
            for m in messages
        ]
        text = tokenizer.apply_chat_template(shown, add_generation_prompt=True, tokenize=False)
        for picture in pictures:
            cells = picture["width"] * picture["height"] // CELL**2
            text = text.replace("<|image_pad|>", "<|placeholder|>" * cells, 1)
        prompt = tokenizer.encode(text.replace("<|placeholder|>", "<|image_pad|>"))
        self.tokens = [*prompt, *tokenizer.encode(said + "<|im_end|>")]
        self.start = len(prompt)
        seen = images(images=[paint(picture) for picture in pictures], return_tensors="pt")
        self.pixels, self.grid = seen["pixel_values"], seen["image_grid_thw"]


def episode(tokenizer: Any, images: Any, rng: random.Random) -> list[Example]:
    """The three calls of one episode, with wrong answers among the right ones."""
    task = make_task(rng)
    first, second = task["pictures"]
    answers: list[str] = []
    examples = []
    for shown, true in zip([(first,), (first, second), (second,)], truth(task), strict=True):
        said = rng.choice(list(COLOURS)) if rng.random() < WRONG else true
        examples.append(Example(tokenizer, images, contexts(task, answers), shown, said))
        answers.append(said)
    return examples


def loss_of(model: Any, batch: list[Example], image_token: int) -> torch.Tensor:
    """Cross-entropy of the answers."""
    length = max(len(example.tokens) for example in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.long)
    targets = torch.full((len(batch), length), -100)
    for row, example in enumerate(batch):
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)
        answer = slice(example.start, len(example.tokens))
        targets[row, answer] = tokens[row, answer]
    logits = model(
        input_ids=tokens,
        pixel_values=torch.cat([example.pixels for example in batch]),
        image_grid_thw=torch.cat([example.grid for example in batch]),
        mm_token_type_ids=(tokens == image_token).int(),
    ).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    steps: Annotated[int, typer.Option(help="Pre-training steps.")] = 300,
) -> None:
    """Write the example's checkpoint."""
    tokenizer = make_tokenizer()
    size = TinyVision(vocab_size=-(-len(tokenizer) // 64) * 64, max_cells=MAX_CELLS)
    model = vision_model(size, tokenizer, seed=0)
    save_vision_model(out, model, tokenizer, max_cells=MAX_CELLS, stop=("<|endoftext|>",))
    images = Qwen2VLImageProcessor.from_pretrained(out)
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=steps, pct_start=0.1
    )
    loss = torch.zeros(())
    for _ in track(range(steps), description="pre-training"):
        batch = [example for _ in range(8) for example in episode(tokenizer, images, rng)]
        loss = loss_of(model, batch, image_token)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(out, safe_serialization=True)
    typer.echo(f"{out}: loss {loss.item():.3f}")


if __name__ == "__main__":
    typer.run(main)
