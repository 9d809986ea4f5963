"""llama.cpp through its Python binding `llama-cpp-python`, for `worker.py`: GGUF files as they are.

Drafts are the binding's own: prompt lookup, or a smaller file's most probable tokens. It accepts a
drafted token if the target draws it, so its law is the target's.
"""

import re
from importlib import import_module
from typing import Any, Final

import numpy as np

_CONTEXT: Final = 2048


class Engine:
    """A file in memory.

    Its version names the instructions that the library was built with.
    """

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
        self._host: Any = import_module("llama_cpp")
        said = self._host.llama_print_system_info().decode()
        names = re.findall(r"(\w+) = 1\b", said)
        self.version = f"{self._host.__version__} ({' '.join(names) or 'no instructions named'})"
        self._path, self._threads = target, threads
        drafter = None
        if method == "lookup":
            speculative: Any = import_module("llama_cpp.llama_speculative")
            drafter = speculative.LlamaPromptLookupDecoding(**settings)
        elif method == "draft":
            drafter = _Greedy(self._opened(draft, logits_all=True), **settings)
        # The binding verifies drafts by the logits of all rows.
        self._model = self._opened(target, logits_all=drafter is not None, draft_model=drafter)

    def generate(
        self, *, prompt_ids: list[int], max_new_tokens: int, temperature: float, seed: int
    ) -> list[int]:
        """New tokens."""
        self._model.reset()  # else the next call would find the prompt read
        self._model.set_seed(seed)
        rules = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        stream = self._model.generate(prompt_ids, temp=temperature, **rules)
        return [token for token, _ in zip(stream, range(max_new_tokens), strict=False)]

    def score(self, *, token_ids: list[int]) -> float:
        """Negative log-probability of the tokens after the second, in nats."""
        model = self._opened(self._path, logits_all=True)
        model.eval(token_ids)
        logits = np.asarray(model.scores[1 : len(token_ids) - 1], dtype=np.float64)
        following = logits[np.arange(len(logits)), token_ids[2:]]
        largest = logits.max(axis=1)
        totals = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
        return float((totals - following).sum())

    def _opened(self, path: str, **options: Any) -> Any:  # noqa: ANN401 (the package's)
        threads = {"n_threads": self._threads, "n_threads_batch": self._threads}
        return self._host.Llama(path, n_ctx=_CONTEXT, verbose=False, **threads, **options)


class _Greedy:
    """The most probable tokens of another file, as the binding asks for drafts."""

    def __init__(self, model: Any, num_pred_tokens: int) -> None:  # noqa: ANN401
        self._model, self._count = model, num_pred_tokens

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:  # noqa: ANN401
        stream = self._model.generate(input_ids.tolist(), temp=0.0, repeat_penalty=1.0)
        drafted = [token for token, _ in zip(stream, range(self._count), strict=False)]
        return np.array(drafted, dtype=np.intc)
