"""Write a drafter, let enumeration say whether it is lossless, and decode with it beside the draft model."""

from dataclasses import dataclass
from itertools import pairwise

import monge
from monge.api import make_components
from monge.core.context import Context, DraftPlan
from monge.draft.base import Capabilities, ModelFreeDrafter, model_free
from monge.laws.draws import Draws
from monge.laws.tree import TokenTree, fixed_chain
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel

VOCAB = 3


@dataclass(frozen=True, slots=True)
class Followers(ModelFreeDrafter[None]):
    """Propose the token that followed the last token before, then the one that followed that."""

    depth: int = 4

    @property
    def capabilities(self) -> Capabilities:
        return model_free(max_depth=self.depth)

    def start(self, context: Context) -> None:
        return None  # the text is all that it reads

    def tree(self, context: Context, state: None, plan: DraftPlan, draws: Draws) -> TokenTree:
        text, drafted = context.token_ids, list[int]()
        followers, token = dict(pairwise(text)), text[-1]
        while token in followers and len(drafted) < plan.nodes(plan.depth(self.depth)):
            token = followers[token]
            drafted.append(token)
        return fixed_chain(text[-1], tuple(drafted))


def target() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 1), VOCAB)


case = Case(prompt=(0, 1, 0), horizon=2, max_new_tokens=3)
output = output_law(lambda: make_components(target(), drafter=Followers()), case)
print(f"law error {law_error(output, target_law(target(), case)):.1e}")

decoder = monge.load(drafter=monge.Pool(Followers(), monge.Model()))
(result,) = decoder.generate("one, two, one, two, one,", max_new_tokens=32)
drafters = {record.drafter for record in result.records}
print(f"{result.stats.num_tokens} tokens in {result.stats.num_rounds} target forwards")
print("drafted by", ", ".join(sorted(name for name in drafters if name)))
