"""Small heads for tables, with weights that make every law different, and texts whose laws are known."""

import torch

from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.oracle.tabular import RandomTable, TabularModel
from monge.training.texts import Ends, Texts, read_texts


def read_rows(target: TabularModel, rows: list[list[int]], **options) -> Texts:
    """Texts without prompts, read by the target."""
    return read_texts(target, [((), row) for row in rows], **options)


def random_head(
    target: TabularModel,
    kind: str = "gated",
    *,
    num_steps: int = 2,
    is_branched: bool = True,
    alignment: str = "none",
    seed: int = 0,
) -> ShapeHead:
    """A head whose every number is drawn, so that no law it makes is that of another node."""
    sizes = TargetSizes.of(target)
    settings = {"width": 4, "gate_rank": 2} if kind == "gated" else {}
    head = ShapeHead(
        make_predictor(kind, sizes, num_steps=num_steps, is_branched=is_branched, **settings),
        sizes,
        alignment,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*head.predictor.parameters(), *head.alignments.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        head.temperatures.copy_(0.5 + torch.rand(num_steps, generator=generator))
        for name, tensor in head.alignments.named_buffers():
            if name.endswith("masses"):
                tensor.copy_(torch.full_like(tensor, 1 / len(tensor)))
    head.remember(target)
    return head


def markov_table(vocab: int) -> TabularModel:
    """A target whose next law is known from its last token; its states are its logits."""
    laws = RandomTable(vocab, 2)
    return TabularModel(lambda text: list(laws(text[-1:])), vocab)


def markov_ends(vocab: int) -> Ends:
    eye = torch.eye(vocab)
    return Ends(embed=lambda ids: eye[ids], unembed=lambda states: states)


def markov_texts(vocab: int, rows: int, length: int) -> Texts:
    """Text that the target wrote."""
    table, generator = markov_table(vocab), torch.Generator().manual_seed(0)
    laws = torch.tensor([list(table.table((token,))) for token in range(vocab)])
    columns = [torch.randint(vocab, (rows,), generator=generator)]
    for _ in range(length - 1):
        columns.append(torch.multinomial(laws[columns[-1]], 1, generator=generator)[:, 0])
    return read_rows(table, torch.stack(columns, dim=1).tolist(), dtype=torch.float32)
