"""The CUDA sources of this package, as text. Knows nothing of compilers."""

from __future__ import annotations

from importlib import resources

ENTRY = "nvfp4r.cu"  # the file that is compiled; it includes the others by name
_SUFFIXES = (".cu", ".cuh")


def kernel_sources() -> dict[str, str]:
    """File name -> text of every file in `nvfp4r/kernels`, in the order of names.

    Raises:
        FileNotFoundError: the installation lacks them.
    """
    folder = resources.files("nvfp4r").joinpath("kernels")
    texts = {
        file.name: file.read_text(encoding="utf-8")
        for file in (folder.iterdir() if folder.is_dir() else ())
        if file.name.endswith(_SUFFIXES)
    }
    if ENTRY not in texts:
        raise FileNotFoundError(
            f"{folder}: {ENTRY} is missing, so the CUDA kernels cannot be compiled; install "
            "reset-decoding again"
        )
    return dict(sorted(texts.items()))
