"""Training of a byte-level BPE, the kind GPT-2 has, written as one `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron.data.sidecar import write_atomically
from megatron.data.tokenizer import END_OF_TEXT
from megatron.errors import ConfigError, DataError, missing_extra

MIN_VOCAB_SIZE = 257
"""The 256 bytes and the end mark."""
MAX_VOCAB_SIZE = 1 << 20
"""Four times the largest vocabulary in use.

The trainer allocates all entries at once and aborts if memory is insufficient.
"""


def train_byte_level_bpe(texts: Iterable[str], *, vocab_size: int, output: Path) -> int:
    """Train on `texts`, write `output`, and return the number of entries reached.

    Id 0 is `<|endoftext|>`, 1 to 256 are the bytes; every string can be encoded and decodes to
    itself. A small text may yield fewer entries than requested. Equal texts in equal order yield
    the same file. Uses every core.

    Raises:
        ConfigError: `vocab_size` is out of range, or the `tokenizers` package is not installed.
        DataError: There is too little text, or the file cannot be written.
    """
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        wanted = (
            f"at least {MIN_VOCAB_SIZE}"
            if vocab_size < MIN_VOCAB_SIZE
            else f"at most {MAX_VOCAB_SIZE}"
        )
        raise ConfigError(f"--vocab-size: {vocab_size}; wanted {wanted}")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise missing_extra("tokenizers", "data") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached == MIN_VOCAB_SIZE < vocab_size:
        raise DataError("--input: too little text to learn a single merge from")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{output.parent}: {error.strerror}") from error
    write_atomically(output, tokenizer.to_str(pretty=True).encode())
    return reached
