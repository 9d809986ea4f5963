"""What parity tests compare with: plain decoding, and fresh forwards without a cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.networks.base import NodeBlock
from monge.networks.forward import Forward, NetworkForward
from monge.networks.hf_tree import HfTreeModel

Text = tuple[int, ...]


def plain_greedy(network: PreTrainedModel, prompt: Text, num_tokens: int) -> Text:
    """The greedy continuation written by `transformers` alone, end-of-text ignored."""
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    output = network.generate(input_ids=ids, max_new_tokens=num_tokens, **options)
    return tuple(output[0, len(prompt) :].tolist())


def fresh_logits(network: PreTrainedModel, text: Text) -> Tensor:
    """Logits after every token of a text, `[seq, vocab]`, in one forward without a cache."""
    with torch.inference_mode():
        return network(input_ids=torch.tensor([text]), use_cache=False).logits[0]


def assert_same_tokens(
    network: PreTrainedModel, prompt: Text, got: Sequence[int], expected: Sequence[int]
) -> None:
    """Compare two continuations; a difference is reported with the logit gap there, to tell a tie from an error."""
    if tuple(got) == tuple(expected):
        return
    assert len(got) == len(expected), f"lengths: got {len(got)}, expected {len(expected)}"
    first = [one == other for one, other in zip(got, expected, strict=True)].index(False)
    top = fresh_logits(network, prompt + tuple(expected[:first]))[-1].topk(2).values
    gap = f"the two largest logits differ by {float(top[0] - top[1])}"
    raise AssertionError(f"token {first}: got {got[first]}, expected {expected[first]}; {gap}")


class RandomGrowth:
    """Grows random trees behind several sequences and commits random paths, comparing every node with a fresh forward.

    The forward is that of `reference`, a network with the same weights, or of the network itself.
    `step` reads the nodes where one is given.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        prompts: Sequence[Text],
        seed: int,
        reference: PreTrainedModel | None = None,
        step: NetworkForward | None = None,
    ) -> None:
        make_step = None if step is None else lambda _: Forward(step)
        self.model, self.texts = HfTreeModel(network, make_step), dict(enumerate(prompts))
        self.network, self.vocab = reference or network, network.config.get_text_config().vocab_size
        self.generator = torch.Generator().manual_seed(seed)
        self.non_prefix_commits = 0
        self.model.open({row: text[:-1] for row, text in self.texts.items()})

    def round(self, *, compare: bool) -> float:
        """One round: two blocks of nodes a sequence, then a random path.

        The largest difference of any logit.
        """
        trees = {
            row: (NodeBlock((text[-1],), (-1,)), self._block(1), self._block(4))
            for row, text in self.texts.items()
        }
        logits: dict[int, list[Tensor]] = {row: [] for row in trees}
        for index in range(3):
            blocks = {row: own[index] for row, own in trees.items() if own[index].token_ids}
            for row, block_logits in (self.model.extend(blocks) if blocks else {}).items():
                logits[row].append(block_logits.cpu())
        worst = 0.0
        paths: dict[int, list[int]] = {}
        for row, blocks in trees.items():
            tokens = [token for block in blocks for token in block.token_ids]
            parents = [parent for block in blocks for parent in block.parents]
            if compare:
                given = self.texts[row], tokens, parents, torch.cat(logits[row])
                worst = max(worst, self._difference(*given))
            path = _path(self._integer(len(tokens)), parents)
            self.non_prefix_commits += path != list(range(len(path)))
            # As in the loop: the path is committed and a token after it, which is the next root.
            self.texts[row] += (*(tokens[node] for node in path[1:]), self._integer(self.vocab))
            paths[row] = path
        self.model.commit(paths)
        self.model.check_integrity()
        return worst

    def _block(self, first: int) -> NodeBlock:
        # Ragged on purpose; the second block may be empty for some rows. Parents are any earlier
        # nodes.
        size = 3 if first == 1 else self._integer(5)
        parents = tuple(self._integer(first + index) for index in range(size))
        return NodeBlock(tuple(self._integer(self.vocab) for _ in range(size)), parents)

    def _difference(
        self, text: Text, tokens: list[int], parents: list[int], logits: Tensor
    ) -> float:
        worst = 0.0
        for leaf in sorted(set(range(len(tokens))) - set(parents)):
            path = _path(leaf, parents)
            own = text + tuple(tokens[node] for node in path[1:])
            expected = fresh_logits(self.network, own)[-len(path) :]
            worst = max(worst, float((logits[path] - expected).abs().max()))
        return worst

    def _integer(self, stop: int) -> int:
        return int(torch.randint(stop, (1,), generator=self.generator))


def _path(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
