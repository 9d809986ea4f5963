"""Requests, and laws of their first tokens: by plain decoding, and by the real loop over every draw."""

from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import decode
from monge.engine.session import Request, Session
from monge.oracle.exact_law import exact_law


def plain_law(law_after, horizon):
    """The product of laws; `law_after` gives that of the next token after a completion."""
    laws = {(): 1.0}
    for _ in range(horizon):
        longer = {}
        for text, weight in laws.items():
            law = law_after(text).sparse()
            for token, prob in zip(law.token_ids.tolist(), law.probs.tolist(), strict=True):
                longer[(*text, token)] = weight * prob
        laws = longer
    return laws


def session(request_id, prompt, **options):
    """An open request for a prompt of token ids."""
    given = {"max_new_tokens": 9, "rules": SamplingRules(), "seed": request_id, **options}
    return Session(Request(prompt_ids=prompt, **given), request_id)


def loop_law(make_parts, horizon, prompt, *, make_processors=tuple, **options):
    """The law of the loop's texts after a prompt, of one request with these options."""
    given = {"max_new_tokens": horizon + 1, **options}

    def run(draws):
        one = session(0, prompt, draws=draws, processors=make_processors(), **given)
        for _ in decode([one], make_parts(), max_batch_size=1):
            if one.num_generated >= horizon:
                break
        return one.completion_ids[:horizon]

    return exact_law(run)
