"""Laws of the first tokens of a text: by plain decoding, and by the real loop over every draw."""

from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import decode
from monge.engine.session import Request, Session
from monge.testing.oracle import exact_law


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


def loop_law(make_parts, horizon, *, make_processors=tuple, **options):
    """The law of the loop's texts, of one request with these options."""
    given = {"max_new_tokens": horizon + 1, "rules": SamplingRules(), "seed": 0, **options}

    def run(draws):
        session = Session(Request(**given, processors=make_processors(), draws=draws), 0)
        for _ in decode([session], make_parts(), max_batch_size=1):
            if session.num_generated >= horizon:
                break
        return session.completion_ids[:horizon]

    return exact_law(run)
