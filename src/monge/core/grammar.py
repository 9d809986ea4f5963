"""Grammars: descriptions of the completions that a request may have."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from monge.core.errors import OptionError
from monge.core.setting_types import is_of
from monge.core.text import check_text

Kind = Literal["json_schema", "regex", "choice", "ebnf"]

_RULES: Final = frozenset({".lark", ".gbnf", ".ebnf"})
_FORMS: Final = (
    "`json`, a file (*.json with a schema; *.lark, *.gbnf or *.ebnf with rules), `regex:PATTERN` or "
    "`choice:ONE|OTHER`"
)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A set of texts, to which every completion belongs. The class methods make it.

    The text is drawn token by token from the target's law, restricted to the tokens with which a
    text of the grammar can go on, and renormalised. Where only a single text can follow, it comes
    in the tokens of the tokenizer. End-of-text tokens are allowed exactly where the grammar may
    end.

    Args:
        kind: The form of `text`.
        text: A JSON schema, a regular expression, a JSON list of texts, or rules.
        any_whitespace: JSON only. False writes values on one line with `", "` and `": "`; true
            leaves the whitespace between tokens of JSON to the model.
    """

    kind: Kind
    text: str
    any_whitespace: bool = False

    def __post_init__(self) -> None:
        check_text(self.text, "grammar")

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any] | type, *, any_whitespace: bool = False
    ) -> "Grammar":
        """Values of a JSON schema, with the properties in its order.

        Args:
            schema: A mapping, JSON text, or a model class of pydantic.
            any_whitespace: See `Grammar`.

        Raises:
            OptionError: If it is no JSON object.
        """
        if isinstance(schema, type):
            schema = getattr(schema, "model_json_schema", dict[str, Any])()
        try:
            value: Any = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"grammar: the JSON schema is not JSON: {error}") from error
        if not isinstance(value, Mapping):
            raise OptionError(
                f"grammar: a JSON schema must be an object; got {type(value).__name__}"
            )
        return cls("json_schema", text, any_whitespace)

    @classmethod
    def json_object(cls, *, any_whitespace: bool = False) -> "Grammar":
        """JSON objects of any content."""
        return cls.json_schema({"type": "object"}, any_whitespace=any_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Texts that a regular expression matches as a whole, without look-around and backreferences."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Exactly the listed texts.

        Raises:
            OptionError: If the list is empty, or an item is not a string.
        """
        listed = () if isinstance(texts, str) else tuple(texts)
        if not listed or not is_of(listed, tuple[str, ...]):
            raise OptionError(f"grammar: choice takes a list of texts, at least one; got {texts!r}")
        return cls("choice", json.dumps(listed, ensure_ascii=False))

    @classmethod
    def ebnf(cls, rules: str) -> "Grammar":
        """Texts of a context-free grammar, in the notation of Lark or in GBNF, that of llama.cpp."""
        return cls("ebnf", rules)

    @classmethod
    def parse(cls, text: str) -> "Grammar":
        """Read the text form that command lines take: see `_FORMS`.

        Raises:
            OptionError: If it is none of the forms, or a file cannot be read.
        """
        form, _, rest = text.partition(":")
        path = Path(text)
        if text == "json":
            return cls.json_object()
        if form == "regex":
            return cls.regex(rest)
        if form == "choice":
            return cls.choice(rest.split("|"))
        if path.suffix != ".json" and path.suffix not in _RULES:
            raise OptionError(f"grammar {text!r}: expected {_FORMS}")
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"grammar {text!r}: the file cannot be read: {error}") from error
        return cls.json_schema(content) if path.suffix == ".json" else cls.ebnf(content)


def grammar_of(given: object) -> Grammar | None:
    """Return a grammar from its text form, or as it is.

    Raises:
        OptionError: If it is neither.
    """
    if given is None or isinstance(given, Grammar):
        return given
    if not isinstance(given, str):
        raise OptionError(f"grammar: expected a Grammar or text; got {type(given).__name__}")
    return Grammar.parse(given)
