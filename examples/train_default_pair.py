"""Trains the default pair: the target by next-token cross entropy, the draft by distillation from it.

    python examples/train_default_pair.py target --data DATA --out OUT --init PAIR/target [--fresh]
    python examples/train_default_pair.py draft --data DATA --out OUT --target PAIR/target [--init PAIR/draft]

`DATA` holds `corpus/` and `prompts/`. Rerunning a command continues where it stopped; Ctrl-C saves first. With glibc, setting
`MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184` doubles the speed: large buffers are then reused, not mapped again.

In the maths p = target, q = draft. A draft token is rejected with probability TV(p, q) = 1 - sum_v min(p_v, q_v), so the draft
is trained on KL(p || q) first, whose gradient never vanishes while they differ, and on TV itself at the end. The target is
twelve times deeper than the draft, so its last hidden states are computed once and stored: 512 bytes per token.
"""

import argparse
import json
import math
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from default_pair_data import (
    COOL,
    DOMAINS,
    Pools,
    corpus_shards,
    draw_batch,
    draw_order,
    read_corpora,
    sampled_shards,
    save_atomically,
    seeded,
)
from default_pair_evaluation import evaluate_draft, held_out_losses, own_text, token_latency_s
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

Step = Callable[[int], float]
SAVE_EVERY_S = 120
FREE_SETTINGS = ("steps", "threads")  # a run may be shortened, prolonged or moved while it is under way


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Returns a float32 model with normal weights; vectors (the norms) keep their ones."""
    model = LlamaForCausalLM(config).float()
    for index, weight in enumerate(model.parameters()):
        if weight.dim() > 1:
            weight.data.normal_(0, config.initializer_range, generator=seeded(seed, index))
    return model


def resized(config: LlamaConfig, args: argparse.Namespace) -> LlamaConfig:
    """Returns the configuration with the sizes given on the command line."""
    sizes = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "intermediate_size": args.intermediate}
    return LlamaConfig(**config.to_dict() | sizes)


def widened(model: LlamaForCausalLM, intermediate: int, seed: int) -> LlamaForCausalLM:
    """Returns the same function with a wider MLP: new units read small random directions and write nothing yet."""
    wide = new_model(LlamaConfig(**model.config.to_dict() | {"intermediate_size": intermediate}), seed)
    for name, old in model.state_dict().items():
        new = wide.state_dict()[name]
        if "down_proj" in name:
            new.zero_()
        new[tuple(slice(size) for size in old.shape)] = old.float()
    return wide


def cross_entropy_step(model: LlamaForCausalLM, rows: Tensor, args: argparse.Namespace) -> Step:
    """Returns the function that adds one batch's gradient of the next-token loss; every epoch has its own order."""
    per_epoch = len(rows) // args.batch

    def step_fn(step: int) -> float:
        epoch, index = divmod(step, per_epoch)
        order = draw_order(len(rows), seeded(args.seed, epoch))
        batch = rows[order[index * args.batch : (index + 1) * args.batch]]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        return float(loss)

    return step_fn


def loss_weights(progress: float) -> tuple[float, float]:
    """Returns the weights of KL and TV: KL alone, then both, then TV alone at the end of the last third."""
    if progress < 1 / 3:
        return 1.0, 0.0
    return 0.5 * min(1.0, 3 * (1 - progress)), 1.0


def law_gradient(draft_logits: Tensor, target_logits: Tensor, kl: float, tv: float) -> tuple[Tensor, Tensor]:
    """Returns the gradient of `kl * KL(p || q) + tv * TV(p, q)` in the draft's logits, and TV of each row.

    dKL/dz = q - p; with b = q where q < p and 0 elsewhere, dTV/dz = q * sum(b) - b. Written out because autograd reads and
    writes the vocabulary several times more.
    """
    p = torch.softmax(target_logits, -1, dtype=torch.float32)
    q = torch.softmax(draft_logits, -1, dtype=torch.float32)
    below = torch.where(q < p, q, 0.0)
    gradient = kl * (q - p) + tv * (q * below.sum(-1, keepdim=True) - below)
    return gradient, (p - q).clamp_min(0).sum(-1)


def distillation_step(draft: LlamaForCausalLM, head: Tensor, pools: Pools, args: argparse.Namespace) -> Step:
    """Returns the function that adds one batch's gradient of the distillation loss and gives the mean TV."""

    def step_fn(step: int) -> float:
        generator = seeded(args.seed, 3, step)
        rows, states = draw_batch(pools, args.batch, args.sampled_fraction, generator)
        is_cool = torch.empty(args.batch).uniform_(generator=generator) < args.cool_fraction
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = draft.model(rows, use_cache=False).last_hidden_state
        weight = draft.lm_head.weight
        low_hidden, low_weight = hidden.detach().bfloat16(), weight.detach().bfloat16()
        hidden_gradient, weight_gradient, total_tv = torch.empty_like(hidden), torch.zeros_like(weight), 0.0
        for i, temperature in enumerate(torch.where(is_cool, COOL, 1.0).tolist()):
            # One row at a time, so that its laws stay in the processor's cache.
            draft_logits, target_logits = low_hidden[i] @ low_weight.T, states[i] @ head.T
            weights = loss_weights(step / args.steps)
            gradient, tv = law_gradient(draft_logits / temperature, target_logits / temperature, *weights)
            gradient = gradient.div_(temperature * rows.numel()).bfloat16()
            hidden_gradient[i] = gradient @ low_weight
            weight_gradient += gradient.T @ low_hidden[i]
            total_tv += float(tv.mean())
        hidden.backward(hidden_gradient)
        weight.grad += weight_gradient  # tied: the embedding's gradient is already there
        return total_tv / args.batch

    return step_fn


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Returns a linear warm-up of 100 steps times a cosine that ends at zero."""
    return args.lr * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / args.steps))


def settings_of(args: argparse.Namespace) -> dict[str, str | int | float | bool | None]:
    """Returns the arguments without the folders they lie in, which are the machine's and not the recipe's."""
    return {key: value.name if isinstance(value, Path) else value for key, value in vars(args).items()}


def restore(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> dict:
    """Loads a checkpoint, if there is one, and returns its step and seconds."""
    if not path.exists():
        return {"step": 0, "seconds": 0.0}
    state = torch.load(path)
    settings = settings_of(args)
    differing = sorted(k for k in settings if k not in FREE_SETTINGS and state["settings"][k] != settings[k])
    if differing:
        raise ValueError(f"{path} was written with other values of {differing}; restore them or choose another --out")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state


def train(model: LlamaForCausalLM, step_fn: Step, args: argparse.Namespace) -> float:
    """Runs the remaining steps and returns the seconds they all took; an interrupt saves and exits.

    All draws are functions of the seed and the step, so the step is also the state of the data's generator.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    path = args.out / "checkpoint.pt"
    state = restore(path, model, optimizer, args)
    step, seconds = state["step"], state["seconds"]
    interrupts: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: interrupts.append(received))
    started = saved = time.monotonic()
    bar = tqdm(initial=step, total=args.steps, mininterval=5)
    while step < args.steps:
        loss = step_fn(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        now = time.monotonic()
        if interrupts or step == args.steps or now - saved > SAVE_EVERY_S:
            saved = now
            state = {"step": step, "seconds": seconds + now - started, "settings": settings_of(args)}
            save_atomically(state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        if interrupts:
            sys.exit(f"saved at step {step}; run the same command to continue")
    bar.close()
    return state["seconds"]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, numbers: dict, args: argparse.Namespace) -> None:
    """Writes the weights in bf16, the tokenizer and `training_report.json`."""
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}
    report = numbers | {"settings": settings_of(args), "versions": versions}
    (args.out / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")


def load(folder: Path) -> LlamaForCausalLM:
    """Loads a bf16 model for inference."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def run_target(args: argparse.Namespace) -> None:
    """Trains or continues a target."""
    tokenizer = AutoTokenizer.from_pretrained(args.init)
    corpora = read_corpora(args.data, tokenizer, args.sequence)
    rows = torch.cat([c.rows.repeat(DOMAINS[name].repeats, 1) for name, c in corpora["train"].items()])
    if args.fresh:
        target = new_model(resized(LlamaConfig.from_pretrained(args.init), args), args.seed)
    else:
        target = load(args.init).float()
    seconds = train(target, cross_entropy_step(target, rows, args), args)
    target = target.bfloat16().eval()
    numbers = {"held_out": held_out_losses(target, corpora["held_out"]), "corpus_tokens": rows.numel()}
    save(target, tokenizer, numbers | {"seconds": seconds, "tokens": args.steps * args.batch * args.sequence}, args)


def run_draft(args: argparse.Namespace) -> None:
    """Distils a draft from a target."""
    tokenizer, target = AutoTokenizer.from_pretrained(args.target), load(args.target)
    corpora, sizes = read_corpora(args.data, tokenizer, args.sequence), {"seq": args.sequence, "seed": args.seed}
    texts = own_text(target, corpora["held_out"], args.out / "cache", **sizes)
    initial = new_model(resized(target.config, args), args.seed) if args.init is None else load(args.init)
    draft = widened(initial, args.intermediate, args.seed)
    pools = (
        sampled_shards(target, corpora["train"], args.out / "cache", num_tokens=args.sampled_tokens, **sizes),
        corpus_shards(target, corpora["train"], args.out / "cache", num_tokens=args.corpus_tokens, **sizes),
    )
    head = target.lm_head.weight.detach()
    seconds = train(draft, distillation_step(draft, head, pools, args), args)
    numbers: dict[str, object] = {"target_held_out": held_out_losses(target, corpora["held_out"])}
    for moment, model in (("before", initial), ("after", draft)):
        numbers[moment] = evaluate_draft(model.bfloat16().eval(), target, corpora["held_out"], texts)
    numbers["target_latency_s"], numbers["draft_latency_s"] = token_latency_s(target), token_latency_s(draft)
    save(draft, tokenizer, numbers | {"seconds": seconds, "tokens": args.steps * args.batch * args.sequence}, args)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    target, draft = commands.add_parser("target"), commands.add_parser("draft")
    for command, sequence, batch, steps, sizes in (
        (target, 512, 8, 2_600, (12, 256, 704)),
        (draft, 256, 16, 10_000, (1, 256, 2048)),
    ):
        command.add_argument("--data", type=Path, required=True, help="folder with corpus/ and prompts/")
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--lr", type=float, default=2e-3)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--batch", type=int, default=batch)
        command.add_argument("--sequence", type=int, default=sequence)
        for name, size in zip(("--layers", "--hidden", "--intermediate"), sizes, strict=True):
            command.add_argument(name, type=int, default=size)
    target.add_argument("--init", type=Path, required=True, help="model that gives the tokenizer, the layout and the start")
    target.add_argument("--fresh", action="store_true", help="start from new weights of the given sizes")
    draft.add_argument("--target", type=Path, required=True)
    draft.add_argument("--init", type=Path, help="draft to widen and continue; without it, new weights of the given sizes")
    draft.add_argument("--corpus-tokens", type=int, default=4_000_000)
    draft.add_argument("--sampled-tokens", type=int, default=1_300_000)
    draft.add_argument("--sampled-fraction", type=float, default=0.5, help="share of sampled text in a batch")
    draft.add_argument("--cool-fraction", type=float, default=0.3, help=f"share of rows whose laws are taken at {COOL}")
    return parser.parse_args()


def main() -> None:
    """Runs the chosen command."""
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    {"target": run_target, "draft": run_draft}[args.command](args)


if __name__ == "__main__":
    main()
