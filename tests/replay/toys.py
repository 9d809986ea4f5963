"""Toy runs: the joint law of a text and of everything that happened on the way, by the real loop and by replay."""

from itertools import product

import torch

from monge.api import make_components
from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import decode
from monge.engine.session import Request, Session
from monge.replay.log import LawLog, LoggedText, Masses, ModelIdentity
from monge.replay.simulate import replay_text
from monge.testing.oracle import exact_law
from monge.testing.tabular import RandomTable, TabularModel

PROMPT = (0, 1)


def models(vocab, style="positive"):
    return TabularModel(RandomTable(vocab, 1, style), vocab), TabularModel(
        RandomTable(vocab, 2, style), vocab
    )


def toy_parts(vocab, style="positive", **options):
    """Components of the toy pair; the draft model only where the drafter has one."""
    target, draft = models(vocab, style)
    return make_components(target, draft if "drafter" not in options else None, **options)


def logged(target, token_ids, *, top=None, prompt=PROMPT, tag="toy"):
    """A log of one text."""
    rows = [target.table((*prompt, *token_ids[:place])) for place in range(len(token_ids))]
    masses = Masses(probs=torch.tensor([list(row) for row in rows], dtype=torch.float64))
    if top is not None:
        masses = masses.compact(top, tuple(token_ids))
    text = LoggedText(
        tag=tag,
        prompt_ids=prompt,
        token_ids=tuple(token_ids),
        max_new_tokens=len(token_ids),
        masses=masses,
        vocab_size=target.vocab_size,
    )
    model = ModelIdentity(name="toy", vocab_size=target.vocab_size)
    return LawLog(model=model, rules=SamplingRules(), texts=(text,), top=top)


def story(records):
    """What is compared of a round: all that does not depend on a clock."""
    return tuple(
        (r.num_accepted, r.num_nodes, r.depth, r.examined, r.next_kind, r.token_ids)
        for r in records
    )


def real_stories(vocab, horizon, style="positive", **options):
    """Joint law of the text and its rounds, by the real loop."""

    def run(draws):
        components = toy_parts(vocab, style, **options)
        request = Request(
            prompt_ids=PROMPT, max_new_tokens=horizon, rules=SamplingRules(), seed=0, draws=draws
        )
        session = Session(request, 0)
        for _ in decode([session], components, max_batch_size=1):
            pass
        return session.completion_ids, story(session.records)

    return exact_law(run)


def replayed_stories(vocab, horizon, style="positive", *, top=None, **options):
    """The same, by replay of every text that the target can write, weighted with the target's own law."""
    law = {}
    target, _ = models(vocab, style)
    for token_ids in product(range(vocab), repeat=horizon):
        weight = 1.0
        for place, token in enumerate(token_ids):
            weight *= target.table((*PROMPT, *token_ids[:place]))[token]
        if weight == 0.0:
            continue
        log = logged(target, token_ids, top=top)

        def run(draws, log=log):
            components = toy_parts(vocab, style, **options)
            return story(replay_text(components, log, log.texts[0], draws))

        for found, prob in exact_law(run).items():
            law[token_ids, found] = weight * prob
    return law
