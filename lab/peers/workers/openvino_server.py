"""OpenVINO GenAI behind `/v1/completions`, for `monge audit`: float32 weights, arithmetic and cache.

`python openvino_server.py TARGET [--draft DRAFT | --lookup] [--port N]`, in the environment that
`python -m lab.peers --install` makes. Requests that arrive while others are decoded are decoded
together. The fields of a request are those in `FIELDS`; others are refused.
"""

import json
import threading
from argparse import ArgumentParser
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

FIELDS: Final = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "logprobs",
    "return_tokens_as_token_ids",
)
_FIRST_SEED: Final = 1 << 31  # of requests without a seed: far from the seeds of the others


class Completions:
    """Completions of one pipeline.

    Args:
        target: Folder of the exported target.
        draft: Folder of the exported draft model, if there is one.
        is_lookup: Whether drafts are looked up in the text.
        options: Properties of both models.
        speculation: Fields of every `GenerationConfig`.
    """

    def __init__(
        self,
        target: str,
        draft: str | None,
        *,
        is_lookup: bool,
        options: dict[str, Any],
        speculation: dict[str, Any],
    ) -> None:
        self._host: Any = import_module("openvino_genai")
        self._tensors: Any = import_module("openvino")
        extra = dict(options)
        if draft is not None:
            extra["draft_model"] = self._host.draft_model(draft, "CPU", **options)
        if is_lookup:
            extra["prompt_lookup"] = True
        self._pipeline = self._host.ContinuousBatchingPipeline(
            target, self._host.SchedulerConfig(), "CPU", extra
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self._ends = self._pipeline.get_config().stop_token_ids | {
            self._tokenizer.get_eos_token_id()
        }
        self._speculation, self._num_requests = speculation, 0
        self._waiting = SimpleQueue[tuple[Any, Any, Future[list[int]]]]()
        threading.Thread(target=self._decode, daemon=True).start()

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The choice that answers a request.

        Raises:
            ValueError: If it has a field that is not known, or asks for more than one text.
        """
        if unknown := sorted(asked.keys() - {*FIELDS}):
            raise ValueError(f"unknown fields {unknown}; known: {', '.join(FIELDS)}")
        if asked.get("n", 1) != 1:
            raise ValueError(f"n must be 1; got {asked['n']}")
        prompt = asked["prompt"]
        ids = (
            self._tokenizer.encode(prompt).input_ids
            if isinstance(prompt, str)
            else self._tensors.Tensor(np.array([prompt], dtype=np.int64))
        )
        config = self._config(asked)
        done = Future[list[int]]()
        self._waiting.put((ids, config, done))
        tokens = done.result()
        is_ended = len(tokens) < config.max_new_tokens or tokens[-1] in self._ends
        names: list[str] = (
            [f"token_id:{token}" for token in tokens]
            if asked.get("return_tokens_as_token_ids")
            else [self._tokenizer.decode([token]) for token in tokens]
        )
        logprobs = {"tokens": names, "token_logprobs": [None] * len(tokens), "top_logprobs": None}
        return {
            "index": 0,
            "text": self._tokenizer.decode(tokens),
            "finish_reason": "stop" if is_ended else "length",
            "logprobs": logprobs if asked.get("logprobs") is not None else None,
        }

    def _config(self, asked: dict[str, Any]) -> Any:  # noqa: ANN401 (the package's)
        config = self._host.GenerationConfig()
        config.max_new_tokens, config.apply_chat_template = asked.get("max_tokens", 16), False
        config.stop_token_ids = self._ends
        temperature, top_k = asked.get("temperature", 1.0), asked.get("top_k", -1)
        config.do_sample = temperature > 0
        if temperature > 0:
            self._num_requests += 1
            config.temperature = temperature
            config.top_p, config.top_k = asked.get("top_p", 1.0), top_k if top_k > 0 else 2**31
            config.rng_seed = asked.get("seed", _FIRST_SEED + self._num_requests)
        for name, value in self._speculation.items():
            setattr(config, name, value)
        return config

    def _decode(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            ids, configs, waiting = zip(*batch, strict=True)
            try:
                results = self._pipeline.generate(list(ids), list(configs))
            except Exception as error:  # noqa: BLE001 (whatever an engine raises is an answer)
                for done in waiting:
                    done.set_exception(error)
                continue
            for done, result in zip(waiting, results, strict=True):
                done.set_result(list(result.m_generation_ids[0]))


def handler(completions: Completions, name: str) -> type[BaseHTTPRequestHandler]:
    """Return the handler of a server's requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open

        def do_GET(self) -> None:
            self._answer(200, {"object": "list", "data": [{"id": name, "object": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                choice = completions.complete(asked)
            except (KeyError, TypeError, ValueError) as error:
                self._answer(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
            except Exception as error:  # noqa: BLE001 (whatever an engine raises is an answer)
                self._answer(500, {"error": {"message": f"{type(error).__name__}: {error}"}})
            else:
                self._answer(200, {"object": "text_completion", "model": name, "choices": [choice]})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Requests are not reported."""

    return Handler


def main() -> None:
    """Serve until interrupted."""
    parser = ArgumentParser(description="OpenVINO GenAI behind /v1/completions.")
    parser.add_argument("target", help="folder of the target's checkpoint")
    parser.add_argument("--draft", help="folder of the draft model's checkpoint")
    parser.add_argument("--lookup", action="store_true", help="look drafts up in the text")
    parser.add_argument("--num-assistant-tokens", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--max-ngram-size", type=int, default=2, help="longest match of a lookup")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", default="~/.cache/monge/peers", help="folder of exported models")
    asked = parser.parse_args()
    worker: Any = import_module("engine_openvino_genai")  # beside this program
    work = str(Path(asked.work).expanduser())
    speculation: dict[str, Any] = {}
    if asked.draft or asked.lookup:
        speculation["num_assistant_tokens"] = asked.num_assistant_tokens
    if asked.lookup:
        speculation["max_ngram_size"] = asked.max_ngram_size
    completions = Completions(
        worker.exported(asked.target, work),
        asked.draft and worker.exported(asked.draft, work),
        is_lookup=asked.lookup,
        options=worker.float32(asked.threads),
        speculation=speculation,
    )
    address = ("127.0.0.1", asked.port)
    server = ThreadingHTTPServer(address, handler(completions, Path(asked.target).name))
    print(f"listening at http://127.0.0.1:{asked.port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
