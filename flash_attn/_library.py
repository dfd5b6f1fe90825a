"""Loads the compiled library (`_C`), or says in one line why it cannot."""

import importlib

import torch

_BUILD = "build it from the source folder with `pip install -v --no-build-isolation -e .`"


def _load():
    try:
        build = importlib.import_module("flash_attn._build_info")
    except ModuleNotFoundError:
        raise ImportError(f"flash_attn: the C++ library is not built; {_BUILD}") from None
    # A C++ extension is bound to the one libtorch it was compiled against: any other gives
    # undefined symbols, or worse, none.
    if str(torch.__version__) != build.TORCH_VERSION:
        raise ImportError(
            f"flash_attn: built against torch {build.TORCH_VERSION}, but this is torch"
            f" {torch.__version__}; install that torch, or {_BUILD}"
        )
    try:
        return importlib.import_module("flash_attn._C")
    except ModuleNotFoundError:
        raise ImportError(f"flash_attn: the C++ library is not built; {_BUILD}") from None
    except ImportError as error:
        raise ImportError(f"flash_attn: the C++ library does not load: {error}; {_BUILD}") from None


C = _load()
