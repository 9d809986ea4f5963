"""`python -m lab.peers`."""

import json
import os
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import torch

from lab.command import run
from lab.never_slower.__main__ import PROMPTS as PASSAGES
from lab.peers.compare import PeerSettings, compare_peers
from lab.peers.engines import PEERS, ROUNDED, gguf_peers, peer_named
from lab.peers.report import facts_table, peer_table
from monge.api import built_in
from monge.bench.arms import TokenIds
from monge.bench.provenance import busy_note
from monge.cli import options
from monge.cli.console import notes, output, quiet_host, reported, write_document
from monge.cli.options import check_out_folder
from monge.core.errors import OptionError
from monge.loading.networks import load_tokenizer, prepare
from monge.loading.sources import ModelSource
from monge.prompts import asked_prompts, encode, read_prompts
from monge.requests.chat_format import chat_format

OUT: Final = Path("out/peers")
QUICK: Final[dict[str, Any]] = {"max_new_tokens": 48, "repeats": 2}
QUICK_PROMPTS: Final = 1
PROMPTS: Final = 3
_BACKEND: Final = "compiled(weights='file')"

Peers = Annotated[
    list[str] | None,
    options.measuring("--peer", "An engine; may be repeated.", ", ".join(p.name for p in PEERS)),
]
Install = Annotated[
    bool,
    options.option(
        "--install", options.RUNNING, "Install missing engines, each in an environment of its own."
    ),
]
Rounded = Annotated[
    bool,
    options.option(
        "--rounded",
        options.MODELS,
        "Compare weights of 4 and 8 bits: this library with a head, llama.cpp, OpenVINO GenAI.",
    ),
]
Work = Annotated[
    Path | None,
    options.option(
        "--work",
        options.OUTPUT,
        "Folder of environments and converted models.",
        "~/.cache/monge/peers",
    ),
]


@reported
def main(
    *,
    peer: Peers = None,
    target: options.Target = None,
    draft: options.Draft = None,
    prompts: Path | None = options.measuring(
        None,
        "Text lines, or *.jsonl with `prompt`, `question`, `turns` or `messages`.",
        "the shipped prompts",
    ),
    rounded: Rounded = False,
    file: Path | None = options.option(
        None,
        options.MODELS,
        "Compare engines on this GGUF file, or `smollm2`: this library, and llama.cpp built for this machine.",
        None,
        "--gguf",
    ),
    is_chat: options.Chat = False,
    quick: bool = options.switch(
        "--quick", options.MEASURING, "Few prompts, short texts, batch 1: within a minute."
    ),
    max_new_tokens: int | None = options.measuring(None, "Length of every completion."),
    repeats: int | None = options.measuring(None, "Measured passes over the prompts."),
    temperature: list[float] | None = options.measuring(None, "0 is greedy; may be repeated."),
    per_task: int | None = options.measuring(
        None, "Prompts of each task; of a file all.", None, "--prompts-per-task"
    ),
    seed: int | None = options.measuring(None, "Seed of the sampled arms."),
    threads: options.Threads = None,
    install: Install = False,
    work: Work = None,
    out: Path = options.option(OUT, options.OUTPUT, "Folder for the JSON."),
    as_json: options.Json = False,
) -> None:
    """Compare engines: this library and transformers, OpenVINO GenAI, llama.cpp and vLLM, with the same models.

    Every engine runs in a process and an environment of its own, in float32 or with rounded weights,
    and looks for its best settings first. An engine that cannot be installed or fails is listed with the reason.
    With `--gguf`, memory, time to the first token and perplexity stand beside speed, and `--draft` is a head or a GGUF file.

    **Examples**

        python -m lab.peers --install --quick
        python -m lab.peers --rounded --chat --target FOLDER --draft HEAD --prompts examples/questions.txt
        python -m lab.peers --install --gguf model.Q4_K_M.gguf --chat
        python -m lab.peers --peer monge --peer llama_cpp --temperature 0 --json | tail -n 1
    """
    quiet_host()
    options.check_positive(threads=threads)
    check_out_folder(out)
    if file is not None:
        if target is not None or rounded:
            raise OptionError(
                "--gguf is the target, and has its own types: leave --target and --rounded out"
            )
        known, other = gguf_peers(draft or ""), draft or ""
        model = ModelSource.of(str(file))
        source, tokenizer = str(model.path), load_tokenizer(prepare(model, _BACKEND))
    else:
        known = ROUNDED if rounded else PEERS
        source, other = _folder(target, "target"), _folder(draft, "draft")
        tokenizer = load_tokenizer(source)
    chosen = [peer_named(name, known) for name in peer] if peer else list(known)
    shown = asked_prompts(prompts, per_task=per_task, default=QUICK_PROMPTS if quick else PROMPTS)
    chat = chat_format(tokenizer, is_built_in=target is None and file is None)
    given: dict[str, Any] = (QUICK if quick else {}) | options.given(
        max_new_tokens=max_new_tokens, repeats=repeats, seed=seed
    )
    if temperature:
        given["temperatures"] = tuple(temperature)
    settings = PeerSettings(
        target=source,
        draft=other,
        work=(work or _cache()).expanduser().resolve(),
        threads=threads or torch.get_num_threads(),
        is_quick=quick,
        installs=install,
        texts=_texts(tokenizer, 2 if quick else None) if file is not None else (),
        **given,
    )
    document = compare_peers(
        chosen,
        tuple(
            chat.encode([{"role": "user", "content": prompt.text}])
            if is_chat
            else encode(tokenizer, prompt.text)
            for prompt in shown
        ),
        settings,
        notify=notes().print,
    )
    _report(document, write_document(document, out, "peers.json"))
    if as_json:
        print(json.dumps(document))


def _report(document: dict[str, Any], file: Path) -> None:
    console = output(120)
    for temperature in document["settings"]["temperatures"]:
        cell = [arm for arm in document["arms"] if arm["temperature"] == temperature]
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        console.print(peer_table(cell, f"{mode}, batch 1, {document['num_prompts']} prompts"))
        if any(arm["facts"] for arm in cell):
            console.print(facts_table(cell))
            known = (f"{arm['peer']} {arm['version']}" for arm in cell if arm["version"])
            for version in dict.fromkeys(known):
                console.print(version, style="dim", markup=False, soft_wrap=True)
        for arm in cell:
            if arm["failure"] is not None:
                console.print(
                    f"{arm['arm']}: {arm['failure']}", style="dim", markup=False, soft_wrap=True
                )
        for name, value in document["headline"][f"{temperature:g}"].items():
            shown = (
                "not measured"
                if value is None
                else value
                if isinstance(value, str)
                else format(value, ".3f")
            )
            console.print(f"{name:<26}{shown}", markup=False)
        console.print()
    for left in document["not_sampled"]:
        console.print(
            f"{left['arm']} is not asked to sample: {left['reason']}",
            style="dim",
            markup=False,
            soft_wrap=True,
        )
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False)
    console.print(f"written: {file}", soft_wrap=True)


def _texts(tokenizer: Any, count: int | None) -> TokenIds:  # noqa: ANN401 (the host's)
    """Passages of books, of which perplexity is measured."""
    found = (one.text for one in read_prompts(PASSAGES) if one.task == "summary")
    return tuple(encode(tokenizer, text) for text in islice(found, count))


def _folder(given: str | None, which: str) -> str:
    """A checkpoint's folder: other engines cannot take anything else."""
    source = ModelSource.of(built_in(which) if given is None else given)
    folder = Path(prepare(source, "eager").place if source.is_gguf else source.path).resolve()
    if not (folder / "config.json").is_file():
        raise OptionError(
            f"--{which} {str(given)!r}: peers need the folder of a checkpoint, with "
            "config.json in it"
        )
    return str(folder)


def _cache() -> Path:
    return (
        Path(
            os.environ.get("MONGE_CACHE")
            or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "monge"
        )
        / "peers"
    )


if __name__ == "__main__":
    run(main)
