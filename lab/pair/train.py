"""Trains the default pair: the target by next-token cross entropy, the draft by distillation from it.

    python -m lab.pair.train target --data DATA --out OUT --init PAIR/target [--fresh [--family gpt_neox]]
    python -m lab.pair.train draft --data DATA --out OUT --target PAIR/target [--init PAIR/draft]
    python -m lab.pair.train evaluate --data DATA --out OUT --target PAIR/target --draft PAIR/draft

`DATA` holds `corpus/` and `prompts/`. A rerun of a command continues where it stopped; Ctrl-C saves
first. `--device cuda` trains on a GPU. With `--minutes` the schedule follows the clock where it
runs ahead of the steps, so that it always completes.

In the maths p = target, q = draft. A draft token is rejected with probability TV(p, q) = 1 - sum_v
min(p_v, q_v), so the draft is trained on KL(p || q) first, whose gradient never vanishes while they
differ, and on TV itself at the end.
"""

import argparse
import json
import math
import platform
import signal
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lab.pair.data import (
    COOL,
    DOMAINS,
    MOST_PROMPT_TOKENS,
    Pool,
    Pools,
    draw_indices,
    draw_order,
    read_corpora,
    sampled_pool,
    save_atomically,
    seeded,
)
from lab.pair.evaluation import (
    arithmetic,
    evaluate_draft,
    held_out_losses,
    law_gradient,
    load,
    loss_weights,
    measure_pair,
    own_text,
)

# Of the step and the progress, from 0 to 1, to a value to show.
Step = Callable[[int, float], Tensor]
SAVE_EVERY_S = 60
SHOW_EVERY = 50
SHARED_BY_FAMILIES = (
    "vocab_size",
    "num_attention_heads",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
)
WATCHED = ("gsm8k", "prose")  # domains that are measured during a run
# A run may be shortened, prolonged or moved while it is under way.
FREE_SETTINGS = ("steps", "minutes", "threads", "device")


def new_model(config: PreTrainedConfig, family: str, args: argparse.Namespace) -> PreTrainedModel:
    """Returns a float32 model of the given sizes with normal weights.

    Vectors (the norms) keep their ones.

    Of another family it has the vocabulary, heads, context and end of text of `config`, and its
    family's own choices otherwise.
    """
    sizes = {
        "num_hidden_layers": args.layers,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
    }
    if family == config.model_type:
        made = type(config)(**config.to_dict() | sizes)
    else:
        made = AutoConfig.for_model(
            family, **{name: getattr(config, name) for name in SHARED_BY_FAMILIES} | sizes
        )
    model = AutoModelForCausalLM.from_config(made).float()
    for index, weight in enumerate(model.parameters()):
        if weight.dim() > 1:
            weight.data.normal_(0, config.initializer_range, generator=seeded(args.seed, index))
    return model


def mixed_precision(args: argparse.Namespace) -> torch.autocast:
    """Returns the context of a forward.

    Bf16 on a GPU, float32 on a CPU, of which most only imitate bf16.
    """
    return torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda")


def cross_entropy_step(model: PreTrainedModel, rows: Tensor, args: argparse.Namespace) -> Step:
    """Returns the function that adds one batch's gradient of the next-token loss.

    Every epoch cuts the text at other places and has its own order.
    """
    per_epoch = len(rows) // args.batch

    @lru_cache(maxsize=1)
    def rows_of(epoch: int) -> Tensor:
        generator = seeded(args.seed, epoch)
        shift, order = (
            int(draw_indices(args.sequence, 1, generator)),
            draw_order(len(rows), generator),
        )
        return rows.flatten().roll(-shift).view_as(rows)[order].to(args.device)

    def step_fn(step: int, _: float) -> Tensor:
        epoch, index = divmod(step, per_epoch)
        batch = rows_of(epoch)[index * args.batch : (index + 1) * args.batch]
        with mixed_precision(args):
            logits = model(batch, use_cache=False).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()
        )
        loss.backward()
        return loss.detach()

    return step_fn


def distillation_step(
    draft: PreTrainedModel, target: PreTrainedModel, pools: Pools, args: argparse.Namespace
) -> Step:
    """Returns the function that adds one batch's gradient of the distillation loss and gives the mean TV."""
    head = target.lm_head.weight.detach()
    kind = arithmetic(args.device)
    # On a CPU the laws of a chunk stay in the processor's cache.
    chunk = 16384 if args.device == "cuda" else 256

    def step_fn(step: int, progress: float) -> Tensor:
        generator = seeded(args.seed, 3, step)
        rows, is_cool = pools.draw(args.batch, args.sampled_fraction, generator)
        # Cool text has cool laws; of the rest a fraction has.
        is_cool |= torch.empty(args.batch).uniform_(generator=generator) < args.cool_fraction
        temperatures = (
            torch.where(is_cool, COOL, 1.0)
            .repeat_interleave(args.sequence)[:, None]
            .to(rows.device)
        )
        with torch.inference_mode():
            states = target.model(rows, use_cache=False).last_hidden_state.flatten(0, 1)
        with mixed_precision(args):
            hidden = draft.model(rows, use_cache=False).last_hidden_state.flatten(0, 1)
        weight = draft.lm_head.weight
        low_hidden, low_weight = hidden.detach().to(kind), weight.detach().to(kind)
        hidden_gradient, weight_gradient, rejections = (
            torch.empty_like(hidden),
            torch.zeros_like(weight),
            [],
        )
        parts = zip(
            *(part.split(chunk) for part in (low_hidden, states, temperatures, hidden_gradient)),
            strict=True,
        )
        for part, part_states, temperature, part_gradient in parts:
            draft_logits, target_logits = (
                part @ low_weight.T / temperature,
                part_states @ head.T / temperature,
            )
            gradient, tv = law_gradient(draft_logits, target_logits, *loss_weights(progress))
            gradient = gradient.div_(temperature * rows.numel()).to(kind)
            part_gradient.copy_(gradient @ low_weight)
            weight_gradient += gradient.T @ part
            rejections.append(tv.sum())
        hidden.backward(hidden_gradient)
        weight.grad += weight_gradient  # tied: the embedding's gradient is already there
        return torch.stack(rejections).sum() / rows.numel()

    return step_fn


def learning_rate(step: int, progress: float, args: argparse.Namespace) -> float:
    """Returns a linear warm-up of some steps times a cosine that ends at zero."""
    return args.lr * min(1.0, (step + 1) / args.warm_up) * 0.5 * (1 + math.cos(math.pi * progress))


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model with the numbers of its stored weights, which have bf16, in the type it runs in."""
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().to(arithmetic(weight.device.type))
    return model.eval()


def settings_of(args: argparse.Namespace) -> dict[str, str | int | float | bool | None]:
    """Returns the arguments without the folders they lie in, which are the machine's and not the recipe's."""
    return {
        key: value.name if isinstance(value, Path) else value for key, value in vars(args).items()
    }


def progress_of(step: int, seconds: float, args: argparse.Namespace) -> float:
    """Returns the part of the run that is done, by its steps or by its minutes, whichever is further."""
    return max(step / args.steps, seconds / (60 * args.minutes) if args.minutes else 0.0)


def save_state(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
    **numbers: float,
) -> None:
    """Writes a checkpoint."""
    states = {
        "settings": settings_of(args),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    save_atomically(numbers | states, path)


def restore(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, args: argparse.Namespace
) -> dict:
    """Loads a checkpoint, if there is one, and returns its step and seconds."""
    if not path.exists():
        return {"step": 0, "seconds": 0.0}
    state = torch.load(path, map_location=args.device)
    settings = settings_of(args)
    differing = sorted(
        k for k in settings if k not in FREE_SETTINGS and state["settings"][k] != settings[k]
    )
    if differing:
        raise ValueError(
            f"{path} was written with other values of {differing}; restore them or "
            "choose another --out"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state


def train(
    model: PreTrainedModel, step_fn: Step, args: argparse.Namespace, watch: Callable[[], object]
) -> dict:
    """Runs the remaining steps and returns how many there were and the seconds.

    An interrupt saves and exits.

    All draws are functions of the seed and the step, so the step is also the state of the data's
    generator.
    """
    model = model.to(args.device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    path = args.out / "checkpoint.pt"
    state = restore(path, model, optimizer, args)
    step, seconds = state["step"], state["seconds"]
    interrupts: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: interrupts.append(received))
    started = saved = time.monotonic()
    bar = tqdm(initial=step, total=args.steps, mininterval=10)
    while (progress := progress_of(step, seconds + time.monotonic() - started, args)) < 1:
        loss = step_fn(step, progress)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, args)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        if step % SHOW_EVERY == 0:
            bar.set_postfix(loss=f"{float(loss):.3f}", progress=f"{progress:.2f}", refresh=False)
        if interrupts or time.monotonic() - saved > SAVE_EVERY_S:
            save_state(
                path,
                model,
                optimizer,
                args,
                step=step,
                seconds=seconds + time.monotonic() - started,
            )
            tqdm.write(f"step {step}: {watch()}")
            saved = time.monotonic()
        if interrupts:
            sys.exit(f"saved at step {step}; run the same command to continue")
    bar.close()
    seconds += time.monotonic() - started
    save_state(path, model, optimizer, args, step=step, seconds=seconds)
    return {"steps": step, "seconds": seconds, "tokens": step * args.batch * args.sequence}


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    numbers: dict,
    args: argparse.Namespace,
) -> None:
    """Writes the weights in bf16, the tokenizer and `training_report.json`."""
    model.cpu().bfloat16().save_pretrained(args.out)
    # Stored small, run in float32: most CPUs only imitate bfloat16, and then eight nodes cost three
    # times as much as one.
    config = json.loads((args.out / "config.json").read_text()) | {"dtype": "float32"}
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(args.out)
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    report = numbers | {"settings": settings_of(args), "versions": versions}
    (args.out / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")


def run_target(args: argparse.Namespace) -> None:
    """Trains or continues a target."""
    tokenizer = AutoTokenizer.from_pretrained(args.init)
    corpora = read_corpora(args.data, tokenizer, args.sequence)
    rows = torch.cat(
        [c.rows.repeat(DOMAINS[name].repeats, 1) for name, c in corpora["train"].items()]
    )
    initial = load(args.init, args.device)
    numbers: dict[str, object] = {"epoch_tokens": rows.numel()}
    if not args.fresh:
        numbers["init_held_out"] = held_out_losses(initial, corpora["held_out"])
    target = (
        new_model(initial.config, args.family or initial.config.model_type, args)
        if args.fresh
        else initial.float()
    )
    few = {name: corpora["held_out"][name] for name in WATCHED}
    report = train(
        target, cross_entropy_step(target, rows, args), args, lambda: held_out_losses(target, few)
    )
    target = rounded(target)
    numbers["held_out"] = held_out_losses(target, corpora["held_out"])
    save(target, tokenizer, numbers | report, args)


def run_draft(args: argparse.Namespace) -> None:
    """Distils a draft from a target."""
    tokenizer, target = AutoTokenizer.from_pretrained(args.target), load(args.target, args.device)
    corpora, sizes = (
        read_corpora(args.data, tokenizer, args.sequence),
        {"seq": args.sequence, "seed": args.seed},
    )
    held_out, train_text = corpora["held_out"], corpora["train"]
    texts = own_text(target, held_out, args.out / "cache", **sizes)
    draft = (
        new_model(target.config, target.config.model_type, args)
        if args.init is None
        else load(args.init, args.device).float()
    )
    draft = draft.to(args.device)
    numbers: dict[str, object] = {"before": evaluate_draft(draft, target, held_out, texts)}
    shares = [DOMAINS[name].share for name in train_text]
    pools = Pools(
        sampled=sampled_pool(
            target,
            train_text,
            args.out / "cache",
            num_tokens=args.sampled_tokens,
            shard_rows=args.sample_rows,
            **sizes,
        ),
        read=Pool.of([corpus.rows for corpus in train_text.values()], shares, target.device),
    )
    few = {name: held_out[name] for name in WATCHED}
    step_fn = distillation_step(draft, target, pools, args)
    report = train(draft, step_fn, args, lambda: evaluate_draft(draft, target, few, texts)["mean"])
    draft = rounded(draft)
    numbers["after"] = evaluate_draft(draft, target, held_out, texts)
    save(draft, tokenizer, numbers | report, args)


def run_evaluate(args: argparse.Namespace) -> None:
    """Measures a pair and writes `evaluation.json`."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target, draft = load(args.target, args.device), load(args.draft, args.device)
    held_out = read_corpora(args.data, tokenizer, args.sequence)["held_out"]
    texts = own_text(target, held_out, args.out / "cache", seq=args.sequence, seed=args.seed)
    report = measure_pair(draft, target, held_out, texts)
    (args.out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    target, draft = commands.add_parser("target"), commands.add_parser("draft")
    evaluate = commands.add_parser("evaluate")
    for command in (target, draft, evaluate):
        command.add_argument(
            "--data", type=Path, required=True, help="folder with corpus/ and prompts/"
        )
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--sequence", type=int, default=512)
    for command, steps, layers, intermediate in (
        (target, 8_000, 12, 704),
        (draft, 40_000, 1, 2048),
    ):
        command.add_argument("--lr", type=float, default=2e-3)
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument(
            "--minutes", type=float, help="wall-clock budget of the training steps"
        )
        command.add_argument("--warm-up", type=int, default=200, help="steps")
        command.add_argument("--weight-decay", type=float, default=0.1)
        command.add_argument("--batch", type=int, default=64)
        command.add_argument("--layers", type=int, default=layers)
        command.add_argument("--hidden", type=int, default=256)
        command.add_argument("--intermediate", type=int, default=intermediate)
    target.add_argument(
        "--init",
        type=Path,
        required=True,
        help="model that gives the tokenizer, the layout and the start",
    )
    target.add_argument(
        "--fresh", action="store_true", help="start from new weights of the given sizes"
    )
    target.add_argument(
        "--family",
        help="family of a fresh model, as transformers names it; default: that of --init",
    )
    for command in (draft, evaluate):
        command.add_argument("--target", type=Path, required=True)
    evaluate.add_argument("--draft", type=Path, required=True)
    draft.add_argument(
        "--init", type=Path, help="draft to continue; without it, new weights of the given sizes"
    )
    draft.add_argument("--sampled-tokens", type=int, default=20_000_000)
    draft.add_argument("--sample-rows", type=int, default=2048, help="rows sampled at once")
    draft.add_argument(
        "--sampled-fraction", type=float, default=0.7, help="share of sampled text in a batch"
    )
    draft.add_argument(
        "--cool-fraction", type=float, default=0.15, help=f"share of warm rows with laws at {COOL}"
    )
    args = parser.parse_args()
    if args.command == "target" and args.family is not None and not args.fresh:
        parser.error("--family is a new model's: it needs --fresh")
    if args.command == "draft" and args.sequence <= MOST_PROMPT_TOKENS:
        parser.error(
            f"--sequence {args.sequence} leaves prompts of up to {MOST_PROMPT_TOKENS} "
            "tokens nothing to continue with"
        )
    return args


def main() -> None:
    """Runs the chosen command."""
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    {"target": run_target, "draft": run_draft, "evaluate": run_evaluate}[args.command](args)


if __name__ == "__main__":
    main()
