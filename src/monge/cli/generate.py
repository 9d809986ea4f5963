"""`monge generate`."""

from pathlib import Path
from typing import Annotated

import typer

from monge.cli import options
from monge.options import OUTPUT, LoadOptions, SamplingOptions


@options.command(one=("controller",))
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; without it, --prompts or standard input."),
    ] = None,
    *,
    file: options.File = None,
    is_chat: options.Chat = False,
    system: options.System = None,
    load: LoadOptions,
    sampling: SamplingOptions,
    trace: Path | None = options.option(
        None, OUTPUT, "Write windows and accepted tokens round by round, as JSON.", "nothing"
    ),
    html: Path | None = options.option(
        None, OUTPUT, "Write a page that shows every token and every verified tree.", "nothing"
    ),
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Continue a prompt, or many at once.

    On a terminal the text appears as it is decoded, with a line of figures at the end; into a pipe
    goes the text alone. Ctrl-C keeps what there is.

    **Examples**

        monge generate "The history of mathematics"
        monge generate "Question: What is 7 times 8?" --temperature 0.8 --seed 1 --stop "Question:"
        monge generate --prompts prompts.jsonl --batch-size 8 --json > completions.jsonl
        monge generate --chat "Why is the sky blue?" --target smollm2
        cat letter.txt | monge generate --drafter ngram --max-new-tokens 40
        monge generate "Once" --controller goodput --trace rounds.json
        monge generate "Once" --temperature 1 --html run.html
        monge generate "Once" --target ./my-target --draft ./my-draft --tree "chain(6)" --verifier speculative_sampling
    """
    options.check_out_file(trace, "--trace")
    options.check_out_file(html, "--html")
    # The help and a wrong option need no torch, whose import takes seconds.
    from monge.cli.generation import run

    run(
        prompt,
        file,
        load,
        sampling,
        is_chat=is_chat,
        system=system,
        trace=trace,
        html=html,
        as_json=as_json,
        verbose=verbose,
    )
