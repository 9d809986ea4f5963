"""Checks of what other engines give to the programs; none of them waits for a device.

Shapes, types and numbers on the host are refused. Numbers on a device are known too late for that:
tokens are brought into the vocabulary, and the request gets no token.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from math import inf, nan, nextafter
from sys import float_info
from typing import Any, Final, ParamSpec

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.core.setting_types import is_of
from monge.laws import from_logits
from monge.laws.from_logits import RuleRows, laws_from_logits
from monge.laws.law import DenseLaw, SparseLaw
from monge.laws.lazy_laws import can_score
from monge.verify.functional.tensors import DraftLaws, Verified
from monge.verify.functional.tensors import quantile as _quantile

_Arguments = ParamSpec("_Arguments")
_Bounds = tuple[float | int, float | int, str]
_MASSES: Final = (torch.float64, torch.float32)
"""Types of laws."""
_UNIFORM: Final[_Bounds] = (0.0, nextafter(1.0, 0.0), "numbers in [0, 1)")
_RULES: Final[Mapping[str, _Bounds]] = {
    "temperature": (0.0, float_info.max, "finite numbers of at least 0"),
    "top_k": (1, inf, "whole numbers of at least 1"),
    "top_p": (nextafter(0.0, 1.0), 1.0, "numbers in (0, 1]"),
    "min_p": (0.0, 1.0, "numbers in [0, 1]"),
}


def checked(
    program: Callable[_Arguments, Verified],
    on_host: Callable[..., Verified | None] | None = None,
    *,
    takes_padding: bool = False,
) -> Callable[_Arguments, Verified]:
    """Return a program that checks its arguments.

    Args:
        program: Reads laws in float64.
        on_host: Gives the same verdicts for laws on a CPU, also in float32, or `None`.
        takes_padding: Whether negative tokens are padding.
    """
    names = tuple(signature(program).parameters)

    @wraps(program)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Verified:
        given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
        scores, token_ids, draft = given[names[0]], given["token_ids"], given.get("draft")
        _check(names[0], scores, (None, None, None), *(() if names[0] == "logits" else _MASSES))
        batch, nodes, vocab = scores.shape
        _check("token_ids", token_ids, (batch, nodes), torch.int64)
        known = (0, vocab - 1, f"tokens of a vocabulary of {vocab}")
        least = -inf if takes_padding else 0
        numbers = {"token_ids": (token_ids[:, 1:], (least, *known[1:]))}
        given["token_ids"] = token_ids.clamp(None if takes_padding else 0, vocab - 1)
        if draft is not None:
            probs, ids = draft
            support = vocab if ids is None else None
            _check("draft.probs", probs, (batch, nodes, support), *_MASSES)
            if ids is not None:
                _check("draft.token_ids", ids, tuple(probs.shape), torch.int64)
                numbers["draft.token_ids"] = ids, known
                given["draft"] = DraftLaws(probs, ids.clamp(0, vocab - 1))
        if isinstance(given.get("uniforms"), Tensor):
            _check("uniforms", given["uniforms"], (batch, None), torch.float64)
            numbers["uniforms"] = given["uniforms"], _UNIFORM
        is_bad = _bad_rows(numbers)
        verified = on_host(**given) if on_host is not None else None
        if verified is None:
            verified = program(**given | _in_float64(given))  # pyright: ignore[reportCallIssue]
        return verified._replace(next_token=verified.next_token.masked_fill(is_bad, -1))

    return call


def quantile(
    probs: Float[Tensor, "*rows vocab"], positions: Float[Tensor, " *rows"]
) -> Int64[Tensor, " *rows"]:
    """Return the tokens whose cumulative intervals cover positions in [0, 1): draws from the laws.

    Args:
        probs: Laws, in float64.
        positions: A uniform per law, in float64.

    Returns:
        Tokens, never a token of mass zero; -1 where the law is NaN, or a position on a device is
        not in [0, 1).

    Raises:
        OptionError: If a shape, a type, or a position on the host is wrong.
    """
    _check("probs", probs, (None,) * probs.ndim, torch.float64)
    _check("positions", positions, tuple(probs.shape[:-1]), torch.float64)
    is_bad = _bad_rows({"positions": (positions.reshape(-1, 1), _UNIFORM)}).view(positions.shape)
    return _quantile(probs, positions).masked_fill(is_bad, -1)


def probs_from_logits(
    logits: Float[Tensor, "batch nodes vocab"],
    *,
    temperature: float | int | Tensor = 1.0,
    top_k: float | int | Tensor | None = None,
    top_p: float | int | Tensor | None = None,
    min_p: float | int | Tensor | None = None,
) -> Float64[Tensor, "batch nodes vocab"]:
    """Return the laws of sampling rules, as `monge.SamplingRules` defines them.

    The rules are applied in the order of the arguments, each to the renormalised law that the rule
    before it leaves. A rule that is `None` is not computed; for single requests without it, give a
    `top_k` of the size of the vocabulary, a `top_p` of 1 and a `min_p` of 0.

    Args:
        logits: Logits in any float type.
        temperature: At least 0, as all of these a number or `[batch]`. 0 gives the point mass at
            the first of the largest logits.
        top_k: Whole numbers of at least 1. Tokens equal to the last of them are kept too.
        top_p: In (0, 1].
        min_p: In [0, 1].

    Returns:
        Laws; a row whose logits are not finite, or all -inf, or with a wrong number on a device, is
        NaN.

    Raises:
        OptionError: If a shape, a type, or a number on the host is wrong.
    """
    _check("logits", logits, (None, None, None))
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    plain = {name: rule for name, rule in given.items() if not isinstance(rule, Tensor | None)}
    SamplingRules(**plain)  # pyright: ignore[reportArgumentType]
    if not is_of(plain.get("top_k", 1), int):
        raise OptionError(f"top_k must be a whole number; got {top_k!r}")
    batch, _, vocab = logits.shape
    numbers: dict[str, tuple[Tensor, _Bounds]] = {}
    columns: list[Tensor] = []
    for (name, rule), unused in zip(given.items(), (1.0, vocab, 1.0, 0.0), strict=True):
        if isinstance(rule, Tensor):
            _check(name, rule, (batch,), *([torch.int64] * (name == "top_k")))
            numbers[name] = rule[:, None], _RULES[name]
            columns.append(rule.double())
        else:
            number = unused if rule is None else rule
            # Made on the device, since a copy cannot be captured.
            columns.append(logits.new_full((batch,), number, dtype=torch.float64))
    if numbers:
        logits = logits.masked_fill(_bad_rows(numbers)[:, None, None], nan)
    num_sorted = None
    if top_p is not None or isinstance(top_k, Tensor):
        num_sorted = vocab
    elif top_k is not None or min_p is not None:
        num_sorted = min(int(top_k or 0), vocab)
    rules = torch.stack(columns)
    is_host = all(map(_is_known, (logits, rules))) and not logits.requires_grad
    if is_host and (num_sorted is not None or can_score(logits, 1.0)):
        return _rows_of_laws(logits, rules)
    heat = rules[:1]
    probs = from_logits.probs_from_logits(
        logits, RuleRows(torch.cat([heat + (heat == 0), rules[1:]]), num_sorted)
    )
    if not isinstance(temperature, Tensor) and temperature > 0:
        return probs
    place = torch.arange(vocab, device=logits.device)
    best = (place == logits.argmax(-1, keepdim=True)).double()
    # NaN where the largest is not finite.
    best = best + 0 * logits.amax(-1, keepdim=True)
    return torch.where(heat.reshape(-1, 1, 1) == 0, best, probs)


def _rows_of_laws(
    logits: Float[Tensor, "batch nodes vocab"], rules: Float64[Tensor, "four batch"]
) -> Float64[Tensor, "batch nodes vocab"]:
    """Return the laws on the host, request by request."""
    probs = torch.full(logits.shape, nan, dtype=torch.float64)
    for rows, scores, (temperature, top_k, top_p, min_p) in zip(
        probs, logits, rules.t().tolist(), strict=True
    ):
        of_row = SamplingRules(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
        for row, law in zip(rows, laws_from_logits(scores, of_row), strict=True):
            if isinstance(law, SparseLaw):
                row.zero_()[law.token_ids] = law.probs
            elif isinstance(law, DenseLaw):
                row.copy_(law.probs)
    return probs


def _in_float64(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the laws that masses in float32 declare: these masses, each over the sum of its row."""

    def law(masses: Tensor) -> Tensor:
        if masses.dtype == torch.float64:
            return masses
        exact = masses.double()
        return exact.div_(exact.sum(-1, keepdim=True))

    changed: dict[str, Any] = {"probs": law(given["probs"])} if "probs" in given else {}
    if (draft := given.get("draft")) is not None:
        changed["draft"] = DraftLaws(law(draft[0]), draft[1])
    return changed


def _check(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raise `OptionError` for a tensor of another shape or type; `None` is any size, and no type any float type."""
    is_typed = tensor.dtype in dtypes if dtypes else tensor.is_floating_point()
    sizes = zip(tensor.shape, shape, strict=False)
    is_shaped = tensor.ndim == len(shape) and all(want in {None, size} for size, want in sizes)
    if not (is_typed and is_shaped):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise OptionError(
            f"{name}: got {tensor.dtype} of shape {tuple(tensor.shape)}; expected "
            f"{' or '.join(map(str, dtypes)) or 'a float type'} of shape ({wanted})"
        )


def _bad_rows(
    numbers: Mapping[str, tuple[Shaped[Tensor, "rows _"], _Bounds]],
) -> Bool[Tensor, " rows"]:
    """Return which rows have a number outside of its bounds, or NaN; raise `OptionError` where it lies on the host."""
    rows: list[Tensor] = []
    for name, (values, (least, most, expected)) in numbers.items():
        exact = values.double().flatten(1)  # bounds are numbers of float64
        is_bad = ((exact >= least) & (exact <= most)).logical_not()
        rows.append(is_bad.any(1))
        if _is_known(values) and bool(rows[-1].any()):
            row, number = int(rows[-1].int().argmax()), values.flatten(1)[is_bad][0].item()
            raise OptionError(f"{name}: got {number} in row {row}; expected {expected}")
    return torch.stack(rows).any(0)


def _is_known(values: Tensor) -> bool:
    """Return whether the host may read numbers: tensors without data, and those that are traced, have none."""
    return values.is_cpu and type(values) is Tensor and not torch.compiler.is_compiling()
