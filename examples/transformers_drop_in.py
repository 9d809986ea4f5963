"""Speed up `model.generate` of `transformers`: one line, the same greedy tokens."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import monge
from monge.api import built_in

TARGET, DRAFT = built_in("target"), built_in("draft")  # replace them by your models
tokenizer = AutoTokenizer.from_pretrained(TARGET)
model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
draft = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
inputs = tokenizer("The history of mathematics", return_tensors="pt")

plain = model.generate(**inputs, max_new_tokens=32, do_sample=False)
monge.accelerate(model, draft)  # the one line
faster = model.generate(**inputs, max_new_tokens=32, do_sample=False)

print(tokenizer.decode(faster[0], skip_special_tokens=True))
print("the same greedy tokens:", bool(torch.equal(plain, faster)))
