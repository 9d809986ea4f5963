"""Make a log: let the target write, then read its texts once and keep the laws."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from jaxtyping import Float64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from monge.core.errors import OptionError
from monge.core.law import every_token
from monge.core.model import SequenceModel
from monge.core.prompt import PromptProfile
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.engine.decoder import Decoder
from monge.engine.follow import logits_along
from monge.engine.opening import ending_size, profiled
from monge.replay.log import LawLog, LoggedText, Masses, ModelIdentity

_SAMPLE = 256  # numbers of every weight that go into a network's digest


def record_log(
    decoder: Decoder,
    prompts: Mapping[str, Sequence[str | Sequence[int]]],
    *,
    model: ModelIdentity,
    rules: SamplingRules = SamplingRules(temperature=0.0),  # noqa: B008 (frozen)
    max_new_tokens: int = 64,
    ignore_eos: bool = False,
    seed: int = 0,
    top: int | None = None,
    on_text: Callable[[], None] = lambda: None,
) -> LawLog:
    """Let the target write a text after every prompt, and keep its laws along them.

    Args:
        decoder: Writes the texts; as speculation is lossless, with any parts.
        prompts: Text or token ids, by tag.
        model: Which target it is.
        rules: Sampling rules of texts and laws.
        max_new_tokens: Longest text.
        ignore_eos: Whether texts go on after an end-of-text token.
        seed: Of the first text; the others get their own.
        top: Tokens to keep of every law; `None` keeps all of them.
        on_text: Called after every text.

    Raises:
        OptionError: If there are no prompts, or decoding fails.
    """
    texts: list[LoggedText] = []
    target = decoder.components.target
    for tag, group in prompts.items():
        for prompt in group:
            (result,) = decoder.generate(
                [prompt],
                max_new_tokens=max_new_tokens,
                seed=seed + len(texts),
                ignore_eos=ignore_eos,
                **asdict(rules),
            )
            (session,) = decoder.sessions([prompt], max_new_tokens=max_new_tokens, seed=0)
            if result.error is not None:
                raise OptionError(f"a text cannot be logged: {result.error}")
            probs, profile = _read(target, session.prompt, result.token_ids, rules)
            token_ids = _possible(probs, result.token_ids)
            masses = Masses(probs=probs[: len(token_ids)])
            texts.append(
                LoggedText(
                    tag=tag,
                    prompt_ids=profile.token_ids,
                    token_ids=token_ids,
                    max_new_tokens=max_new_tokens,
                    masses=masses if top is None else masses.compact(top, token_ids),
                    vocab_size=target.vocab_size,
                    profile=profile,
                )
            )
            on_text()
    if not texts:
        raise OptionError("a log needs at least one prompt")
    return LawLog(model=model, rules=rules, texts=tuple(texts), top=top)


def identity_of(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str
) -> ModelIdentity:
    """Return digests of a network's architecture and weights, and of its tokenizer's vocabulary."""
    return ModelIdentity(
        name=name,
        vocab_size=int(network.config.get_text_config().vocab_size),
        network=_digest(_network_parts(network)),
        tokenizer=_digest([json.dumps(sorted(tokenizer.get_vocab().items())).encode()]),
    )


def _read(
    target: SequenceModel, prompt: PromptProfile, token_ids: tuple[int, ...], rules: SamplingRules
) -> tuple[Float64[Tensor, "seq vocab"], PromptProfile]:
    """Return the law of every token of a text, read in one pass."""
    ids, ending = prompt.token_ids, ending_size(target, prompt)
    rows = list[Tensor]()
    for logits in logits_along(target, (*ids, *token_ids[:-1]), len(ids) - 1 - ending):
        start = 0 if rows else ending  # the first piece holds the ending whole
        if start:
            prompt = profiled(prompt, logits[:start])
        every = every_token(target.vocab_size, logits.device)
        rows += [law_from_logits(row, rules).at(every).cpu() for row in logits[start:]]
    return torch.stack(rows), prompt


def _possible(probs: Float64[Tensor, "seq vocab"], token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the text up to the first token without mass.

    Logits read in one pass differ in rounding from those it was written with, which can move the
    largest of a greedy law, or the last token that a truncated law keeps.
    """
    masses = probs[torch.arange(len(token_ids)), torch.tensor(token_ids)]
    impossible = (masses == 0.0).nonzero().flatten().tolist()
    cut = impossible[0] if impossible else len(token_ids)
    if cut == 0:
        raise OptionError(
            "a text cannot be logged: its first token has no mass in a second "
            "reading; use another dtype"
        )
    return token_ids[:cut]


def _network_parts(network: PreTrainedModel) -> list[bytes]:
    left_out = {"_name_or_path", "dtype", "transformers_version"}
    settings = network.config.to_dict().items()
    config = {key: value for key, value in settings if key not in left_out}
    parts = [json.dumps(config, sort_keys=True, default=str).encode()]
    for name, weight in sorted(network.named_parameters()):
        sample = weight.detach().flatten()[:_SAMPLE].to(torch.float32).cpu()
        parts.append(name.encode() + sample.numpy().tobytes())
    return parts


def _digest(parts: Sequence[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
