"""The model card of a drafter's folder, ``README.md`` with the hub's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from sglang_hyperdflash.draft.config import parse_config
from sglang_hyperdflash.training.recipe import Recipe, Schedule

CARD = "README.md"
TEMPLATE = """\
---
{{ card_data }}
---

<!-- Before publishing, add `license` above{% if not base_model %}, and `base_model`, the target's \
hub id{% endif %}. -->

# HyperDFlash drafter for {{ name }}

A draft model for speculative decoding with [SGLang](https://docs.sglang.io) and the plugin \
sglang-hyperdflash ([method](https://arxiv.org/abs/2606.26744)). It drafts {{ drafts }} tokens at \
a time. The target verifies them, so its output stays the same. It serves no other target.

| | |
|---|---|
{% for row in rows %}| {{ row | join(" | ") }} |
{% endfor %}
## Training
{% if not stages %}
None: `hyperdflash init` made it.
{% else %}
| stage | data | steps | samples a step | blocks a sample | learning rate |
|---|---|---|---|---|---|
{% for row in stages %}| {{ row | join(" | ") }} |
{% endfor %}
Loss: `{{ loss }}`. Checkpoint: step {{ step }} of the last stage.
{% endif %}{% if tau %}
Simulated accept length, from held-out answers replayed without a server:

| answers | temperature 0 | temperature 1, expected |
|---|---|---|
{% for row in tau %}| {{ row | join(" | ") }} |
{% endfor %}{% endif %}
## Serving

With this folder's path or hub id as DRAFTER:

```bash
python -m sglang.launch_server --model-path {{ base_model or "TARGET" }} \\
    --speculative-algorithm HYPERDFLASH --speculative-draft-model-path DRAFTER
```
"""


def shape_lines(raw: Mapping[str, Any]) -> dict[str, str]:
    """A drafter's layers, block, reducer and head in words.

    Args:
        raw: its ``config.json``.
    """
    config = parse_config(raw)
    starts = {
        "none": "fc, a linear projection: nothing is inherited",
        "inherited": "hc_gate inherited exactly from the target's hc_head",
        "approximate": "hc_gate APPROXIMATE, from the last layer's hc_ffn: the target applies that "
        "gate one sub-layer later than it computes it, so this is not its collapse",
    }
    head = config.dependency
    lines = {
        "layers": f"{config.num_hidden_layers}, {raw['num_attention_heads']} heads of "
        f"{raw['head_dim']}, {raw['num_key_value_heads']} K/V heads, "
        f"MLP {raw['intermediate_size']}",
        "block": f"{config.block_size} rows{', causal' if config.causal else ''}, window "
        f"{config.window or 'none'}",
        "reducer": starts[config.gate],
        "head": f"rank {head.rank}, {head.top_k} candidates" if head else "none",
    }
    if config.captured_layers:
        layers = " ".join(map(str, config.captured_layers))
        lines["source"] = f"layers {layers}, not the pre-collapse residual"
    return lines


def model_card(
    raw: Mapping[str, Any],
    target: str,
    schedule: Schedule | None = None,
    recipes: Sequence[Recipe] = (),
    best: Mapping[str, Any] | None = None,
) -> str:
    """The text of a drafter's card; a local folder is named without the folders around it.

    Args:
        raw: the drafter's ``config.json``. target: folder or hub id.
        schedule: of its training, None before any; recipes: of its stages.
        best: the record of the checkpoint (:class:`~sglang_hyperdflash.training.trainer.Trainer`).
    """
    config = parse_config(raw)
    known, method = config.target, "DFlash-style" if config.captured_layers else "HyperDFlash"
    base_model = None if Path(target).is_dir() else target
    name = base_model or Path(target).resolve().name
    rows = {
        "method": f"{method}-2, with a dependency head" if config.dependency else method,
        "target": f"{name}: {known.architecture}, {config.hc_mult} x {config.hidden_size}, "
        f"{known.num_hidden_layers} layers",
        "target's `hc_head`": f"fingerprint {known.hc_head_fingerprint or 'none'}",
        **shape_lines(raw),
    }
    data = ModelCardData(
        base_model=base_model,
        library_name="sglang",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "hyperdflash"],
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        name=name,
        drafts=config.num_drafts,
        rows=list(rows.items()),
        stages=_stages(schedule, recipes),
        loss=schedule.objective.resolved(config).loss if schedule else None,
        step=best["step"] if best else None,
        tau=_tau(best),
    )
    return str(card)


def _stages(schedule: Schedule | None, recipes: Sequence[Recipe]) -> list[tuple[Any, ...]]:
    if schedule is None:
        return []
    data = [
        ", ".join(name if name.startswith("hub:") else Path(name).name for name in stage.data)
        for stage in schedule.stage
    ]
    return [
        (i, files, r.steps or f"{r.minutes:g} minutes", r.batch, r.anchors, f"{r.lr:g}")
        for i, (files, r) in enumerate(zip(data, recipes, strict=True), 1)
    ]


def _tau(best: Mapping[str, Any] | None) -> list[tuple[str, ...]]:
    """A held-out file's name and simulated taus, a row for each."""
    found = (best or {}).get("held_out") or {}
    numbers = {
        name: [result[kind] for kind in ("tau", "tau_sampled") if kind in result]
        for name, result in found.items()
    }
    return [
        (name, *(f"{tau:.2f}" for tau in taus), *[""] * (2 - len(taus)))
        for name, taus in numbers.items()
    ]
