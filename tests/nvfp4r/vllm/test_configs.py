"""Which NVFP4 layers vLLM's configs hand to the plug-in, and why others are left alone."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="the package vllm is not installed; see make test-vllm")

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from nvfp4r.checkpoint.dialects import config_block, hf_quant_config
from nvfp4r.vllm import configs
from nvfp4r.vllm.kernel import NVFP4RLinearKernel
from nvfp4r.vllm.methods import NVFP4RLinearMethod
from nvfp4r.vllm.record import record
from tests.nvfp4r.toy import write_toy

pytestmark = pytest.mark.vllm

CONFIGS = {
    "modelopt": configs.NVFP4RModelOptConfig,
    "compressed-tensors": configs.NVFP4RCompressedTensorsConfig,
}
DIALECTS = tuple(CONFIGS)
MAPPING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    record.cache_clear()
    for name in ("NVFP4R_GEMV_MAX_M", "NVFP4R_ACTIVATIONS", "VLLM_DISABLED_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVFP4R", "1")


def make_config(dialect: str, activations: str = "nvfp4", exclude=("lm_head",), **changes):
    block = config_block(dialect, activations, list(exclude), {"name": "modelopt"})
    config = CONFIGS[dialect].from_config({**block, **changes})
    config.packed_modules_mapping = MAPPING
    return config


def bare(kind: type = LinearBase) -> nn.Module:
    """A layer of this class; nothing of it matters but the class."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    return layer


def method_of(config, name: str = "model.layers.0.mlp.gate_up_proj", layer=None):
    return config.get_quant_method(layer if layer is not None else bare(), name)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("activations", ["nvfp4", "none"])
@pytest.mark.parametrize("kind", [LinearBase, ParallelLMHead])
def test_d5_nvfp4_layers_go_to_the_plugin(dialect, activations, kind):
    name = "lm_head" if kind is ParallelLMHead else "model.layers.0.mlp.gate_up_proj"
    found = method_of(make_config(dialect, activations, exclude=()), name, bare(kind))
    assert type(found) is NVFP4RLinearMethod
    assert (found.dialect, found.activations, found.name) == (dialect, activations, name)
    assert found.members == MAPPING.get(name.rpartition(".")[2])


def test_a10_the_side_file_alone_is_read_too():
    block = hf_quant_config("nvfp4", ["lm_head"], {"name": "x", "version": "1"})
    config = configs.NVFP4RModelOptConfig.from_config({**block, "quant_method": "modelopt"})
    assert method_of(config).activations == "nvfp4"


def test_a5_no_input_activations_are_w4a16_whatever_the_algorithm_is_called():
    config = make_config("modelopt", "none", quant_algo="NVFP4")
    assert method_of(config).activations == "none"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a8_excluded_layers_stay_unquantised(dialect):
    members = [f"model.layers.0.self_attn.{name}" for name in MAPPING["qkv_proj"]]
    config = make_config(dialect, exclude=[*members, "lm_head"])
    found = method_of(config, "model.layers.0.self_attn.qkv_proj")
    assert type(found) is UnquantizedLinearMethod


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a8_an_exclusion_list_that_splits_a_fused_layer_is_refused(dialect):
    config = make_config(dialect, exclude=["model.layers.0.self_attn.q_proj", "lm_head"])
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.qkv_proj"):
        method_of(config, "model.layers.0.self_attn.qkv_proj")


def test_layers_of_other_formats_and_of_vision_towers_are_left_to_vllm():
    config = make_config("modelopt")
    assert type(method_of(config, "vision_tower.fc1")) is UnquantizedLinearMethod
    arguments = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**arguments, "dynamic": False},
        "input_activations": {**arguments, "strategy": "token", "dynamic": True},
    }
    eight_bits = {"format": "float-quantized", "config_groups": {"group_0": group}}
    scheme = make_config("compressed-tensors", **eight_bits).get_scheme_dict(bare(), "x.fc1")
    assert configs._nvfp4_scheme(scheme) is None


@contextlib.contextmanager
def vllm_config(**kernels):
    config = VllmConfig()
    for name, value in kernels.items():
        setattr(config.kernel_config, name, value)
    with set_current_vllm_config(config):
        yield config


@pytest.mark.parametrize(
    ("kernels", "environment", "told"),
    [
        ({"linear_backend": "marlin"}, {}, "--linear-backend is marlin"),
        ({"linear_backend_per_quant": {"nvfp4_w4a4": "cutlass"}}, {}, "backend is cutlass"),
        ({}, {"VLLM_DISABLED_KERNELS": "NVFP4RLinearKernel"}, "VLLM_DISABLED_KERNELS names"),
        ({}, {"NVFP4R": "0"}, "nvfp4r is off"),
    ],
)
def test_d5_who_asks_for_another_kernel_gets_it_and_is_told(
    monkeypatch, caplog, kernels, environment, told
):
    assert decline(monkeypatch, caplog, kernels, environment) == 2
    assert told in caplog.text


def test_k7_the_plugin_declines_batch_invariance(monkeypatch, caplog):
    assert decline(monkeypatch, caplog, {}, {"VLLM_BATCH_INVARIANT": "1"}) == 2
    assert "VLLM_BATCH_INVARIANT is set, and a row's bits depend on" in caplog.text


def decline(monkeypatch, caplog, kernels, environment) -> int:
    """How many of two layers are recorded as left to vLLM, whose own choice is cut out here."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stock = configs.ModelOptNvFp4Config
    monkeypatch.setattr(stock, "get_quant_method", lambda self, layer, prefix: "vLLM's own")
    layers = [bare(), bare()]
    with vllm_config(**kernels):
        for index, layer in enumerate(layers):
            name = f"model.layers.{index}.mlp.gate_up_proj"
            assert method_of(make_config("modelopt"), name, layer) == "vLLM's own"
    assert len([r for r in caplog.records if "are left to vLLM" in r.message]) == 1
    return len(record().declined)


@pytest.mark.parametrize(
    ("capability", "is_supported", "told"),
    [
        *(((8, 0), True, None), ((8, 6), True, None), ((9, 0), True, None)),
        *(((10, 0), True, None), ((10, 3), True, None), ((12, 1), True, None)),
        ((7, 5), False, "compute capability 7.5"),
    ],
)
def test_d2_support_by_compute_capability(monkeypatch, capability, is_supported, told):
    platform = SimpleNamespace(
        is_cpu=lambda: False,
        is_cuda=lambda: True,
        get_device_capability=lambda: SimpleNamespace(major=capability[0], minor=capability[1]),
    )
    monkeypatch.setattr("nvfp4r.vllm.kernel.current_platform", platform)
    for given in (None, 10 * capability[0] + capability[1]):
        found, reason = NVFP4RLinearKernel.is_supported(given)
        assert found is is_supported
        assert (reason is None) if told is None else told in reason


def test_settings_are_part_of_the_key_of_compiled_graphs(monkeypatch):
    """Otherwise a graph that was compiled with other layers would be found again."""
    monkeypatch.setattr(
        configs.ModelOptNvFp4Config, "get_quant_method", lambda self, layer, prefix: None
    )
    hashes = []
    for settings in ({}, {"NVFP4R_GEMV_MAX_M": "8"}, {"NVFP4R_GEMV_MAX_M": "400"}, {"NVFP4R": "0"}):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with vllm_config() as config:
            before = config.compute_hash()
            method_of(make_config("modelopt", "none"))
        hashes.append(config.compute_hash())
    assert len(set(hashes)) == 4
    assert hashes[-1] == before  # switched off, the key is vLLM's own


def test_kernels_of_inductor_that_start_early_have_a_key_of_their_own(monkeypatch):
    monkeypatch.setattr(
        configs.ModelOptNvFp4Config, "get_quant_method", lambda self, layer, prefix: None
    )
    hashes = []
    for early in (False, True):
        monkeypatch.setattr(configs, "inductor_starts_early", lambda early=early: early)
        with vllm_config() as config:
            method_of(make_config("modelopt", "none"))
        hashes.append(config.compute_hash())
    assert hashes[0] != hashes[1]


def test_d5_another_plugin_in_the_same_place_is_refused(monkeypatch):
    class Theirs(configs.ModelOptNvFp4Config):
        pass

    monkeypatch.setattr(configs, "get_quantization_config", lambda name: Theirs)
    with pytest.raises(RuntimeError, match=r"'modelopt_fp4' has been replaced by .*Theirs"):
        configs.install()


MODULE = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("weight_scale_2", None, "weight_scale_2 is missing"),
        ("weight_scale_2", 0.0, "weight_scale_2 is 0.0, need a finite multiplier > 0"),
        ("input_scale", float("nan"), "input_scale is nan, need a finite multiplier > 0"),
        ("input_scale", None, "input_scale is missing"),
    ],
)
def test_a4_a_local_checkpoint_with_bad_scales_is_refused_before_it_is_loaded(
    tmp_path, field, value, told
):
    def damage(tensors):
        if value is None:
            del tensors[f"{MODULE}.{field}"]
        else:
            tensors[f"{MODULE}.{field}"].fill_(value)

    toy = write_toy(tmp_path / "toy", "modelopt", edit=damage)
    with pytest.raises(ValueError, match=f"{MODULE}.{told}"):
        make_config("modelopt").maybe_update_config(str(toy.folder))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a9_scales_of_an_excluded_head_are_named(tmp_path, dialect):
    def add(tensors):
        tensors["lm_head.weight_scale"] = torch.ones(4, 1).to(torch.float8_e4m3fn)

    toy = write_toy(tmp_path / "toy", dialect, edit=add)
    with pytest.raises(ValueError, match=r"lm_head\.weight_scale stored, but the exclusion list"):
        make_config(dialect).maybe_update_config(str(toy.folder))


def test_a_sound_checkpoint_a_name_on_a_hub_and_a_folder_without_weights_pass(tmp_path):
    toy = write_toy(tmp_path / "toy", "modelopt")
    for model in (str(toy.folder), "someone/model", str(tmp_path)):
        make_config("modelopt").maybe_update_config(model, hf_config=None)
