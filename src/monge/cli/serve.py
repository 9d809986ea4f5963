"""`monge serve`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from monge.cli import options
from monge.cli.console import notes, quiet_host, reported
from monge.cli.generate import say_memory, say_parts
from monge.cli.loading import follow, is_led, loaded
from monge.cli.options import set_threads
from monge.cli.serve_ray import check_without_ray, serve_with_ray
from monge.engine.decoder import Decoder
from monge.options import LoadOptions, ServeOptions, changed

if TYPE_CHECKING:
    from monge.audit.recorder import Recorder


@reported
@options.command
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="The target and its draft models, by place: as --target and --draft.",
            metavar="TARGET DRAFT",
        ),
    ] = None,
    *,
    load: LoadOptions,
    settings: ServeOptions,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does.

    Completions and chat, whole or as streams, `/v1/models`, `/health`, and `/metrics` for
    Prometheus. On SIGTERM no more requests are taken, and those that run are finished.
    docs/serving.md has recipes for clients.

    **Examples**

        monge serve
        monge serve --target smollm2 --backend compiled
        monge serve ./my-target ./my-draft --tree "chain(6)" --max-batch-size 16
        monge serve ./my-target --drafter ngram --controller goodput --port 8080
        monge serve --controller goodput --controller fixed
        monge serve --certificates
        MONGE_API_KEY=secret monge serve ./my-target --host 0.0.0.0
        torchrun --nproc-per-node 2 -m monge serve ./my-target ./my-draft --tensor-parallel
        monge serve ./my-target --ray --address auto --autoscale 1:8 --gpus-per-replica 1
    """
    quiet_host()
    import monge.serve  # noqa: F401 (it says which packages it lacks)

    if settings.use_ray:
        serve_with_ray(load, settings)
    else:
        check_without_ray(settings)
        _serve_here(load, settings)


def _serve_here(load: LoadOptions, options: ServeOptions) -> None:
    from monge.engine.chat_format import chat_format
    from monge.serve import run
    from monge.serve.app import create_app
    from monge.serve.settings import checked_options, hosts_to_accept, is_loopback

    is_open = not (options.api_keys or is_loopback(options.host))
    hosts = hosts_to_accept(options.host, options.api_keys, options.allowed_hosts)
    options = checked_options(replace(options, allowed_hosts=hosts), load.target)
    set_threads(options.threads)
    if options.tensor_parallel and is_led():
        follow(load)
        return
    with (
        run.listen(options.host, options.port) as listener,
        loaded(load, tensor_parallel=options.tensor_parallel) as decoder,
    ):
        chat = chat_format(decoder.tokenizer, load.chat_template, is_built_in=load.target is None)
        recorder = _recorder(decoder, load) if options.certificates else None
        app = create_app(decoder, options, chat, recorder=recorder)
        where = f"serving {options.served_model_name} at {run.url_of(listener)}/v1"
        _say(decoder, where, verbose=options.verbose, is_open=is_open)
        run.serve_until_signal(
            app,
            listener,
            drain_s=options.drain_s,
            lame_duck_s=options.lame_duck_s,
            access_log=options.access_log,
        )


def _recorder(decoder: Decoder, load: LoadOptions) -> "Recorder":
    """Return a recorder whose certificates name the models without their folders, as clients know them."""
    from monge.audit.recorder import Recorder, loading_of
    from monge.serve.settings import served_name

    drafts = None if load.draft is None else [served_name(one) for one in load.draft]
    target = served_name(load.target)
    return Recorder(decoder, target=target, loading=loading_of(drafts, changed(load)))


def _say(decoder: Decoder, where: str, *, verbose: bool, is_open: bool) -> None:
    """Say what runs and where; programs that start a server wait for the line that says where."""
    say_memory(decoder)
    if verbose:
        say_parts(decoder)
    notes().print(where, markup=False, soft_wrap=True)
    if (dtype := decoder.components.coarse_dtype) is not None:
        text = f"{dtype} depends on the other rows of a batch: a seed does not give its text again, and answers have seed null"
        notes().print(
            f"{text}; --dtype float32 makes texts repeatable", style="yellow", markup=False
        )
    if is_open:
        notes().print(
            "anyone who reaches this address may use it; --api-key asks for a key",
            style="yellow",
            markup=False,
        )
