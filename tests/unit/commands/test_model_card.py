"""The card of a drafter's folder, and drafters that are named by their hub ids."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import ModelCard

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.training.model_card import model_card
from sglang_hyperdflash.training.recipe import read_schedule
from tests.conftest import EXAMPLE, ROOT
from tests.unit.commands.test_train import small
from tests.unit.hub_cache import hub_home, use_hub_home

FLASH = json.loads(
    (ROOT / "examples/deepseek_v4_flash_config/drafter/config.json").read_text(encoding="utf-8")
)


def tables(text: str) -> list[list[str]]:
    """The cells of every row of a card's tables, without the lines under their heads."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if any(row)]


def test_a_card_of_a_hub_target_has_its_metadata():
    card = ModelCard(model_card(FLASH, "deepseek-ai/DeepSeek-V4-Flash"))
    assert card.data.base_model == "deepseek-ai/DeepSeek-V4-Flash"
    assert card.data.library_name == "sglang" and "speculative-decoding" in card.data.tags
    assert card.data.license is None and "add `license` above. -->" in card.text
    rows = tables(card.text)
    assert ["method", "HyperDFlash-2, with a dependency head"] in rows
    assert ["target's `hc_head`", "fingerprint 0000000000000000"] in rows
    assert ["layers", "5, 32 heads of 128, 8 K/V heads, MLP 12288"] in rows
    assert ["block", "7 rows, window 2048"] in rows
    assert "None: `hyperdflash init` made it." in card.text
    assert "--model-path deepseek-ai/DeepSeek-V4-Flash" in card.text


def test_init_writes_a_card(tmp_path, target_dir):
    command = ["init", "--target", str(target_dir), "--out", str(tmp_path / "draft")]
    assert main([*command, "--dependency-rank", "0", "--layers", "1"]) == 0
    card = ModelCard.load(tmp_path / "draft" / "README.md")
    # A folder of this machine is no hub id, and is not shown.
    assert card.data.base_model is None and str(target_dir.parent) not in card.content
    assert "`base_model`, the target's hub id. -->" in card.text
    fingerprint = json.loads((EXAMPLE / "drafter/config.json").read_text())["hyperdflash_config"]
    expected = f"fingerprint {fingerprint['target']['hc_head_fingerprint']}"
    rows = tables(card.text)
    assert ["target's `hc_head`", expected] in rows and ["method", "HyperDFlash"] in rows


def test_a_drafter_of_the_hub_is_trained_and_its_card_says_how(
    tmp_path, target_dir, monkeypatch, capsys
):
    config = small(tmp_path, target_dir)
    hub_home(tmp_path / "home", tmp_path / "draft", "owner/drafter")
    use_hub_home(monkeypatch, tmp_path / "home")
    text = config.read_text().replace('draft = "draft"', 'draft = "owner/drafter"')
    config.write_text(text)
    command = ["train", "--config", str(config), "--work", str(tmp_path / "work")]
    assert main(command) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    lines = (tmp_path / "work/stage-1/training_log.jsonl").read_text().splitlines()
    best = max(map(json.loads, lines), key=lambda line: line["score"])
    rows = tables(card.text)
    assert ["1", "a.jsonl", "2", "2", "32", "0.001"] in rows
    assert ["count", f"{best['tau']:.2f}"] in rows
    assert f"Loss: `ce_kl`. Checkpoint: step {best['step']} of the last stage." in card.text
    plan = ["plan", "--training", str(config), "--conversations", "1000", "--json"]
    assert main([*plan, "--draft", "owner/drafter"]) == 0
    capsys.readouterr()
    config.write_text(text.replace("owner/drafter", "owner/gone"))
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "drafter owner/gone: expected a folder, or the hub id of a drafter" in error
    assert error.count("\n") == 1


def test_a_folder_comes_before_a_hub_id(tmp_path, target_dir):
    config = small(tmp_path, target_dir)
    config.write_text(config.read_text().replace('draft = "draft"', 'draft = "owner/drafter"'))
    assert read_schedule(config).draft == Path("owner/drafter")
    (tmp_path / "owner").mkdir()
    (tmp_path / "draft").rename(tmp_path / "owner" / "drafter")
    assert read_schedule(config).draft == tmp_path / "owner" / "drafter"
