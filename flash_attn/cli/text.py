"""The demo's text: bytes of a file, of a folder, or of the prose inside Python itself."""

from pathlib import Path

import torch

from .common import CliError

_LIMIT = 64 * 2**20  # bytes read from a folder; the demo sees a few million at most


def read_text(path: str | None, at_least: int) -> torch.Tensor:
    """uint8 (length,) of a file, of the text files under a folder, or of ``pydoc_data.topics``."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n".join(topics[name] for name in sorted(topics)).encode()
    else:
        data = _read(Path(path))
    if len(data) < at_least:
        raise CliError(
            f"--text: expected at least {at_least:,} bytes of text, got {len(data):,} in {path!r}"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read(path: Path) -> bytes:
    try:
        if path.is_file():
            return path.read_bytes()
        if path.is_dir():
            return _read_folder(path)
    except OSError as error:
        raise CliError(f"--text: cannot read {str(path)!r}: {error.strerror}") from None
    raise CliError(f"--text: expected a file or a folder, got {str(path)!r}, which does not exist")


def _read_folder(folder: Path) -> bytes:
    """Files without a NUL byte, by name; hidden files and folders are left out."""
    pieces, total = [], 0
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if hidden or not file.is_file():
            continue
        data = file.read_bytes()
        if b"\0" in data[:4096]:
            continue
        pieces.append(data)
        total += len(data)
        if total >= _LIMIT:
            break
    return b"\n".join(pieces)
