"""Verdicts on vLLM's drafts, and the distributions from which its draft models draw.

p = target law, q = draft law. vLLM's V1 runner concatenates the drafted tokens of a batch; the
programs of `monge.verify.functional` take a row for each chain. Nothing here waits for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Float64, Int, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad

from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import laws_from_logits
from monge.laws.law import one_hot
from monge.laws.lazy_laws import can_read, can_score, laws_of_masses
from monge.verify import functional as f
from monge.verify.functional import on_host
from monge.verify.functional.rejection import whole_chain

PLACEHOLDER: Final = -1
"""Where vLLM has no token."""
RULES: Final[Mapping[str, tuple[Callable[..., f.Verified], on_host.Decide]]] = {
    "block": (f.block, whole_chain),
    "speculative_sampling": (f.speculative_sampling, on_host.token_by_token),
}
"""Rules by name: for a batch, and for a request on a CPU."""


class DraftedBatch(NamedTuple):
    """The arguments of `rejection_sample` in `vllm.v1.sample.rejection_sampler`, under its names.

    Attributes:
        draft_token_ids: Drafted tokens of all requests, `[tokens]`.
        num_draft_tokens: Their number for each request.
        max_spec_len: The largest of these numbers.
        cu_num_draft_tokens: Running sum of these numbers, `[batch]`.
        draft_probs: Laws from which they were drawn, `[tokens, vocab]`; `None` for drafts of
            another origin, such as looked-up text.
        target_logits: The target's logits at each drafted token, after the rules of the request,
            `[tokens, vocab]`.
        bonus_token_ids: Token after a whole accepted chain, drawn by vLLM, `[batch, 1]`.
        sampling_metadata: vLLM's sampling rules and random generators of the requests.
        synthetic_mode: Whether acceptance is made up, which `hooks.check` refuses.
        synthetic_conditional_rates: Its rates.
        use_fp64_gumbel: Precision of vLLM's own noise.
    """

    draft_token_ids: Tensor
    num_draft_tokens: Sequence[int]
    max_spec_len: int
    cu_num_draft_tokens: Tensor
    draft_probs: Tensor | None
    target_logits: Tensor
    bonus_token_ids: Tensor
    sampling_metadata: Any
    synthetic_mode: bool = False
    synthetic_conditional_rates: Tensor | None = None
    use_fp64_gumbel: bool = False


def rejection_sample(rule: str, batch: DraftedBatch) -> Int32[Tensor, "batch depth_and_one"]:
    """Verify the drafts of a batch.

    Greedy requests get the target's most probable tokens. Drafts without a law are verified by the
    sample and match, which is exact for drafts of any origin, also for drawn drafts whose law is
    missing.

    Args:
        rule: Name of the rule for drawn drafts.
        batch: Arguments of vLLM.

    Returns:
        Accepted tokens and the token after them, then `PLACEHOLDER`.
    """
    depth, metadata = batch.max_spec_len, batch.sampling_metadata
    if depth == 0:
        return batch.bonus_token_ids.to(torch.int32)
    ends = batch.cu_num_draft_tokens.long()[:, None]
    starts = pad(ends[:-1], (0, 0, 1, 0))
    places = torch.arange(depth, device=ends.device)
    is_drafted = places < ends - starts
    rows = torch.where(is_drafted, starts + places, 0)
    token_ids = torch.where(is_drafted, batch.draft_token_ids.long()[rows], PLACEHOLDER)
    widths = [count and count + 1 for count in batch.num_draft_tokens]
    decided = _on_host(rule, batch, widths)
    if decided is None:
        # Neither missing nodes nor the last one decide: vLLM has drawn the token after a whole chain.
        rows = pad(rows, (0, 1))
        verified = _verdicts(
            rule,
            batch.target_logits[rows],
            # The id of node 0, the last committed token, is not read.
            pad(token_ids, (1, 0)),
            None if batch.draft_probs is None else _law(batch.draft_probs[rows]),
            uniforms=lambda: _uniforms(metadata.generators, widths, ends.device),
            metadata=metadata,
        )
        decided = verified.num_accepted, verified.next_token
    accepted, next_token = (numbers[:, None] for numbers in decided)
    # Logits that are not finite give no token; vLLM, too, goes on with one of no meaning then.
    following = torch.where(
        starts + accepted == ends, batch.bonus_token_ids.long(), next_token
    ).clamp_min(0)
    places, drafted = torch.arange(depth + 1, device=ends.device), pad(token_ids, (0, 1))
    output = torch.where(places < accepted, drafted, PLACEHOLDER)
    return torch.where(places == accepted, following, output).to(torch.int32)


def _on_host(
    rule: str, batch: DraftedBatch, widths: Sequence[int]
) -> tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]] | None:
    """Decide each request on a CPU, its laws read where they lie.

    Returns:
        The number of accepted tokens and the token after them; `None` where the programs for
        batches are to decide.
    """
    logits, q, metadata = batch.target_logits, batch.draft_probs, batch.sampling_metadata
    token_ids = batch.draft_token_ids.long()
    if metadata.all_greedy or not can_score(logits, 1.0):
        return None
    drafts = None
    if q is not None:
        is_drawn = bool((q.gather(1, token_ids[:, None]) > 0.0).all())
        if not (is_drawn and can_read(q[None])):
            return None
        drafts = laws_of_masses(q[None], [len(q)])
    targets = laws_from_logits(logits, SamplingRules())
    if (q is not None and drafts is None) or None in targets:
        return None
    device = logits.device
    best: list[int] = [] if metadata.all_random else logits.argmax(-1).tolist()
    uniforms = _uniforms(metadata.generators, widths, device).tolist()
    tokens, bonus = token_ids.tolist(), batch.bonus_token_ids.flatten().tolist()
    numbers, start = list[tuple[int, int, int]](), 0
    for row, count in enumerate(batch.num_draft_tokens):
        part, start = slice(start, start + count), start + count
        is_greedy = bool(best) and float(metadata.temperature[row]) == 0.0
        is_walk = is_greedy or drafts is None
        laws = [one_hot(token, device) for token in best[part]] if is_greedy else targets[part]
        # vLLM has drawn the token after a whole chain.
        laws = [*laws, one_hot(bonus[row], device)]
        chain = on_host.HostChain(tokens[part], laws, [] if drafts is None else drafts[0][part])
        decide = on_host.walk if is_walk else RULES[rule][1]
        numbers.append(on_host.decided(decide, chain, uniforms[row]))
    accepted, next_token, _ = torch.tensor(numbers).unbind(1)
    return accepted, next_token


def draw_draft(
    logits: Float[Tensor, "batch vocab"], sampling_metadata: Any, use_fp64_gumbel: bool = False
) -> tuple[Int64[Tensor, " batch"], Float[Tensor, "batch vocab"]]:
    """Draw a drafted token from each request's own law: its temperature, top-k, top-p and seed.

    Stands for `compute_probs_and_sample_next_token` of `vllm.v1.spec_decode.llm_base_proposer`.

    Returns:
        The tokens, and the laws from which they were drawn, in float32 as vLLM keeps them.
    """
    del use_fp64_gumbel
    probs = _request_law(logits, sampling_metadata).float()
    uniforms = _uniforms(sampling_metadata.generators, [1] * len(logits), logits.device)
    return f.quantile(_law(probs), uniforms[:, 0]).clamp_min(0), probs


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return each request's number at each of its tokens, `[tokens]`, with a value replaced.

    Replaces a function of vLLM, whose kernel for CPUs leaves the result uninitialised.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def _verdicts(
    rule: str,
    logits: Float[Tensor, "batch nodes vocab"],
    nodes: Int[Tensor, "batch nodes"],
    law: Float64[Tensor, "batch nodes vocab"] | None,
    *,
    uniforms: Callable[[], Float64[Tensor, "batch uniforms"]],
    metadata: Any,
) -> f.Verified:
    """Decide greedy and sampled requests, each kind only if there are any."""
    chain = f.children_of(range(-1, nodes.shape[1] - 1))
    if metadata.all_greedy:
        return f.exact_match(logits, nodes, chain)
    probs = logits.softmax(-1, dtype=torch.float64)
    sampled = (
        f.sample_and_match(probs, nodes, chain, uniforms())
        if law is None
        else RULES[rule][0](probs, nodes, f.DraftLaws(law), uniforms())
    )
    if metadata.all_random:
        return sampled
    greedy, is_greedy = f.exact_match(logits, nodes, chain), metadata.temperature == 0
    return f.Verified(
        torch.where(is_greedy[:, None], greedy.path, sampled.path),
        *(torch.where(is_greedy, *pair) for pair in zip(greedy[1:], sampled[1:], strict=True)),
    )


def _law(probs: Float[Tensor, "*rows vocab"]) -> Float64[Tensor, "*rows vocab"]:
    """The law that vLLM's masses in float32 declare: that of the draw is that of the verdict."""
    masses = probs.to(torch.float64, copy=True)
    return masses.div_(masses.sum(-1, keepdim=True))


def _request_law(
    logits: Float[Tensor, "batch vocab"], rules: Any
) -> Float64[Tensor, "batch vocab"]:
    top_k = None if rules.top_k is None else rules.top_k.long()
    return f.probs_from_logits(
        logits[:, None], temperature=rules.temperature, top_k=top_k, top_p=rules.top_p
    )[:, 0]


def _uniforms(
    generators: Mapping[int, torch.Generator], widths: Sequence[int], device: torch.device
) -> Float64[Tensor, "batch uniforms"]:
    """Return uniforms of each request; with a seed, they do not depend on the other requests."""
    uniforms = torch.empty(len(widths), max(widths), dtype=torch.float64, device=device).uniform_()
    for row, generator in generators.items():
        if widths[row]:
            uniforms[row, : widths[row]].uniform_(generator=generator)
    return uniforms
