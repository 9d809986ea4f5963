"""Verdicts on vLLM's drafts, over played tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from monge.backends.cpu.law_masses import load_law_masses
from monge.laws import lazy_laws
from monge.laws.law import DenseLaw
from monge.oracle.exact_law import ExactRows, exact_law, law_error
from monge.plugins.vllm import verify
from monge.plugins.vllm.grammar import mend
from monge.plugins.vllm.settings import settings_of
from monge.plugins.vllm.verify import (
    PLACEHOLDER,
    RULES,
    DraftedBatch,
    _law,
    draw_draft,
    expand_batch_to_tokens,
    rejection_sample,
)
from monge.verify.functional import probs_from_logits
from tests.engine import pretend
from tests.engine.laws import plain_law

VOCAB, DEPTH = 4, 2
TABLES = 1.5 * torch.randn(2, 1 + VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
"""Logits of the target and of a draft, after nothing and after each first token."""
LAWLESS = "drawn, but their laws are missing"


def metadata(count, temperature=1.0, *, top_k=None, top_p=None, seeds=()):
    """vLLM's `SamplingMetadata`, as far as it is read."""
    heat = torch.as_tensor(temperature, dtype=torch.float32).expand(count)
    return SimpleNamespace(
        temperature=heat,
        top_k=None if top_k is None else torch.full((count,), top_k, dtype=torch.int32),
        top_p=None if top_p is None else torch.full((count,), top_p),
        all_greedy=bool((heat == 0).all()),
        all_random=bool((heat > 0).all()),
        generators={row: torch.Generator().manual_seed(seed) for row, seed in dict(seeds).items()},
    )


def batch_of(lengths, token_ids, logits, probs, rules, bonus=None):
    """What vLLM passes on: rows of all requests, one after another."""
    is_drafted = torch.arange(token_ids.shape[1]) < torch.tensor(lengths)[:, None]
    return DraftedBatch(
        draft_token_ids=token_ids[is_drafted].int(),
        num_draft_tokens=lengths,
        max_spec_len=max(lengths),
        cu_num_draft_tokens=torch.tensor(lengths).cumsum(0).int(),
        draft_probs=None if probs is None else probs[is_drafted],
        target_logits=logits[is_drafted],
        bonus_token_ids=torch.zeros(len(lengths), 1).long() if bonus is None else bonus,
        sampling_metadata=rules,
    )


def drawn(logits):
    return torch.distributions.Categorical(logits=logits).sample()


def texts_of(rule, origin, *, count, rules=None, allowed=None):
    """The first two tokens of many requests: one round of two drafts, then draws from p."""
    torch.manual_seed(0)
    target, draft = TABLES.clone()
    if allowed is not None:
        target[:, [token for token in range(VOCAB) if token not in allowed]] = -torch.inf
    rules = rules or metadata(count)
    tokens, laws = [], []
    after = torch.zeros(count, dtype=torch.int64)
    for _ in range(DEPTH):
        if origin == "greedy":
            token, law = draft[after].argmax(-1), None
        else:
            token, law = draw_draft(draft[after], rules)
        after = 1 + token
        tokens.append(token)
        laws.append(law)
    token_ids = torch.stack(tokens, 1)
    probs = torch.stack(laws, 1) if origin == "drawn" else None
    logits = torch.stack([target[0].expand(count, -1), target[1 + token_ids[:, 0]]], 1)
    lengths = [count % (DEPTH + 1) for count in range(count)]
    ends = torch.tensor(lengths)
    # The token after a whole chain.
    before = token_ids.gather(1, (ends - 1).clamp_min(0)[:, None])[:, 0]
    bonus = drawn(target[torch.where(ends == 0, 0, 1 + before)])[:, None]
    batch = batch_of(lengths, token_ids, logits, probs, rules, bonus)
    output = rejection_sample(rule, batch).long()
    second = torch.where(output[:, 1] < 0, drawn(target[1 + output[:, 0]]), output[:, 1])
    return torch.stack([output[:, 0], second], 1), target


def p_value(texts, target):
    first, second = target[0].double().softmax(-1), target[1:].double().softmax(-1)
    law = (first[:, None] * second).flatten().numpy()
    seen = np.bincount((texts[:, 0] * VOCAB + texts[:, 1]).numpy(), minlength=VOCAB**2)
    assert not seen[law == 0].any()
    return stats.chisquare(seen[law > 0], law[law > 0] * len(texts)).pvalue


@pytest.mark.parametrize("origin", ["drawn", "greedy", LAWLESS])
@pytest.mark.parametrize("allowed", [None, (0, 2, 3)], ids=["free", "grammar"])
@pytest.mark.parametrize("rule", RULES)
def test_texts_have_the_targets_law(rule, allowed, origin):
    texts, target = texts_of(rule, origin, count=30_000, allowed=allowed)
    assert p_value(texts, target) > 1e-3


class Manager:
    """vLLM's manager of grammars, of one that allows increasing tokens."""

    def __init__(self):
        self.shown = {}

    def validate_tokens(self, request, spec_tokens):
        count = 0
        while count < len(spec_tokens) and spec_tokens[count] > [request, *spec_tokens][count]:
            count += 1
        return spec_tokens[:count]

    def grammar_bitmask(
        self, requests, structured_output_request_ids, scheduled_spec_decode_tokens
    ):
        self.shown = scheduled_spec_decode_tokens
        return structured_output_request_ids


ALLOWED = ((0, 2), (1, 2), (0, 1, 2))
"""Tokens of a grammar at each place, of three."""
CUT = metadata(1, 0.7, top_k=2)


class Places(Manager):
    """vLLM's manager of grammars, of one that allows `ALLOWED`."""

    def validate_tokens(self, request, spec_tokens):
        allowed = zip(spec_tokens, ALLOWED, strict=False)
        return spec_tokens[: [*(token in place for token, place in allowed), False].index(False)]


def grammar_error(rule, monkeypatch, *, drops=False, is_async=False):
    """Error of the law of two tokens of a structured request, over all drafts and verdicts of a round.

    Asynchronous scheduling pads drafts for the bitmask, and verifies all that the device holds.
    """
    target, draft = (table[:4, :3] for table in TABLES)

    def target_law(before):
        """After no token, or after the last one."""
        row = target[1 + before[-1] if before else 0].clone()
        row[[token for token in range(3) if token not in ALLOWED[len(before)]]] = -torch.inf
        return row

    def drawn_after(draws, before):
        return draws.categorical(DenseLaw(target_law(before).softmax(-1, dtype=torch.float64)))

    def text(draws):
        drafted, laws = [], []
        for _ in range(DEPTH):
            logits = draft[1 + drafted[-1] if drafted else 0][None]
            laws.append(_law(draw_draft(logits, CUT)[1]))
            drafted.append(draws.categorical(DenseLaw(laws[-1][0])))
        manager = Places()
        if not drops:
            mend(manager)
        kept = manager.validate_tokens(None, drafted)
        sent = drafted if is_async else kept
        padded = kept + [PLACEHOLDER] * (len(sent) - len(kept))
        manager.grammar_bitmask({"a": None}, ["a"], {"a": padded})
        # vLLM masks up to the first placeholder. Whatever it leaves out after it must not matter.
        num_masked = [*manager.shown["a"], PLACEHOLDER].index(PLACEHOLDER) + 1
        rows = [target_law(drafted[:place]) for place in range(len(sent))]
        rows[num_masked:] = [row.clamp_min(0.0) for row in rows[num_masked:]]
        legal = Places().validate_tokens(None, sent)
        bonus = drawn_after(draws, legal) if legal == sent else 0
        if not sent:
            return (bonus, drawn_after(draws, [bonus]))
        drafts = [len(sent)], torch.tensor([sent]), torch.stack(rows)[None]
        probs = torch.stack(laws, 1)[:, : len(sent)]
        batch = batch_of(*drafts, probs, metadata(1), torch.tensor([[bonus]]))
        with monkeypatch.context() as patch:
            patch.setattr(verify, "_uniforms", lambda *_: ExactRows(draws))
            written = [token for token in rejection_sample(rule, batch)[0].tolist() if token >= 0]
        while len(written) < 2:
            written.append(drawn_after(draws, written))
        return tuple(written[:2])

    truth = plain_law(lambda before: DenseLaw(target_law(before).double().softmax(-1)), 2)
    return law_error(exact_law(text), truth)


@pytest.mark.parametrize("rule", RULES)
def test_a_verdict_under_a_grammars_bitmask_has_the_targets_law(rule, monkeypatch):
    for is_async in (False, True):
        assert grammar_error(rule, monkeypatch, is_async=is_async) < 1e-12
    assert grammar_error(rule, monkeypatch, drops=True) > 0.01


def test_a_law_that_was_not_drawn_from_is_noticed():
    """The control: most probable tokens, declared as drawn."""
    torch.manual_seed(0)
    token_ids = TABLES[1][0].argmax().expand(30_000, 1)
    law = TABLES[1][0].softmax(-1).expand(30_000, 1, -1)
    logits = TABLES[0][0].expand(30_000, 1, -1)
    declared = batch_of([1] * 30_000, token_ids, logits, law, metadata(30_000))
    seen = torch.bincount(rejection_sample("block", declared)[:, 0], minlength=VOCAB)
    expected = TABLES[0][0].double().softmax(-1) * 30_000
    assert stats.chisquare(seen, expected).pvalue < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_requests_of_all_kinds_share_a_batch(rule):
    """Greedy ones get the most probable tokens; those with a seed what they get alone."""
    lengths, heat = [2, 0, 1, 2, 2, 1], [0.0, 0.7, 0.7, 1.0, 0.0, 1.3]
    count = len(lengths)
    logits = torch.randn(count, DEPTH, VOCAB)
    probs = torch.rand(count, DEPTH, VOCAB).softmax(-1)
    token_ids = drawn(probs.log())
    token_ids[0] = logits[0].argmax(-1)
    bonus = torch.arange(count)[:, None] % VOCAB

    def output(rows):
        seeds = {place: 5 + row for place, row in enumerate(rows)}
        rules = metadata(len(rows), torch.tensor(heat)[rows], seeds=seeds)
        chosen = [lengths[row] for row in rows]
        parts = (part[rows] for part in (token_ids, logits, probs))
        found = rejection_sample(rule, batch_of(chosen, *parts, rules, bonus[rows]))
        return [[token for token in row if token >= 0] for row in found.tolist()]

    together = output(list(range(count)))
    assert together == [output([row])[0] for row in range(count)]
    assert together[0] == [*token_ids[0].tolist(), bonus[0].item()]
    assert together[1] == [bonus[1].item()]
    best = logits[4].argmax(-1).tolist()
    accepted = 0 if token_ids[4, 0] != best[0] else 1
    assert together[4][: accepted + 1] == best[: accepted + 1]


@pytest.mark.parametrize("origin", ["drawn", LAWLESS])
@pytest.mark.parametrize("rule", RULES)
def test_machine_code_gives_the_verdicts_of_the_programs(rule, origin, monkeypatch):
    """For requests of all kinds, each by itself; a greedy one beside them, and one without drafts."""
    load_law_masses()
    monkeypatch.setattr(lazy_laws, "_LEAST", 1)
    vocab, depth = 2100, 3
    for step in range(20):
        torch.manual_seed(step)
        lengths, heat = [3, 0, 1, 2, 3, 3], torch.tensor([1.0, 0.7, 0.7, 0.0, 1.0, 1.3])
        logits = 2 * torch.randn(len(lengths), depth, vocab)
        probs = (logits + 0.5 * torch.randn_like(logits)).softmax(-1)
        token_ids, rules = drawn(probs.log()), metadata(len(lengths), heat)
        token_ids[3] = logits[3].argmax(-1)
        batch = batch_of(lengths, token_ids, logits, probs if origin == "drawn" else None, rules)
        outputs = []
        for kernels in (lazy_laws._KERNELS, {}):
            monkeypatch.setattr(lazy_laws, "_KERNELS", kernels)
            rules.generators = {row: torch.Generator().manual_seed(row) for row in range(6)}
            outputs.append(rejection_sample(rule, batch))
            monkeypatch.undo()
            monkeypatch.setattr(lazy_laws, "_LEAST", 1)
        assert torch.equal(*outputs)
        assert outputs[0][3].tolist() == [*token_ids[3][:2].tolist(), 0, -1]


def test_steps_without_drafts_and_bad_logits_have_tokens():
    nothing, bonus = torch.zeros(2, 1, VOCAB), torch.tensor([[2], [3]])
    empty = batch_of([0, 0], torch.zeros(2, 1).int(), nothing, None, metadata(2), bonus)
    assert rejection_sample("block", empty).tolist() == [[2], [3]]
    logits = torch.full((1, 1, VOCAB), torch.nan)
    for heat in (0.0, 1.0):
        bad = batch_of([1], torch.tensor([[1]]), logits, None, metadata(1, heat))
        assert rejection_sample("block", bad)[0, 0] >= 0, "the engine would wait for a token"


def test_the_host_waits_for_no_device():
    lengths, logits = [2, 0, 1], torch.randn(3, DEPTH, VOCAB)
    token_ids, rules = drawn(logits), metadata(3, torch.tensor([0.0, 0.7, 1.0]), top_k=3, top_p=0.9)
    batch = batch_of(lengths, token_ids, logits, logits.softmax(-1), rules)

    def placed(values):
        tensors = {name: one for name, one in values.items() if isinstance(one, torch.Tensor)}
        return values | {name: tensor.to(device) for name, tensor in tensors.items()}

    with pretend.device() as device:
        rules = SimpleNamespace(**placed(vars(rules)))
        batch = DraftedBatch(**placed(batch._asdict()))._replace(sampling_metadata=rules)
        for _ in range(2):  # the tables of a shape are made once
            pretend.waits.clear()
            for rule in RULES:
                rejection_sample(rule, batch)
            rejection_sample("block", batch._replace(draft_probs=None))
            draw_draft(logits[:, 0].to(device), rules)
            expand_batch_to_tokens(rules.temperature, batch.cu_num_draft_tokens, 3, 0, 1)
        assert not pretend.waits


def test_drafts_are_drawn_from_the_requests_law():
    torch.manual_seed(0)
    logits = torch.randn(4, 9).repeat(5000, 1)
    rules = metadata(20_000, torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(5000), top_k=4, top_p=0.9)
    tokens, law = draw_draft(logits, rules)
    given = {"top_k": rules.top_k[:4].long(), "top_p": rules.top_p[:4]}
    exact = probs_from_logits(logits[:4, None], temperature=rules.temperature[:4], **given)[:, 0]
    assert law.dtype == torch.float32
    torch.testing.assert_close(law[:4], exact.float())
    assert (tokens[::4] == logits[0].argmax()).all()
    for row in (1, 2, 3):
        seen, expected = torch.bincount(tokens[row::4], minlength=9), exact[row] * 5000
        assert not seen[expected == 0].any()
        assert stats.chisquare(seen[expected > 0], expected[expected > 0]).pvalue > 1e-3
    seeded = [draw_draft(logits[:4], metadata(4, seeds={2: 7}))[0][2].item() for _ in range(9)]
    assert len(set(seeded)) == 1


def test_numbers_of_requests_are_repeated_for_their_tokens():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    heat = torch.tensor([0.0, 0.5, 0.7])
    found = expand_batch_to_tokens(heat, ends, 5, 0, 1).tolist()
    assert found == pytest.approx([1, 1, 0.7, 0.7, 0.7])
    top_k = torch.tensor([3, 4, 5], dtype=torch.int32)
    expanded = expand_batch_to_tokens(top_k, ends, 5)
    assert (expanded.dtype, expanded.tolist()) == (torch.int32, [3, 3, 5, 5, 5])


def test_a_draft_that_a_grammar_forbids_is_kept_for_the_verifier():
    manager = Manager()
    mend(manager)
    cases = [[3, 5, 4, 8], [3, 5, 6], [1], [3, -1, -1], []], [[3, 5, 4], [3, 5, 6], [1], [3], []]
    for drafted, kept in zip(*cases, strict=True):
        assert manager.validate_tokens(2, drafted) == kept
    scheduled = {"a": [3, 5, 4], "b": [3, 4], "free": [0, 0]}
    names = ["a", "b", "undrafted"]
    assert manager.grammar_bitmask({"a": 2, "b": 2}, names, scheduled) == names
    assert manager.shown == {"a": [3, 5, -1], "b": [3, 4], "free": [0, 0]}
    assert scheduled["a"] == [3, 5, 4]


def test_the_request_decides_the_law_where_this_library_verifies():
    for settings, draws in (
        ({}, False),
        ({"verifier": "block"}, True),
        ({"verifier": "block", "draft_law": "temperature"}, False),
        ({"draft_law": "request"}, True),
    ):
        config = SimpleNamespace(additional_config={"monge": settings})
        assert settings_of(config).draws == draws


def test_a_seed_uses_as_many_uniforms_beside_a_longer_draft_as_alone():
    """What the next round of a seeded request reads does not depend on the width of the batch."""
    following = []
    for widths in ([2], [2, 5]):
        generator = torch.Generator().manual_seed(7)
        first = verify._uniforms({0: generator}, widths, torch.device("cpu"))[0, :2]
        following.append([*first.tolist(), torch.rand((), generator=generator).item()])
    assert following[0] == following[1]
