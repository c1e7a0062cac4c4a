"""What importing the packages loads, and that imports point one way: cli -> adapters -> core."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
HEAVY = (
    *("vllm", "transformers", "huggingface_hub", "triton", "accelerate", "datasets"),
    *("matplotlib", "typer", "rich"),
)
CLI_MODULES = ("cli", "cli_bench", "console")
ADAPTERS = {
    "reset": ("hf", "engine", "hub", "_triton", "_triton_rule", "_triton_launch", "vllm"),
    "nvfp4r": ("hf", "vllm"),
}


def top_level_imports(path: Path) -> set[str]:
    """Modules that `path` imports when it is imported (imports inside functions are lazy)."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules(package: str) -> list[Path]:
    return sorted((SOURCE / package).rglob("*.py"))


def layer(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if any(name in parts[1:] for name in CLI_MODULES):
        return "cli"
    return "adapter" if parts[1] in ADAPTERS[parts[0]] else "core"


@pytest.mark.parametrize(("package", "other"), [("reset", "nvfp4r"), ("nvfp4r", "reset")])
def test_importing_a_package_needs_torch_alone(package, other):
    blocked = (*HEAVY, other)
    code = (
        f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
        f"import {package}\n"
        f"print(sorted(n for n in sys.modules if n.split('.')[0] == {package!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{package}.hf" not in done.stdout


@pytest.mark.parametrize("path", [p for name in ADAPTERS for p in modules(name)], ids=str)
def test_imports_point_one_way(path):
    package = path.relative_to(SOURCE).parts[0]
    imports = top_level_imports(path)
    if layer(path) == "core":
        heavy = [name for name in imports if name.split(".")[0] in HEAVY]
        assert not heavy, f"core module {path} imports {heavy}"
        for adapter in ADAPTERS[package]:
            name = f"{package}.{adapter}"
            assert not [n for n in imports if n == name or n.startswith(f"{name}.")]
    if layer(path) != "cli":
        assert not [n for n in imports if any(part in CLI_MODULES for part in n.split("."))]
    if package == "nvfp4r":
        assert not [name for name in imports if name.split(".")[0] == "reset"]


def test_both_packages_carry_one_version():
    import nvfp4r
    import reset

    assert reset.__version__ == nvfp4r.__version__
