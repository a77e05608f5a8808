"""A random Qwen3 model over bytes: small enough to train in tests, with a real tokenizer."""

import json
from pathlib import Path

from safetensors.numpy import save_file

from tests.support.models import qwen3_config, qwen3_moe_config, qwen3_weights

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_byte_model(
    directory: Path, *, seed: int = 0, tied: bool = False, mixture: bool = False
) -> Path:
    """Write the model: 256 byte tokens and `SPECIAL`, two layers, random float32 weights.

    `tied` models use their embedding as the output layer; a `mixture` has experts.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False,
                "model_max_length": 4096,
                "chat_template": TEMPLATE,
            }
        )
    )
    config = (qwen3_moe_config if mixture else qwen3_config)(
        vocab_size=tokenizer.get_vocab_size(),
        bos_token_id=None,
        eos_token_id=end,
        tie_word_embeddings=tied,
    )
    weights = qwen3_weights(config, seed=seed)
    if not tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
