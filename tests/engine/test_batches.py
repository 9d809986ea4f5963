"""Requests that share a batch: joining, leaving, permuted, failing; each as if it were alone."""

from dataclasses import replace

import pytest
import torch

import monge
from monge.core.errors import DrafterError, NonFiniteLogitsError
from monge.draft.model import ModelDrafter
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.engine.result import result_of
from monge.engine.session import Session
from tests.engine.tiny import network, perturbed, prompts
from tests.parity.comparing import assert_same_tokens, plain_greedy

PROMPTS = prompts((9, 4, 7, 11, 5, 3, 8), seed=6)
NUM_TOKENS = 15


def decoder(max_batch_size=8, **options):
    target = network("llama")
    return monge.load(
        target,
        perturbed(target),
        max_batch_size=max_batch_size,
        **{"controller": "fixed", **options},
    )


def run(parts, requests, order, max_batch_size):
    sessions = [Session(requests[number], request_id=slot) for slot, number in enumerate(order)]
    for _ in decode(sessions, parts, max_batch_size=max_batch_size):
        pass
    return {
        number: result_of(session, "eager") for number, session in zip(order, sessions, strict=True)
    }


@pytest.mark.parametrize("tree", ["chain(4)", "fixed_width((3, 2, 1))", "best_first"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_neighbours_and_places_change_nothing(tree, temperature):
    whole = decoder(tree=tree)
    requests = whole.requests(
        PROMPTS, max_new_tokens=NUM_TOKENS, temperature=temperature, seed=3, ignore_eos=True
    )
    requests = [
        replace(request, max_new_tokens=NUM_TOKENS - 2 * row)
        for row, request in enumerate(requests)
    ]
    in_order = run(whole.components, requests, list(range(7)), max_batch_size=7)
    permuted = run(whole.components, requests, [4, 2, 6, 0, 5, 1, 3], max_batch_size=7)
    joining = run(whole.components, requests, [6, 5, 4, 3, 2, 1, 0], max_batch_size=2)
    alone = run(whole.components, requests, list(range(7)), max_batch_size=1)
    for number in range(7):
        tokens = in_order[number].token_ids
        assert len(tokens) == NUM_TOKENS - 2 * number
        assert (
            permuted[number].token_ids
            == joining[number].token_ids
            == alone[number].token_ids
            == tokens
        )
    accepted = {record.num_accepted for result in in_order.values() for record in result.records}
    assert len(accepted) > 2, "acceptance was to be ragged"
    assert whole.components.target.cache_bytes == 0, "a model without texts holds no cache"
    whole.components.target.check_integrity()


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_memory_that_runs_out_while_a_prompt_is_read_is_told_and_given_back(monkeypatch, whose):
    whole = decoder(tree="chain(2)")
    model = whole.components.target if whose == "target" else whole.components.drafter.model
    requests = whole.requests(PROMPTS[:2], max_new_tokens=5, temperature=0.0, ignore_eos=True)

    def written(components):
        found = run(components, requests, [0, 1], max_batch_size=2)
        return {number: one.token_ids for number, one in found.items()}

    def run_out(**_):
        raise RuntimeError("out of memory")

    expected = written(decoder(tree="chain(2)").components)
    with monkeypatch.context() as patch:
        patch.setattr(model.network, "forward", run_out)
        if whose == "target":
            with pytest.raises(RuntimeError, match="out of memory"):
                written(whole.components)
        else:
            with pytest.warns(
                UserWarning, match=r"request [01]: the drafter failed .*out of memory"
            ):
                assert written(whole.components) == expected
    assert written(whole.components) == expected


@pytest.mark.parametrize("tree", ["chain(4)", "fixed_width((3, 2, 1), 'iid')"])
def test_a_forward_of_the_draft_model_that_fails_now_and_then_changes_no_text(monkeypatch, tree):
    """Each request's level is read again alone, behind the levels that were read before.

    No token is drawn anew.
    """
    whole = decoder(tree=tree)
    requests = whole.requests(
        PROMPTS[:3], max_new_tokens=NUM_TOKENS, temperature=0.8, seed=3, ignore_eos=True
    )
    expected = run(whole.components, requests, [0, 1, 2], max_batch_size=3)
    draft, calls = whole.components.drafter.model, [0]
    forward = draft._forward

    def stumbling(token_ids, *inputs, keep_logits):
        output = forward(token_ids, *inputs, keep_logits=keep_logits)
        is_shared = keep_logits and len(token_ids) > 1
        calls[0] += is_shared
        # A level below the roots: every fourth forward of a chain reads them, and they are narrow.
        if is_shared and (calls[0] % 4 in {2, 3} if tree == "chain(4)" else len(token_ids[0]) > 2):
            raise RuntimeError("out of memory")
        return output

    monkeypatch.setattr(draft, "_forward", stumbling)
    found = run(whole.components, requests, [0, 1, 2], max_batch_size=3)
    assert calls[0] > 8
    for number in range(3):
        assert found[number].token_ids == expected[number].token_ids
        assert [record.depth for record in found[number].records] == [
            record.depth for record in expected[number].records
        ]
    draft.check_integrity()


class DrawsInVain(ModelDrafter):
    """Raises after a draw, with no tree to show for it."""

    def draft(self, contexts, states, plans, draws):
        draws[0].uniform()
        raise RuntimeError("broken")


def test_a_drafter_that_drew_in_vain_says_why():
    made = decoder(tree="chain(2)", controller="fixed", drafter="model")
    drafter = DrawsInVain(model=made.components.drafter.model, tree=made.components.drafter.tree)
    whole = Decoder(replace(made.components, drafter=drafter))
    with pytest.raises(DrafterError, match=r"failed .RuntimeError: broken. after it had drawn"):
        whole.generate([(1, 2, 3)], max_new_tokens=8, temperature=1.0, seed=1)


def test_end_of_text_inside_a_block_leaves_the_batch():
    target = network("llama")
    texts = [plain_greedy(target, prompt, NUM_TOKENS) for prompt in PROMPTS]
    eos = texts[0][7]  # the first text ends early, others somewhere or never
    results = Decoder(decoder().components, eos_ids=frozenset({eos}), max_batch_size=3).generate(
        PROMPTS, max_new_tokens=NUM_TOKENS
    )
    for prompt, result, text in zip(PROMPTS, results, texts, strict=True):
        end = text.index(eos) + 1 if eos in text else NUM_TOKENS
        assert_same_tokens(target, prompt, result.token_ids, text[:end])
        assert result.finish_reason == ("eos" if eos in text else "length")
    assert {result.finish_reason for result in results} == {"eos", "length"}


class NanInjector:
    """Makes the logits of one row NaN in one forward of a network."""

    def __init__(self, network_, *, call, row):
        self.calls, self.call, self.row = 0, call, row
        self._hook = network_.register_forward_hook(self._inject)

    def _inject(self, module, args, output):
        self.calls += 1
        if self.calls == self.call:
            output.logits[self.row] = float("nan")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._hook.remove()


@pytest.mark.usefixtures("unchecked_types")
def test_a_request_with_nan_logits_ends_alone():
    target = network("llama")
    expected = [plain_greedy(target, prompt, NUM_TOKENS) for prompt in PROMPTS]
    parts = decoder()
    with NanInjector(target, call=4, row=1):
        results = parts.generate(PROMPTS, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    failed = results[1]
    assert failed.finish_reason == "error"
    assert "not finite" in failed.error
    assert 0 < len(failed.token_ids) < NUM_TOKENS
    assert failed.token_ids == expected[1][: len(failed.token_ids)]
    for number in (0, 2, 3, 4, 5, 6):
        assert_same_tokens(target, PROMPTS[number], results[number].token_ids, expected[number])
    parts.components.target.check_integrity()


@pytest.mark.usefixtures("unchecked_types")
def test_speculate_raises_on_nan_logits():
    target = network("llama")
    draft = perturbed(target)  # made before the hook is set, which a copy would inherit
    inputs = {"input_ids": torch.tensor([PROMPTS[0]]), "max_new_tokens": 8, "do_sample": False}
    with (
        NanInjector(target, call=3, row=0),
        pytest.raises(NonFiniteLogitsError, match="not finite"),
    ):
        target.generate(**inputs, custom_generate=monge.speculate, draft_model=draft)


@pytest.mark.parametrize("calls", ["once", "always"])
def test_a_draft_model_with_nan_logits_costs_speed_only(calls):
    target = network("llama")
    draft = perturbed(target)
    hook = draft.register_forward_hook(_poison) if calls == "always" else None
    try:
        with (
            NanInjector(draft, call=5, row=0),
            pytest.warns(UserWarning, match="draft model.*drafting stops here"),
        ):
            results = decoder().generate(PROMPTS, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    finally:
        if hook is not None:
            hook.remove()
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_same_tokens(
            target, prompt, result.token_ids, plain_greedy(target, prompt, NUM_TOKENS)
        )
    if calls == "always":
        assert {result.stats.num_rounds for result in results} == {NUM_TOKENS}


def _poison(module, args, output):
    output.logits.fill_(float("nan"))
