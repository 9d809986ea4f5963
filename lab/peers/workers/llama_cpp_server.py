"""llama.cpp's server for `monge audit`: eight requests at once, a float32 cache, four drafted tokens.

`python llama_cpp_server.py TARGET.gguf [--draft DRAFT.gguf | --lookup] [--port N]`, in the environment
that `python -m lab.peers --install` makes.
"""

import threading
from argparse import ArgumentParser
from importlib import import_module
from typing import Any


def main() -> None:
    """Serve until the process is ended."""
    parser = ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--port", type=int, default=8100)
    asked = parser.parse_args()
    host: Any = import_module("xllamacpp")
    params, kinds = host.CommonParams(), host.common_speculative_type
    params.model.path, params.port = asked.target, asked.port
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 4096, 8, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = host.ggml_type.GGML_TYPE_F32
    speculative = params.speculative
    if asked.draft:
        draft = speculative.draft
        speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft.mparams.path, draft.n_max, draft.n_gpu_layers = asked.draft, 4, 0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
        draft.cache_type_k = draft.cache_type_v = host.ggml_type.GGML_TYPE_F32
    elif asked.lookup:
        speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = 2, 4
    server = host.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
