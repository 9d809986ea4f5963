"""Facts about a prompt before the first round."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProfile:
    """A prompt, as a controller may look at it.

    Args:
        token_ids: Its tokens.
        text: Its text; `None` where there is no tokenizer.
        surprisal: Mean of -log p over its last tokens under the target, in nats; `None` if the
            target did not read the prompt.
        entropy: Mean entropy of the target's laws of these tokens, in nats; likewise.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    surprisal: float | None = None
    entropy: float | None = None
