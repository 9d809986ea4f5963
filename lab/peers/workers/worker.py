"""An engine behind JSON lines.

`python worker.py ENGINE`, where `engine_ENGINE.py` beside this file holds its `Engine`.

Every line of standard input is an object with `op`; the answer is one line of standard output, with
`error` if it failed.

* `{"op": "open", "target": folder, "draft": folder, "work": folder, "threads": n, "method": name,
  "settings": {..}}` answers `{"version": text}`. An open engine is replaced.
* `{"op": "generate", "prompt_ids": [..], "max_new_tokens": n, "temperature": t, "seed": s}` answers
  `{"token_ids": [..], "seconds": s}`: new tokens, no end-of-text stop, the wall time of the call
  alone.
* `{"op": "score", "token_ids": [..]}` answers `{"nats": x}`: the negative log-probability of the tokens
  after the second.
* `{"op": "memory"}` answers `{"peak_bytes": n}`: the most memory that this process had at once.
* `{"op": "close"}` ends the program, as the end of the input does.
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(name: str) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # engines print what they like: it must not get between the answers
    engine: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        op = asked.pop("op")
        if op == "close":
            break
        try:
            if op == "open":
                engine = None  # its memory is given back before the next one takes some
                engine = _engine(name)(**asked)
                answer = {"version": engine.version}
            elif op == "score":
                answer = {"nats": engine.score(**asked)}
            elif op == "memory":
                answer = {"peak_bytes": _peak_bytes()}
            else:
                start = time.perf_counter()
                token_ids = engine.generate(**asked)
                answer = {
                    "seconds": time.perf_counter() - start,
                    "token_ids": [int(token) for token in token_ids],
                }
        except Exception as error:  # noqa: BLE001 (whatever an engine raises is an answer)
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


def _peak_bytes() -> int:
    # What `getrusage` says begins with the memory of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.split("VmHWM:")[1].split(maxsplit=1)[0])


def _engine(name: str) -> Any:  # noqa: ANN401 (found by name)
    path = Path(__file__).with_name(f"engine_{name}.py")
    spec = importlib.util.spec_from_file_location(f"engine_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Engine


if __name__ == "__main__":
    main(sys.argv[1])
