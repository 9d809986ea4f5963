"""Speculative decoding in a loop of plain PyTorch: the tensor programs verify, and nothing waits until a round ends."""

from inspect import signature

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from monge.api import built_in
from monge.verify import functional as f

DEPTH, NEW_TOKENS, TEMPERATURE = 4, 48, 1.0
TARGET, DRAFT = built_in("target"), built_in("draft")  # replace them by your models
tokenizer = AutoTokenizer.from_pretrained(TARGET)
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
CACHE = "cache" if "cache" in signature(target.forward).parameters else "past_key_values"


@torch.inference_mode()
def decode(text: torch.Tensor, temperature: float, seed: int = 0) -> tuple[torch.Tensor, int]:
    """Return the text, `[1, tokens]`, and the number of rounds; the caches hold all but its last token."""
    generator = torch.Generator().manual_seed(seed)
    caches = {network: DynamicCache(config=network.config) for network in (target, draft)}
    for network, cache in caches.items():
        network(text[:, :-1], **{CACHE: cache})
    length, rounds = text.shape[1] + NEW_TOKENS, 0
    while text.shape[1] < length:
        uniforms = torch.rand(1, 2 * DEPTH + 1, dtype=torch.float64, generator=generator)
        block, laws = text[:, -1:], []
        for level in range(DEPTH + 1):  # the last level only fills the cache
            unread = torch.cat([text, block[:, 1:]], 1)[:, caches[draft].get_seq_length() :]
            logits = draft(unread, **{CACHE: caches[draft]}).logits[:, -1:]
            laws.append(f.probs_from_logits(logits, temperature=temperature)[:, 0])
            if level < DEPTH:
                token = f.quantile(laws[-1], uniforms[:, level])
                block = torch.cat([block, token[:, None]], 1)
        logits = target(block, **{CACHE: caches[target]}).logits
        probs = f.probs_from_logits(logits, temperature=temperature)
        verified = f.block(probs, block, f.DraftLaws(torch.stack(laws, 1)), uniforms[:, DEPTH:])
        accepted = int(verified.num_accepted)  # the only wait of a round
        text = torch.cat([text, block[:, 1 : 1 + accepted], verified.next_token[:, None]], 1)
        for cache in caches.values():
            if surplus := cache.get_seq_length() - (text.shape[1] - 1):
                cache.crop(-surplus)
        rounds += 1
    return text[:, :length], rounds


prompt = tokenizer("The history of mathematics", return_tensors="pt").input_ids
sampled, num_rounds = decode(prompt, TEMPERATURE)
print(tokenizer.decode(sampled[0], skip_special_tokens=True))
print(f"{NEW_TOKENS} tokens in {num_rounds} target forwards")
greedy, _ = decode(prompt, 0.0)
plain = target.generate(
    prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
)
print("the greedy tokens of transformers:", bool(torch.equal(greedy, plain)))
