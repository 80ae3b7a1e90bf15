"""A checkpoint in several files, as it is published when it is large."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def split(folder: Path, count: int = 2) -> list[Path]:
    """Replace ``model.safetensors`` by so many shards and their index."""
    whole = folder / "model.safetensors"
    tensors, files = load_file(whole), {}
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    whole.unlink()
    for i, file in enumerate(names):
        part = sorted(tensors)[i::count]
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
    (folder / f"{whole.name}.index.json").write_text(json.dumps({"weight_map": files}))
    return [folder / name for name in names]
