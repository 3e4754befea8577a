"""Small models with random weights that take pictures or sound."""

from __future__ import annotations

import base64
import io
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks.pooling_models import WIDTH, enlarge_weights

#: What a picture is in a prompt, and the other marks of its processor.
IMAGE: Final = "<image>"
_MARKS: Final = (IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TILES: Final = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
_TASK_MARKS: Final = [
    "translate",
    "transcribe",
    "startoflm",
    "startofprev",
    "nospeech",
    "notimestamps",
]
#: Seconds of sound that the model hears at once.
PIECE_S: Final = 4
#: The shape of a decoder, with the two first tokens of `tokenizer`.
DECODER: Final[Mapping[str, int]] = MappingProxyType(
    {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
)


def picture(seed: int, width: int = 100, height: int = 80) -> bytes:
    """A picture of noise, as PNG."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def shown(content: bytes) -> dict[str, Any]:
    """A picture as a part of a message."""
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def write_picture_model(folder: Path) -> Path:
    """Write a model like SmolVLM into a new folder, and return the folder.

    A picture is at most 128 pixels wide or high, and each tile of 64 by 64 pixels is four tokens.
    """
    import torch
    import transformers

    words = tokenizer((*_MARKS, *_TILES), {"image": IMAGE})
    names = ("image_token", "fake_image_token", "global_image_token", "end_of_utterance_token")
    for name, mark in zip(names, _MARKS, strict=True):
        setattr(words, name, mark)
    words.image_token_id = words.convert_tokens_to_ids(IMAGE)
    encoder = {
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
    }
    config = transformers.Idefics3Config(
        vision_config=encoder,
        text_config=transformers.LlamaConfig(vocab_size=len(words), **DECODER),
        image_token_id=words.image_token_id,
        scale_factor=2,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    model = transformers.Idefics3ForConditionalGeneration(config)
    enlarge_weights(model)
    model.float().save_pretrained(folder)
    pictures = transformers.Idefics3ImageProcessor(
        size={"longest_edge": 128}, max_image_size={"longest_edge": 64}
    )
    transformers.Idefics3Processor(
        pictures, words, image_seq_len=4, chat_template=words.chat_template
    ).save_pretrained(folder)
    return folder


def tokenizer(marks: Sequence[str], shown_as: Mapping[str, str]) -> Any:
    """One token for each character and mark; ``shown_as`` are marks by the types of parts."""
    import tokenizers
    import transformers

    words = ["<pad>", "<end>", *marks, *string.printable]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="<pad>")  # noqa: S106 - no password
    coder = tokenizers.Tokenizer(model)
    coder.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=coder,
        pad_token="<pad>",  # noqa: S106
        eos_token="<end>",  # noqa: S106
        additional_special_tokens=[*marks],
    )
    parts = "".join(f"{{% elif c.type == '{kind}' %}}{mark}" for kind, mark in shown_as.items())
    fast.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}"
        "{% else %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}"
        f"{parts}{{% endif %}}{{% endfor %}}{{% endif %}}\n{{% endfor %}}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return fast


def write_sound_model(folder: Path) -> Path:
    """Write a model like Whisper into a new folder, and return the folder.

    It hears pieces of `PIECE_S` seconds, and knows all languages of Whisper.
    """
    import tokenizers
    import torch
    import transformers
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    end = "<|endoftext|>"
    marks = [f"<|{name}|>" for name in ("startoftranscript", *LANGUAGES, *_TASK_MARKS)]
    times = [f"<|{step * 0.02:.2f}|>" for step in range(PIECE_S * 50 + 1)]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([end, *letters])}
    words = transformers.WhisperTokenizer(
        vocab=vocabulary, merges=[], unk_token=end, bos_token=end, eos_token=end
    )
    words.add_special_tokens({"additional_special_tokens": [*marks, *times]})
    features = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=PIECE_S)
    config = transformers.WhisperConfig(
        vocab_size=len(words),
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH,
        num_mel_bins=80,
        max_source_positions=PIECE_S * 50,
        max_target_positions=64,
        decoder_start_token_id=words.convert_tokens_to_ids("<|startoftranscript|>"),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(1)
    model = transformers.WhisperForConditionalGeneration(config)
    enlarge_weights(model)
    model.float().save_pretrained(folder)
    transformers.WhisperProcessor(features, words).save_pretrained(folder)
    return folder
