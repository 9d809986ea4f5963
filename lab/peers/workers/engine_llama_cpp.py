"""llama.cpp through the wheel `xllamacpp`, for `worker.py`.

Float32 cache, its server's own speculation. A method that begins with `q4_0`, `q4_1` or `q8_0` has
weights of that kind, others have float32.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import numpy as np

_JSON: Final = {"Content-Type": "application/json"}
_FLOATS: Final = "f32"


class Engine:
    """A server in this process, over files that are converted once."""

    def __init__(
        self,
        *,
        target: str,
        draft: str,
        work: str,
        threads: int,
        method: str,
        settings: dict[str, Any],
    ) -> None:
        host: Any = import_module("xllamacpp")
        *kind, method = method.split()
        weights = kind[0] if kind else _FLOATS
        self.version = host.__version__
        params = host.CommonParams()
        params.model.path = converted(target, work, weights)
        params.n_ctx, params.n_parallel, params.n_gpu_layers = 1024, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = host.ggml_type.GGML_TYPE_F32
        params.warmup, params.verbosity = False, 0
        kinds = host.common_speculative_type
        speculative = params.speculative
        if method == "draft":
            speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            speculative.draft.mparams.path = converted(draft, work)
            speculative.draft.n_max = settings["n_max"]
            speculative.draft.n_gpu_layers = 0
            speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = (
                threads
            )
            speculative.draft.cache_type_k = speculative.draft.cache_type_v = (
                host.ggml_type.GGML_TYPE_F32
            )
        elif method == "lookup":
            speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = (
                settings["size_n"],
                settings["size_m"],
            )
        self._server = host.Server(params)

    def generate(
        self, *, prompt_ids: list[int], max_new_tokens: int, temperature: float, seed: int
    ) -> list[int]:
        """New tokens."""
        asked = {
            "prompt": prompt_ids,
            "n_predict": max_new_tokens,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": False,
            "seed": seed,
            "temperature": temperature,
            "samplers": ["temperature"] if temperature > 0 else ["top_k"],
            "top_k": 0 if temperature > 0 else 1,
        }
        # Only the server's own route gives tokens; the wheel's functions give text.
        request = Request(
            f"{self._server.listening_address}/completion",
            data=json.dumps(asked).encode(),
            headers=_JSON,
        )
        with urlopen(request) as answer:
            return list(json.load(answer)["tokens"])


def converted(folder: str, work: str, weights: str = _FLOATS) -> str:
    """A GGUF file of a Llama checkpoint with a byte-level tokenizer.

    Ids are what is asked and answered. Beside layers of four bits, embeddings have eight.

    The program forbids every token that ends a text instead of reading on, and knows such tokens by
    their names too. So all tokens of the checkpoint get plain names, and one more token is there to
    be the forbidden one: laws stay as they are.
    """
    suffix = "" if weights == _FLOATS else f"-{weights}"
    out = Path(work) / f"{Path(folder).name}{suffix}.gguf"
    if out.exists():
        return str(out)
    gguf: Any = import_module("gguf")
    config = json.loads((Path(folder) / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"only Llama checkpoints are converted, not {config['model_type']}")
    partial = out.with_suffix(".part")
    writer = gguf.GGUFWriter(str(partial), "llama")
    _describe(writer, gguf, config)
    _tokens(
        writer,
        gguf,
        json.loads((Path(folder) / "tokenizer.json").read_text()),
        config["vocab_size"],
    )
    for name, tensor in _tensors(folder, config):
        if weights == _FLOATS or tensor.ndim < 2:
            writer.add_tensor(name, tensor)
            continue
        kind = getattr(
            gguf.GGMLQuantizationType, (weights if name.startswith("blk.") else "q8_0").upper()
        )
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)
    return str(out)


def _describe(writer: Any, gguf: Any, config: dict[str, Any]) -> None:  # noqa: ANN401 (the package's)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"] + 1)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _tokens(writer: Any, gguf: Any, tokenizer: dict[str, Any], size: int) -> None:  # noqa: ANN401 (the package's)
    special = {entry["id"] for entry in tokenizer["added_tokens"]}
    names = {
        number: text
        for text, number in tokenizer["model"]["vocab"].items()
        if number not in special
    }
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(
        [*(names.get(number, f"[token {number}]") for number in range(size)), "[end]"]
    )
    writer.add_token_types([*(kinds.NORMAL for _ in range(size)), kinds.CONTROL])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    )
    writer.add_eos_token_id(size)
    writer.add_bos_token_id(size)
    writer.add_add_bos_token(False)


def _tensors(folder: str, config: dict[str, Any]) -> Any:  # noqa: ANN401 (a generator of names and arrays)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for file in sorted(Path(folder).glob("*.safetensors")):
        for full, tensor in _read(file):
            name = full.removesuffix(".weight")
            if name in whole:
                yield (
                    f"{whole[name]}.weight",
                    np.pad(tensor, ((0, 1), (0, 0))) if tensor.ndim == 2 else tensor,
                )
                continue
            _, _, layer, rest = name.split(".", 3)
            ours = names[rest]
            # The format rotates neighbouring channels, the checkpoint halves of a head.
            ordered = (
                tensor.reshape(heads[ours], 2, -1, tensor.shape[1]).swapaxes(1, 2)
                if ours in heads
                else tensor
            )
            yield f"blk.{layer}.{ours}.weight", np.ascontiguousarray(ordered).reshape(tensor.shape)


def _read(file: Path) -> Any:  # noqa: ANN401 (a generator of names and arrays)
    """Tensors of a safetensors file, as float32.

    Eight bytes of length, a table in JSON, the numbers.
    """
    raw = np.memmap(file, dtype=np.uint8, mode="r")
    length = int(raw[:8].view(np.uint64)[0])
    table = json.loads(raw[8 : 8 + length].tobytes())
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        numbers = raw[8 + length + start : 8 + length + stop]
        if entry["dtype"] == "BF16":
            values = (numbers.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = numbers.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(
                np.float32
            )
        yield name, values.reshape(entry["shape"])
