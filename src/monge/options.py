"""The only list of options: a field per option, with its help and its default.

`monge.load`, configuration files, the command line, the drop-in and Ray read it here. It imports no
torch, so that a mistyped option is refused at once.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import isfinite
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar, cast

from monge.core.errors import OptionError, unknown_name
from monge.core.grammar import Grammar, grammar_of
from monge.core.setting_types import is_of

MODELS: Final = "Models"
SPECULATION: Final = "Speculation"
SAMPLING: Final = "Sampling"
RUNNING: Final = "Running"
OUTPUT: Final = "Output"
SERVER: Final = "Server"
LIMITS: Final = "Limits"
MEASURING: Final = "Measuring"
RAY: Final = "Ray"
"""Panels of `--help`."""

Group = TypeVar("Group")
_Owner = TypeVar("_Owner")
_Input = TypeVar("_Input")
_Output = TypeVar("_Output")
_Fields = ParamSpec("_Fields")
_ENTRY: Final = "option"
_OTHER_NAMES: Final = {
    "do_sample": "temperature",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
"""Names that other libraries give to fields of `SamplingOptions`."""


@dataclass(frozen=True, slots=True)
class Option:
    """The text form of an option: on a command line, in a file, in the arguments of Ray.

    Args:
        help: One sentence, with the unit of a number.
        panel: Panel of `--help`; `None` for an option that is no flag.
        kind: Type of a value; `None` for an option that only Python calls take.
        otherwise: What holds where the option is absent, if the default does not say it.
        flags: Names on the command line; none for the field's own.
        several: The option may be repeated.
        least: Smallest value of a number.
        envvar: Variable of the environment that holds it.
        bounds: Bounds in a request over HTTP, by pydantic's names, which may be narrower than those
            of the library; `None` if it has no such field, or writes it in another way.
    """

    help: str
    panel: str | None
    kind: Any = str
    otherwise: object = None
    flags: tuple[str, ...] = ()
    several: bool = False
    least: float | int | None = None
    envvar: str | None = None
    bounds: Mapping[str, float | int] | None = None


def option(
    default: Any,  # noqa: ANN401 (of any type)
    panel: str | None,
    help: str,
    otherwise: object = None,
    **more: Any,
) -> Any:  # noqa: ANN401 (as `dataclasses.field`)
    """Return a field; the kind is that of the default, or text. A tuple takes several values."""
    several = isinstance(default, tuple)
    sample = next(iter(default), None) if several else default
    kind = str if sample is None else type(sample)
    said = default if otherwise is None and default not in {None, ()} else otherwise
    settings = {"kind": kind, "several": several, **more}
    entry = Option(help, panel, otherwise=None if isinstance(said, bool) else said, **settings)
    return field(default=default, metadata={_ENTRY: entry})


LAW: Final = ("temperature", "top_k", "top_p", "min_p")
"""Sampling options that are arguments of `SamplingRules`."""
_FINITE: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")
PENALTIES: Final = (*_FINITE, "logit_bias", "min_tokens")
"""Sampling options that are arguments of `Penalties`."""
_argument: Final = partial(option, panel=None, kind=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Arguments of `monge.load`, which documents them and says which objects it takes for text."""

    target: Any = option(None, MODELS, "Target model: a folder or a name.", "the built-in target")
    draft: Any = option(
        None,
        MODELS,
        "Draft model with the target's tokenizer, or the folder of a head for the target. "
        "Several draft models, given one by one, draft together.",
        "the built-in draft, or none beside a --target",
        several=True,
    )
    cross_tokenizer: bool = option(
        False,
        MODELS,
        "Take a draft model with another tokenizer: it drafts the tokens that both have.",
    )
    batch_invariant: bool = option(
        False, MODELS, "Refuse a target whose logits depend on how many tokens a forward reads."
    )
    chat_template: str | None = option(
        None, MODELS, "`instruction`, or a file with a Jinja template.", "the tokenizer's own"
    )
    dtype: Any = option("auto", MODELS, "Type of the weights: float32, bfloat16, ...")
    device: Any = option(None, MODELS, "Where the models run: cpu, cuda, ...", "cpu")
    attention: str | None = option(
        None, MODELS, "eager, sdpa or flex_attention.", "the model's own"
    )
    backend: Any = option(
        None,
        MODELS,
        "The backend: eager or compiled.",
        "that of a GGUF file's own types on a CPU, else eager",
    )
    draft_backend: Any = option(
        None, MODELS, "The backend of the draft model: eager or compiled.", "as the target"
    )
    trust_remote_code: bool = False
    tokenizer: Any = option(
        None, MODELS, "The tokenizer: a folder or a name.", "the one beside the target"
    )
    drafter: Any = option(
        None,
        SPECULATION,
        "What proposes tokens, e.g. `ngram(max_ngram=4)`, `model(top_k=64)`.",
        "ngram or model as the controller chooses, model where it does not, ngram without a draft "
        "model",
    )
    tree: Any = option(
        None,
        SPECULATION,
        "Shape of the proposals, e.g. `chain(6)`, `fixed_width((4, 2))`.",
        "a chain, or what the verifier needs",
    )
    verifier: Any = option(
        None, SPECULATION, "Acceptance rule; see `monge list`.", "the one for the candidates"
    )
    controller: Any = option(
        None,
        SPECULATION,
        "How much to draft, e.g. `fixed(max_depth=2)`; `monge serve` takes several: a request may "
        "name one, the others get the first.",
        "goodput, and fixed for sampled requests with a seed",
        several=True,
    )
    max_batch_size: int = option(
        8,
        RUNNING,
        "Requests decoded together.",
        flags=("--max-batch-size", "--batch-size"),
        least=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthAndTruncation:
    """Options that requests and benchmarks have."""

    max_new_tokens: int = option(128, SAMPLING, "Most tokens to generate.")
    top_k: int | None = option(None, SAMPLING, "Keep the k most probable tokens.", "all", kind=int)
    top_p: float | int = option(
        1.0, SAMPLING, "Keep the most probable tokens up to this mass.", bounds={"gt": 0, "le": 1}
    )
    min_p: float | int = option(
        0.0,
        SAMPLING,
        "Keep tokens of at least this share of the largest mass.",
        bounds={"ge": 0, "le": 1},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(LengthAndTruncation):
    """Options of a request: arguments of `Decoder.generate`, and fields of batch rows and of HTTP.

    Raises:
        OptionError: If a value is wrong for every model.
    """

    temperature: float | int = option(0.0, SAMPLING, "0 decodes greedily.", bounds={"ge": 0})
    min_tokens: int = option(0, SAMPLING, "Fewest tokens before one that ends the text.")
    repetition_penalty: float | int = option(
        1.0,
        SAMPLING,
        "Above 1, tokens that the text holds become less probable.",
        bounds={"ge": 0.01, "le": 10},
    )
    presence_penalty: float | int = option(
        0.0,
        SAMPLING,
        "Taken off the logits of tokens that the completion holds.",
        bounds={"ge": -2, "le": 2},
    )
    frequency_penalty: float | int = option(
        0.0,
        SAMPLING,
        "Taken off the logits of such tokens once for every occurrence.",
        bounds={"ge": -2, "le": 2},
    )
    seed: int | None = option(
        None,
        SAMPLING,
        "Makes the text reproducible.",
        "drawn, and reported where it gives the text again",
        kind=int,
        bounds={"ge": -(1 << 63), "le": (1 << 64) - 1},
    )
    stop: str | Sequence[str] = option(
        (), SAMPLING, "End before this string; may be repeated.", "none"
    )
    stop_token_ids: Sequence[int] = option(
        (),
        SAMPLING,
        "End after this token; may be repeated.",
        "none",
        kind=int,
        flags=("--stop-token-id",),
    )
    ignore_eos: bool = option(False, SAMPLING, "Go on after an end-of-text token.", bounds={})
    grammar: Grammar | str | None = option(
        None,
        SAMPLING,
        "What the completion must be: `json`, a file (*.json with a schema, *.lark or *.gbnf with "
        "rules), `regex:[a-z]+` or `choice:yes|no`.",
        "any text",
    )
    logit_bias: Mapping[int, float | int] | None = option(
        None, None, "What is added to logits, by token id.", "nothing", kind=dict
    )
    allowed_token_ids: Sequence[int] | None = option(
        None, None, "The only tokens that may come.", "all", kind=int, several=True
    )
    bad_words: str | Sequence[str] = option(
        (),
        None,
        "Words whose tokens, with and without a space before them, may not come in their order; "
        "other tokens that spell them may.",
        "none",
    )
    n: int = _argument(1, help="Texts per prompt.")
    row: int = _argument(
        0, help="Number of the first text's stream among those of the seed; the next have the next."
    )
    logprobs: int | None = _argument(
        None,
        help="Scores of tokens and of so many top ones, under the distribution that they come from; also of "
        "the tokens under the model at temperature 1, and the mass that truncation kept.",
    )
    logits_processors: Sequence[Callable[..., Any]] = _argument(
        (),
        help="Logits processors, `(token_ids [1, seq], scores [1, vocab]) -> scores`, before the "
        "penalties; each text decodes with copies of them, which may keep state.",
    )
    stopping_criteria: Callable[[tuple[int, ...]], bool] | None = _argument(
        None, help="Called with all token ids after every token; true stops."
    )
    controller: str | None = _argument(None, help="Which of the controllers of `load` plans.")
    return_trees: bool = _argument(False, help="Whether records have the trees of their rounds.")

    def __post_init__(self) -> None:
        wholes = ("n", self.n, 1), ("min_tokens", self.min_tokens, 0)
        for name, value, least in (*wholes, ("logprobs", self.logprobs or 0, 0)):
            if not is_of(value, int) or value < least:
                expected = f"a whole number of at least {least}"
                raise OptionError(f"{name} must be {expected}; got {value!r}")
        for name in _FINITE:
            value = getattr(self, name)
            if not is_of(value, float) or not isfinite(value):
                raise OptionError(f"{name} must be a finite number; got {value!r}")
        # The request itself checks the larger one.
        if is_of(self.max_new_tokens, int) and self.min_tokens > max(self.max_new_tokens, 0):
            most = f"max_new_tokens={self.max_new_tokens}"
            raise OptionError(f"min_tokens={self.min_tokens} is more than {most}")
        for name in ("stop", "bad_words"):
            value: Any = getattr(self, name)
            texts = (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(text, str) for text in texts):
                raise OptionError(f"{name!r} must be a text or a list of texts")
            object.__setattr__(self, name, texts)
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise OptionError(f"{name}: a grammar says where the text ends; leave one of them out")
        # Read here, before anything is loaded.
        object.__setattr__(self, "grammar", grammar_of(self.grammar))

    def only(self, *names: str) -> dict[str, Any]:
        """Return the named options, as keyword arguments."""
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `monge serve`, beside those of `monge.load`."""

    host: str = option("127.0.0.1", SERVER, "Address to listen on; 0.0.0.0 is open to the network.")
    port: int = option(8000, SERVER, "Port; 0 takes a free one.")
    api_keys: tuple[str, ...] = option(
        (),
        SERVER,
        "Ask for this key; may be repeated.",
        "none",
        flags=("--api-key",),
        envvar="MONGE_API_KEY",
    )
    api_key_file: str | None = option(
        None,
        SERVER,
        "File of further keys, one `name:key` a line, read again when it changes; logs and metrics "
        "have the names.",
        "none",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        SERVER,
        "Another name or address, without a port, that requests may be sent to; may be repeated.",
        "on loopback without a key: its own names; else any",
        flags=("--allowed-host",),
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        SERVER,
        "Site whose pages may send requests, as `https://my.site`, or `*`; may be repeated.",
        "none",
        flags=("--allowed-origin",),
    )
    root_path: str = option(
        "", SERVER, "Path that a proxy takes off before it passes requests on.", "none"
    )
    ssl_keyfile: str | None = option(None, SERVER, "Private key for TLS.", "no TLS")
    ssl_certfile: str | None = option(None, SERVER, "Certificate chain for TLS.", "no TLS")
    served_model_name: str | None = option(
        None, SERVER, "Name that clients ask for.", "the target's own"
    )
    logprobs_of: Literal["raw", "processed"] = option(
        "raw",
        SERVER,
        "raw: the target's own distribution; processed: the distribution that tokens are drawn from.",
        kind=Literal["raw", "processed"],
    )
    generation_config: Literal["auto", "none"] = option(
        "auto",
        SERVER,
        "auto: requests without sampling settings get those of the checkpoint; none: temperature 1.",
        kind=Literal["auto", "none"],
    )
    override_generation_config: str | None = option(
        None,
        SERVER,
        'Sampling settings over those of the checkpoint, as JSON: `{"temperature": 0.7}`.',
        "none",
    )
    strict: bool = option(
        False,
        SERVER,
        "Refuse fields of requests that are otherwise ignored, and named in a header.",
    )
    shutdown_delay_s: int = option(
        5,
        SERVER,
        "Seconds after SIGTERM in which requests are still taken, while /ready gives a 503.",
        flags=("--shutdown-delay",),
        least=0,
    )
    graceful_timeout_s: int = option(
        30,
        SERVER,
        "Seconds that running requests get after the shutdown delay.",
        flags=("--graceful-timeout",),
        least=0,
    )
    access_log: bool = option(False, SERVER, "Log every request, with its times and tokens.")
    log_format: Literal["text", "json"] = option(
        "text", SERVER, "Lines of the log: text or json.", kind=Literal["text", "json"]
    )
    max_waiting: int = option(256, LIMITS, "Requests that may wait; one more gets a 429.", least=1)
    kv_budget_tokens: int | None = option(
        None,
        LIMITS,
        "Tokens of room in the caches.",
        "batch size times context",
        kind=int,
        flags=("--kv-budget",),
    )
    prefix_cache_bytes: int = option(
        1 << 30,
        LIMITS,
        "Memory for texts whose beginnings later prompts share; 0 reads every prompt whole.",
        least=0,
    )
    prefill_chunk: int = option(512, LIMITS, "Prompt tokens that are read between two rounds.")
    cut_max_tokens: bool = option(
        False, LIMITS, "Cut a `max_tokens` beyond the context, instead of a 400."
    )
    request_timeout_s: float | int = option(
        600,
        LIMITS,
        "Seconds after which a request is ended; 0 for never.",
        kind=float,
        flags=("--request-timeout",),
    )
    round_timeout_s: float | int = option(
        120,
        LIMITS,
        "Seconds after which a round is taken to hang and /health gives a 503; 0 for never.",
        kind=float,
        flags=("--round-timeout",),
        least=0,
    )
    threads: int | None = option(
        None, RUNNING, "Threads of torch.", "torch's own", kind=int, least=1
    )
    use_ray: bool = option(False, RAY, "Serve from replicas, on many machines.", flags=("--ray",))
    replicas: int | str = option(
        1,
        RAY,
        "Replicas, or the fewest and the most of them with the load, as `1-4`.",
        kind=int | str,
    )
    address: str | None = option(
        None, RAY, "Address of a running cluster, or `auto`.", "a cluster of this machine alone"
    )
    cpus_per_replica: float | int = option(1, RAY, "Cores of a replica.", kind=float, least=0)
    gpus_per_replica: float | int = option(0, RAY, "GPUs of a replica.", kind=float, least=0)

    @property
    def has_keys(self) -> bool:
        """True if requests need a key."""
        return bool(self.api_keys) or self.api_key_file is not None


def options_of(*groups: type) -> dict[str, Option]:
    """Return the options of the groups that can be written as text or JSON, by field."""
    return {
        field.name: field.metadata[_ENTRY]
        for group in groups
        for field in fields(group)
        if _ENTRY in field.metadata and field.metadata[_ENTRY].kind is not None
    }


PARTS: Final = tuple(
    name for name, entry in options_of(LoadOptions).items() if entry.panel == SPECULATION
)
"""Options that choose the parts of a decoder, whose networks are loaded."""


FORMER_KEYS: Final = {
    "lame_duck": "shutdown_delay",
    "drain": "graceful_timeout",
    "exact_numerics": "batch_invariant",
    "processors": "logits_processors",
    "stop_check": "stopping_criteria",
    "keeps_trees": "return_trees",
}
"""Names of options in Python and in files, and with dashes on the command line, that this release takes
beside the present names."""
HERE_ONLY: Final = (
    *("access_log", "log_format", "shutdown_delay_s"),
    *("root_path", "ssl_keyfile", "ssl_certfile"),
)
"""Options of a server that Ray does not take: it has its own proxy and logs."""


def flag_of(name: str, option: Option) -> str:
    """Return the first name of an option on the command line."""
    return option.flags[0] if option.flags else f"--{name.replace('_', '-')}"


def key_of(name: str, option: Option) -> str:
    """Return the name of an option in a file."""
    return flag_of(name, option).removeprefix("--").replace("-", "_")


def types_of(option: Option) -> tuple[type, ...]:
    """Return the types of an option's value in TOML or JSON."""
    kinds: dict[Any, tuple[type, ...]] = {float: (int, float), int: (int,), bool: (bool,)}
    kinds |= {dict: (dict,), int | str: (int, str)}
    types = kinds.get(option.kind, (str,))
    if not option.several:
        return types
    return (list,) if option.kind is int else (*types, list)


def described(help: str, otherwise: object) -> str:
    """Return the help of an option with what holds where it is absent."""
    if isinstance(otherwise, tuple):
        parts = cast(tuple[Any, ...], otherwise)
        otherwise = ", ".join(part if isinstance(part, str) else f"{part:g}" for part in parts)
    return help if otherwise is None else f"{help} Default: {otherwise}."


def changed(options: object) -> dict[str, Any]:
    """Return the fields that are not their defaults, as keyword arguments."""
    defaults = {field.name: field.default for field in fields(options)}  # pyright: ignore[reportArgumentType]
    values = {name: getattr(options, name) for name in defaults}
    return {
        name: value
        for name, value in values.items()
        if value is not defaults[name] and value != defaults[name]
    }


def by_present_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments by the present names of options; former names are taken with a warning.

    Raises:
        OptionError: If an option is given by both names.
    """
    for name in given.keys() & FORMER_KEYS.keys():
        present = FORMER_KEYS[name]
        if present in given:
            raise OptionError(f"{present} is given twice, also as {name}; leave {name} out")
        text = f"{name} is {present} now; the next release takes no other name"
        warnings.warn(text, FutureWarning, stacklevel=4)
    return {FORMER_KEYS.get(name, name): value for name, value in given.items()}


def checked(
    group: type[Group], given: Mapping[str, Any], known: Sequence[str], **defaults: Any
) -> Group:
    """Return options from keyword arguments, with other defaults than the usual defaults.

    Raises:
        OptionError: If a name is unknown.
    """
    given = by_present_names(given)
    for name in given:
        if name not in known:
            raise unknown_name("option", name, known)
    return group(**{**defaults, **given})


def sampling_options(given: Mapping[str, Any]) -> SamplingOptions:
    """Return sampling options from keyword arguments.

    Raises:
        OptionError: If a name is unknown, or a value is wrong for every model.
    """
    for name in given:
        if name in _OTHER_NAMES:
            raise OptionError(f"unknown option {name!r}; did you mean {_OTHER_NAMES[name]!r}?")
    return checked(SamplingOptions, given, [field.name for field in fields(SamplingOptions)])


def takes(
    group: Callable[_Fields, object],
) -> Callable[
    [Callable[Concatenate[_Owner, _Input, ...], _Output]],
    Callable[Concatenate[_Owner, _Input, _Fields], _Output],
]:
    """Let a method with `**options` show the fields of a group, to type checkers and in its help."""

    def shown(method: Any) -> Any:  # noqa: ANN401 (the types are above)
        signature, of_group = inspect.signature(method), inspect.signature(group)
        *first, _ = signature.parameters.values()
        method.__signature__ = signature.replace(parameters=[*first, *of_group.parameters.values()])
        entries = [(field.name, field.metadata[_ENTRY]) for field in fields(cast(Any, group))]
        lines = [f"    {name}: {described(entry.help, entry.otherwise)}" for name, entry in entries]
        method.__doc__ = "\n".join((inspect.getdoc(method) or "", "", "Options:", *lines))
        return method

    return shown


def takes_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function with `**keywords` show `PARTS` among its parameters, to editors and to hosts."""
    signature, known = inspect.signature(function), inspect.signature(LoadOptions).parameters
    *first, keywords = signature.parameters.values()
    parts = [known[name] for name in PARTS]
    vars(function)["__signature__"] = signature.replace(parameters=[*first, *parts, keywords])
    return function


def check_least(name: str, option: Option, value: object) -> None:
    """Refuse a number that is too small.

    Raises:
        OptionError: If it is.
    """
    least = option.least
    if least is not None and isinstance(value, int | float) and value < least:
        raise OptionError(f"{flag_of(name, option)} must be at least {least:g}; got {value}")
