"""`monge chat`."""

from typing import Annotated, Literal

from monge.cli import options
from monge.options import SAMPLING, LoadOptions, SamplingOptions


@options.command(
    without=("max_batch_size", "stop", "stop_token_ids", "ignore_eos", "grammar"),
    one=("controller",),
    # None: not given, so that the checkpoint's value holds, though 0 and 1 can be asked for.
    defaults={"max_new_tokens": 512, "temperature": None, "top_p": None, "min_p": None},
)
def chat(
    *,
    load: LoadOptions,
    system: options.System = None,
    sampling: SamplingOptions,
    generation_config: Annotated[
        Literal["auto", "none"],
        options.option(
            "--generation-config",
            SAMPLING,
            "auto: the checkpoint's sampling settings; none: greedy.",
            "auto",
        ),
    ] = "auto",
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model, turn by turn.

    Answers appear as they are decoded. Earlier turns stay in the target's cache, so only the new
    message is read. Without `--target`, the model is SmolLM2-135M-Instruct where its package is
    installed, and the built-in target otherwise. When the context is full, the oldest turns are
    left out, and a line says so. `/help` lists the commands, such as `/file` and `/save`.

    **Examples**

        monge chat
        monge chat --target ./model.gguf --system "You are a poet." --temperature 0.7 --top-p 0.9
        echo "What is the capital of France?" | monge chat --target smollm2
    """
    # The help and a wrong option need no torch, whose import takes seconds.
    from monge.cli.talk import talk

    talk(load, sampling, system, reads_defaults=generation_config == "auto", verbose=verbose)
