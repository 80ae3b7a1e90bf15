"""Every private SGLang function we hook still has the shape we rely on, and a lost hook is loud."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import sglang

from docs.reference.sglang_uses import fields, overridden, own_classes
from sglang_hyperdflash import plugin, seams
from sglang_hyperdflash.tools.errors import SeamError
from tests.unit.other_process import ask


@pytest.mark.parametrize("seam", plugin.ALL_SEAMS, ids=lambda s: s.target.rpartition(":")[2])
def test_seam_signature(seam):
    seams.check_seam(seam)
    assert seam.hook.__doc__, "the first sentence is the reason in the documentation"


def test_a_replacement_takes_what_it_replaces():
    replacements = [seam for seam in plugin.ALL_SEAMS if seam.kind == "replace"]
    assert len(replacements) > 10
    for seam in replacements:
        theirs = inspect.unwrap(pkgutil.resolve_name(seam.target))
        own, needed = (list(inspect.signature(one).parameters) for one in (seam.hook, theirs))
        assert own == needed, seam.target


def test_every_declared_hook_is_installed():
    """A hook in a module that nothing lists would be missing without an error."""
    root = Path(plugin.__file__).parent
    files = [*root.rglob("*.py"), *(root.parent / "cpu_engine").rglob("*.py")]
    declared = re.compile(r"^@(?:after|around|replace)\(.*?^def (\w+)\(", re.M | re.S)
    names = [name for path in files for name in declared.findall(path.read_text())]
    assert sorted(names) == sorted(seam.hook.__name__ for seam in plugin.ALL_SEAMS)


def test_other_parameters_are_named():
    seam = dataclasses.replace(plugin.ALL_SEAMS[0], target="tests.unit.test_seams:over")
    with pytest.raises(SeamError, match=r"source f7606bcecd55, found \w{12} of \(\*\*theirs"):
        seams.check_seam(seam)


def test_a_removed_seam_is_named():
    seam = dataclasses.replace(plugin.ALL_SEAMS[0], target="sglang.srt.no_such_function")
    with pytest.raises(SeamError, match="no_such_function is gone"):
        seams.check_seam(seam)


def test_a_changed_body_is_named():
    seam = dataclasses.replace(plugin.ALL_SEAMS[0], source="0" * 12)
    with pytest.raises(SeamError, match="expected source 000000000000, found f7606bcecd55"):
        seams.check_seam(seam)


PATCHED = """
class Pool:
    @staticmethod
    def size(rows, spare=2):
        'Slots of a pool.'
        # One per row.
        if rows > 0:
            return align(rows + spare)
        return u"none"
"""


@pytest.fixture
def patched(tmp_path):
    """The hash of a method as if SGLang's file had some of its text replaced."""

    def hash_with(old: str = "", new: str = "") -> str:
        path = tmp_path / f"pool_{len(list(tmp_path.iterdir()))}.py"
        assert old in PATCHED
        path.write_text(PATCHED.replace(old, new) if old else PATCHED)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return seams.source_hash(module.Pool.size)

    return hash_with


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# One per row.", "# A slot for each row."),
        ("        # One per row.\n", "\n\n"),
        ("            return", "            # patched\n# at the margin\n            return"),
        ("'Slots of a pool.'", '"""The pool\'s slots,\n        padded."""'),
        ("        'Slots of a pool.'\n", ""),
        ("(rows, spare=2)", "(\n        rows,\n        spare=2,\n    )"),
        ("rows > 0", "(rows > 0)"),
        ('u"none"', "'none'"),
    ],
)
def test_text_that_does_not_run_may_change(patched, old, new):
    assert patched(old, new) == patched()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("spare=2", "spare=3"),
        ("spare=2", "spare=2.0"),
        ("spare=2", "spare=None"),
        ("spare=2", "spare"),
        ("spare=2", "other=2"),
        ("spare=2", "spare=2, more=0"),
        ("rows, spare=2", "rows, *, spare=2"),
        ("align(", "align_up("),
        ("align(rows + spare)", "align(rows + spare, page=1)"),
        ("rows + spare", "rows - spare"),
        ("rows > 0", "rows >= 0"),
        ("rows > 0", "not rows > 0"),
        ('u"none"', "None"),
        ('u"none"', "none"),
        ("        return u", "        rows = 0\n        return u"),
        ("            return align", "            align"),
        ("@staticmethod", "@classmethod"),
    ],
)
def test_a_changed_statement_is_refused(patched, old, new):
    assert patched(old, new) != patched()


def test_a_newer_python_s_empty_fields_change_no_hash(monkeypatch, patched):
    before = patched()
    fields = (*ast.FunctionDef._fields, "type_params")
    monkeypatch.setattr(ast.FunctionDef, "_fields", fields)
    monkeypatch.setattr(ast.FunctionDef, "type_params", [], raising=False)
    assert patched() == before


@pytest.fixture
def fresh(monkeypatch):
    """The module as in a process where nothing was installed yet."""
    for name in ("recorded", "_failures"):
        monkeypatch.setattr(seams, name, [])
    monkeypatch.setattr(seams, "in_place", set())


def test_missing_hooks_refuse_to_start(fresh, monkeypatch):
    with pytest.raises(SeamError, match="not in place: all of them"):
        seams.check_installed()
    for seam in plugin.ALL_SEAMS:
        pkgutil.resolve_name(seam.target)
        seams.recorded.append(seam)
    with pytest.raises(SeamError, match="are not in place") as caught:
        seams.check_installed()
    for seam in plugin.ALL_SEAMS:
        assert seam.target in str(caught.value)


def test_a_seam_that_no_longer_fits_stops_our_server_and_no_import(fresh, monkeypatch):
    wrong = dataclasses.replace(plugin.ALL_SEAMS[0], source="0" * 12)
    pkgutil.resolve_name(wrong.target)
    seams.install([wrong])
    with pytest.raises(SeamError, match="resolve_spec_aux_hidden_state_config changed"):
        seams.check_installed()


def test_a_target_has_one_hook_of_ours():
    targets = [seam.target for seam in plugin.ALL_SEAMS]
    assert len(targets) == len(set(targets))


def test_hooks_wait_for_their_modules_and_are_there_when_names_are_read():
    """In a process of its own, as SGLang starts one."""
    found = ask("tests.unit.plugin_load", None, warm=False)
    assert found["early"] == [], "loading the plugin imports what only a scheduler needs"
    assert set(found["patched"]) == {
        seam.target for seam in plugin.SERVING_SEAMS if not seam.only_with
    }
    assert found["called"] == "pass_admission", "a name that another module took is hooked too"
    assert found["models"] == [True, True, True]


def test_another_sglang_is_refused(monkeypatch):
    monkeypatch.setattr(seams.metadata, "version", lambda name: "0.6.0")
    with pytest.raises(SeamError, match=r"sglang==0\.5\.23; found 0\.6\.0"):
        seams.check_version()


def test_the_algorithm_answers_everything_the_enum_does():
    """SGLang checks only is_* and supports_*; the scheduler calls more."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_hyperdflash.serving.startup.algorithm import HyperDFlashAlgorithm

    algorithm = HyperDFlashAlgorithm("HYPERDFLASH", lambda args: None, supports_overlap=True)
    names = [
        name
        for name, value in vars(SpeculativeAlgorithm).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert len(names) > 20
    predicates = {"need_topk", "carries_draft_hidden_states"}
    for name in names:
        method = getattr(algorithm, name)
        if name.startswith(("is_", "supports_")) or name in predicates:
            expected = getattr(SpeculativeAlgorithm.DFLASH, name)()
            assert (bool(method) if isinstance(method, bool) else method()) == expected, name


def unfit(owner: type) -> list[str]:
    """Methods of a class that cannot be called as those of SGLang that they override.

    Ours lacks a parameter, needs another one, or has them in another order.
    """
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = []
    for name, ours, _, theirs in overridden(owner):
        own, needed = (inspect.signature(one).parameters for one in (ours, theirs))
        open_ended = any(one.kind in rest for one in own.values())
        given = [one for one in needed if needed[one].kind not in rest]
        common = [one for one in given if one in own]
        more = [one for one in own.values() if one.name not in needed and one.kind not in rest]
        fits = (open_ended or common == given) and common == [o for o in own if o in given]
        if not fits or any(one.default is one.empty for one in more):
            found.append(f"{name}: expected {tuple(own)}, found {tuple(needed)}")
    return found


@pytest.mark.parametrize("owner", own_classes(), ids=lambda owner: owner.__name__)
def test_overrides_take_what_sglang_gives(owner):
    assert unfit(owner) == []


class Ours:
    """Methods over those of an SGLang that changes."""

    def accept(self, drafts, logits, *, bs): ...

    def write(self, rows, **rest): ...

    def seeded(self, rows, seed=None): ...


def over(**theirs) -> type:
    """``Ours`` with an SGLang base of these methods."""
    base = type("Base", (), {"__module__": "sglang.srt.base", **theirs})
    own = {name: getattr(Ours, name) for name in theirs}
    return type("Worker", (base,), {"__module__": __name__, **own})


@pytest.mark.parametrize(
    "theirs",
    [
        {"accept": lambda self, drafts, logits, *, bs: 0},
        {"write": lambda self, rows, more, others=0: 0},
        {"seeded": lambda self, rows: 0},
    ],
)
def test_an_override_that_fits_is_accepted(theirs):
    assert unfit(over(**theirs)) == []


@pytest.mark.parametrize(
    "theirs",
    [
        {"accept": lambda self, drafts, logits, *, bs, tree: 0},
        {"accept": lambda self, drafts, *, bs: 0},
        {"accept": lambda self, logits, drafts, *, bs: 0},
        {"write": lambda self, slots: 0},
    ],
)
def test_an_override_of_another_method_is_named(theirs):
    assert len(unfit(over(**theirs))) == 1


def test_every_private_field_is_still_sglangs():
    """A name that is neither ours nor in SGLang's source is a typing error or is gone."""
    folder = Path(sglang.__file__).parent
    text = "".join(path.read_text(errors="replace") for path in folder.glob("srt/**/*.py"))
    words = set(re.findall(r"\b_\w+", text))
    names = [use.name.rpartition(".")[2] for use in fields()]
    private = {name for name in names if name.startswith("_")}
    assert len(private) > 10
    assert private - words == set()


def test_draft_model_is_called_where_we_expect():
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    source = inspect.getsource(DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc)
    assert "self.draft_model.project_target_hidden(target_hidden)" in source


def test_the_fused_kv_switch_is_where_we_expect():
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    assert "self._fused_kv_helper = " in inspect.getsource(DFlashWorkerV2)


def test_the_compact_draft_cache_is_made_in_the_order_that_the_window_relies_on():
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    source = inspect.getsource(DFlashWorkerV2.forward_batch_generation)
    # The order that the overrides rely on: measure, then write the rows, then draft.
    calls = (
        "_compute_compact_draft_seq_lens(",
        "_fill_compact_seq_lens_cpu_bound(",
        "_rebuild_compact_draft_cache(",
        ".bind(",
    )
    places = [source.index(call) for call in calls]
    assert places == sorted(places)


def test_the_draft_pool_is_sized_and_named_where_we_expect():
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.kv_loc_plan import IdSpace, KVLocPlan
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    assert "config = self.memory_pool_config" in inspect.getsource(KVCacheConfigurator.configure)
    assert "self._spaces[" in inspect.getsource(KVIndexTranslator.__init__)
    assert set(IdSpace.__struct_fields__) == {"key", "write", "read_v2p"}
    assert "self.write_virtual = write_virtual" in inspect.getsource(KVLocPlan.__init__)
    assert tuple(inspect.signature(ReqToTokenPool).parameters) == (
        "size",
        "max_context_len",
        "device",
        "enable_memory_saver",
    )


def test_deepseek_v4_is_where_we_expect():
    """What ``deepseek_v4.py`` reads and calls besides its three hooks."""
    from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator

    source = inspect.getsource(DSV4PoolConfigurator)
    for name in ("_spec_infl", "bytes_per_swa_token", "bytes_per_full_token"):
        assert f"self.{name}" in source, name
    for name in ("_get_bytes_per_swa_token", "_get_bytes_per_full_token"):
        assert callable(getattr(DSV4PoolConfigurator, name)), name
