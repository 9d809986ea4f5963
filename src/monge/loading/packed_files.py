"""Networks of GGUF files whose matrices stay in the types of the file.

A file is read once, some rows at a time, into panels beside the configuration; later starts map
these. There is no copy of the matrices in floats, neither on disk nor in memory.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as host

from monge.backends.cpu.gguf_blocks import BLOCK_TYPES, panels_of_type
from monge.backends.cpu.law_masses import load_law_masses
from monge.backends.cpu.packed_linear import (
    PackedEmbedding,
    PackedLinear,
    load_packed_linear,
    panels_of,
)
from monge.loading.gguf_header import Header
from monge.loading.named_models import PANELS_FILE

FLOATS: Final = ("F32", "F16", "BF16")
"""Types of GGUF files that are no blocks."""
_PANELS: Final = ".panels"
_ROWS: Final = 2048  # of a matrix that are read at a time; whole panels
_ENTRY: Final = 256  # bytes of the header for each tensor, at most
_LINE: Final = 4096  # where the tensors of a file begin
# Those of other architectures do more than to reorder rows of matrices.
_PROCESSORS: Final = (
    host.TensorProcessor,
    host.LlamaTensorProcessor,
    host.Gemma2TensorProcessor,
    host.NemotronTensorProcessor,
)
_NAMES: Final = {
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.float32: "F32",
}


class CannotPackError(Exception):
    """A file cannot be read tensor by tensor; the message gives the reason."""


def empty_network(config: Any, attention: str | None = None) -> PreTrainedModel:
    """Return a network without memory for its tensors."""
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()


def write_panels(
    header: Header, network: PreTrainedModel, names: Mapping[str, str] | None, folder: Path
) -> None:
    """Write the tensors of a GGUF file for `read_packed`.

    Matrices are written in panels of their own types; norms, biases and others in float32.

    Args:
        header: The header of the file.
        network: The network of `empty_network`.
        names: Names of its tensors by those of the file's, if they are known.
        folder: Where the tensors are written.

    Raises:
        CannotPackError: If the file has tensors or an architecture whose rows are not known to lie in
            the file as they are in the network.
        OSError: If there is no room.
    """
    source = _Source(header, network, names)
    with (folder / PANELS_FILE).open("wb") as file:
        _write_tensors(file, source.tensors(), len(source.places))


def read_packed(folder: Path, attention: str | None = None) -> PreTrainedModel:
    """Return the network that `write_panels` wrote; its matrices are mapped.

    Args:
        folder: The folder, with the configuration.
        attention: Its attention; `None` for the network's own default.

    Raises:
        OSError, ValueError, RuntimeError: As `transformers`, and if the compiler refuses.
    """
    load_packed_linear()
    load_law_masses()
    network = empty_network(AutoConfig.from_pretrained(folder), attention)
    network.generation_config = GenerationConfig.from_pretrained(folder)
    _make_buffers(network)
    with safe_open(folder / PANELS_FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    for name, panels in tensors.items():
        if name.endswith(_PANELS):
            _pack(network, name.removesuffix(_PANELS), panels)
    _share_output(network)
    floats = {name: tensor for name, tensor in tensors.items() if not name.endswith(_PANELS)}
    network.load_state_dict(floats, strict=False, assign=True)
    for parameter in network.parameters():
        parameter.requires_grad = False
    if missing := [name for name, tensor in network.state_dict().items() if tensor.is_meta]:
        raise ValueError(
            f"{folder / PANELS_FILE} lacks {missing[0]}; delete the folder, and load the file again"
        )
    return network


class _Source:
    """The tensors of a GGUF file by the names of a network."""

    def __init__(
        self, header: Header, network: PreTrainedModel, names: Mapping[str, str] | None
    ) -> None:
        self._reader, self._network = header.reader, network
        self._processor: Any = header.processor(network)
        if type(self._processor) not in _PROCESSORS or names is None:
            raise CannotPackError(
                f"architecture {header.architecture!r} needs more than rows in another order"
            )
        self.places: dict[str, Any] = {
            names[tensor.name]: tensor for tensor in self._reader.tensors if tensor.name in names
        }
        self._check()

    def _check(self) -> None:
        for name, expected in self._network.state_dict().items():
            if (tensor := self.places.get(name)) is None:
                continue  # tied
            kind, shape = tensor.tensor_type.name, tuple(map(int, reversed(tensor.shape)))
            if shape != tuple(expected.shape):
                raise CannotPackError(
                    f"{tensor.name} is {shape}, {tuple(expected.shape)} was expected"
                )
            if kind not in (*BLOCK_TYPES, *FLOATS):
                raise CannotPackError(f"{tensor.name} is of type {kind}")

    def tensors(self) -> Iterator[tuple[str, Iterator[Tensor]]]:
        """Names, and tensors in consecutive parts."""
        for name in self._network.state_dict():
            if name in self.places:
                yield self._tensor(name, self.places[name])
                # Pages of the file that were read are no memory of this process any more.
                self._reader.data._mmap.madvise(mmap.MADV_DONTNEED)

    def _tensor(self, name: str, tensor: Any) -> tuple[str, Iterator[Tensor]]:
        module = self._network.get_submodule(name.rpartition(".")[0])
        is_matrix = name.endswith(".weight") and (
            type(module) is torch.nn.Linear or isinstance(module, torch.nn.Embedding)
        )
        if not is_matrix:
            return name, iter([self._floats(tensor)])
        panels = name.removesuffix(".weight") + _PANELS
        order = self._row_order(tensor)
        kind = tensor.tensor_type.name
        if kind not in BLOCK_TYPES:
            return panels, iter([panels_of(self._dequantised(tensor)[order])])
        return panels, self._block_panels(tensor, order)

    def _block_panels(self, tensor: Any, order: Tensor) -> Iterator[Tensor]:
        for rows in order.split(_ROWS):
            try:
                part = torch.from_numpy(np.array(tensor.data[rows.numpy()]))
                yield panels_of_type(tensor.tensor_type.name, part)
            except ValueError as error:
                raise ValueError(f"{tensor.name}: {error}") from error

    def _dequantised(self, tensor: Any) -> Tensor:
        from gguf import dequantize

        return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))

    def _floats(self, tensor: Any) -> Tensor:
        return torch.from_numpy(
            np.array(self._processed(self._dequantised(tensor).numpy(), tensor))
        )

    def _row_order(self, tensor: Any) -> Tensor:
        """Return the order of the file's rows in the network, as transformers reorders them."""
        column = np.arange(len(tensor.data))[:, None]
        order = self._processed(column, tensor)
        if order.shape != column.shape or not np.array_equal(np.sort(order, axis=0), column):
            raise CannotPackError(f"{tensor.name} needs more than rows in another order")
        return torch.from_numpy(np.array(order[:, 0]))

    def _processed(self, weights: Any, tensor: Any) -> Any:
        return self._processor.process(
            weights, tensor.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        ).weights


def _write_tensors(
    file: BinaryIO, tensors: Iterator[tuple[str, Iterator[Tensor]]], count: int
) -> None:
    """Write a file of safetensors part by part; its header is padded to the room that was left for it."""
    room = -(-(8 + _ENTRY * count) // _LINE) * _LINE
    file.seek(room)
    header: dict[str, Any] = {}
    for name, parts in tensors:
        begin, shape, dtype = file.tell() - room, [0], ""
        for part in parts:
            file.write(part.contiguous().numpy().data)
            shape, dtype = [shape[0] + part.shape[0], *part.shape[1:]], _NAMES[part.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, file.tell() - room]}
    written = json.dumps(header).encode().ljust(room - 8)
    assert len(written) == room - 8
    file.seek(0)
    file.write((room - 8).to_bytes(8, "little") + written)


def _pack(network: PreTrainedModel, name: str, panels: Tensor) -> None:
    parent, _, child = name.rpartition(".")
    module: Any = network.get_submodule(name)
    if isinstance(module, torch.nn.Embedding):
        packed: torch.nn.Module = PackedEmbedding(module, panels, "file")
    else:
        packed = PackedLinear(module.weight, module.bias, weights="file", panels=panels)
    network.get_submodule(parent).add_module(child, packed)


def _share_output(network: PreTrainedModel) -> None:
    """Let an output layer that is tied to the embeddings read their panels."""
    output, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if isinstance(output, torch.nn.Linear) and isinstance(embedding, PackedEmbedding):
        packed: Any = PackedLinear(
            output.weight, output.bias, weights="file", panels=embedding.panels
        )
        network.set_output_embeddings(packed)


def _make_buffers(network: PreTrainedModel) -> None:
    """Compute what no file holds, such as rotary frequencies, as transformers does."""
    for module in network.modules():
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        if missing := {name: buffer for name, buffer in buffers.items() if buffer.is_meta}:
            for name, buffer in missing.items():
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
            with torch.no_grad():
                network._init_weights(module)
