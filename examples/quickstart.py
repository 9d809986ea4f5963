"""Decode with the built-in pair: all at once, piece by piece, and inside `transformers`' own `generate`."""

import torch

import monge

PROMPT = "Question: Ann has 5 pens and buys 3 more. How many pens does she have?\nAnswer:"

decoder = monge.load()
(result,) = decoder.generate(PROMPT, max_new_tokens=32, temperature=0.7, seed=0)
print(result.text)
print(f"{result.stats.num_tokens} tokens in {result.stats.num_rounds} target forwards")

for piece in decoder.stream(PROMPT, max_new_tokens=32, temperature=0.7, seed=0):
    print(piece.text, end="", flush=True)
print()

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from monge.api import built_in  # noqa: E402

tokenizer = AutoTokenizer.from_pretrained(built_in("target"))
target = AutoModelForCausalLM.from_pretrained(built_in("target"), dtype=torch.float32)
draft = AutoModelForCausalLM.from_pretrained(built_in("draft"), dtype=torch.float32)
inputs = tokenizer(PROMPT, return_tensors="pt")
plain = target.generate(**inputs, max_new_tokens=32, do_sample=False)
ours = target.generate(
    **inputs, max_new_tokens=32, do_sample=False, custom_generate=monge.speculate, draft_model=draft
)
print("the same greedy tokens:", bool(torch.equal(plain, ours)))
