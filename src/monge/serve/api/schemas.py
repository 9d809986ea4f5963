"""Bodies of requests: every field is honoured, or neutral, or refused with its reason.

Unknown fields are refused.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag, create_model

from monge.core.errors import OptionError
from monge.core.grammar import Grammar
from monge.options import SamplingOptions, described, options_of
from monge.serve.api.conversations import (
    FunctionCallItem,
    FunctionChoice,
    Items,
    Message,
    Messages,
    NamedFunction,
    ResponseTools,
    ToolChoice,
    Tools,
    conversation,
)
from monge.serve.api.fields import (
    Biases,
    DraftSize,
    Ignored,
    Label,
    Labels,
    NumChoices,
    NumNewTokens,
    NumTokens,
    NumTop,
    Prompts,
    Settings,
    StopIds,
    Stops,
    Strict,
    TokenIds,
    TopK,
    Words,
    ignorable,
    neutral,
    optional,
)

DEFAULTS: Final = {"temperature": 1.0}
"""Sampling options whose default is not the library's."""
Asked = Literal["default", "options", "off"]
"""Forms of the `speculation` field: absent or true, an object, or false."""


class SpeculationOptions(Strict):
    """Options of drafting for a request, within those of the server."""

    max_depth: DraftSize | None = optional("Most tokens along a path; 0 is none.")
    max_nodes: DraftSize | None = optional("Most tokens on all paths; 0 is none.")
    adaptive: bool | None = optional("false drafts the largest tree within the limits.")
    controller: Label | None = optional("The controller; absent, the first.")


class StreamOptions(Strict):
    """Parts of a stream beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = neutral("chunks are not padded", False)


Speculation = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[SpeculationOptions, Tag("options")],
    # Or errors would speak of both.
    Discriminator(
        lambda value: "options" if isinstance(value, dict | SpeculationOptions) else "switch"
    ),
]


class SchemaFacts(Strict):
    """A schema as a client names it."""

    name: Ignored = None
    description: str | None = optional("Changes nothing.")
    strict: bool | None = optional("The schema is always followed.")


class JsonSchemaFormat(SchemaFacts):
    """The schema of a response format."""

    # `schema` is a method of pydantic's models, so the field has another name here.
    value: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Strict):
    """Forms of a completion, as vLLM names them; a request sends exactly one of the first five."""

    value: dict[str, Any] | str | None = Field(default=None, alias="json", description="A schema.")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = optional("Rules in the notation of Lark, or in GBNF.")
    json_object: bool | None = None
    disable_any_whitespace: bool | None = optional(
        "false leaves the whitespace of JSON to the model; absent means true."
    )


_SAME: Final[dict[str, Any]] = {
    name: (
        option.kind | None,
        optional(described(option.help, DEFAULTS.get(name, option.otherwise)), **option.bounds),
    )
    for name, option in options_of(SamplingOptions).items()
    if option.bounds is not None
}
"""Fields that are written as the library takes them."""


class SamplingRequest(create_model("_Sampling", __base__=Strict, **_SAME)):
    """Fields of both endpoints."""

    model: str | None = optional("The served model; it may be left out.")
    top_k: TopK | None = optional("-1 and 0 keep all tokens.")
    logit_bias: Biases | None = None
    stop: Stops = Field(default=(), description="Texts before which the completion ends.")
    stop_token_ids: StopIds | None = optional("End the completion, as the model's own do.")
    min_tokens: NumTokens | None = optional("Fewest tokens before one that ends the completion.")
    allowed_token_ids: TokenIds | None = optional("The only tokens that may come.")
    bad_words: Words | None = optional("Words whose tokens may not come in their order.")
    n: NumChoices | None = None
    speculation: Speculation | None = optional("Whether to draft, or how; absent means true.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = optional("Return the tokens of prompt and completion.")
    prompt_logprobs: NumTop | None = optional(
        "Log-probabilities of the prompt: so many of the most probable tokens at each place."
    )
    trace: bool | None = optional("Return the trees of the rounds, as the page shows them.")
    cache_salt: Annotated[Label, Field(min_length=1)] | None = optional(
        "Beginnings of prompts are shared with requests of the same salt only."
    )
    cache_prompt: bool | None = optional("false keeps the request out of the prefix cache.")
    user: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    metadata: Labels | None = optional("Labels; they change nothing.")
    store: Any = ignorable("answers are not kept", False)
    service_tier: Any = ignorable("there is one tier", "auto", "default")
    prompt_cache_retention: Any = ignorable("the least recently used texts are dropped first")
    best_of: Any = neutral("completions are not ranked against each other", 1)
    use_beam_search: Any = neutral("beams are not searched", False)
    length_penalty: Any = neutral("beams are not searched", 1.0)
    include_stop_str_in_output: Any = neutral("text ends before a stop string", False)
    skip_special_tokens: Any = neutral("special tokens are not written out", True)
    spaces_between_special_tokens: Any = neutral("special tokens are not written out", True)
    truncate_prompt_tokens: Any = neutral("prompts are not cut")
    response_format: ResponseFormat | None = optional("Absent means text.")
    structured_outputs: StructuredOutputs | None = None
    priority: Any = neutral("requests are served in their order", 0)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the completion.

        Raises:
            OptionError: If the request sends two grammars, a malformed grammar, or
                `structured_outputs` without a grammar.
        """
        form, outputs = self.response_format, self.structured_outputs
        if form is not None and form.type != "text":
            if outputs is not None:
                raise OptionError("structured_outputs: response_format is sent too; send one")
            if form.type == "json_object":
                return Grammar.json_object()
            if form.json_schema is None:
                raise OptionError("response_format: json_schema is missing")
            return Grammar.json_schema(form.json_schema.value)
        if outputs is None:
            return None
        spaces = outputs.disable_any_whitespace is False
        makers: dict[str, Callable[[Any], Grammar]] = {
            "value": lambda schema: Grammar.json_schema(schema, any_whitespace=spaces),
            "regex": Grammar.regex,
            "choice": Grammar.choice,
            "grammar": Grammar.ebnf,
            "json_object": lambda _: Grammar.json_object(any_whitespace=spaces),
        }
        sent = {name: getattr(outputs, name) for name in makers}
        given = [name for name, value in sent.items() if value is not None and value is not False]
        if len(given) != 1:
            known = "json, regex, choice, grammar, json_object"
            raise OptionError(f"structured_outputs: send one of {known}; got {len(given)}")
        return makers[given[0]](sent[given[0]])

    @property
    def salt(self) -> str | None:
        """Salt for the prefix cache; `None` keeps the request out of it."""
        return None if self.cache_prompt is False else self.cache_salt or ""

    @property
    def asked(self) -> Asked:
        """Form of the `speculation` field."""
        if isinstance(self.speculation, SpeculationOptions):
            return "options"
        return "off" if self.speculation is False else "default"


class CompletionRequest(SamplingRequest):
    """Body of `POST /v1/completions`."""

    prompt: Prompts = Field(description="Text or token ids, or a list of either.")
    max_tokens: NumTokens | None = optional("Absent means 16.")
    logprobs: NumTop | None = None
    drawn_logprobs: bool | None = optional(
        "With the scores, how each token was drawn: its scores under both distributions, and the mass that "
        "truncation kept."
    )
    echo: bool | None = optional("Put the prompt before the completion.")
    suffix: Any = neutral("text cannot be written before a given end", "")
    add_special_tokens: bool | None = optional("Those around a text; absent means true.")


class ChatSettings(Strict):
    """Fields about the template of a conversation."""

    chat_template_kwargs: Settings | None = optional("Variables of the chat template.")
    continue_final_message: bool | None = optional(
        "Whether the last message is the start of the answer."
    )
    add_generation_prompt: bool | None = optional("The opposite of continue_final_message.")


class ChatRequest(SamplingRequest, ChatSettings):
    """Body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: NumNewTokens | None = None
    max_tokens: NumNewTokens | None = optional("The older name.")
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    drawn_logprobs: bool | None = optional(
        "With the scores, how each token was drawn: its scores under both distributions, and the mass that "
        "truncation kept."
    )
    tools: Tools | None = optional("Functions that may be called.")
    tool_choice: ToolChoice | None = optional("Absent means auto.")
    parallel_tool_calls: bool | None = optional("false allows one call in an answer.")
    functions: Any = neutral("send tools", [])
    function_call: Any = neutral("send tool_choice", "none", "auto")
    modalities: Any = neutral("answers are text", ["text"])
    audio: Any = neutral("answers are text")
    prediction: Any = ignorable("drafts come from the server's drafter")
    reasoning_effort: Label | None = optional("A variable of the template, if it reads it.")
    verbosity: Any = ignorable("there is no switch for verbosity")
    web_search_options: Any = neutral("nothing is searched")
    chat_template: Any = neutral("templates come from the server, never from a request")
    add_special_tokens: Any = neutral("the template writes them", False)


class TextFormat(SchemaFacts):
    """The form of the text of a response: a `ResponseFormat` without its inner object."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    value: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def of_chat(self) -> ResponseFormat:
        """The same form of a chat answer."""
        schema = None if self.value is None else JsonSchemaFormat.model_construct(value=self.value)
        return ResponseFormat.model_construct(type=self.type, json_schema=schema)


class TextOptions(Strict):
    """Options of the text of a response."""

    format: TextFormat | None = None
    verbosity: Any = ignorable("there is no switch for verbosity", "medium")


class ReasoningOptions(Strict):
    """Options of the reasoning before a response."""

    effort: Label | None = optional("A variable of the template, if it reads it.")
    summary: Any = ignorable("there are no summaries")
    generate_summary: Any = ignorable("there are no summaries")


class ResponsesRequest(SamplingRequest, ChatSettings):
    """Body of `POST /v1/responses`."""

    input: Annotated[
        Annotated[str, Tag("string")] | Annotated[Items, Tag("items")],
        Discriminator(lambda value: "string" if isinstance(value, str) else "items"),
    ]
    instructions: str | None = optional("A system message before the input.")
    max_output_tokens: NumNewTokens | None = None
    stream_options: Any = neutral("chunks are not padded", {}, {"include_obfuscation": False})
    n: Any = neutral("a response has one text", 1)
    trace: Any = neutral("a response carries no trees", False)
    return_token_ids: Any = neutral("a response carries no token ids", False)
    prompt_logprobs: Any = neutral("a response carries no scores")
    top_logprobs: Any = neutral("a response carries no scores", 0)
    include: Any = ignorable("nothing is added", [])
    background: Any = neutral("answers are not kept", False)
    previous_response_id: Any = neutral("answers are not kept; send the conversation")
    conversation: Any = neutral("conversations are not kept; send the messages")
    prompt: Any = neutral("there are no stored prompts")
    text: TextOptions | None = None
    response_format: Any = neutral("the form of a response is its `text.format`")
    reasoning: ReasoningOptions | None = None
    truncation: Any = ignorable("conversations are not cut", "disabled")
    tools: ResponseTools | None = optional("Functions that may be called.")
    tool_choice: FunctionChoice | None = optional("Absent means auto.")
    parallel_tool_calls: bool | None = optional("false allows one call in a response.")
    max_tool_calls: NumTokens | None = optional("Of built-in tools, of which there are none.")

    @property
    def as_chat(self) -> ChatRequest:
        """The chat request for the same text."""
        turns = (
            [Message(role="user", content=self.input)]
            if isinstance(self.input, str)
            else conversation(self.input)
        )
        if self.instructions is not None:
            turns = [Message(role="system", content=self.instructions), *turns]
        shared = self.model_fields_set & ChatRequest.model_fields.keys() - {"stream_options"}
        fields = {name: getattr(self, name) for name in shared}
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.of_chat
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.tools is not None:
            fields["tools"] = [tool.of_chat for tool in self.tools]
        if isinstance(self.tool_choice, NamedFunction):
            fields["tool_choice"] = self.tool_choice.of_chat
        return ChatRequest.model_construct(messages=turns, **fields)


class TokenizeRequest(ChatSettings):
    """Body of `POST /tokenize`."""

    model: str | None = optional("The served model; it may be left out.")
    messages: Messages | None = optional("A conversation.")
    tools: Tools | None = optional("Functions that may be called.")
    prompt: str | None = optional("Or a text.")
    add_special_tokens: bool | None = optional("Those around a text; absent means true.")
    return_token_strs: bool | None = optional("Return tokens as the tokenizer spells them, too.")


class DetokenizeRequest(Strict):
    """Body of `POST /detokenize`."""

    model: str | None = optional("The served model; it may be left out.")
    tokens: TokenIds


TextRequest = CompletionRequest | ChatRequest | ResponsesRequest
"""Bodies of requests for a text."""
TokensRequest = TokenizeRequest | DetokenizeRequest
"""Bodies of requests about tokens alone."""
FIELD_NAMES: Final = frozenset(
    name
    for model in (
        *(CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, FunctionCallItem),
        *Strict.__subclasses__(),
    )
    for name in model.model_fields
)
"""Names of all fields at any depth. Other words in the place of an error name branches of a union."""
