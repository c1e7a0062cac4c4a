"""Settings of the plug-in: their values, the environment that carries them, what they decide."""

from __future__ import annotations

import os

import pytest

import nvfp4r
from nvfp4r.vllm import register
from nvfp4r.vllm.settings import NO_LIMIT, Settings, resolve_activations
from nvfp4r.vllm.versions import (
    KNOWN,
    UnknownVllmError,
    check_plugin_is_loaded,
    check_version,
    warn_of_old_variable,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Every test starts without settings, and leaves none behind."""
    for name in ("NVFP4R", "NVFP4R_GEMV_MAX_M", "NVFP4R_ACTIVATIONS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_plugin_is_off_by_default_and_registering_does_nothing(monkeypatch):
    monkeypatch.setattr("nvfp4r.vllm.installed_version", lambda: "9.9.9")
    assert Settings.from_environment() == Settings(False, None, "auto")
    register()  # would refuse this version if it did anything


def test_configure_is_kept_in_the_environment_that_workers_inherit():
    assert nvfp4r.configure(gemv_max_m=8) == Settings(False, 8, "auto")
    assert nvfp4r.configure(activations="none") == Settings(False, 8, "none")
    assert os.environ["NVFP4R_GEMV_MAX_M"] == "8"
    assert os.environ["NVFP4R_ACTIVATIONS"] == "none"
    assert Settings.from_environment() == Settings(False, 8, "none")


def test_a_limit_can_be_lifted_again_and_is_not_lifted_by_leaving_it_out():
    nvfp4r.configure(gemv_max_m=0)
    assert nvfp4r.configure(activations="none") == Settings(False, 0, "none")
    assert nvfp4r.configure(gemv_max_m=None) == Settings(False, None, "none")
    assert "NVFP4R_GEMV_MAX_M" not in os.environ
    assert nvfp4r.configure() == Settings.from_environment() == Settings(False, None, "none")


@pytest.mark.parametrize(
    ("limit", "held"),
    [(None, NO_LIMIT), (0, 0), (193, 193), (NO_LIMIT - 1, NO_LIMIT - 1), (1 << 80, NO_LIMIT)],
)
def test_every_limit_fits_the_schema_of_the_op(limit, held):
    settings = nvfp4r.configure(gemv_max_m=limit)
    assert (settings.gemv_max_m, settings.token_limit) == (limit, held)
    assert Settings.from_environment() == settings
    assert held < 1 << 63


@pytest.mark.parametrize(
    ("values", "error", "told"),
    [
        ({"gemv_max_m": -1}, ValueError, "gemv_max_m is -1, need 0 .* or more, or None for no l"),
        ({"gemv_max_m": 2.5}, TypeError, "gemv_max_m is 2.5, need an int"),
        ({"gemv_max_m": True}, TypeError, "gemv_max_m is True, need an int"),
        ({"gemv_max_m": "8"}, TypeError, "gemv_max_m is '8', need an int >= 0, or None"),
        ({"activations": "fp8"}, ValueError, "activations is 'fp8', need one of auto, nvfp4, none"),
        ({"activations": None}, ValueError, "activations is None, need one of auto, nvfp4, none"),
    ],
)
def test_configure_names_a_bad_value_and_changes_nothing(values, error, told):
    nvfp4r.configure(gemv_max_m=4)
    with pytest.raises(error, match=told):
        nvfp4r.configure(**values)
    assert Settings.from_environment() == Settings(False, 4, "auto")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("NVFP4R", "yes", "NVFP4R is 'yes' in the environment, need 1 .on. or 0 .off."),
        ("NVFP4R_GEMV_MAX_M", "many", "NVFP4R_GEMV_MAX_M is 'many' in the environment"),
        ("NVFP4R_GEMV_MAX_M", "", "M is '' in the environment, need an integer >= 0; unset it for"),
        ("NVFP4R_GEMV_MAX_M", "-1", "NVFP4R_GEMV_MAX_M is '-1' in the environment"),
        ("NVFP4R_GEMV_MAX_M", "8_0", "NVFP4R_GEMV_MAX_M is '8_0' in the environment"),
        ("NVFP4R_GEMV_MAX_M", "9" * 5000, "NVFP4R_GEMV_MAX_M=999.* in the environment"),
        ("NVFP4R_ACTIVATIONS", "w4a4", "NVFP4R_ACTIVATIONS=w4a4 in the environment"),
    ],
)
def test_d5_a_bad_variable_is_named_and_not_passed_over(monkeypatch, name, value, told):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=told):
        register()


def test_d5_an_unknown_version_is_refused_and_leaves_the_plugin_off(monkeypatch):
    monkeypatch.setattr("nvfp4r.vllm.installed_version", lambda: "0.34.2")
    with pytest.raises(UnknownVllmError, match=r"vLLM is 0\.34\.2.*0\.26 to 0\.33"):
        nvfp4r.enable()
    assert not Settings.from_environment().enabled
    monkeypatch.setenv("NVFP4R", "1")
    with pytest.raises(UnknownVllmError, match=r"0\.34\.2"):
        register()


def test_enabling_without_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr("nvfp4r.vllm.installed_version", lambda: None)
    with pytest.raises(ImportError, match=r"pip install 'reset-decoding.vllm.'"):
        nvfp4r.enable()


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.32.0+cpu", "0.33.1rc2"])
def test_known_versions(version):
    assert check_version(version) in KNOWN


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.26.0", "dev"])
def test_d5_unknown_versions(version):
    with pytest.raises(UnknownVllmError, match="will not guess"):
        check_version(version)


@pytest.mark.parametrize(
    ("names", "allowed", "told"),
    [
        (["other"], None, "no entry point 'nvfp4r'"),
        (["nvfp4r"], "other", "VLLM_PLUGINS is 'other'"),
        (["nvfp4r"], "", "VLLM_PLUGINS is ''"),
    ],
)
def test_d5_a_plugin_that_vllm_would_not_load_is_refused(names, allowed, told):
    environment = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    with pytest.raises(RuntimeError, match=told):
        check_plugin_is_loaded(environment, names)


@pytest.mark.parametrize("value", [None, "cutlass"])
def test_d5_a_variable_that_vllm_no_longer_reads_is_told_of(caplog, value):
    warn_of_old_variable({} if value is None else {"VLLM_NVFP4_GEMM_BACKEND": value})
    told = "VLLM_NVFP4_GEMM_BACKEND is set to 'cutlass', which vLLM"
    assert (told in caplog.text) is (value is not None)


@pytest.mark.parametrize("allowed", [None, "nvfp4r", "other,nvfp4r"])
def test_a_plugin_that_vllm_loads_is_accepted(allowed):
    environment = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    check_plugin_is_loaded(environment, ["other", "nvfp4r"])


@pytest.mark.parametrize(
    ("stored", "setting", "has_units", "done", "why"),
    [
        ("nvfp4", "auto", True, "nvfp4", "GPU X has FP4 units"),
        ("nvfp4", "auto", False, "none", "GPU X has no FP4 units"),
        ("nvfp4", "none", True, "none", "activations='none' was asked for"),
        ("nvfp4", "nvfp4", False, "nvfp4", "activations='nvfp4' was asked for"),
        ("none", "auto", True, "none", "the checkpoint is W4A16"),
        ("none", "none", False, "none", "the checkpoint is W4A16"),
    ],
)
def test_d4_the_choice_for_activations_and_its_reason(stored, setting, has_units, done, why):
    found, reason = resolve_activations(stored, setting, has_units, "GPU X")
    assert (found, why in reason) == (done, True), reason


def test_a5_a_checkpoint_without_input_scales_never_gets_made_up_ones():
    with pytest.raises(ValueError, match=r"NVFP4R_ACTIVATIONS.*W4A16 and holds none"):
        resolve_activations("none", "nvfp4", True, "GPU X")
