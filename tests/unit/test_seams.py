"""Every private SGLang name that we use still has the shape we rely on; a lost hook is loud."""

import dataclasses
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import sglang

from docs.reference import generate
from docs.reference.sglang_uses import fields, overrides
from eval.rivals import plugin as rivals
from sglang_hyperdflash import plugin, seams
from sglang_hyperdflash.tools.errors import SeamError
from tests.unit.cuda_start import tiny_arguments
from tests.unit.other_process import ask
from tests.unit.plugin_load import MODELS

pytestmark = pytest.mark.heavy

SEAMS = plugin.ALL_SEAMS + rivals.SEAMS
SEAM = SEAMS[0]


def test_every_seam_fits_and_is_listed_once():
    for seam in SEAMS:
        seams.check_seam(seam)
        if seam.kind == "replace":
            theirs = inspect.unwrap(pkgutil.resolve_name(seam.target))
            ours, needed = (list(inspect.signature(f).parameters) for f in (seam.hook, theirs))
            assert ours == needed, seam.target
    targets = [seam.target for seam in SEAMS]
    assert len(targets) == len(set(targets)) > 10
    # A hook in a module that nothing lists would be missing without an error.
    roots = (Path(one.__file__).parent for one in (plugin, rivals))
    files = [path for root in roots for path in root.rglob("*.py")]
    declared = re.compile(r"^@(?:after|around|replace)\(.*?^(?:async )?def (\w+)\(", re.M | re.S)
    names = [name for path in files for name in declared.findall(path.read_text())]
    assert sorted(names) == sorted(seam.hook.__name__ for seam in SEAMS)


@pytest.fixture
def fresh(monkeypatch):
    """The module as in a process where nothing was installed yet."""
    for name in ("recorded", "_failures"):
        monkeypatch.setattr(seams, name, [])
    monkeypatch.setattr(seams, "in_place", set())


def test_a_seam_that_no_longer_fits_is_named_and_stops_our_server_alone(fresh, monkeypatch):
    gone = dataclasses.replace(SEAM, target="sglang.srt.no_such_function")
    changed = dataclasses.replace(SEAM, source="0" * 12)
    for seam in (gone, changed):
        with pytest.raises(SeamError, match=seam.target):
            seams.check_seam(seam)
    pkgutil.resolve_name(changed.target)
    seams.install([changed])  # no import fails
    with pytest.raises(SeamError, match=changed.target):
        seams.check_installed()
    monkeypatch.setattr(seams.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(SeamError, match=r"0\.6\.0"):
        seams.install([])


def test_missing_hooks_refuse_to_start(fresh, monkeypatch):
    with pytest.raises(SeamError):
        seams.check_installed()
    for seam in plugin.ALL_SEAMS:
        pkgutil.resolve_name(seam.target)
        seams.recorded.append(seam)
    monkeypatch.setattr(seams, "in_place", set())  # importing may have put hooks in place
    with pytest.raises(SeamError) as refusal:
        seams.check_installed()
    assert all(seam.target in str(refusal.value) for seam in plugin.ALL_SEAMS)


@pytest.fixture(scope="module")
def loaded() -> dict:
    """A process as SGLang starts one."""
    cases = {name: tiny_arguments()[name] for name in ("readme", "demo", "deterministic")}
    return ask("tests.unit.plugin_load", cases, seconds=3600)


def test_hooks_wait_for_their_modules_and_are_there_when_names_are_read(loaded):
    assert loaded["early"] == [], "loading the plugin imports what only a scheduler needs"
    expected = {seam.target for seam in plugin.SERVING_SEAMS if not seam.only_with}
    assert set(loaded["patched"]) == expected
    assert loaded["stale"] == [], "a module that took a name keeps what is not hooked"
    assert loaded["called"] == "pass_admission", "a name that another module took is hooked too"
    assert loaded["models"] == list(MODELS)


def test_hooks_add_nothing_to_a_server_s_log(loaded):
    assert any("hyperdflash" in line for line in loaded["logged"]), "SGLang names its plugins"
    assert not any(seam.dotted in line for line in loaded["logged"] for seam in plugin.ALL_SEAMS)


def test_a_cpu_serves_the_tiny_target_in_fp32(loaded):
    reference = "torch_reference"
    assert loaded["resolved"] == {
        "readme": [reference, reference, 1, "auto", "float32"],
        "demo": [reference, None, 1, "auto", "float32"],
        "deterministic": [reference, None, 1, "auto", "float32"],
    }


def test_the_committed_reference_pages_are_generated_from_this_code(loaded):
    assert {path.name for path in generate.HERE.glob("*.md")} == set(generate.PAGES)
    pages = {name: make() for name, make in generate.PAGES.items() if name != "hooks.md"}
    for name, page in {**pages, "hooks.md": loaded["hooks.md"]}.items():
        assert (generate.HERE / name).read_text() == page, f"{name}: run make reference"


def test_the_algorithm_answers_everything_the_enum_does():
    """SGLang checks only is_* and supports_*; the scheduler calls more."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_hyperdflash.serving.startup.algorithm import HyperDFlashAlgorithm

    algorithm = HyperDFlashAlgorithm("HYPERDFLASH", lambda args: None, supports_overlap=True)
    methods = vars(SpeculativeAlgorithm).items()
    names = [n for n, v in methods if inspect.isfunction(v) and not n.startswith("_")]
    assert len(names) > 20
    for name in names:
        method = getattr(algorithm, name)
        predicates = ("is_", "supports_", "need_topk", "carries_draft_hidden_states")
        if name.startswith(predicates):
            expected = getattr(SpeculativeAlgorithm.DFLASH, name)()
            assert (method() if callable(method) else method) == expected, name


def test_overrides_take_what_sglang_gives():
    """None lacks a parameter, needs another one, or has them in another order."""
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    overridden = list(overrides())
    assert len(overridden) > 20
    for name, owner, ours, theirs in overridden:
        have, needed = (inspect.signature(f).parameters for f in (ours, theirs))
        open_ended = any(one.kind in rest for one in have.values())
        given = [one for one in needed if needed[one].kind not in rest]
        common = [one for one in given if one in have]
        more = [one for one in have.values() if one.name not in needed and one.kind not in rest]
        message = f"{owner.__name__}, {name}: expected {tuple(have)}, found {tuple(needed)}"
        assert open_ended or common == given, message
        assert common == [one for one in have if one in given], message
        assert not any(one.default is one.empty for one in more), message


def test_every_private_field_is_still_sglangs():
    """A name that is neither ours nor in SGLang's source is a typing error or is gone."""
    folder = Path(sglang.__file__).parent
    text = "".join(path.read_text(errors="replace") for path in folder.glob("srt/**/*.py"))
    names = {name.rpartition(".")[2] for name in fields()}
    private = {name for name in names if name.startswith("_")}
    assert len(private) > 10 and private <= set(re.findall(r"\b_\w+", text))


WORKER = "speculative.dflash_worker_v2:DFlashWorkerV2"
# Functions without a hook of ours whose way of working we rely on.
SOURCES = {
    # Projects every row that is appended.
    f"{WORKER}._append_target_hidden_to_draft_kv_by_loc": "fae12d81a6e1",
    # Measures, then writes the rows, then drafts: the order that a window relies on.
    f"{WORKER}.forward_batch_generation": "f42a3bb18adb",
    # The draft pool's size and name, and what is written where.
    "mem_cache.kv_cache_configurator:KVCacheConfigurator.configure": "c8e14f836b56",
    "mem_cache.kv_loc_plan:KVLocPlan.__init__": "59ce0965caaf",
    "mem_cache.kv_loc_plan:IdSpace": "1dcc14a51e25",
    "mem_cache.memory_pool:ReqToTokenPool.__init__": "474f1c413d92",
    # A checkpoint's tensors come as no list (``sent_in_parts``).
    "model_loader.loader:DefaultModelLoader._get_weights_iterator": "66d216d6f9e3",
}


@pytest.mark.parametrize("target", SOURCES, ids=lambda target: target.rpartition(":")[2])
def test_sglangs_source_is_the_one_that_we_rely_on(target):
    assert seams.source_hash(pkgutil.resolve_name(f"sglang.srt.{target}")) == SOURCES[target]
