"""Broken, foreign and unknown heads: an error that says what was found and what is read."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import monge
from monge.api import built_in, drafts_of
from monge.core.errors import ModelLoadError, OptionError
from monge.draft.by_name import drafter_of, read_head
from monge.draft.published_heads import Head
from monge.draft.tree.registry import TREES
from monge.heads.readers.eagle3 import Eagle3Head
from monge.heads.readers.registry import FORMATS, load_head
from monge.loading.networks import load_network
from monge.loading.sources import ModelSource
from monge.oracle.tabular import RandomTable, TabularModel
from tests.heads.readers.published import KINDS, Published

VOCAB = 4
TREE = TREES.parse("chain(2)")
Write = Callable[..., Path]


def made(kind: str) -> Published:
    return KINDS[kind](VOCAB, VOCAB)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a head of a kind with other settings and tensors, `None` for none; return its folder."""

    def written(
        kind: str,
        config: dict | None = None,
        tensors: dict[str, Tensor | None] | None = None,
        change: Callable[[Published], object] = lambda one: None,
    ) -> Path:
        one = made(kind)
        one.config |= config or {}
        one.tensors |= tensors or {}
        one.tensors = {name: tensor for name, tensor in one.tensors.items() if tensor is not None}
        change(one)
        return one.write(tmp_path / f"head-{len(list(tmp_path.iterdir()))}")

    return written


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_head(folder)


def table(vocab: int = VOCAB) -> TabularModel:
    return TabularModel(RandomTable(vocab, 0), vocab)


OPTIONAL = ["t2d", "input_embed_fn", "embed_tokens", "shared_head.head", "confidence_head", "bias"]
# Without these the files are recognised as something else, or read as a head that has no such part.
OPTIONAL += ["markov_head.markov_w1", "q_norm", "k_norm", "d2t", "conv.base_kernel"]
OPTIONAL += ["candidate_selector.hidden", "res_connection"]
PREFIXES = {
    "mtp-deepseek": "model.layers.7.",
    "mtp-mimo": "model.mtp_layers.0.",
    "mtp-qwen": "mtp.",
    "speculators-mtp": "mtp_layers.0.",
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_missing_or_superfluous_are_named(kind: str, write: Write) -> None:
    """Every tensor that decides what the head computes is missed when it is gone, and none can be smuggled in."""
    names = [name for name in made(kind).tensors if not any(part in name for part in OPTIONAL)]
    for name in (names[0], names[len(names) // 2], names[-1]):
        missing = r"lacks tensor|is no head|tensors beside|asks for|without gaps|not have"
        refused(write(kind, tensors={name: None}), missing)
    extra = PREFIXES.get(kind, "") + "surplus.weight"
    refused(write(kind, tensors={extra: torch.ones(2, dtype=torch.float64)}), "surplus.weight")


@pytest.mark.parametrize("kind", KINDS)
def test_misshapen_and_infinite_tensors_and_other_targets_are_named(
    kind: str, write: Write
) -> None:
    name = next(name for name in made(kind).tensors if name.endswith("o_proj.weight"))
    tensor = made(kind).tensors[name]
    wide, broken = torch.cat([tensor, tensor]), tensor.clone()
    broken[0, 0] = float("nan")
    wrong = r"has shape \(\d+, \d+\); the configuration asks for"
    refused(write(kind, tensors={name: wide}), wrong)
    refused(write(kind, tensors={name: broken}), "holds numbers that are not finite")
    folder = write(kind)
    sizes = r"is for a target with states 4 wide.*the target's are 5 wide, 5 tokens, 1 layers"
    with pytest.raises(OptionError, match=sizes):
        Head(target=table(5), head=folder, tree=TREE)
    Head(target=table(), head=folder, tree=TREE)


@pytest.mark.parametrize("kind", ["eagle3", "dflash2"])
def test_truncated_and_corrupted_files_are_refused(kind: str, write: Write) -> None:
    folder = write(kind)
    file = folder / made(kind).file
    whole = file.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"\xff" * 100):
        file.write_bytes(broken)
        refused(folder, r"cannot read .*; fetch it again")
    file.unlink()
    refused(folder, "holds no tensors")
    (folder / "config.json").write_text("{")
    refused(folder, r"cannot read .*config.json")


class Intruder:
    """A file of weights that would run code."""

    def __reduce__(self):
        return (Path.touch, (Path("intruder"),))


def test_files_that_would_run_code_are_refused(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write("eagle3")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Intruder()}))
    refused(folder, "cannot read")
    assert not (tmp_path / "intruder").exists()
    torch.save({"fc.weight": "text"}, folder / "pytorch_model.bin")
    refused(folder, "expected tensors by name")


AUX = "eagle_aux_hidden_state_layer_ids"
LOSSY = {"proposal_methods": [{"accept_tolerance": 0.1}]}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
CONTRADICTIONS = [
    ("eagle3", {"num_attention_heads": 3}, "3 query heads cannot share 1 key|asks for"),
    ("eagle3", {"num_key_value_heads": 4}, "2 query heads cannot share 4"),
    ("eagle3", {"hidden_size": None}, "lacks hidden_size"),
    ("eagle3", {"hidden_size": "4"}, "hidden_size must be a whole number; got '4'"),
    ("eagle3", {"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ("eagle3", {"hidden_act": "sine"}, "activation 'sine' is not known to transformers"),
    ("eagle3", {"rope_scaling": DYNAMIC}, "type 'dynamic' are not known here; known: default"),
    ("eagle3", {"layer_types": ["linear"]}, r"kinds \['linear'\]; known: full_attention"),
    ("eagle3", {"draft_vocab_size": 2}, "draft_vocab_size is 2, and lm_head.weight has 3 rows"),
    ("eagle3", {"fc_norm": True}, "fc_norm is set, and there is no fc_norm.0.weight"),
    ("eagle3", {"norm_before_fc": True}, "norm_before_fc is set, and there is no input_norm"),
    ("eagle3", {AUX: "all"}, "must be a list of whole numbers; got 'all'"),
    ("eagle3", {"target_hidden_size": 6}, "asks for|no embeddings of its own"),
    ("dflash", {"architectures": ["DominoDraftModel"]}, "Domino's recurrent correction is not rea"),
    ("dflash", {"input_embedding_scale": 2.0}, "input_embedding_scale is set"),
    ("dspark", {"markov_head_type": "second"}, "'second' is not known here; known: vanilla, gated"),
    ("speculators-eagle3", {"speculators_model_type": "peagle"}, "'peagle', which is not read"),
    ("speculators-eagle3", {"transformer_layer_config": None}, "lacks transformer_layer_config"),
    ("speculators-dflash", {"aux_hidden_state_layer_ids": None}, "lacks aux_hidden_state_layer"),
    ("speculators-eagle3", {"speculators_config": LOSSY}, "accept_tolerance 0.1 .* change the"),
]
MASK = torch.tensor([True, True, True, False])
BROKEN_TENSORS = [
    ("eagle3", "midlayer.mlp.up_proj.weight_scale_inv", torch.ones(1), "is quantised"),
    ("eagle3", "d2t", None, "and no d2t says over which"),
    ("eagle3", "d2t", torch.tensor([0, 0, 9]), "3 draft tokens to 3 tokens between 0 and 11"),
    ("eagle3", "d2t", torch.tensor([0, -1, 0]), "d2t maps 3 draft tokens to 2 tokens"),
    ("eagle3", "t2d", MASK, "d2t and t2d name different tokens"),
    ("dspark", "markov_head.markov_w1.weight", None, "markov_rank is set, and there is no markov"),
]


@pytest.mark.parametrize(("kind", "config", "message"), CONTRADICTIONS)
def test_settings_that_contradict_the_tensors_are_refused(
    kind: str, config: dict, message: str, write: Write
) -> None:
    refused(write(kind, config), message)


@pytest.mark.parametrize(("kind", "name", "tensor", "message"), BROKEN_TENSORS)
def test_tensors_that_contradict_the_settings_are_refused(
    kind: str, name: str, tensor: Tensor | None, message: str, write: Write
) -> None:
    refused(write(kind, tensors={name: tensor}), message)


def test_other_files_are_refused(write: Write) -> None:
    folder = write("eagle3")
    (folder / "pytorch_model.bin").rename(folder / "model.gguf")
    refused(folder, "GGUF files, which are not read here")


def test_declared_modules_without_tensors_are_no_heads(tmp_path: Path) -> None:
    config, name = {"num_nextn_predict_layers": 1}, "model.embed_tokens.weight"
    folder = Published(config, {name: torch.ones(2, 2)}).write(tmp_path / "declared")
    refused(folder, rf"is no head that is read here.*{name}.*formats read are specul")
    assert drafter_of(folder, folder) is None


def test_shards_are_read_and_missing_ones_named(tmp_path: Path, write: Write) -> None:
    one, folder = made("mtp-deepseek"), write("mtp-deepseek")
    whole = load_head(folder).num_parameters
    (folder / one.file).unlink()
    names, weights = sorted(one.tensors), dict[str, str]()
    for place, file in enumerate(("model-1.safetensors", "model-2.safetensors")):
        save_file({name: one.tensors[name] for name in names[place::2]}, folder / file)
        weights |= dict.fromkeys(names[place::2], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert load_head(folder).num_parameters == whole
    (folder / "model-2.safetensors").unlink()
    refused(folder, r"names \['model-2.safetensors'\]; fetch the folder again")


def test_a_folder_is_recognised_where_a_draft_is_given(write: Write) -> None:
    """By its files; a prediction module beside a whole model is a head of that model only."""
    names = ["speculators", "eagle3", "dflash", "mtp"]
    assert [one.name for one in FORMATS] == names
    head = write("eagle3")
    assert drafter_of(head, None) == "head"
    assert drafter_of(head / "pytorch_model.bin", None) == "head"
    assert drafter_of(built_in("shape"), None) == "shape"
    assert drafter_of(built_in("draft"), None) is None
    assert drafter_of("some/name", None) is None
    beside = {"model.embed_tokens.weight": torch.ones(VOCAB, VOCAB, dtype=torch.float64)}
    whole = write("mtp-qwen", tensors=beside)
    assert drafter_of(whole, str(whole)) == "head"
    assert drafter_of(whole, head) is None
    assert drafter_of(write("mtp-qwen"), None) == "head"


def test_a_head_that_ships_with_the_package_is_found_by_name() -> None:
    assert drafter_of("smollm2-head", "smollm2") == "head"
    assert drafter_of(Path("smollm2-head"), None) is None  # a path of that name is a path
    head = read_head("smollm2-head", "smollm2")
    text = drafts_of("smollm2-head", ModelSource.of(None)).head_text
    assert isinstance(head, Eagle3Head)
    assert head.draft_ids is not None
    assert text is not None
    assert text.startswith("head(head=")
    assert "smollm2_head" in text


def test_heads_are_loaded_as_drafts(tmp_path: Path) -> None:
    one = KINDS["mtp-mimo"](256, 4096)
    one.tensors = {name: tensor.float() for name, tensor in one.tensors.items()}
    folder = one.write(tmp_path / "mtp")
    drafter = monge.load(draft=folder, tree="chain(2)", controller="fixed").components.drafter
    assert isinstance(drafter, Head)
    can = drafter.capabilities
    assert (can.num_bytes, can.bytes_per_token) == (4 * can.num_parameters, 4 * 4)
    with pytest.raises(OptionError, match=r"drafter 'ngram' takes no head \(draft=...\)"):
        monge.load(draft=folder, drafter="ngram")
    with pytest.raises(OptionError, match="drafter 'head' needs a head: give its folder"):
        monge.load(drafter="head")
    strange = {"model_type": "strange", "architectures": ["Strange"]}
    odd = Published(strange, {"a.weight": torch.ones(2)}).write(tmp_path / "odd")
    why = r"(?s)cannot load a model.* is no head that is read here: architectures \['Strange'\]"
    with pytest.raises(ModelLoadError, match=why):
        monge.load(draft=odd)


def test_unknown_layers_are_refused(write: Write) -> None:
    folder = write("eagle3", {AUX: [0, 1, 7]})
    with pytest.raises(OptionError, match=r"states \[0, 1, 7\]; the target has 0 to 1"):
        Head(target=table(), head=folder, tree=TREE)
    folder = write("eagle3", change=lambda one: one.config.pop(AUX))
    with pytest.raises(OptionError, match="a target of 1 layers has none"):
        Head(target=table(), head=folder, tree=TREE)
    assert load_head(folder).layers(32) == (2, 16, 29)
    assert load_head(write("eagle3", {AUX: [1, 15, 28]})).layers(32) == (2, 16, 29)


def test_layers_of_block_drafters_are_counted_from_their_outputs(write: Write) -> None:
    def count(one: Published) -> None:
        one.config["dflash_config"]["target_layer_ids"] = [1, 33]

    def spread(one: Published) -> None:
        del one.config["dflash_config"]["target_layer_ids"]

    for change in (count, spread):
        assert load_head(write("dflash", change=change)).layers(36) == (2, 34)
    kinds = ("dflash", "dspark", "dflash2")
    assert [load_head(write(kind)).max_depth for kind in kinds] == [3, 4, 3]


def test_modules_for_deeper_tokens_are_left_out_aloud(write: Write) -> None:
    own = made("mtp-qwen").tensors
    more = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in own.items()}
    with pytest.warns(UserWarning, match="2 prediction modules; the first one is applied at every"):
        load_head(write("mtp-qwen", tensors=more))


def test_a_head_is_no_model_with_random_weights(write: Write) -> None:
    """A head may call itself a Llama; where a model is wanted, it must not be filled up with noise."""
    lacks = r"lacks \d+ weights of a LlamaForCausalLM, .* if it is a head, give it to the drafter"
    with pytest.raises(ModelLoadError, match=lacks):
        load_network(write("mtp-mimo", {"model_type": "llama"}))
