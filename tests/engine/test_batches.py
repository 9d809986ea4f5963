"""Requests that share a batch: joining, leaving, permuted, failing; each as if it were alone."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import monge
from monge.core.errors import NonFiniteLogitsError
from monge.engine.batch import decode
from monge.engine.result import result_of
from monge.engine.session import Session
from tests.engine.tiny import network, perturbed, prompts

PROMPTS = prompts((9, 4, 7, 11, 5, 3, 8), seed=6)
NUM_TOKENS = 15


def decoder(max_batch_size=8, **options):
    options = {"controller": "fixed", "max_batch_size": max_batch_size, **options}
    return monge.load(network("llama"), perturbed(network("llama")), **options)


def run(parts, requests, order, max_batch_size):
    sessions = [Session(requests[number], request_id=slot) for slot, number in enumerate(order)]
    for _ in decode(sessions, parts, max_batch_size=max_batch_size):
        pass
    results = [result_of(session, "eager") for session in sessions]
    return dict(zip(order, results, strict=True))


@pytest.mark.parametrize("tree", ["chain(4)", "fixed_width((3, 2, 1))", "best_first"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_neighbours_and_places_change_nothing(tree, temperature):
    whole = decoder(tree=tree)
    requests = whole.requests(PROMPTS, temperature=temperature, seed=3, ignore_eos=True)
    sizes = [NUM_TOKENS - 2 * row for row in range(7)]
    requests = [
        replace(request, max_new_tokens=size) for request, size in zip(requests, sizes, strict=True)
    ]
    ways = ([*range(7)], 7), ([4, 2, 6, 0, 5, 1, 3], 7), ([*range(7)][::-1], 2), ([*range(7)], 1)
    in_order, *others = [run(whole.components, requests, order, size) for order, size in ways]
    assert [len(in_order[number].token_ids) for number in range(7)] == sizes
    for other in others:
        assert all(other[row].token_ids == in_order[row].token_ids for row in range(7))
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
            said = r"requests 0, 1: the drafter failed .*out of memory"
            with pytest.warns(UserWarning, match=said):
                assert written(whole.components) == expected
    assert written(whole.components) == expected


@pytest.mark.usefixtures("unchecked_types")
def test_speculate_raises_on_nan_logits():
    target = network("llama")
    draft = perturbed(target)  # made before the hook is set, which a copy would inherit
    inputs = {"inputs": torch.tensor([PROMPTS[0]]), "max_new_tokens": 8, "do_sample": False}
    hook = target.register_forward_hook(_poison)
    try:
        with pytest.raises(NonFiniteLogitsError, match="not finite"):
            target.generate(**inputs, custom_generate=monge.speculate, draft_model=draft)
    finally:
        hook.remove()


def _poison(module, args, output):
    output.logits.fill_(float("nan"))


def test_threads_that_share_a_decoder_take_turns():
    shared = decoder(tree="chain(4)")
    texts = [
        [result.token_ids for result in shared.generate([prompt], max_new_tokens=60)]
        for prompt in PROMPTS
    ]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        futures = [pool.submit(shared.generate, [prompt], max_new_tokens=60) for prompt in PROMPTS]
        together = [[result.token_ids for result in future.result()] for future in futures]
    assert together == texts
