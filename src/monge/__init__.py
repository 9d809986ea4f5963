"""Lossless acceleration of large language models by speculative decoding, seen as optimal transport.

`load` makes a `Decoder` from a target and what drafts for it; `speculate` is the drop-in for `model.generate`.
"""

from monge.api import load as load
from monge.plugins.transformers_generate import speculate as speculate
