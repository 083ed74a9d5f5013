"""A GGUF file as a transformers checkpoint.

python -m kvtier.demo.convert FOLDER FILE OUT      with FOLDER/lib, which holds what transformers reads GGUF with
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(folder: Path, file: str, out: Path) -> None:
    """Write the model and tokenizer in `folder`/`file` to `out`, in float32: what a CPU computes in."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):  # it is not quantised any more
        del model.config.quantization_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)


if __name__ == "__main__":
    sys.path.append(str(Path(sys.argv[1], "lib")))
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
