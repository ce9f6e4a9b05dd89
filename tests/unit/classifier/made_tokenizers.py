"""Small tokenizers."""

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TRAINING = [
    "the quick brown fox jumps over the lazy dog and the fox runs again",
    "def add(first, second):\n    return first + second  # adds 1234 and 5678",
    "It's the cat's pyjamas; they'll say we've won 99 of 100 games in 2024!",
    "l'été à Köln, naïve café, Привет мир, 你好世界, こんにちは",
] * 30


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=alphabet,
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer
