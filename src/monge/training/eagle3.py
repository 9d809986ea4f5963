"""`monge train eagle3`: states of three layers, a reduced vocabulary, and chains that read their own predictions.

In the maths p = target, q = draft.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from monge.core.errors import OptionError, UnsupportedModelError
from monge.heads.readers.attention import GroupedAttention
from monge.heads.readers.eagle3 import Eagle3Head
from monge.heads.readers.source import Source
from monge.networks.base import FeatureModel
from monge.training.chain import ChainQuality, Step, chain_quality
from monge.training.loop import NOBODY, Outcome, Recipe, Watch, train
from monge.training.own_text import AnswerSettings, OnRows, digest_of, write_answers
from monge.training.texts import Text, Texts, TokenStates, feature_model, read_texts

DRAFT_VOCABULARY: Final = 8192
MIN_LAYERS: Final = 5
_CHOSEN: Final = 0.04  # of the conversations, to choose weights by, and as many to measure
_MOST_CHOSEN: Final = 128
_LOOK: Final = 48  # conversations of an evaluation during training
_ROWS: Final = 4  # rows of one measurement's forward
_LONGEST: Final = 384  # most tokens of a text, whose states take a few kilobytes each
_LOGITS: Final = 512  # rows of logits at a time
_LAYER: Final = "midlayer"


@dataclass(kw_only=True, eq=False)
class Eagle3Trainee:
    """An EAGLE-3 head of a single layer in training; `tensors` are changed in place.

    Chains start at every position. Step n of a chain reads the prediction of step n - 1. Attention
    reads the true states up to the start of the chain and the chain's own predictions after it, as
    in decoding ("training-time test").

    The loss of a step moves from the cross entropy to the total variation, which equals the rejection
    probability:

        (1 - a) (-sum_v p_v log q_v) + a (1 - sum_v min(p_v, q_v)),    v in the draft vocabulary,

    where a rises from 0 to 1 between two shares of the training.

    Args:
        fitted: Training conversations.
        embeddings: The target's embeddings of all tokens, which stay as they are.
        output: Rows of its output layer for the draft vocabulary.
        norm: Weight of its norm before the output layer.
        draft_ids: The draft vocabulary, ascending.
        config: Llama-like configuration of the layer.
        num_steps: Length of a chain.
        decay: Weight of a step relative to the previous step.
        anneal: The shares of the training between which the loss moves.
        seed: Seed of the initial weights.
        dtype: Type of the head's matrix products.

    Reference:
        Li et al., EAGLE-3, arXiv 2503.01840, section 3.
    """

    fitted: Texts
    embeddings: Float[Tensor, "vocab hidden"]
    output: Float[Tensor, "draft hidden"]
    norm: Float[Tensor, " hidden"]
    draft_ids: Int64[Tensor, " draft"]
    config: Mapping[str, Any]
    num_steps: int = 4
    decay: float = 0.8
    anneal: tuple[float, float] = (0.3, 0.7)
    seed: int = 0
    dtype: torch.dtype = torch.float32
    tensors: dict[str, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        fresh = initial(self.config, self.norm, self.output, generator)
        device, ids = self._device, self.draft_ids.cpu()
        self.tensors = {name: part.to(device).requires_grad_() for name, part in fresh.items()}
        named = {name.replace(_LAYER, "layers.0"): part for name, part in self.tensors.items()}
        named["d2t"] = ids - torch.arange(len(ids))
        self.head = Eagle3Head(Source.in_memory(named, self.config))

    def loss(self, batch_size: int, generator: torch.Generator, share: float = 1.0) -> Tensor:
        """Loss of a random batch of about `batch_size` positions.

        Args:
            batch_size: Approximate number of positions.
            generator: Source of the batch.
            share: Share of the training that is done.
        """
        # Neighbours have about the same length.
        first = int(torch.randint(len(self.fitted), (1,), generator=generator))
        count = batch_size // (self.fitted.starts[first + 1] - self.fitted.starts[first])
        first = min(first, max(0, len(self.fitted) - count))
        low, high = self.anneal
        variation = min(1.0, max(0.0, (share - low) / (high - low)))
        total = torch.zeros((), device=self._device)
        texts = self.fitted.batch(first, max(1, count), self._device)
        for number, step in enumerate(self._steps(texts)):
            assert step.log_z is not None
            p = (step.true - step.log_z[:, None]).exp()
            total = total + self.decay**number * _Loss.apply(step.drafted.float(), p, variation)
        return total

    @torch.no_grad()
    def quality(self, texts: Texts) -> ChainQuality:
        """Acceptance of chains that start at tokens of the target."""
        return chain_quality(
            self._steps(texts.batch(start, _ROWS, self._device))
            for start in range(0, len(texts), _ROWS)
        )

    def _steps(self, texts: TokenStates) -> Iterator[Step]:
        """Steps of the chains that count, over the draft vocabulary.

        The chain at position t is given x_0 .. x_{t+1}. Its step n (from 0) reads the embedding of
        x_{t+1+n} and predicts the law of x_{t+2+n}.
        """
        rows, length = texts.token_ids.shape
        places, ids = length - 1 - self.num_steps, self.draft_ids
        # A chain counts if the target wrote all the tokens that it is about.
        is_learnt = texts.is_learnt.unfold(1, self.num_steps, 1).all(dim=2)[:, 2 : 2 + places]
        learnt, log_z = is_learnt.flatten(), texts.log_z
        assert log_z is not None
        embeddings = functional.embedding(texts.token_ids, self.embeddings)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        with torch.no_grad(), self._mixed():  # neighbouring steps share most places
            is_read = torch.zeros(rows, length, dtype=torch.bool, device=learnt.device)
            for number in range(self.num_steps):
                is_read[:, 1 + number : 1 + number + places] |= is_learnt
            read_at = is_read.flatten().cumsum(0).view(rows, length) - 1
            all_true = functional.linear(texts.states[is_read].float(), self.output).float()
        with self._mixed():
            states = self.head.fuse(texts.features[:, :places].flatten(0, 1).float())
        for number in range(self.num_steps):
            at = slice(1 + number, 1 + number + places)
            with self._mixed():
                states = self._advance(embeddings[:, at], states, number, keys, values)
                drafted = self.head.scores(states[learnt]).float()
            tokens = texts.token_ids[:, 2 + number : 2 + number + places].flatten()[learnt]
            place = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
            yield Step(
                drafted=drafted,
                true=all_true[read_at[:, at].flatten()[learnt]],
                token_ids=torch.where(ids[place] == tokens, place, -1),
                log_z=log_z[:, at].flatten()[learnt].float(),
            )

    def _advance(
        self,
        embeddings: Tensor,
        states: Tensor,
        number: int,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Run a step of all chains through the layer, which appends to `keys` and `values`."""
        rows, places = embeddings.shape[:2]
        layer: Any = self.head.decoder[0]
        attention: GroupedAttention = layer.attention
        residual, read = self.head.enter(embeddings.flatten(0, 1), states.float())
        positions = torch.arange(number, number + places).repeat(rows)
        parts = attention.turned(read, attention.rotary.angles(positions, residual))[:3]
        queries, key, value = (
            part.unflatten(0, (rows, places)).transpose(1, 2).float() for part in parts
        )
        keys.append(key.repeat_interleave(attention.heads // attention.kv_heads, dim=1))
        values.append(value.repeat_interleave(attention.heads // attention.kv_heads, dim=1))
        mixed = self._attention(queries, keys, values).transpose(1, 2).flatten(2).flatten(0, 1)
        after = residual + attention.o_proj(mixed)
        return after + layer.mlp(layer.second(after))

    def _attention(
        self, queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """The first step's keys up to a chain's start, and the chain's own keys of the later steps."""
        length, scale = queries.shape[2], queries.shape[-1] ** -0.5
        with torch.autocast(self._device.type, enabled=False):
            hidden = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
            scores = (queries @ keys[0].transpose(2, 3)).masked_fill(hidden, -math.inf)
            later_scores = [(queries * key).sum(dim=-1, keepdim=True) for key in keys[1:]]
            shares = (torch.cat([scores, *later_scores], dim=-1) * scale).softmax(dim=-1)
            later = zip(shares[..., length:].split(1, dim=-1), values[1:], strict=False)
            return shares[..., :length] @ values[0] + sum(share * value for share, value in later)

    def _mixed(self) -> torch.autocast:
        is_narrow = self.dtype != torch.float32
        return torch.autocast(self._device.type, dtype=self.dtype, enabled=is_narrow)

    @property
    def _device(self) -> torch.device:
        return self.output.device


class _Loss(torch.autograd.Function):
    """(1 - a) cross entropy + a total variation, with their gradient: autograd would keep eight tables of logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, variation: float) -> Tensor:
        q, mass = logits.softmax(dim=1), p.sum(dim=1)
        entropy = mass * logits.logsumexp(dim=1) - torch.linalg.vecdot(p, logits)
        overlap = torch.minimum(p, q).sum(dim=1)
        # d entropy = q mass - p;  d overlap = q (1[q < p] - sum_v q_v 1[q_v < p_v]).
        below = (q < p).to(q.dtype)
        inside = torch.linalg.vecdot(below, q)
        slope = q * ((1 - variation) * mass + variation * inside)[:, None]
        slope -= (1 - variation) * p
        slope.addcmul_(below, q, value=-variation)
        ctx.save_for_backward(slope.div_(len(logits)))
        return ((1 - variation) * entropy + variation * (1 - overlap)).mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad_outputs[0], None, None


def initial(
    config: Mapping[str, Any], norm: Tensor, output: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Weights under the names of the published format.

    Output projections are zero, so the last fused state passes unchanged into the target's norm and
    the rows of its output layer.
    """
    hidden, inner, dim = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    layer = {
        "hidden_norm": torch.ones(hidden),
        "input_layernorm": torch.ones(hidden),
        "self_attn.q_proj": drawn(heads * dim, 2 * hidden),
        "self_attn.k_proj": drawn(kv_heads * dim, 2 * hidden),
        "self_attn.v_proj": drawn(kv_heads * dim, 2 * hidden),
        "self_attn.o_proj": torch.zeros(hidden, heads * dim),
        "mlp.gate_proj": drawn(inner, hidden),
        "mlp.up_proj": drawn(inner, hidden),
        "mlp.down_proj": torch.zeros(hidden, inner),
        "post_attention_layernorm": torch.ones(hidden),
    }
    return {
        "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1),
        **{f"{_LAYER}.{name}.weight": weight for name, weight in layer.items()},
        "norm.weight": norm.detach().float().cpu().clone(),
        "lm_head.weight": output.detach().float().cpu().clone(),
    }


def train_eagle3(
    network: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    recipe: Recipe,
    answers: AnswerSettings,
    draft_vocabulary: int = DRAFT_VOCABULARY,
    num_steps: int = 4,
    watch: Watch = NOBODY,
    on_answers: OnRows = lambda count: None,
    about: Mapping[str, Any] | None = None,
) -> Outcome:
    """Let the target answer the prompts, read the answers, train an EAGLE-3 head, and save it in the published format.

    Args:
        network: The target, a Llama-like network.
        prompts: Token ids, each up to where the answer starts.
        folder: Folder of the answers, the checkpoint and the head; a rerun continues there.
        recipe: Settings of the training.
        answers: Settings of the answers.
        draft_vocabulary: Number of tokens that the head drafts, those that the target writes most
            often.
        num_steps: Steps of the chains that the head is trained on.
        watch: Receives progress.
        on_answers: Receives the number of new answers.
        about: Further entries of the saved configuration.

    Raises:
        UnsupportedModelError: If the target has too few layers, or no norm before its output layer.
        OptionError: If there are too few answers.
    """
    sizes = feature_model(network)
    if sizes.num_layers < MIN_LAYERS:
        raise UnsupportedModelError(
            f"an EAGLE-3 head fuses three layers; this target has {sizes.num_layers}"
        )
    quick = faster_copy(network)
    written = write_answers(quick, prompts, answers, folder, on_answers)
    layers = (2, sizes.num_layers // 2, sizes.num_layers - 3)
    pairs = [(prompt, answer) for prompt, answer in written if len(answer) > num_steps]
    count = min(_MOST_CHOSEN, max(1, round(_CHOSEN * len(pairs))))
    if len(pairs) < 2 * count + 1:
        raise OptionError(
            f"training: {len(pairs)} answers are too few to fit, to choose and to "
            "measure; give more prompts"
        )

    def read(some: Sequence[Text], by: PreTrainedModel = network) -> Texts:
        device, num_states = by.device, (len(layers) + 1) * sizes.hidden_size
        size = 2 * num_states * sum(len(prompt) + len(answer) for prompt, answer in some)
        has_room = device.type == "cuda" and 2 * size < torch.cuda.mem_get_info(device)[0]
        texts = read_texts(
            feature_model(by),
            some,
            layers,
            longest=_LONGEST,
            least=num_steps + 1,  # a chain needs so many tokens of the target
            batch_size=64 if device.type == "cuda" else 8,
            dtype=torch.bfloat16,
            device=device if has_room else "cpu",
            on_rows=watch.on_read,
        )
        return replace(texts, log_z=_log_z(by, texts.states))

    measured, chosen = read(pairs[:count]), read(pairs[count : 2 * count][:_LOOK])
    fitted = read(pairs[2 * count :], quick)
    learnt, vocab = fitted.token_ids[fitted.is_learnt], sizes.vocab_size
    # The most frequent tokens; ties prefer smaller ids.
    order = torch.bincount(learnt, minlength=vocab).sort(descending=True, stable=True).indices
    ids = order[: min(draft_vocabulary, vocab)].sort().values.cpu()
    trainee = Eagle3Trainee(
        fitted=fitted,
        **_ends(network, ids),
        config=layer_config(network, sizes),
        num_steps=num_steps,
        seed=recipe.seed,
        dtype=quick.dtype,
    )
    progress = train(
        trainee.tensors,
        lambda generator, share: trainee.loss(recipe.batch_size, generator, share),
        lambda: trainee.quality(chosen).block_efficiency,
        recipe=recipe,
        folder=folder,
        identity={
            "target": digest_of(network),
            "text": fitted.digest,
            "num_steps": num_steps,
            "draft_vocabulary": draft_vocabulary,
        },
        watch=watch,
    )
    outcome = Outcome(
        num_parameters=sum(tensor.numel() for tensor in trainee.tensors.values()),
        quality=None if watch.should_stop() else trainee.quality(measured),
        progress=progress,
    )
    if outcome.quality is not None:
        covered = torch.isin(measured.token_ids[measured.is_learnt].cpu(), ids).double().mean()
        config = {
            **trainee.config,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(ids),
            "about": {
                "answers": len(pairs),
                "tokens": len(learnt),
                "draft_vocabulary_covers": round(float(covered), 4),
                **outcome.figures,
                **(about or {}),
            },
        }
        save_published(
            folder / "model.safetensors",
            trainee.tensors,
            config,
            d2t=ids - torch.arange(len(ids)),
            t2d=torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, value=True),
        )
    return outcome


def faster_copy(network: PreTrainedModel) -> PreTrainedModel:
    """Return the network, or a bfloat16 copy on devices where that writes and reads text faster."""
    able = getattr(torch.cpu, "get_capabilities", dict)()
    has_bfloat16 = (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if network.device.type == "cuda"
        else bool(able.get("amx_tile") or able.get("avx512_bf16"))
    )
    if not has_bfloat16 or network.dtype != torch.float32:
        return network
    copied: Any = deepcopy(network)
    return copied.to(torch.bfloat16)


@torch.no_grad()
def _log_z(network: Any, states: Float[Tensor, "tokens hidden"]) -> Float[Tensor, " tokens"]:
    """Return the log-sum-exp of the logits at every token."""
    output, device = network.get_output_embeddings(), network.device
    parts = (part.to(device, network.dtype) for part in states.split(_LOGITS))
    return torch.cat([output(part).float().logsumexp(dim=-1) for part in parts]).to(states.device)


def _ends(network: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Return the frozen parts of the target that training needs, see `Eagle3Trainee`."""
    norm = getattr(network.model, "norm", None)
    if norm is None:
        raise UnsupportedModelError(f"{type(network).__name__} has no norm before its output layer")
    return {
        "embeddings": network.get_input_embeddings().weight.detach().float(),
        "output": network.get_output_embeddings().weight.detach()[ids].float(),
        "norm": norm.weight.detach().float(),
        "draft_ids": ids.to(network.device),
    }


def save_published(
    file: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any], **beside: Tensor
) -> None:
    """Save a head in a published format, its weights in bfloat16, which changes no output distribution."""
    rounded = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in weights.items()}
    save_file({name: tensor.contiguous() for name, tensor in (rounded | beside).items()}, file)
    text = json.dumps(config, indent=2) + "\n"
    (file.parent / "config.json").write_text(text, encoding="utf-8")


def layer_config(network: PreTrainedModel, sizes: FeatureModel) -> dict[str, Any]:
    """Configuration of a Llama layer of the target's size."""
    config = network.config.get_text_config()

    def given(name: str, default: Any) -> Any:
        return getattr(config, name, None) or default

    heads = int(given("num_attention_heads", max(1, sizes.hidden_size // 64)))
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": int(given("num_key_value_heads", heads)),
        "head_dim": int(given("head_dim", sizes.hidden_size // heads)),
        "intermediate_size": int(given("intermediate_size", 4 * sizes.hidden_size)),
        "hidden_act": "silu",
        "rms_norm_eps": float(given("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta") or 10000.0),
        "bias": False,
    }
