"""Loads the compiled library (`_C`), or says in one line why it cannot."""

import importlib
import importlib.util
from pathlib import Path

import torch

_BUILD = "build it from the source folder with `pip install -v --no-build-isolation -e .`"


def _expect_here(name: str) -> None:
    """Raises unless this part of the build lies beside this file.

    The package's path has other folders too, and there may lie the library of another copy.
    """
    here = Path(__file__).resolve().parent
    spec = importlib.util.find_spec(f"flash_attn.{name}")
    if spec is None or Path(spec.origin).resolve().parent != here:
        other = "" if spec is None else f" (that of {Path(spec.origin).parent} is another copy's)"
        raise ImportError(f"flash_attn: the C++ library is not built in {here}{other}; {_BUILD}")


def _load():
    _expect_here("_build_info")
    build = importlib.import_module("flash_attn._build_info")
    # A C++ extension is bound to the one libtorch it was compiled against: any other gives
    # undefined symbols, or worse, none.
    if str(torch.__version__) != build.TORCH_VERSION:
        raise ImportError(
            f"flash_attn: built against torch {build.TORCH_VERSION}, but this is torch"
            f" {torch.__version__}; install that torch, or {_BUILD}"
        )
    _expect_here("_C")
    try:
        return importlib.import_module("flash_attn._C")
    except ImportError as error:
        raise ImportError(f"flash_attn: the C++ library does not load: {error}; {_BUILD}") from None


C = _load()
