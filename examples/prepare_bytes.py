"""Real text for a small training run: the sources of Python's standard library, as bytes.

    python examples/prepare_bytes.py data/stdlib

writes data/stdlib.bin and data/stdlib.idx, a Megatron indexed dataset for `--data-path data/stdlib`. A token
is a byte. Files are cut at line ends into documents of about PIECE bytes, each ending with END_OF_DOCUMENT:
Megatron shuffles documents, so that one long sequence holds text from many files, and a batch of a single
sequence says more of the whole. For Megatron: `--tokenizer-type NullTokenizer --vocab-size 257`, whose
end-of-document token is the last one.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

END_OF_DOCUMENT = 256
PIECE = 512
TOKEN = np.uint16
EXCLUDED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def sources(root: Path) -> Iterator[Path]:
    """The Python files under `root` in the order of their names, without tests and installed packages."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        if EXCLUDED.isdisjoint(path.relative_to(root).parts):
            yield path


def pieces(text: bytes) -> Iterator[bytes]:
    """The text, cut at the first line end after every PIECE bytes."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def document(text: bytes) -> np.ndarray:
    """[len(text) + 1] tokens."""
    return np.append(np.frombuffer(text, dtype=np.uint8).astype(TOKEN), TOKEN(END_OF_DOCUMENT))


def write(prefix: Path, texts: Iterator[bytes]) -> tuple[int, int]:
    """Write the dataset; return the number of texts and of their bytes.

    The two files appear under their names when they are complete, the index last: a reader looks for both.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}.") as directory:
        partial = os.path.join(directory, prefix.name)
        builder = IndexedDatasetBuilder(get_bin_path(partial), dtype=TOKEN)
        count = size = 0
        for text in texts:
            for piece in pieces(text):
                tokens = document(piece)
                builder.add_document(tokens, [len(tokens)])
            count, size = count + 1, size + len(text)
        builder.finalize(get_idx_path(partial))
        for path in (get_bin_path, get_idx_path):
            os.replace(path(partial), path(str(prefix)))
    return count, size


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The standard library's sources as a Megatron dataset of bytes."
    )
    parser.add_argument("prefix", type=Path, help="where to write: PREFIX.bin and PREFIX.idx")
    prefix = parser.parse_args().prefix
    root = Path(sysconfig.get_path("stdlib"))
    files, size = write(prefix, (path.read_bytes() for path in sources(root)))
    print(f"{prefix}: {files} files of {root}, {size} bytes")


if __name__ == "__main__":
    main()
