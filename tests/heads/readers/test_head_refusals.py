"""Broken, foreign and unknown heads: an error that says what was found and what is read."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import monge
from monge.api import built_in
from monge.core.errors import ModelLoadError, OptionError
from monge.draft.by_name import drafter_of
from monge.draft.published_heads import HeadDrafter
from monge.draft.tree.registry import TREES
from monge.heads.readers.registry import FORMATS, load_head
from monge.loading.networks import load_network
from monge.testing.tabular import RandomTable, TabularModel
from tests.heads.readers.published import KINDS, Published

VOCAB = 4
TREE = TREES.parse("chain(2)")


def made(kind: str) -> Published:
    return KINDS[kind](VOCAB, VOCAB)


def write(
    kind: str, folder: Path, change: Callable[[Published], object] = lambda made: None
) -> Path:
    one = made(kind)
    change(one)
    return one.write(folder)


def table(vocab: int = VOCAB) -> TabularModel:
    return TabularModel(RandomTable(vocab, 0), vocab)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_missing_or_superfluous_are_named(kind: str, tmp_path: Path) -> None:
    """Every tensor that decides what the head computes is missed when it is gone, and none can be smuggled in."""
    optional = (
        "t2d",
        "input_embed_fn",
        "embed_tokens",
        "shared_head.head",
        "confidence_head",
        "bias",
    )
    tensors = [name for name in made(kind).tensors if not any(part in name for part in optional)]
    # Without these the files are recognised as something else, or read as a head that has no such
    # part.
    parts = (
        "markov_head.markov_w1",
        "q_norm",
        "k_norm",
        "d2t",
        "conv.base_kernel",
        "candidate_selector.hidden",
        "res_connection",
    )
    removed = [name for name in tensors if not any(part in name for part in parts)]
    for name in (removed[0], removed[len(removed) // 2], removed[-1]):
        folder = write(
            kind, tmp_path / f"without-{name}", lambda one, name=name: one.tensors.pop(name)
        )
        with pytest.raises(
            ModelLoadError,
            match=r"lacks tensor|is no head|has no tensor|tensors beside|asks "
            r"for|without gaps|not have",
        ):
            load_head(folder)
    prefix = {
        "mtp-deepseek": "model.layers.7.",
        "mtp-mimo": "model.mtp_layers.0.",
        "speculators-mtp": "mtp_layers.0.",
    }
    extra = prefix.get(kind, "mtp." if kind == "mtp-qwen" else "") + "surplus.weight"
    folder = write(
        kind,
        tmp_path / "more",
        lambda one: one.tensors.update({extra: torch.ones(2, dtype=torch.float64)}),
    )
    with pytest.raises(ModelLoadError, match="surplus.weight"):
        load_head(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_misshapen_and_infinite_tensors_are_named(kind: str, tmp_path: Path) -> None:
    name = next(
        name
        for name in made(kind).tensors
        if name.endswith(("o_proj.weight", "1.linear.weight", "0.linear.weight"))
    )

    def widen(one: Published) -> None:
        one.tensors[name] = torch.cat([one.tensors[name], one.tensors[name]], dim=0)

    with pytest.raises(ModelLoadError, match=r"has shape \(\d+, \d+\); the configuration asks for"):
        load_head(write(kind, tmp_path / "wide", widen))

    def spoil(one: Published) -> None:
        one.tensors[name][0, 0] = float("nan")

    with pytest.raises(ModelLoadError, match="holds numbers that are not finite"):
        load_head(write(kind, tmp_path / "nan", spoil))


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "dflash2"])
def test_truncated_and_corrupted_files_are_refused(kind: str, tmp_path: Path) -> None:
    folder = write(kind, tmp_path)
    file = folder / made(kind).file
    whole = file.read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"\xff" * 100):
        file.write_bytes(broken)
        with pytest.raises(ModelLoadError, match=r"cannot read .*; fetch it again"):
            load_head(folder)
    file.unlink()
    with pytest.raises(ModelLoadError, match="holds no tensors"):
        load_head(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"cannot read .*config.json"):
        load_head(folder)


class Intruder:
    """What a file of weights must not be able to do."""

    def __reduce__(self):
        return (Path.touch, (Path("intruder"),))


def test_files_that_would_run_code_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write("medusa", tmp_path / "head")
    (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Intruder()}))
    with pytest.raises(ModelLoadError, match="cannot read"):
        load_head(folder)
    assert not (tmp_path / "intruder").exists()
    torch.save({"0.0.linear.weight": "text"}, folder / "medusa_lm_head.pt")
    with pytest.raises(ModelLoadError, match="expected tensors by name"):
        load_head(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_another_target_are_refused(kind: str, tmp_path: Path) -> None:
    folder = write(kind, tmp_path)
    with pytest.raises(
        OptionError,
        match=r"is for a target with states 4 wide.*the target's are "
        r"5 wide, 5 tokens, 1 layers",
    ):
        HeadDrafter(target=table(5), head=folder, tree=TREE)
    HeadDrafter(target=table(), head=folder, tree=TREE)


CONTRADICTIONS = [
    ("eagle", {"bias": True}, "bias=true, and there is no fc.bias", "fc.bias"),
    ("eagle", {"num_attention_heads": 3}, "3 query heads cannot share 1 key|asks for", None),
    (
        "eagle",
        {"num_attention_heads": 2, "num_key_value_heads": 4},
        "2 query heads cannot share 4",
        None,
    ),
    ("eagle", {"hidden_size": None}, "lacks hidden_size", None),
    ("eagle", {"hidden_size": "4"}, "hidden_size must be a whole number; got '4'", None),
    ("eagle", {"rms_norm_eps": "small"}, "rms_norm_eps must be a number", None),
    ("eagle", {"hidden_act": "sine"}, "activation 'sine' is not known to transformers", None),
    (
        "eagle",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "type 'dynamic' are not known here; known: default",
        None,
    ),
    (
        "eagle",
        {"layer_types": ["linear_attention"]},
        "kinds \\['linear_attention'\\]; known: full_attention",
        None,
    ),
    (
        "eagle3",
        {"draft_vocab_size": 2},
        "draft_vocab_size is 2, and lm_head.weight has 3 rows",
        None,
    ),
    ("eagle3", {}, "and no d2t says over which", "d2t"),
    ("eagle3", {"fc_norm": True}, "fc_norm is set, and there is no fc_norm.0.weight", None),
    ("eagle3", {"norm_before_fc": True}, "norm_before_fc is set, and there is no input_norm", None),
    (
        "eagle3",
        {"eagle_aux_hidden_state_layer_ids": "all"},
        "must be a list of whole numbers; got 'all'",
        None,
    ),
    ("eagle3", {"target_hidden_size": 6}, "asks for|no embeddings of its own", None),
    (
        "dflash",
        {"architectures": ["DominoDraftModel"]},
        "Domino's recurrent correction is not read here",
        None,
    ),
    ("dflash", {"input_embedding_scale": 2.0}, "input_embedding_scale is set", None),
    (
        "dspark",
        {"markov_head_type": "second_order"},
        "'second_order' is not known here; known: vanilla, gated, rnn",
        None,
    ),
    (
        "dspark",
        {},
        "markov_rank is set, and there is no markov_head",
        "markov_head.markov_w1.weight",
    ),
    (
        "hydra",
        {"hydra_head_arch": "cross-attn"},
        "'cross-attn' are not read here; read are eagle-attn, mlp, prefix-mlp",
        None,
    ),
    ("hydra", {"grounded_heads": 1}, "grounded_heads must be true or false", None),
    (
        "speculators-eagle3",
        {"speculators_model_type": "peagle"},
        "'peagle', which is not read here; read are dflash, dspark",
        None,
    ),
    (
        "speculators-eagle3",
        {"transformer_layer_config": None},
        "lacks transformer_layer_config",
        None,
    ),
    (
        "speculators-dflash",
        {"aux_hidden_state_layer_ids": None},
        "lacks aux_hidden_state_layer_ids",
        None,
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message", "gone"), CONTRADICTIONS)
def test_settings_that_contradict_the_tensors_are_refused(
    kind: str, changes: dict[str, object], message: str, gone: str | None, tmp_path: Path
) -> None:
    def change(one: Published) -> None:
        one.config |= changes
        if gone is not None:
            del one.tensors[gone]

    with pytest.raises(ModelLoadError, match=message):
        load_head(write(kind, tmp_path, change))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("d2t", [0, 0, 9], "d2t maps 3 draft tokens to 3 tokens between 0 and 11"),
        ("d2t", [0, -1, 0], "d2t maps 3 draft tokens to 2 tokens"),
        ("t2d", [True, True, True, False], "d2t and t2d name different tokens"),
    ],
)
def test_draft_vocabularies_that_contradict_themselves_are_refused(
    name: str, values: list, message: str, tmp_path: Path
) -> None:
    folder = write("eagle3", tmp_path, lambda one: one.tensors.update({name: torch.tensor(values)}))
    with pytest.raises(ModelLoadError, match=message):
        load_head(folder)


def test_heads_that_change_the_text_are_refused(tmp_path: Path) -> None:
    def tolerate(one: Published) -> None:
        one.config["speculators_config"]["proposal_methods"][0]["accept_tolerance"] = 0.1

    with pytest.raises(
        ModelLoadError, match="asks for accept_tolerance 0.1 .* which change the text"
    ):
        load_head(write("speculators-eagle3", tmp_path, tolerate))


def test_quantised_heads_and_other_files_are_refused(tmp_path: Path) -> None:
    scale = {"layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}
    with pytest.raises(ModelLoadError, match="is quantised"):
        load_head(write("eagle", tmp_path / "packed", lambda one: one.tensors.update(scale)))
    folder = write("eagle", tmp_path / "gguf")
    (folder / "pytorch_model.bin").rename(folder / "model.gguf")
    with pytest.raises(ModelLoadError, match="GGUF files, which are not read here"):
        load_head(folder)


def test_declared_modules_without_tensors_are_no_heads(tmp_path: Path) -> None:
    folder = tmp_path / "declared"
    Published(
        {"num_nextn_predict_layers": 1}, {"model.embed_tokens.weight": torch.ones(2, 2)}
    ).write(folder)
    with pytest.raises(
        ModelLoadError,
        match=r"is no head that is read here.*model.embed_tokens.weight.*formats "
        r"read are specul",
    ):
        load_head(folder)
    assert drafter_of(folder, folder) is None


def test_shards_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    one = made("mtp-deepseek")
    names = sorted(one.tensors)
    first, second = tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"
    save_file({name: one.tensors[name] for name in names[::2]}, first)
    save_file({name: one.tensors[name] for name in names[1::2]}, second)
    weights = {name: (first if place % 2 == 0 else second).name for place, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (tmp_path / "config.json").write_text(json.dumps(one.config))
    assert (
        load_head(tmp_path).num_parameters
        == load_head(write("mtp-deepseek", tmp_path / "whole")).num_parameters
    )
    second.unlink()
    with pytest.raises(
        ModelLoadError,
        match=r"names \['model-2.safetensors'\]; fetch the folder "
        r"again",
    ):
        load_head(tmp_path)


def test_a_folder_is_recognised_where_a_draft_is_given(tmp_path: Path) -> None:
    """By its files; a prediction module beside a whole model is a head of that model only."""
    assert [one.name for one in FORMATS] == [
        "speculators",
        "medusa",
        "hydra",
        "eagle3",
        "dflash",
        "eagle",
        "mtp",
    ]
    assert drafter_of(write("eagle", tmp_path / "eagle"), None) == "head"
    assert drafter_of(tmp_path / "eagle" / "pytorch_model.bin", None) == "head"
    assert drafter_of(built_in("shape"), None) == "shape"
    assert drafter_of(built_in("draft"), None) is None
    assert drafter_of("some/name", None) is None
    beside = {"model.embed_tokens.weight": torch.ones(VOCAB, VOCAB, dtype=torch.float64)}
    whole = write("mtp-qwen", tmp_path / "whole", lambda one: one.tensors.update(beside))
    assert drafter_of(whole, str(whole)) == "head"
    assert drafter_of(whole, tmp_path / "eagle") is None
    assert drafter_of(write("mtp-qwen", tmp_path / "alone"), None) == "head"


def test_heads_are_loaded_as_drafts(tmp_path: Path) -> None:
    def tidy(one: Published) -> None:
        one.tensors = {name: tensor.float() for name, tensor in one.tensors.items()}

    folder = KINDS["eagle"](256, 4096)
    tidy(folder)
    decoder = monge.load(
        draft=folder.write(tmp_path / "eagle"), tree="chain(2)", controller="fixed"
    )
    assert isinstance(decoder.components.drafter, HeadDrafter)
    can = decoder.components.drafter.capabilities
    assert (can.num_bytes, can.bytes_per_token) == (4 * can.num_parameters, 4 * 4)
    with pytest.raises(OptionError, match=r"drafter 'ngram' takes no head \(draft=...\)"):
        monge.load(draft=tmp_path / "eagle", drafter="ngram")
    with pytest.raises(OptionError, match="drafter 'head' needs a head: give its folder"):
        monge.load(drafter="head")
    Published(
        {"model_type": "strange", "architectures": ["Strange"]}, {"a.weight": torch.ones(2)}
    ).write(tmp_path / "odd")
    with pytest.raises(
        ModelLoadError,
        match=r"(?s)cannot load a model.* is no head that is read here: "
        r"architectures \['Strange'\]",
    ):
        monge.load(draft=tmp_path / "odd")


def test_unknown_layers_and_blind_targets_are_refused(tmp_path: Path) -> None:
    folder = write(
        "eagle3",
        tmp_path,
        lambda one: one.config.update({"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}),
    )
    with pytest.raises(
        OptionError,
        match=r"reads hidden states \[0, 1, 7\]; the target has 0 to "
        r"1",
    ):
        HeadDrafter(target=table(), head=folder, tree=TREE)
    folder = write(
        "eagle3", tmp_path / "usual", lambda one: one.config.pop("eagle_aux_hidden_state_layer_ids")
    )
    with pytest.raises(OptionError, match="a target of 1 layers has none"):
        HeadDrafter(target=table(), head=folder, tree=TREE)
    head = load_head(folder)
    assert head.layers(32) == (2, 16, 29)
    folder = write(
        "eagle3",
        tmp_path / "outputs",
        lambda one: one.config.update({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}),
    )
    assert load_head(folder).layers(32) == (2, 16, 29)

    class Blind:
        vocab_size, max_length, no_tree_reason, no_draft_reason, forward_s = (
            3,
            None,
            None,
            None,
            0.0,
        )
        open = append = extend = commit = length = close = lambda *_: None

    with pytest.raises(
        OptionError, match="needs a target that shows its hidden states; Blind does not"
    ):
        HeadDrafter(target=Blind(), head=folder, tree=TREE)


def test_layers_of_block_drafters_are_counted_from_their_outputs(tmp_path: Path) -> None:
    folder = write(
        "dflash",
        tmp_path,
        lambda one: one.config["dflash_config"].update({"target_layer_ids": [1, 33]}),
    )
    assert load_head(folder).layers(36) == (2, 34)

    def spread(one: Published) -> None:
        del one.config["dflash_config"]["target_layer_ids"]

    assert load_head(write("dflash", tmp_path / "spread", spread)).layers(36) == (2, 34)
    assert [
        load_head(write(kind, tmp_path / kind)).max_depth
        for kind in ("dflash", "dspark", "dflash2")
    ] == [3, 4, 3]


def test_modules_for_deeper_tokens_are_left_out_aloud(tmp_path: Path) -> None:
    def add(one: Published) -> None:
        one.tensors |= {
            name.replace("layers.0", "layers.1"): tensor.clone()
            for name, tensor in one.tensors.items()
        }

    with pytest.warns(
        UserWarning, match="2 prediction modules; the first one is applied at every depth"
    ):
        load_head(write("mtp-qwen", tmp_path, add))


def test_a_head_is_no_model_with_random_weights(tmp_path: Path) -> None:
    """An EAGLE head calls itself a Llama.

    Where a model is wanted, it must not be filled up with noise.
    """
    with pytest.raises(
        ModelLoadError,
        match=r"lacks \d+ weights of a LlamaForCausalLM, .* if it is a head, give "
        r"it to the drafter",
    ):
        load_network(
            write("eagle", tmp_path, lambda one: one.config.update({"model_type": "llama"}))
        )
