"""Wrong arguments of tensor programs: refused on a CPU, no token on a device, where nothing waits."""

import math
import re
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from monge.core.errors import OptionError, ProposalMismatchError
from monge.laws.proposal import Iid
from monge.verify.functional import (
    DraftLaws,
    block,
    children_of,
    num_uniforms,
    probs_from_logits,
    quantile,
    sample_and_match,
)
from tests.engine import pretend
from tests.verify.tensor_problems import (
    BELOW_ONE,
    CHAIN,
    PROGRAMS,
    VOCAB,
    problem,
    told,
)


def test_too_few_uniforms_and_wrong_shapes_are_refused() -> None:
    one = problem(("rough", "rough"), CHAIN, Iid, 0)
    arguments = one.p[None], torch.tensor([one.token_ids]), DraftLaws(one.q[None])
    with pytest.raises(OptionError, match=r"uniforms: got 2 a request; these trees need 4"):
        block(*arguments, torch.zeros(1, 2, dtype=torch.float64))
    with pytest.raises(ProposalMismatchError, match=r"expected -1 for node 0"):
        children_of((0, 0, 1, 2))
    with pytest.raises(ProposalMismatchError, match=r"children of node 1: got \(1,\); expected"):
        sample_and_match(
            *arguments[:2], ((1,), (1,), (3,), ()), torch.zeros(1, 4, dtype=torch.float64)
        )
    with pytest.raises(ProposalMismatchError, match=r"token_ids have 4 nodes, but children has 3"):
        sample_and_match(*arguments[:2], ((1,), (2,), ()), torch.zeros(1, 4, dtype=torch.float64))


def arguments_of(name: str, device: str = "cpu", **changes) -> dict:
    """Arguments of a program by name, for two requests, some of them changed."""
    program, _, kind, (shape, *_) = PROGRAMS[name]
    one = problem(("rough", "rough"), shape, kind, 1)
    arguments = {
        "probs": one.p.expand(2, -1, -1),
        "token_ids": torch.tensor([one.token_ids] * 2),
        "children": one.children,
        "draft": DraftLaws(one.q.expand(2, -1, -1)),
        "uniforms": torch.full((2, num_uniforms(one.children)), 0.5, dtype=torch.float64),
    }
    arguments |= {key: change(arguments[key].clone()) for key, change in changes.items()}
    placed = {
        key: own.to(device) if isinstance(own, Tensor) else own for key, own in arguments.items()
    }
    placed["draft"] = DraftLaws(placed["draft"].probs.to(device))
    return placed


def spoilt(place: tuple[int, ...], value: float) -> Callable[[Tensor], Tensor]:
    """Set one number."""

    def change(tensor: Tensor) -> Tensor:
        tensor[place] = value
        return tensor

    return change


WRONG_NUMBERS = {
    "a uniform of one": ("uniforms", (1, 0), 1.0, "got 1.0 in row 1; expected numbers in [0, 1)"),
    "a negative uniform": ("uniforms", (1, 0), -0.1, "got -0.1 in row 1; expected numbers in"),
    "no uniform": ("uniforms", (1, 0), math.nan, "got nan in row 1; expected numbers in"),
    "a token beyond": ("token_ids", (1, 1), VOCAB, "got 5 in row 1; expected tokens of a"),
    "a token far beyond": ("token_ids", (1, 1), 1 << 40, "got 1099511627776 in row 1; expected"),
    "a negative token": ("token_ids", (1, 1), -1, "got -1 in row 1; expected tokens of a"),
}
WRONG_SHAPES = {
    "uniforms": (lambda own: own.float(), "uniforms: got torch.float32 .* expected torch.float64"),
    "probs": (lambda own: own.half(), "probs: got torch.float16 .* expected torch.float64 or torch.float32 of"),
    "token_ids": (lambda own: own[:, :1], r"token_ids: .* of shape \(2, 1\); expected .* of shape \(2, "),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_numbers_are_refused_or_give_no_token(name: str, wrong: str) -> None:
    """On a device without a wait, and the other requests are not affected."""
    key, place, value, message = WRONG_NUMBERS[wrong]
    program, right, changed = PROGRAMS[name][0], arguments_of(name), {key: spoilt(place, value)}
    if wrong == "a negative token" and name in {
        "block",
        "speculative_sampling",
        "sample_and_match",
    }:
        assert program(**arguments_of(name, **changed)).next_token.min() >= 0, "padding"
        return
    with pytest.raises(OptionError, match=re.escape(f"{key}: {message}")):
        program(**arguments_of(name, **changed))
    expected = told(program(**right))
    with pretend.device() as device:
        arguments = arguments_of(name, device, **changed)
        program(**arguments_of(name, device))  # the tables of a shape are made once
        pretend.waits.clear()
        found = program(**arguments)
        assert not pretend.waits
        assert found.next_token.tolist()[1] == -1
        assert told(found)[0] == expected[0]


@pytest.mark.parametrize("wrong", WRONG_SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_shapes_and_types_are_refused(name: str, wrong: str) -> None:
    change, message = WRONG_SHAPES[wrong]
    with pytest.raises(OptionError, match=message):
        PROGRAMS[name][0](**arguments_of(name, **{wrong: change}))


@pytest.mark.parametrize("name", PROGRAMS)
def test_masses_in_float32_declare_a_law(name: str) -> None:
    """These masses over their sum, of the target and of the draft."""
    own = arguments_of(name)
    q = own["draft"].probs.float()
    own["uniforms"] = torch.rand(
        own["uniforms"].shape, generator=torch.Generator().manual_seed(1)
    ).double()
    coarse = own | {"probs": own["probs"].float() * 3, "draft": DraftLaws(q)}
    exact = own | {"probs": coarse["probs"].double(), "draft": DraftLaws(q.double())}
    exact["probs"] = exact["probs"] / exact["probs"].sum(-1, keepdim=True)
    exact["draft"] = DraftLaws(q.double() / q.double().sum(-1, keepdim=True))
    assert told(PROGRAMS[name][0](**coarse)) == told(PROGRAMS[name][0](**exact))


def test_draft_laws_of_tokens_that_are_not_there_are_refused_or_give_no_token() -> None:
    right = arguments_of("block")
    ids = torch.arange(VOCAB).expand(2, len(CHAIN), -1)
    for wrong in (-1, VOCAB):
        draft = DraftLaws(right["draft"].probs, ids.clone().index_fill(0, torch.tensor(1), wrong))
        with pytest.raises(OptionError, match=f"draft.token_ids: got {wrong} in row 1; expected"):
            block(right["probs"], right["token_ids"], draft, right["uniforms"])
        with pretend.device() as device:
            parts = [right[key].to(device) for key in ("probs", "token_ids", "uniforms")]
            moved = DraftLaws(*(part.to(device) for part in draft))
            found = block(parts[0], parts[1], moved, uniforms=parts[2])
            assert (found.next_token >= 0).tolist() == [True, False]


def test_a_float32_uniform_below_one_is_no_float64_one() -> None:
    """Rounded to float32 it is 1, behind the last token of the vocabulary."""
    probs = torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    last = torch.tensor([BELOW_ONE], dtype=torch.float64)
    with pytest.raises(OptionError, match="positions: got torch.float32"):
        quantile(probs, last.float())
    assert quantile(probs, last).tolist() == [VOCAB - 1]
    for bad in (1.0, -0.1, math.nan):
        positions = torch.tensor([bad], dtype=torch.float64)
        with pytest.raises(OptionError, match=r"positions: got .* expected numbers in \[0, 1\)"):
            quantile(probs, positions)
        with pretend.device() as device:
            assert quantile(probs.to(device), positions.to(device)).tolist() == [-1]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1.0, math.nan, math.inf)),
        ("top_k", (0, -3)),
        ("top_p", (0.0, -0.5, 1.5, math.nan)),
        ("min_p", (-0.1, 2.0, math.nan)),
    ],
)
def test_wrong_sampling_rules_are_refused_or_give_no_law(name: str, values) -> None:
    logits, right = torch.randn(2, 3, VOCAB), {"top_k": 2}.get(name, 0.5)
    expected = probs_from_logits(logits, **{name: right})[0]
    types = [torch.int64] if name == "top_k" else [torch.float32, torch.float64]
    for value, dtype in product(values, types):
        row = torch.tensor([right, value], dtype=dtype)
        with pytest.raises(OptionError, match=name):
            probs_from_logits(logits, **{name: value})
        with pytest.raises(OptionError, match=f"{name}: got .* in row 1; expected"):
            probs_from_logits(logits, **{name: row})
        with pretend.device() as device:
            found = probs_from_logits(logits.to(device), **{name: row.to(device)})
            assert not pretend.waits
            assert found[1].isnan().all().item()
            torch.testing.assert_close(found[0].cpu(), expected, rtol=0, atol=1e-15)
    for odd in (torch.tensor([right]), torch.tensor([[right, right]])):
        with pytest.raises(OptionError, match=f"{name}: got .* of shape"):
            probs_from_logits(logits, **{name: odd})


def test_a_node_has_one_parent() -> None:
    one = problem(("rough", "rough"), CHAIN, Iid, 0)
    arguments = one.p[None], torch.tensor([one.token_ids])
    with pytest.raises(ProposalMismatchError, match="node 2 is a child of nodes 0 and 1"):
        sample_and_match(
            *arguments, ((1, 2), (2, 3), (), ()), torch.zeros(1, 5, dtype=torch.float64)
        )
