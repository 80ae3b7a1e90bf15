"""Untrained drafters whose blocks differ, and the check that compared blocks did."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_hyperdflash.draft.config import causal_fields, default_candidates
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.training import drafter as drafters
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape


@torch.no_grad()
def rescale(drafter: Drafter) -> None:
    """Redraw a drafter's matrices, so large that its blocks depend on what it reads."""
    torch.manual_seed(0)
    for name, value in drafter.named_parameters():
        if value.dim() == 2 and "reducer" not in name:
            value.copy_(torch.randn_like(value) * 3 * value.shape[-1] ** -0.5)


def write_untrained(folder: Path, target: dict, shape: DrafterShape, mask_token: int) -> Path:
    """A drafter of random weights whose blocks differ, for a target of this ``config.json``.

    Its gate is ``approximate``, which is compared with no fingerprint of the target's weights.
    """
    torch.manual_seed(0)
    raw = drafters.draft_config(TargetFacts.from_config(target), None, shape, mask_token)
    raw["hyperdflash_config"]["gate"] = "approximate"
    drafter = Drafter(raw)
    with torch.no_grad():  # random gates, with x @ fn.T of unit size before the sigmoid
        drafter.reducer.fn.normal_(std=drafter.reducer.fn.shape[1] ** -0.5)
        drafter.reducer.base.zero_()
        drafter.reducer.scale.fill_(1.0)
    rescale(drafter)
    drafter.save(folder)
    return folder


def with_dependency(raw: dict[str, Any], rank: int, *, causal: bool = False) -> dict[str, Any]:
    """A ``config.json`` with a dependency head and block attention, and nothing else new."""
    head = {"rank": rank, "top_k": default_candidates(raw["vocab_size"])}
    own = raw["hyperdflash_config"] | {"dependency": head}
    fields = causal_fields(raw["num_hidden_layers"]) if causal else {}
    return raw | fields | {"hyperdflash_config": own}


def with_head(drafter_dir: Path, out: Path, *, causal: bool = False) -> Path:
    """A drafter with a dependency head of random weights."""
    old = Drafter.load(drafter_dir)
    rank = 8 if old.dependency is None else old.config.dependency.rank
    drafter = Drafter(with_dependency(old.raw, rank, causal=causal))
    drafter.load_state_dict(old.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, size in (
            (drafter.dependency.predecessor, 1.0),
            (drafter.dependency.successor, 0.4),
            (drafter.dependency.gate.weight, drafter.config.hidden_size**-0.5),
        ):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    drafter.save(out)
    return out


def with_config(drafter: Path, folder: Path, **fields: Any) -> Path:
    """A copy of a checkpoint, in the new ``folder``, with other fields; dictionaries are merged."""
    raw = json.loads((drafter / "config.json").read_text())
    for name, value in fields.items():
        raw[name] = raw[name] | value if isinstance(value, dict) else value
    shutil.copytree(drafter, folder, ignore=shutil.ignore_patterns(".hyperdflash*"))
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    return folder


def with_window(drafter: Path, folder: Path, window: int | None) -> Path:
    """A copy of a checkpoint, in the new ``folder``, whose blocks see ``window`` context tokens."""
    return with_config(drafter, folder, hyperdflash_config={"window": window})


def rescale_folder(folder: Path) -> None:
    """The same for a checkpoint."""
    drafter = Drafter.load(folder)
    rescale(drafter)
    drafter.save(folder)


def assert_varied(blocks: list[list[int]], share: float = 1 / 3) -> None:
    """A comparison of one block with itself again and again shows nothing: a share is distinct."""
    distinct = len(set(map(tuple, blocks)))
    assert distinct > share * len(blocks), f"{len(blocks)} blocks compared, {distinct} distinct"


def assert_lengths_vary(histograms: list[list[int]]) -> None:
    """Of each request, rounds by drafts accepted: if all end alike, any drafts compare as equal."""
    found = {length for histogram in histograms for length, n in enumerate(histogram) if n}
    assert len(found) >= 3, f"rounds of only these lengths: {sorted(found)}"
    assert len(set(map(tuple, histograms))) > 1, f"every request has the rounds {histograms[0]}"


def with_idle_head(drafter: Path, folder: Path, like: Path) -> Path:
    """A drafter that got a head which adds nothing, in the new ``folder``, in the shape of one."""
    raw = json.loads((like / "config.json").read_text())
    size, width = raw["hyperdflash_config"]["dependency"]["rank"], raw["hidden_size"]
    table = torch.zeros(raw["vocab_size"], size, dtype=torch.bfloat16)
    tensors = load_file(drafter / "model.safetensors")
    tensors |= {"dependency.predecessor": table + 0.5, "dependency.successor": table}
    tensors["dependency.gate.weight"] = torch.zeros(size, width, dtype=torch.bfloat16)
    drafters.write_drafter(folder, raw, tensors)
    return folder


def poisoned(drafter: Path, folder: Path) -> Path:
    """A copy of a checkpoint, in the new ``folder``, with random matrices."""
    rescale_folder(with_config(drafter, folder))
    return folder
