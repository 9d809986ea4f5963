"""Turn a small model in the layout of llama2.c into a folder that `--target` takes: a second target for measurements.

    python examples/second_target.py stories260K.bin tok512.bin --out stories
    monge train shape --target stories --data stories/prompts.txt --out stories-shape
    python -m lab.drafters --target stories --data stories/prompts.txt --head stories-shape

The weights are not part of this package.
"""

import argparse
import struct
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGINNINGS = (
    "Once upon a time, there was a little girl named Lily",
    "One day, a boy went to the park with his",
    "The dog was sad because",
    "Tom and his sister found a big box in the",
    "A small bird wanted to fly, but",
    "Mum said that it was time to",
    "In the garden there was a tree with",
    "The cat looked at the ball and",
)


def network(path: Path) -> LlamaForCausalLM:
    """Header of seven integers, then all weights in float32; the output layer is the embedding."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("<7i", raw[:28])
    numbers, place = torch.from_numpy(np.frombuffer(raw, dtype="<f4", offset=28).copy()), 0

    def take(*shape: int) -> Tensor:
        nonlocal place
        count = int(np.prod(shape))
        place += count
        return numbers[place - count : place].reshape(shape)

    def halves(weight: Tensor, number: int) -> Tensor:
        """Rotated pairs are neighbours there, and half a head apart here."""
        return weight.reshape(number, -1, 2, dim).transpose(1, 2).reshape(-1, dim)

    kv = dim * kv_heads // heads
    state = {"model.embed_tokens.weight": take(vocab, dim)}
    order = (
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (dim, dim)),
        ("self_attn.k_proj", (kv, dim)),
        ("self_attn.v_proj", (kv, dim)),
        ("self_attn.o_proj", (dim, dim)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (hidden, dim)),
        ("mlp.down_proj", (dim, hidden)),
        ("mlp.up_proj", (hidden, dim)),
    )
    for name, shape in order:
        for layer, weight in enumerate(take(layers, *shape)):
            rotated = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(name)
            state[f"model.layers.{layer}.{name}.weight"] = weight if rotated is None else halves(weight, rotated)
    state["model.norm.weight"] = take(dim)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config)
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    made.tie_weights()
    return made


def tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Length of the longest piece, then score, length and bytes of every piece; the best score merges first."""
    raw, place, pieces = path.read_bytes(), 4, list[str]()
    scores: list[float] = []
    while place < len(raw):
        score, length = struct.unpack_from("<fi", raw, place)
        pieces.append(raw[place + 8 : place + 8 + length].decode("utf-8", "replace").strip("\n") or f"<{len(pieces)}>")
        scores.append(score)
        place += 8 + length
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    words: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        words[piece if piece not in words else f"<{number}>"] = number
    merges = [
        (-scores[number], piece[:cut], piece[cut:])
        for piece, number in words.items()
        if number > 258
        for cut in range(1, len(piece))
        if piece[:cut] in words and piece[cut:] in words
    ]
    made = Tokenizer(
        models.BPE(vocab=words, merges=[(a, b) for _, a, b in sorted(merges)], byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Prepend(" ")
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("weights", type=Path)
    asked.add_argument("pieces", type=Path)
    asked.add_argument("--out", type=Path, required=True)
    given = asked.parse_args()
    network(given.weights).save_pretrained(given.out)
    tokenizer(given.pieces).save_pretrained(given.out)
    (given.out / "prompts.txt").write_text("\n".join(BEGINNINGS) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
