"""Markers: what is skipped, what fails in CI, and that a GPU run without GPU tests is red."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = (Path(__file__).parent / "conftest.py").read_text(encoding="utf-8")
MARKERS = "[pytest]\nmarkers =\n    gpu\n    vllm\n    model\n    browser\n    pocket\n"


@pytest.fixture
def elsewhere(pytester, monkeypatch):
    """A project with this conftest on a machine that has no model, browser or GPU."""
    pytester.makeconftest(CONFTEST)
    pytester.makeini(MARKERS)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("CI", "NVFP4R_REQUIRE_GPU", "RESET_REQUIRE_VLLM"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(project, marker: str):
    project.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass")
    return project.runpytest_subprocess("-rs", "-p", "no:cacheprovider")


@pytest.mark.parametrize(
    ("marker", "reason"),
    [
        ("model", "make model"),
        ("pocket", "lab.pocket_reasoner.train"),
        ("browser", "apt install chromium"),
        ("gpu", "no CUDA GPU"),
    ],
)
def test_what_is_missing_is_skipped_with_its_reason(elsewhere, marker, reason):
    result = run(elsewhere, marker)
    result.assert_outcomes(skipped=1)
    assert result.ret == 0
    result.stdout.fnmatch_lines(f"SKIPPED*{reason}*")


@pytest.mark.parametrize("marker", ["model", "pocket", "browser"])
def test_in_ci_a_missing_model_or_browser_is_a_failure(elsewhere, monkeypatch, marker):
    monkeypatch.setenv("CI", "true")
    result = run(elsewhere, marker)
    result.assert_outcomes(errors=1)
    assert result.ret == 1


def test_a_gpu_run_without_gpu_tests_fails(elsewhere, monkeypatch):
    monkeypatch.setenv("NVFP4R_REQUIRE_GPU", "1")
    result = run(elsewhere, "gpu")
    result.assert_outcomes(skipped=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines("NVFP4R_REQUIRE_GPU is set, but no gpu test ran: *no CUDA GPU*")


def test_a_vllm_run_without_vllm_tests_fails(elsewhere, monkeypatch):
    monkeypatch.setenv("RESET_REQUIRE_VLLM", "1")
    elsewhere.makeconftest(CONFTEST + "\ndef missing(marker): return 'no vllm here'\n")
    result = run(elsewhere, "vllm")
    assert result.ret == 1
    result.stdout.fnmatch_lines("RESET_REQUIRE_VLLM is set, but no vllm test ran: no vllm here")


def test_a_gpu_run_with_gpu_tests_passes(elsewhere, monkeypatch):
    monkeypatch.setenv("NVFP4R_REQUIRE_GPU", "1")
    elsewhere.makeconftest(CONFTEST + "\ndef missing(marker): return None\n")
    result = run(elsewhere, "gpu")
    result.assert_outcomes(passed=1)
    assert result.ret == 0
