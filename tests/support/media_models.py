"""More small models with random weights that see or hear.

`python -m tests.support.media_models FOLDER` writes all of them, each into a folder with its name.
It needs `torchvision`, as vLLM does to load those that see.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, Literal, get_args

from benchmarks.media_models import DECODER, IMAGE, WIDTH, tokenizer
from benchmarks.pooling_models import enlarge_weights

#: Those whose processors need `torchvision`.
SeeingKind = Literal["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
_QWEN: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SHOWN_AS: Final = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_PIXELS: Final = {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 16}
_ENCODER: Final = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_SMALL: Final = {"hidden_size": 64, "intermediate_size": WIDTH, "out_hidden_size": WIDTH}
_ROTARY: Final = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}


def _write(folder: Path, model: Any, processor: Any, renamed: tuple[str, str] = ("", "")) -> None:
    """Write a model; some weights have another name in vLLM than in transformers."""
    from safetensors.torch import load_file, save_file

    enlarge_weights(model)
    model.float().save_pretrained(folder)
    processor.save_pretrained(folder)
    old, new = renamed
    if old:
        file = folder / "model.safetensors"
        weights = {
            new + name.removeprefix(old) if name.startswith(old) else name: weight
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, {"format": "pt"})


def write_llava(folder: Path) -> None:
    """LLaVA: 16 tokens for a picture of 56 by 56 pixels."""
    import transformers

    words = tokenizer([IMAGE], {"image": IMAGE})
    side = {"height": 56, "width": 56}
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=side)
    processor = transformers.LlavaProcessor(
        pictures,
        words,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=words.chat_template,
    )
    encoder = transformers.CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
    )
    config = transformers.LlavaConfig(
        vision_config=encoder,
        text_config=transformers.LlamaConfig(vocab_size=len(words), **DECODER),
        image_token_index=words.convert_tokens_to_ids(IMAGE),
        image_seq_length=16,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    _write(folder, model, processor, ("vision_tower.", "vision_tower.vision_model."))


def write_qwen_vl(kind: SeeingKind, folder: Path) -> None:
    """Qwen-VL of a generation: a token for each 28 by 28 pixels, at most 16 for a picture."""
    import transformers

    named = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    generation = 3 if kind == "qwen3_vl" else 2
    patches: dict[str, Any] = {"patch_size": 16, "merge_size": 2} if generation == 3 else {}
    words = tokenizer(_QWEN, _SHOWN_AS)
    pictures = transformers.Qwen2VLImageProcessor(**_PIXELS, **patches)
    videos = getattr(transformers, f"Qwen{generation}VLVideoProcessor")(**_PIXELS, **patches)
    processor = getattr(transformers, f"{named}Processor")(
        pictures, words, videos, chat_template=words.chat_template
    )
    encoder: dict[str, Any] = {
        "qwen2_vl": {**_ENCODER, "embed_dim": 64, "hidden_size": WIDTH, "mlp_ratio": 2},
        "qwen2_5_vl": {**_ENCODER, **_SMALL, "window_size": 56, "fullatt_block_indexes": [1]},
        "qwen3_vl": {
            **_ENCODER,
            **_SMALL,
            "patch_size": 16,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
    }[kind]
    decoder: dict[str, Any] = {**DECODER, "vocab_size": len(words), "rope_parameters": _ROTARY}
    if generation == 3:
        decoder |= {"head_dim": 32, "rope_parameters": {**_ROTARY, "mrope_interleaved": True}}
    start, _, image, video = words.convert_tokens_to_ids(_QWEN)
    config = getattr(transformers, f"{named}Config")(
        text_config=decoder,
        vision_config=encoder,
        vision_start_token_id=start,
        image_token_id=image,
        video_token_id=video,
    )
    _write(folder, getattr(transformers, f"{named}ForConditionalGeneration")(config), processor)


def write_qwen_audio(folder: Path) -> None:
    """Qwen2-Audio, which hears sound in a chat."""
    import transformers

    marks = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    words = tokenizer(marks, {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"})
    processor = transformers.Qwen2AudioProcessor(
        transformers.WhisperFeatureExtractor(feature_size=80),
        words,
        chat_template=words.chat_template,
    )
    encoder = {
        "d_model": WIDTH,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": WIDTH,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
    }
    config = transformers.Qwen2AudioConfig(
        audio_config=encoder,
        text_config={"model_type": "qwen2", "vocab_size": len(words), **DECODER},
        audio_token_index=words.convert_tokens_to_ids(marks[0]),
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    _write(folder, model, processor, ("language_model.model.model.", "language_model.model."))


if __name__ == "__main__":
    import torch

    into = Path(sys.argv[1])
    torch.manual_seed(1)
    write_llava(into / "llava")
    write_qwen_audio(into / "qwen2_audio")
    for each in get_args(SeeingKind)[1:]:
        write_qwen_vl(each, into / each)
