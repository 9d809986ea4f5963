"""Options that commands share.

No default is written here: what is not given is not passed, and the library's own holds.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import torch
import typer

from monge.api import load
from monge.config import read_config
from monge.core.errors import OptionError
from monge.defaults import ADAPTIVE, STEADY
from monge.engine.decoder import Decoder

MODELS: Final = "Models"
SPECULATION: Final = "Speculation"
SAMPLING: Final = "Sampling"
RUNNING: Final = "Running"
OUTPUT: Final = "Output"
MEASURING: Final = "Measuring"


def default_of(function: Callable[..., Any], name: str) -> str:
    """A default of the library, for `--help`."""
    return str(inspect.signature(function).parameters[name].default)


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def option(*names: str, help: str, panel: str, default: object = None) -> Any:  # noqa: ANN401 (typer's own type is private)
    """An option that is only passed on when it is given; `default` says what holds otherwise."""
    said = help if default is None else f"{help} Default: {default}."
    return typer.Option(*names, help=said, show_default=False, rich_help_panel=panel)


def measuring(name: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    """An option of a measurement."""
    return option(name, help=help, panel=MEASURING, default=default)


def numbers(name: str, help: str, values: Sequence[int]) -> Any:  # noqa: ANN401
    """An option of a measurement that may be repeated, with the numbers that hold otherwise."""
    return measuring(name, f"{help}; may be repeated.", each(values))


def each(values: Sequence[int | float]) -> str:
    """Numbers, for `--help`."""
    return ", ".join(f"{value:g}" for value in values)


def configured(command: Callable[..., None], *, takes_own: bool = False) -> Callable[..., None]:
    """A command whose option `--config` fills the options that are not given.

    Args:
        command: The command.
        takes_own: Whether the file may have its own options, beside those of `monge.load`.
    """
    parameters = inspect.signature(command).parameters
    own = _own_keys(parameters) if takes_own else {}

    @functools.wraps(command)
    def run(*args: Any, config: Path | None = None, **given: Any) -> None:
        by_place = given.get("models") or ()  # the target, then its drafts
        for key, value in ({} if config is None else read_config(config, own)).items():
            if (key == "target" and by_place) or (key == "draft" and len(by_place) > 1):
                continue
            name = next((one for one in _PARAMETERS.get(key, (key,)) if one in parameters), None)
            if key == "chat_template" and (name is None or given.get("is_chat") is False):
                continue  # this command writes no messages
            if name is None:
                if key == "max_batch_size":
                    continue  # this command has one conversation
                raise OptionError(
                    f"configuration {str(config)!r}: this command has no option for {key}; "
                    "leave it out"
                )
            if given.get(name) in (None, False):
                takes_list = "list[" in str(parameters[name].annotation)
                given[name] = _in_form(config, key, value, takes_list=takes_list)
        command(*args, **given)

    return run


def _own_keys(parameters: Mapping[str, inspect.Parameter]) -> dict[str, tuple[type, ...]]:
    """Return the options of a command with the types that their values have in a file."""
    found: dict[str, tuple[type, ...]] = {}
    for name, parameter in parameters.items():
        kind = get_args(parameter.annotation)[0]
        kind = (get_args(kind) or (kind,))[0]  # without None
        if name not in {"config", "models"}:
            found[name] = _TYPES.get(kind, (str, list) if get_origin(kind) is list else (str,))
    return found


_TYPES: Final[Mapping[Any, tuple[type, ...]]] = {int: (int,), float: (float, int), bool: (bool,)}
_PARAMETERS: Final = {"max_batch_size": ("batch_size", "max_batch_size")}
"""Names of the parameters of commands, where they are not those of `monge.load`."""


def _in_form(config: Path | None, key: str, value: Any, *, takes_list: bool) -> Any:  # noqa: ANN401
    """A value as the option of the command line would give it."""
    if takes_list:
        return value if isinstance(value, list) else [value]
    if not isinstance(value, list):
        return value
    if len(value) > 1:
        raise OptionError(
            f"configuration {str(config)!r}: this command takes one {key}; got {len(value)}"
        )
    return value[0]


Config = Annotated[
    Path | None,
    option(
        "--config",
        help="TOML file of options, as `monge tune --save` writes it; options given here win.",
        panel=MODELS,
    ),
]
Target = Annotated[
    str | None,
    option(
        "--target",
        help="Target model: a folder or a name.",
        panel=MODELS,
        default="the built-in target",
    ),
]
Draft = Annotated[
    str | None,
    option(
        "--draft",
        help="Draft model with the target's tokenizer, or the folder of a head for the target.",
        panel=MODELS,
        default="the built-in draft, or none beside a --target",
    ),
]
Drafts = Annotated[
    list[str] | None,
    option(
        "--draft",
        help="Draft model with the target's tokenizer, or the folder of a head for the target. "
        "Several draft models, given one "
        "by one, draft together.",
        panel=MODELS,
        default="the built-in draft, or none beside a --target",
    ),
]
CrossTokenizer = Annotated[
    bool,
    option(
        "--cross-tokenizer",
        help="Take a draft model with another tokenizer: it drafts the tokens that both have.",
        panel=MODELS,
    ),
]
ExactNumerics = Annotated[
    bool,
    option(
        "--exact-numerics",
        help="Refuse a target whose logits depend on how many tokens a forward reads.",
        panel=MODELS,
    ),
]
ChatTemplate = Annotated[
    str | None,
    option(
        "--chat-template",
        help="`instruction`, or a file with a Jinja template.",
        panel=MODELS,
        default="the tokenizer's own",
    ),
]
Chat = Annotated[
    bool,
    option(
        "--chat",
        help="Take every prompt as a user's message, by the model's chat template.",
        panel=MODELS,
    ),
]
System = Annotated[
    str | None,
    option(
        "--system",
        help="The system message.",
        panel=MODELS,
        default="the chat template's own, if any",
    ),
]
Dtype = Annotated[
    str | None,
    option(
        "--dtype",
        help="Type of the weights: float32, bfloat16, ...",
        panel=MODELS,
        default=default_of(load, "dtype"),
    ),
]
Device = Annotated[
    str | None,
    option("--device", help="Where the models run: cpu, cuda, ...", panel=MODELS, default="cpu"),
]
Attention = Annotated[
    str | None,
    option(
        "--attention",
        help="eager, sdpa or flex_attention.",
        panel=MODELS,
        default="the model's own",
    ),
]
Backend = Annotated[
    str | None,
    option(
        "--backend",
        help="The backend: eager or compiled.",
        panel=MODELS,
        default=default_of(load, "backend"),
    ),
]
DraftBackend = Annotated[
    str | None,
    option(
        "--draft-backend",
        help="The backend of the draft model: eager or compiled.",
        panel=MODELS,
        default="as the target",
    ),
]
TensorParallel = Annotated[
    bool,
    option(
        "--tensor-parallel",
        help="Spread the target over the processes of this `torchrun`.",
        panel=MODELS,
    ),
]

Drafter = Annotated[
    str | None,
    option(
        "--drafter",
        help="What proposes tokens, e.g. `ngram(max_ngram=4)`.",
        panel=SPECULATION,
        default="ngram or model as the controller chooses, model where it does not, ngram without "
        "a draft model",
    ),
]
Tree = Annotated[
    str | None,
    option(
        "--tree",
        help="Shape of the proposals, e.g. `chain(6)`, `fixed_width((4, 2))`.",
        panel=SPECULATION,
        default="a chain, or what the verifier needs",
    ),
]
Verifier = Annotated[
    str | None,
    option(
        "--verifier",
        help="Acceptance rule; see `monge list`.",
        panel=SPECULATION,
        default="the one for the candidates",
    ),
]
CONTROLLERS: Final = f"{ADAPTIVE}, and {STEADY} for sampled requests with a seed"
_CONTROLLER: Final = option(
    "--controller",
    help="How much to draft, e.g. `fixed(max_depth=2)`.",
    panel=SPECULATION,
    default=CONTROLLERS,
)
Controller = Annotated[str | None, _CONTROLLER]
Controllers = Annotated[list[str] | None, _CONTROLLER]
"""All that were written: of an option that takes one, the command line drops the others without a word."""
DraftTemperature = Annotated[
    float | None,
    option(
        "--draft-temperature",
        help="Draft at this temperature.",
        panel=SPECULATION,
        default="the request's own",
    ),
]
DraftTopK = Annotated[
    int | None,
    option(
        "--draft-top-k",
        help="Draft from the k most probable tokens of the draft model.",
        panel=SPECULATION,
        default="all",
    ),
]


def _request(name: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    """An option of `Decoder.requests`, with the library's default."""
    shown = default_of(Decoder.requests, name) if default is None else default
    return option(f"--{name.replace('_', '-')}", help=help, panel=SAMPLING, default=shown)


MaxNewTokens = Annotated[int | None, _request("max_new_tokens", "Most tokens to generate.")]
Temperature = Annotated[float | None, _request("temperature", "0 decodes greedily.")]
TopK = Annotated[int | None, _request("top_k", "Keep the k most probable tokens.", "all")]
TopP = Annotated[float | None, _request("top_p", "Keep the most probable tokens up to this mass.")]
MinP = Annotated[
    float | None, _request("min_p", "Keep tokens of at least this share of the largest mass.")
]
Seed = Annotated[
    int | None, _request("seed", "Makes the text reproducible.", "drawn, and reported")
]
Stop = Annotated[
    list[str] | None, _request("stop", "End before this string; may be repeated.", "none")
]
StopTokenIds = Annotated[
    list[int] | None,
    option(
        "--stop-token-id",
        help="End after this token; may be repeated.",
        panel=SAMPLING,
        default="none",
    ),
]
MinTokens = Annotated[
    int | None, _request("min_tokens", "Fewest tokens before one that ends the text.")
]
RepetitionPenalty = Annotated[
    float | None,
    _request("repetition_penalty", "Above 1, tokens that the text holds become less probable."),
]
PresencePenalty = Annotated[
    float | None,
    _request("presence_penalty", "Taken off the logits of tokens that the completion holds."),
]
FrequencyPenalty = Annotated[
    float | None,
    _request("frequency_penalty", "Taken off them once for every occurrence."),
]
IgnoreEos = Annotated[
    bool, option("--ignore-eos", help="Go on after an end-of-text token.", panel=SAMPLING)
]
BatchSize = Annotated[
    int | None,
    option(
        "--batch-size",
        help="Prompts decoded together.",
        panel=RUNNING,
        default=default_of(load, "max_batch_size"),
    ),
]
Threads = Annotated[
    int | None, option("--threads", help="Threads of torch.", panel=RUNNING, default="torch's own")
]


def set_threads(threads: int | None) -> None:
    """Give torch so many threads, if it is said how many."""
    check_positive(threads=threads)
    if threads is not None:
        torch.set_num_threads(threads)


def check_positive(**numbers: int | None) -> None:
    """Refuse numbers below 1 of options that were given.

    Raises:
        OptionError: If there is one.
    """
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be at least 1; got {number}")


File = Annotated[
    Path | None,
    option(
        "--prompts",
        "--file",
        help="Prompts: plain text lines, or *.jsonl with `prompt` or `messages`.",
        panel=RUNNING,
    ),
]
Trace = Annotated[
    Path | None,
    option(
        "--trace",
        help="Write windows and accepted tokens round by round, as JSON.",
        panel=OUTPUT,
        default="nothing",
    ),
]
Certificate = Annotated[
    Path | None,
    option(
        "--certificate",
        help="Write a record of every round, which `monge certify` replays.",
        panel=OUTPUT,
        default="nothing",
    ),
]
Json = Annotated[bool, option("--json", help="Machine-readable output on stdout.", panel=OUTPUT)]
Markdown = Annotated[bool, option("--markdown", help="Print tables as Markdown.", panel=OUTPUT)]
Verbose = Annotated[
    bool, option("--verbose", "-v", help="Say what runs and where the time goes.", panel=OUTPUT)
]
