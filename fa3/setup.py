"""Refuses to take the place of a FlashAttention-3 that somebody else built."""

import sys
import sysconfig
from importlib.metadata import distributions

from setuptools import setup


def other_build() -> str | None:
    """The version of an installed flash-attn-3 that is not ours."""
    # An isolated build sees none of the environment's packages on sys.path, so these are asked for.
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for found in distributions(path=places):
        name = (found.metadata["Name"] or "").lower().replace("_", "-")
        if name == "flash-attn-3" and "+r" not in found.version:
            return found.version
    return None


if other := other_build():
    sys.exit(
        f"flash-attn-3: version {other} of FlashAttention-3 is installed here, which this would"
        " replace; uninstall it first if that is what you want"
    )
setup()
