"""A Llama-like network as a GGUF file, with the mix of types that llama.cpp's `quantize` chooses.

Reference:
    `llama_tensor_get_type` of llama.cpp: in `Q4_K_M`, values and down projections of a half of the
    layers and the output have six bits. Rows that are not divisible by 256 fall back to other types.
"""

import json
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from transformers import PreTrainedModel

from lab.grow.k_quants import BLOCK, quantize
from monge.core.errors import OptionError, UnsupportedModelError, unknown_name
from monge.core.extras import require

_NUMBERS: Final = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "IQ4_NL": 25,
    "IQ4_XS": 30, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18,
}  # fmt: skip
MIXES: Final = {
    "Q4_K_M": ("Q4_K", "Q6_K", 15),
    **{name: (name, name, number) for name, number in _NUMBERS.items()},
}
"""For a mix, the type of most matrices, that of the sensitive ones, and its number in files."""
_FALLBACKS: Final = {
    **dict.fromkeys(("Q2_K", "Q3_K", "IQ4_XS"), "IQ4_NL"),
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
}
_SMALL_BLOCK: Final = 32  # numbers of a block of the other types
_PRE_TOKENIZERS: Final = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
_INSTRUCTIONS: Final = (
    "{% for m in messages %}{% if m.role == 'user' %}Instruction: {{ m.content }}\n"
    "{% elif m.role == 'assistant' %}Response: {{ m.content }}\n\n"
    "{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Response:{% endif %}"
)
"""The format of the built-in target, which has no template."""


def type_of(name: str, depth: int, layers: int, mix: str, *, tied: bool) -> str:
    """The type of a matrix.

    Args:
        name: Its name in the file, such as `blk.3.attn_v.weight`.
        depth: Length of its rows.
        layers: Layers of the network.
        mix: A key of `MIXES`.
        tied: Whether the embeddings are the output, too.
    """
    usual, sensitive, _ = MIXES[mix]
    chosen = usual
    if name == ("token_embd.weight" if tied else "output.weight"):
        chosen = sensitive
    elif name.endswith((".attn_v.weight", ".ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            chosen = sensitive
    if depth % _SMALL_BLOCK:
        return "F16"
    return _FALLBACKS.get(chosen, chosen) if depth % BLOCK else chosen


def write_gguf(network: PreTrainedModel, tokenizer: Any, path: Path, mix: str) -> dict[str, int]:  # noqa: ANN401 (the host's)
    """Write a network and its tokenizer to a new file.

    Args:
        network: A Llama-like network.
        tokenizer: Its byte-level tokenizer.
        path: The file.
        mix: A key of `MIXES`.

    Returns:
        How many tensors have each type.

    Raises:
        OptionError: If the file exists or cannot be written, or the mix is unknown.
        UnsupportedModelError: If the network or the tokenizer is of another kind.
    """
    if mix not in MIXES:
        raise unknown_name("mix of types", mix, MIXES)
    if path.exists():
        raise OptionError(f"{str(path)!r} exists; name another file")
    require("gguf", "writing a GGUF file")
    import gguf

    config: Any = network.config
    if config.model_type != "llama" or config.rope_parameters["rope_type"] != "default":
        raise UnsupportedModelError(
            f"{type(network).__name__} cannot be written as GGUF: only Llama networks with plain "
            "rotary positions can"
        )
    partial, counts = path.with_suffix(".part"), dict[str, int]()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(partial, "llama", use_temp_file=True)
        _describe(writer, config, MIXES[mix][2])
        _add_tokenizer(writer, gguf.TokenType, tokenizer, config.vocab_size)
        for full, weights in network.named_parameters():
            name = names.get_name(full, (".weight",))
            if name is None:
                raise UnsupportedModelError(f"{full} has no name in a GGUF file of a Llama network")
            values = _ordered(name, weights.detach(), config).float().cpu().numpy()
            kind = "F32"
            if values.ndim == 2:
                tied = config.tie_word_embeddings
                kind = type_of(name, values.shape[1], config.num_hidden_layers, mix, tied=tied)
                values = quantize(values, kind)
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind])
            counts[kind] = counts.get(kind, 0) + 1
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return counts


def _ordered(name: str, weights: Tensor, config: Any) -> Tensor:  # noqa: ANN401
    """The format rotates neighbouring channels of a head, the host its halves."""
    heads = {
        "attn_q.weight": config.num_attention_heads,
        "attn_k.weight": config.num_key_value_heads,
    }.get(name.split(".", 2)[-1])
    if heads is None:
        return weights
    return weights.view(heads, 2, -1, weights.shape[1]).transpose(1, 2).reshape(weights.shape)


def _describe(writer: Any, config: Any, file_type: int) -> None:  # noqa: ANN401
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)


def _add_tokenizer(writer: Any, kinds: Any, tokenizer: Any, size: int) -> None:  # noqa: ANN401
    table = json.loads(tokenizer.backend_tokenizer.to_str())
    before = table["pre_tokenizer"] or {}
    pre = tuple(one["type"] for one in before.get("pretokenizers", [before]) if one)
    if table["model"]["type"] != "BPE" or pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"a {table['model']['type']} tokenizer behind {pre} cannot be written as GGUF; "
            "only byte-level ones of GPT-2 and SmolLM2 can"
        )
    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    added = {
        one["id"]: kinds.CONTROL if one["special"] else kinds.USER_DEFINED
        for one in table["added_tokens"]
    }
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZERS[pre])
    writer.add_token_list([texts.get(number, f"[unused {number}]") for number in range(size)])
    writer.add_token_types(
        [
            added.get(number, kinds.NORMAL if number in texts else kinds.UNUSED)
            for number in range(size)
        ]
    )
    merges = table["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_add_bos_token(False)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_chat_template(tokenizer.chat_template or _INSTRUCTIONS)
