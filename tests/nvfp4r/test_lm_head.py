"""The output head: quantised where it is asked for and has a matrix of its own."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from nvfp4r import NVFP4Tensor, load_checkpoint
from nvfp4r.convert import quantise_checkpoint
from nvfp4r.hf import load_model
from nvfp4r.selection import plan_conversion
from reset.cli.quantize import app
from tests.nvfp4r.sources import CONFIG, llama_tensors, write_source
from tests.nvfp4r.toy_models import toy_model

DIALECTS = ("modelopt", "compressed-tensors")


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source", llama_tensors())


def test_the_head_is_kept_unless_it_is_asked_for(source):
    plan = plan_conversion(source)
    assert plan.kept["lm_head.weight"] == "output head"
    assert plan.exclude == ("lm_head",)
    plan = plan_conversion(source, quantise_head=True)
    assert "lm_head" in plan.quantised
    assert plan.exclude == ()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a9_a_quantised_head_is_not_called_excluded(source, tmp_path, dialect):
    out = tmp_path / "out"
    quantise_checkpoint(source, out, dialect=dialect, quantise_head=True)
    checkpoint = load_checkpoint(out)
    assert checkpoint.problems() == []
    assert isinstance(checkpoint["lm_head.weight"], NVFP4Tensor)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == []
    if dialect == "compressed-tensors":  # a head is no "Linear" in vLLM
        assert config["config_groups"]["group_0"]["targets"] == ["Linear", "re:.*lm_head$"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_transformers_computes_logits_with_the_quantised_head(tmp_path, dialect):
    source = tmp_path / "source"
    toy_model("llama", dtype=torch.bfloat16).save_pretrained(source)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    outputs = {}
    for head in (False, True):
        out = tmp_path / f"out-{head}"
        quantise_checkpoint(source, out, dialect=dialect, quantise_head=head)
        model = load_model(out, activations="none")
        with torch.no_grad():
            outputs[head] = model(tokens, output_hidden_states=True)
    hidden = outputs[True].hidden_states[-1]
    assert torch.equal(hidden, outputs[False].hidden_states[-1])
    head = load_checkpoint(tmp_path / "out-True")["lm_head.weight"]
    expected = torch.nn.functional.linear(hidden, head.dequantize(torch.bfloat16))
    assert torch.equal(outputs[True].logits, expected)
    assert not torch.equal(outputs[True].logits, outputs[False].logits)


@pytest.mark.parametrize(
    ("config", "tied", "exclude", "told"),
    [
        ({**CONFIG, "tie_word_embeddings": True}, False, [], "tie_word_embeddings is true"),
        (CONFIG, True, [], "there is no tensor named lm_head.weight"),
        (CONFIG, False, ["lm_head"], "lm_head: --exclude covers it"),
    ],
)
def test_a_head_that_cannot_be_quantised_is_refused(tmp_path, config, tied, exclude, told):
    source = write_source(tmp_path / "source", llama_tensors(tied=tied), config=config)
    with pytest.raises(ValueError, match=told):
        plan_conversion(source, exclude, quantise_head=True)
    plan_conversion(source, exclude)  # without the head it can


def test_the_command_has_the_flag(source, tmp_path):
    flags = ("--model", source, "--output", tmp_path / "out", "--quantize-lm-head", "--json")
    result = CliRunner().invoke(app, [str(flag) for flag in flags])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["quantised_modules"] == 15
    assert report["excluded_in_config"] == []


def test_a_tied_head_is_refused_by_the_command_before_any_work(tmp_path):
    source = write_source(tmp_path / "source", llama_tensors(tied=True))
    flags = ("--model", source, "--output", tmp_path / "out", "--quantize-lm-head")
    result = CliRunner().invoke(app, [str(flag) for flag in flags])
    assert result.exit_code == 2
    assert "--quantize-lm-head" in result.stderr
    assert not (tmp_path / "out").exists()
