"""A conversation of two turns; the second one reads only its own message.

`python examples/chat.py MODEL` takes a chat model: a folder, a GGUF file or `smollm2`.
"""

import sys

import monge
from monge.engine.conversation import Conversation

# The built-in target has no chat template: it is written to in the form of its training data.
decoder = monge.load(sys.argv[1]) if sys.argv[1:] else monge.load(chat_template="instruction")

conversation = Conversation(decoder, max_new_tokens=32, temperature=0.7, seed=0)
for message in ("Name three colours.", "Name three animals."):
    print(f"> {message}")
    for piece in conversation.reply(message):
        print(piece.text, end="", flush=True)
    print()
print(f"{len(conversation.messages)} messages")
