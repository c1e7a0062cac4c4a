"""Rotations in compressed-tensors' words: what is read, what is refused, what is written."""

from __future__ import annotations

import copy
import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.checkpoint.dialects import config_block, read_config
from nvfp4r.checkpoint.writer import save_checkpoint
from nvfp4r.cli import app
from nvfp4r.format import NVFP4Tensor
from nvfp4r.quantize import quantize
from nvfp4r.transforms import parse_transforms
from tests.nvfp4r.rotated_truth import HADAMARD
from tests.nvfp4r.toy import expect_refusal, write_toy

UP = "model.layers.1.mlp.up_proj"
CT = "compressed-tensors"
SIDE = {"targets": ["Linear"], "ignore": ["lm_head"]}
# As llm-compressor 0.14 writes QuIPModifier(rotations=["v"], transform_type="hadamard",
# transform_block_size=16).
QUIP = {
    "config_groups": {
        "v": {
            "type": "hadamard",
            "apply": [
                {**SIDE, "location": "input", "inverse": False},
                {**SIDE, "location": "weight_input", "inverse": True},
            ],
            "randomize": False,
            "requires_grad": False,
            "head_dim": 16,
            "precision": "torch.float64",
        }
    }
}


def changed(*path_and_value: object) -> dict:
    """A deep copy of the scheme in `QUIP`, with one entry set or, for `...`, removed."""
    *path, value = path_and_value
    block = copy.deepcopy(QUIP)
    inner = block["config_groups"]["v"]
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return block


def toy(tmp_path, transform, **options):
    def edit(config):
        config["quantization_config"]["transform_config"] = transform

    return write_toy(tmp_path / "toy", CT, edit_config=edit, **options).folder


# --- reading


@pytest.mark.parametrize("inverses", product([False, True], repeat=2))
def test_the_matrix_is_its_own_inverse_so_that_inverse_changes_nothing(tmp_path, inverses):
    assert torch.equal(HADAMARD @ HADAMARD, torch.eye(16, dtype=torch.float64))
    block = copy.deepcopy(QUIP)
    for entry, inverse in zip(block["config_groups"]["v"]["apply"], inverses, strict=True):
        entry["inverse"] = inverse
    checkpoint = load_checkpoint(toy(tmp_path, block))
    assert checkpoint.rotation == checkpoint.quant.rotation == "hadamard16"
    assert checkpoint.problems() == []


@pytest.mark.parametrize(
    "block",
    [
        changed("precision", ...),
        changed("precision", "torch.bfloat16"),
        changed("randomize", ...),
        changed("requires_grad", ...),
        changed("apply", [*reversed(QUIP["config_groups"]["v"]["apply"])]),
        changed("apply", 0, "targets", "Linear"),
        changed("apply", 0, "ignore", "lm_head"),
        changed("apply", 1, "inverse", ...),
        changed("apply", 1, "targets", [r"re:model\.layers\..*_proj$"]),
    ],
)
def test_other_words_for_the_same(tmp_path, block):
    assert load_checkpoint(toy(tmp_path, block)).rotation == "hadamard16"


@pytest.mark.parametrize("nothing", [None, {}, {"config_groups": {}}])
def test_no_transform_is_no_rotation(tmp_path, nothing):
    assert load_checkpoint(toy(tmp_path, nothing)).rotation is None


def matrices(*modules, group="v", value=HADAMARD.sign(), name="weight", dtype=torch.float32):
    """An edit that stores matrices with modules, as llm-compressor does."""

    def edit(tensors):
        for module in modules:
            tensors[f"{module}.{group}_input.{name}"] = value.clone().to(dtype)

    return edit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("modules", [(UP,), (UP, "model.layers.0.mlp.down_proj")])
def test_stored_matrices_are_no_parameters(tmp_path, modules, dtype):
    plain = write_toy(tmp_path / "plain", CT)
    checkpoint = load_checkpoint(toy(tmp_path, QUIP, edit=matrices(*modules, dtype=dtype)))
    assert checkpoint.names() == load_checkpoint(plain.folder).names()
    assert checkpoint.problems() == []


# --- refusals: what the layers here do not compute

INPUT, WEIGHT = QUIP["config_groups"]["v"]["apply"]
REFUSED = [
    ([1], "got list, need a JSON object"),
    ({"groups": {}}, "groups is not known here"),
    ({"config_groups": [QUIP]}, "config_groups is .*need one transform"),
    ({"config_groups": QUIP["config_groups"] | {"u": {}}}, "config_groups is v, u, need one"),
    ({"config_groups": {"v": 1}}, "v: got int, need a JSON object"),
    ({"config_groups": {"": {}}}, "need a name without dots"),
    ({"config_groups": {"a.b": {}}}, "a.b: need a name without dots"),
    (changed("type", "random-hadamard"), "v: type is 'random-hadamard', need 'hadamard'"),
    (changed("type", "random-matrix"), "v: type is 'random-matrix', need 'hadamard'"),
    (changed("type", ...), "v: type is None, need 'hadamard'"),
    (changed("head_dim", 128), "v: head_dim is 128, need 16"),
    (changed("head_dim", 8), "v: head_dim is 8, need 16"),
    (changed("head_dim", None), "v: head_dim is None, need 16"),
    (changed("head_dim", ...), "v: head_dim is None, need 16"),
    (changed("randomize", True), "v: randomize is True, need False"),
    (changed("requires_grad", True), "v: requires_grad is True, need False"),
    (changed("precision", "torch.int8"), "v: precision is 'torch.int8', need 'torch.float32'"),
    (changed("seed", 3), "v: seed is not known here"),
    (changed("apply", {}), r"v: apply is \{\}, need a list"),
    (changed("apply", []), "v: apply has no location 'input'"),
    (changed("apply", [INPUT]), "v: apply has no location 'weight_input'"),
    (changed("apply", [WEIGHT]), "v: apply has no location 'input'"),
    (changed("apply", [INPUT, INPUT]), "v: apply has location 'input' twice"),
    (changed("apply", [INPUT, WEIGHT, WEIGHT]), "v: apply has location 'weight_input' twice"),
    *(
        (
            changed("apply", [INPUT, {**WEIGHT, "location": location}]),
            f"v: apply has location '{location}', need input and weight_input",
        )
        for location in ("output", "weight_output", "k_cache", "q_attn")
    ),
    (changed("apply", 0, "location", ...), "v: apply has location None"),
    (changed("apply", 0, "permute", True), "v.apply: permute is not known here"),
    (changed("apply", 0, "inverse", "no"), "v: inverse is 'no', need true or false"),
    (changed("apply", 0, "targets", []), "v: targets of input is empty"),
    (changed("apply", 0, "targets", [1]), r"v: targets is \[1\], need a list of names"),
    (changed("apply", 0, "ignore", {"a": 1}), "v: ignore is .* need a list of names"),
    (changed("apply", 0, "targets", ["re:("]), "v: targets: .*not a valid regular expression"),
]


@pytest.mark.parametrize(("block", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_other_transforms_are_refused_by_name(tmp_path, block, message):
    with pytest.raises(ValueError, match=f"config.json: transform_config.*{message}"):
        read_config(toy(tmp_path, block))


def scoped(targets=("Linear",), ignore=("lm_head",), *, weights=None) -> dict:
    """`QUIP` for other layers; `weights` are other targets of the weights alone."""
    scope = {"targets": list(targets), "ignore": list(ignore)}
    block = copy.deepcopy(QUIP)
    for entry in block["config_groups"]["v"]["apply"]:
        entry.update(scope)
    if weights is not None:
        block["config_groups"]["v"]["apply"][1]["targets"] = list(weights)
    return block


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            scoped(ignore=["lm_head", "re:.*down_proj$"]),
            r"leaves out model\.layers\.0\.mlp\.down_proj, which is quantised \(2 such",
        ),
        (scoped([UP]), r"leaves out .*, which is quantised \(13 such"),
        (scoped(["Linear", "Embedding"]), r"targets Embedding, which is no linear layer here"),
        (scoped(["Linear", "re:.*embed"]), r"rotates model.embed_tokens, which is not quantised"),
        (scoped(ignore=["lm_head", "Linear"]), r"leaves out .*, which is quantised \(14 such"),
        (scoped(ignore=[]), r"rotates lm_head, which is not quantised \(1 such"),
        (
            scoped(["re:.*mlp.*"], weights=["re:.*attn.*"]),
            r"rotates the (weight|input) of .*, but not the (weight|input)",
        ),
    ],
)
def test_layers_that_are_rotated_have_to_be_those_that_are_quantised(tmp_path, block, message):
    expect_refusal(toy(tmp_path, block), "config.json: .*transform", message)


OTHER_ORDER = HADAMARD.sign()[torch.randperm(16, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (matrices(UP, value=OTHER_ORDER), "is not the Hadamard matrix"),
        (matrices(UP, value=HADAMARD), "is not the Hadamard matrix"),  # 1/4, of another convention
        (matrices(UP, value=-HADAMARD.sign()), "is not the Hadamard matrix"),
        (matrices(UP, value=torch.full((16, 16), torch.nan)), "is not the Hadamard matrix"),
        (matrices(UP, value=torch.ones(8, 8)), r"is F32 \[8, 8\], need nothing there, or"),
        (matrices(UP, dtype=torch.int8), r"is I8 \[16, 16\], need nothing there, or"),
        (matrices(UP, name="perm"), "v_input.perm is F32"),
        (matrices("lm_head"), "lm_head.v_input.weight is F32"),
        (matrices(UP, group="u"), "u_input.weight is F32"),
    ],
)
def test_stored_matrices_of_other_transforms_are_refused(tmp_path, edit, message):
    expect_refusal(toy(tmp_path, QUIP, edit=edit), "model.safetensors", message)


def test_two_blocks_that_disagree(tmp_path):
    def edit(config):
        block = config["quantization_config"]
        config["compression_config"] = {**block, "transform_config": QUIP}

    folder = write_toy(tmp_path / "toy", CT, edit_config=edit).folder
    with pytest.raises(ValueError, match="disagree about the rotation of inputs: None against"):
        read_config(folder)


def test_modelopt_has_no_transforms(tmp_path):
    def edit(config):
        config["quantization_config"]["transform_config"] = QUIP

    folder = write_toy(tmp_path / "toy", "modelopt", edit_config=edit).folder
    with pytest.raises(ValueError, match="transform_config means nothing in ModelOpt's layout"):
        read_config(folder)


# --- writing

EXCLUDE = ("lm_head", "model.layers.0.mlp.gate")


@pytest.mark.parametrize("activations", ["nvfp4", "none"])
@pytest.mark.parametrize("exclude", [EXCLUDE, ()])
def test_what_is_written_is_what_the_library_says(activations, exclude):
    block = config_block(CT, activations, iter(exclude), {}, "hadamard16")
    plain = config_block(CT, activations, exclude, {})
    transform = block.pop("transform_config")
    assert block == plain
    targets = plain["config_groups"]["group_0"]["targets"]
    scope = {"targets": targets, "ignore": list(exclude)}
    assert transform == {
        "config_groups": {
            "hadamard16": {
                "type": "hadamard",
                "apply": [
                    {**scope, "location": "input", "inverse": False},
                    {**scope, "location": "weight_input", "inverse": True},
                ],
                "randomize": False,
                "requires_grad": False,
                "head_dim": 16,
                "precision": "torch.float32",
            }
        }
    }
    found = parse_transforms(json.loads(json.dumps(transform)), "x")
    assert found.rotation == "hadamard16"
    assert found.covers("model.layers.0.mlp.up_proj")
    assert found.covers("lm_head") == (not exclude)


def saved(folder, *, head=False, **options):
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    names += ["lm_head"] * head
    tensors = {f"{n}.weight": quantize(torch.randn(32, 32, generator=generator)) for n in names}
    tensors["model.norm.weight"] = torch.ones(32)
    if not head:
        tensors["lm_head.weight"] = torch.ones(8, 32)
    exclude = () if head else ("lm_head",)
    report = save_checkpoint(folder, tensors.items(), config={}, exclude=exclude, **options)
    return tensors, report


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [1, 1 << 30])
def test_a_rotated_checkpoint_reads_back(tmp_path, head, max_shard_bytes):
    options = {"dialect": CT, "rotation": "hadamard16", "max_shard_bytes": max_shard_bytes}
    tensors, report = saved(tmp_path / "out", head=head, **options)
    checkpoint = load_checkpoint(tmp_path / "out")
    assert checkpoint.rotation == "hadamard16"
    assert set(checkpoint.names()) == set(tensors)
    for name, tensor in checkpoint.items():
        if isinstance(tensor, NVFP4Tensor):
            assert torch.equal(tensor.codes, tensors[name].codes)
    stored = {k: v for file in report.files for k, v in load_file(tmp_path / "out" / file).items()}
    found = {name: value for name, value in stored.items() if "_input." in name}
    assert set(found) == {f"{m}.hadamard16_input.weight" for m in checkpoint.modules}
    for matrix in found.values():
        assert torch.equal(matrix.double() / 4, HADAMARD)
    assert checkpoint.problems() == []


def test_a_copy_keeps_the_rotation_if_it_is_told(tmp_path):
    saved(tmp_path / "one", dialect=CT, rotation="hadamard16")
    source = load_checkpoint(tmp_path / "one")
    for name, rotation in (("two", source.rotation), ("three", None)):
        save_checkpoint(
            tmp_path / name,
            source.items(),
            config=source.config,
            dialect=source.dialect,
            exclude=source.exclude,
            rotation=rotation,
        )
        assert load_checkpoint(tmp_path / name).rotation == rotation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotation": "hadamard16"}, "modelopt dialect cannot say; use compressed-tensors"),
        (
            {"rotation": "hadamard32", "dialect": CT},
            "got 'hadamard32', need one of None, hadamard16",
        ),
        ({"rotation": "", "dialect": CT}, "got '', need one of None, hadamard16"),
    ],
)
def test_rotations_that_cannot_be_written(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        saved(tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rotation", [None, "hadamard16"])
def test_inspect_tells(tmp_path, rotation):
    saved(tmp_path / "out", dialect=CT, rotation=rotation)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")])
    told = "inputs in blocks of 16 (hadamard16)" if rotation else "none"
    (line,) = [line for line in shown.output.splitlines() if line.startswith("rotation")]
    assert line.split(maxsplit=1)[1].strip() == told
    machine = CliRunner().invoke(app, ["inspect", str(tmp_path / "out"), "--json"])
    assert json.loads(machine.stdout)["rotation"] == rotation
    assert (shown.exit_code, machine.exit_code) == (0, 0)
