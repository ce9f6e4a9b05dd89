"""Make checkpoints of number formats from a BF16 folder by rounding to nearest. Run by an interpreter with llm-compressor.

Usage: python make_formats.py FROM TO FORMAT [FORMAT ...]. Each becomes a folder of its name in TO. FROM may be ``tiny``: then a
model of two layers with random weights is made as TO/bf16 first, with the tokenizer of the folder that follows:
``python make_formats.py tiny TOKENIZER TO FORMAT ...``. Its widths are multiples of 128, as FP8 by blocks needs.
"""

import shutil
import sys
from pathlib import Path

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
HEADS = ["lm_head"]
PRESETS = {
    "fp8": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "int8-w8a8": "W8A8",
    "nvfp4-w4a16": "NVFP4A16",
    "mxfp4": "MXFP4A16",
}
INT4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 64,
}
GROUPS = {"linear": {"targets": ["Linear"], "weights": INT4}}
CALIBRATION_ROWS = 4
ROW_TOKENS = 32
SEED = 0


def make_tiny(tokenizer: Path, target: Path) -> None:
    """Make a model whose logits differ much, so that a wrong product shows."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=49152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    copy_tokenizer(tokenizer, target)


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def quantize(source: Path, target: Path, number_format: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if number_format in PRESETS:
        preset = PRESETS[number_format]
        oneshot(
            model=model,
            recipe=QuantizationModifier(targets="Linear", scheme=preset, ignore=HEADS),
        )
    elif number_format == "int4":
        oneshot(
            model=model,
            recipe=QuantizationModifier(config_groups=GROUPS, ignore=HEADS),
        )
    elif number_format == "gptq-int4":
        generator = torch.Generator().manual_seed(SEED)
        rows = torch.randint(
            model.config.vocab_size,
            (CALIBRATION_ROWS, ROW_TOKENS),
            generator=generator,
        )
        oneshot(
            model=model,
            recipe=GPTQModifier(config_groups=GROUPS, ignore=HEADS),
            dataset=Dataset.from_list([{"input_ids": row} for row in rows.tolist()]),
            max_seq_length=ROW_TOKENS,
            num_calibration_samples=CALIBRATION_ROWS,
        )
    else:
        sys.exit(f"{number_format}: {', '.join((*PRESETS, 'int4', 'gptq-int4'))}")
    model.save_pretrained(target, save_compressed=True)
    copy_tokenizer(source, target)


def main(arguments: list[str]) -> None:
    if not torch.accelerator.is_available():
        # It fails without an accelerator.
        IntermediatesCache.pin_memory = lambda *_args, **_kwargs: None
    if arguments[0] == "tiny":
        _, tokenizer, target, *formats = arguments
        source = Path(target, "bf16")
        make_tiny(Path(tokenizer), source)
    else:
        base, target, *formats = arguments
        source = Path(base)
    for number_format in formats:
        quantize(source, Path(target, number_format), number_format)


main(sys.argv[1:])
