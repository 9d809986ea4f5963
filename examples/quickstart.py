"""Decode with the built-in pair: all at once, and piece by piece."""

import monge

PROMPT = "Question: Ann has 5 pens and buys 3 more. How many pens does she have?\nAnswer:"

decoder = monge.load()
(result,) = decoder.generate(PROMPT, max_new_tokens=32, temperature=0.7, seed=0)
print(result.text)
print(f"{result.stats.num_tokens} tokens in {result.stats.num_rounds} target forwards")

for piece in decoder.stream(PROMPT, max_new_tokens=32, temperature=0.7, seed=0):
    print(piece.text, end="", flush=True)
print()
