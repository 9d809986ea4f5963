"""Options of commands: those of `monge.options`, generated, and those that only commands have."""

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final

import typer

from monge.cli.console import quiet_host, reported
from monge.config import read_config
from monge.core.errors import OptionError
from monge.core.setting_types import check_sampling
from monge.options import (
    LAW,
    MEASURING,
    MODELS,
    OUTPUT,
    RUNNING,
    LoadOptions,
    Option,
    SamplingOptions,
    ServeOptions,
    changed,
    check_least,
    described,
    flag_of,
    key_of,
    options_of,
)

NETWORK: Final = ("target", "dtype", "device")
NETWORKS: Final = (*NETWORK, "draft", "attention", "backend")
"""Options of `monge.load` of commands that run networks by themselves."""
_SKIPPED: Final = ("max_batch_size", "chat_template")
"""Keys of a file that a command with a single text, or without messages, leaves out."""
_POSITIVE: Final = Option(help="", panel="", kind=int, least=1)


def option(
    default: Any,  # noqa: ANN401 (of any type)
    panel: str | None,
    help: str,
    otherwise: object = None,
    *flags: str,
    **more: Any,
) -> Any:  # noqa: ANN401 (typer's own type is private)
    """Return an option of the command line; within `Annotated`, `default` is its first flag.

    `--help` shows `otherwise` in place of the default.
    """
    is_flag = isinstance(default, str) and default.startswith("-")
    if otherwise is None and not is_flag and not isinstance(default, bool):
        otherwise = default
    help = described(help, otherwise)
    return typer.Option(
        default, *flags, help=help, show_default=False, rich_help_panel=panel, **more
    )


def switch(flag: str, panel: str, help: str) -> Any:  # noqa: ANN401
    """Return an option without a value."""
    return option(False, panel, help, None, flag)


def panel(name: str) -> Callable[..., Any]:
    """Return `option` for a panel of `--help`."""
    return lambda default, *words, **more: option(default, name, *words, **more)


measuring: Final = panel(MEASURING)


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def entry(
    group: type, name: str, *, can_undo: bool = False, several: bool = False, default: object = None
) -> Any:  # noqa: ANN401
    """Return an option of the command line for a field of a dataclass of options.

    With `can_undo`, a truth value has a `--no-` form, which undoes that of a file.
    """
    settings = options_of(group)[name]
    first, *others = settings.flags or (flag_of(name, settings),)
    if can_undo and settings.kind is bool:
        first = f"{first}/--no-{first.removeprefix('--')}"
    help = settings.help
    if several and not settings.several:  # where it is usual, the help says it
        help = f"{help.removesuffix('.')}; may be repeated."
    otherwise = settings.otherwise if default is None else default
    return option(first, settings.panel, help, otherwise, *others, envvar=settings.envvar)


def _check_value(name: str, settings: Option, value: Any) -> None:  # noqa: ANN401
    """Refuse a number outside its bounds before anything is imported that takes seconds."""
    check_least(name, settings, value)
    if name in LAW:
        for number in value if isinstance(value, list | tuple) else [value]:
            check_sampling(**{} if number is None else {name: number})


def command(
    function: Callable[..., None] | None = None,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    one: Collection[str] = (),
    many: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    quick: object = None,
) -> Any:  # noqa: ANN401 (a decorator, with or without arguments)
    """Let a command take the options of its parameters that are annotated with a dataclass of options.

    Typer sees an option for each of their fields, and `--config` beside those of `monge.load`: a
    file of options, below what the command line gives. The command gets the dataclasses. Its
    expected failures are `reported`, and transformers is quiet.

    Args:
        function: The command.
        only: Fields of `LoadOptions` and `SamplingOptions` that become options; `None` for all.
        without: Fields that do not.
        one: Fields with several values, of which this command takes only one value.
        many: Fields with a single value, of which this command takes several values.
        defaults: Values of fields that are not given, where they differ from the usual defaults.
        quick: A dataclass of options whose values hold with `--quick` where none are given.
    """
    if function is None:
        settings = {"only": only, "without": without, "one": one, "many": many, "quick": quick}
        return functools.partial(command, **settings, defaults=defaults)
    parameters, usual = inspect.signature(function).parameters, dict(defaults or {})
    groups: dict[str, Any] = {
        name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)
    }
    takes_file = LoadOptions in groups.values() and only is None
    places: dict[str, tuple[str, Option]] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name not in groups:
            shown.append(parameter)
            continue
        group = groups[name]
        can_undo = takes_file and group is not SamplingOptions
        wanted = only if group in {LoadOptions, SamplingOptions} else None
        if takes_file and group is LoadOptions:
            shown.append(_keyword("config", _Config))
        for key, settings in options_of(group).items():
            if settings.panel and key not in without and (wanted is None or key in wanted):
                places[key] = name, settings
                several = key in many
                kind = str if isinstance(settings.kind, UnionType) else settings.kind
                kind = list[kind] if settings.several or several else kind
                written = entry(
                    group, key, can_undo=can_undo, several=several, default=usual.get(key)
                )
                shown.append(_keyword(key, Annotated[kind | None, written]))

    @functools.wraps(function)
    def run(*, config: Path | None = None, models: list[str] | None = None, **options: Any) -> None:
        values = given(**options)
        if models:
            _take_models(values, models)
        if config is not None:
            files = [group for group in groups.values() if group is ServeOptions]
            stated = read_config(config, *files)
            if options.get("is_chat") is False:
                stated.pop("chat_template", None)  # there are no messages to write
            values = _of_file(config, stated, places) | values
        is_quick = quick is not None and options["quick"]
        values = usual | (changed(quick) if is_quick else {}) | values
        rest = {
            name: options[name] for name in parameters if name in options and name not in places
        }
        fields: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for name, (place, settings) in places.items():
            if name in values:
                value = values[name]
                _check_value(name, settings, value)
                if name in one and len(value) > 1:
                    times = f"is given {len(value)} times ({', '.join(value)})"
                    raise OptionError(f"{flag_of(name, settings)} {times}; this command takes one")
                if settings.several or name in many:
                    value = value[0] if name in one else tuple(value)
                fields[place][name] = value
        quiet_host()
        function(**rest, **{name: group(**fields[name]) for name, group in groups.items()})

    run.__annotations__ = {}
    vars(run)["__signature__"] = inspect.Signature(shown)
    return reported(run)


def _keyword(name: str, annotation: object) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _take_models(told: dict[str, Any], models: Sequence[str]) -> None:
    """Name models that are given by place, but for those that are named too, which are refused."""
    target, *drafts = models
    for name, by_place in (("target", target), ("draft", drafts)):
        if by_place and name in told:
            raise OptionError(f"--{name} {told[name]!r} is given as {by_place!r} too; give it once")
        if by_place:
            told[name] = by_place


def _of_file(
    config: Path, found: Mapping[str, Any], places: Mapping[str, tuple[str, Option]]
) -> dict[str, Any]:
    """Return the options of a file by field, as the command line would give them."""
    fields = {key_of(name, settings): (name, settings) for name, (_, settings) in places.items()}
    options: dict[str, Any] = {}
    for key, value in found.items():
        if key in fields:
            name, settings = fields[key]
            options[name] = [value] if settings.several and not isinstance(value, list) else value
        elif key not in _SKIPPED:
            raise OptionError(
                f"configuration {str(config)!r}: this command has no option for {key}; leave it out"
            )
    return options


_Config = Annotated[
    Path | None,
    option(
        "--config",
        MODELS,
        "TOML file of options, as `monge tune --save` writes it; options given here win.",
    ),
]
Target = Annotated[str | None, entry(LoadOptions, "target")]
Draft = Annotated[str | None, entry(LoadOptions, "draft")]
Dtype = Annotated[str | None, entry(LoadOptions, "dtype")]
Device = Annotated[str | None, entry(LoadOptions, "device")]
Attention = Annotated[str | None, entry(LoadOptions, "attention")]
Backend = Annotated[str | None, entry(LoadOptions, "backend")]
DraftBackend = Annotated[str | None, entry(LoadOptions, "draft_backend")]
Threads = Annotated[int | None, entry(ServeOptions, "threads")]
Verbose = Annotated[
    bool, option("--verbose", OUTPUT, "Say what runs and where the time goes.", None, "-v")
]
Chat = Annotated[
    bool,
    option(
        "--chat", MODELS, "Take every prompt as a user's message, by the model's chat template."
    ),
]
System = Annotated[
    str | None, option("--system", MODELS, "The system message.", "the chat template's own, if any")
]
File = Annotated[
    Path | None,
    option(
        "--prompts",
        RUNNING,
        "Prompts: plain text lines, or *.jsonl with `prompt` or `messages`.",
        None,
        "--file",
    ),
]
Json = Annotated[bool, option("--json", OUTPUT, "Machine-readable output on stdout.")]
Markdown = Annotated[bool, option("--markdown", OUTPUT, "Print tables as Markdown.")]


def set_threads(threads: int | None) -> None:
    """Set the number of torch threads, if given."""
    import torch

    check_positive(threads=threads)
    if threads is not None:
        torch.set_num_threads(threads)


def check_positive(**numbers: int | None) -> None:
    """Refuse numbers below 1 of options that were given.

    Raises:
        OptionError: If a number is below 1.
    """
    for name, number in numbers.items():
        check_least(name, _POSITIVE, number)


def check_out_folder(folder: Path, flag: str = "--out") -> None:
    """Refuse a folder that cannot be made or written to, before any work; nothing is made yet.

    Raises:
        OptionError: If it, or the nearest folder above it that is there, is a file, or may not be
            written to.
    """
    path = folder.absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    reason = None
    if not nearest.is_dir():
        reason = f"{str(nearest)!r} is a file; name a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"no permission to write to {str(nearest)!r}"
    if reason is not None:
        raise OptionError(f"{flag} {str(folder)!r}: cannot write results: {reason}")


def check_out_file(file: Path | None, flag: str = "--out") -> None:
    """Refuse a file that cannot be written, before any work; nothing is made yet.

    Raises:
        OptionError: If it is a folder, or as `check_out_folder` for the folder that it is in.
    """
    if file is not None and file.is_dir():
        raise OptionError(f"{flag} {str(file)!r} is a folder; name a file in it")
    if file is not None:
        check_out_folder(file.parent, flag)
