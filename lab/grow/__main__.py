"""`python -m lab.grow`."""

from pathlib import Path
from typing import Annotated

import typer

from lab.command import run
from lab.grow.gguf_file import MIXES, write_gguf
from lab.grow.network import grown, num_parameters, shape_for, write_grown
from monge.api import built_in
from monge.cli import options
from monge.cli.console import quiet_host, reported
from monge.core.errors import OptionError, unknown_name
from monge.loading.networks import load_network, load_tokenizer


@reported
def main(
    out: Annotated[Path, typer.Argument(help="A new folder, or a new file `*.gguf`.")],
    *,
    params: str = options.option("0.5B", options.MODELS, "Parameters: 0.1B, 1B, 300M, ..."),
    types: str | None = options.option(
        None, options.MODELS, f"Types of a GGUF file: {', '.join(MIXES)}.", next(iter(MIXES))
    ),
    target: options.Target = None,
    dtype: options.Dtype = None,
) -> None:
    """Write a target that says what the small one says, at the cost of a large one.

    Hidden units, heads and neurons are repeated and layers that write nothing are added, so the law
    stays the same to rounding, and the small target's draft model keeps its acceptance. In float32
    a parameter takes four bytes, in bfloat16 two. A GGUF file has the types that llama.cpp mixes.

    **Examples**

        python -m lab.grow large --params 0.5B
        python -m lab.grow large --params 8B --dtype bfloat16
        python -m lab.grow large-Q4_K_M.gguf --params 1B --types Q4_K_M
    """
    quiet_host()
    is_file = out.suffix.lower() == ".gguf"
    if types is not None and not is_file:
        raise OptionError(f"--types are those of a GGUF file, and {str(out)!r} is a folder")
    if types is not None and types not in MIXES:
        raise unknown_name("mix of types", types, MIXES)
    source = str(built_in("target")) if target is None else target
    network = load_network(source, **options.given(dtype=dtype))
    shape = shape_for(network, num_parameters(params))
    count = shape.num_parameters(network.config)
    large, tokenizer = grown(network, shape), load_tokenizer(source)
    if is_file:
        counts = write_gguf(large, tokenizer, out, types or next(iter(MIXES)))
        print(", ".join(f"{kind} x{number}" for kind, number in counts.items()))
    else:
        write_grown(large, tokenizer, out)
    print(
        f"{out}: {count / 1e9:.3f}B parameters in {shape.layers} layers of "
        f"{network.config.hidden_size * shape.width} hidden "
        f"units, {shape.intermediate} neurons and "
        f"{network.config.num_attention_heads * shape.width} heads"
    )
    if target is None:
        print(f"monge bench decode --target {out} --draft {built_in('draft')}")


if __name__ == "__main__":
    run(main)
