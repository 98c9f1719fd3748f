"""T5: every member of vec-inf that is used exists, is listed and is still called."""

import ast
import enum
import functools
import importlib
import inspect
from types import SimpleNamespace

import pytest
import support
from vec_inf.client import LaunchOptions, VecInfClient
from vec_inf.client._helper import ModelLauncher
from vec_inf.client._slurm_script_generator import SlurmScriptGenerator
from vec_inf.client.config import ModelConfig

from app.utils.vec_inf_multinode import check_vec_inf, launcher, seam

ALL = seam.MEMBERS + seam.CLI_MEMBERS
MEMBERS = {member.name: member for member in ALL}
OVERRIDDEN = [member for member in ALL if member.overridden]
SUBCLASSES = {
    launcher.MultinodeClient: VecInfClient,
    launcher.MultinodeLauncher: ModelLauncher,
    launcher._Preview: ModelLauncher,
    launcher.MultinodeScriptGenerator: SlurmScriptGenerator,
}


def full_name(cls, attribute):
    """Name of a class's attribute as the member list has it."""
    return f"{cls.__module__}.{cls.__qualname__}.{attribute}"


def owner_of(member):
    """What holds a member, and the member's name in it."""
    owner = importlib.import_module(member.module)
    *outer, last = member.path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, last


def take_away(member, monkeypatch):
    """Take a member out of the installed vec-inf."""
    owner, name = owner_of(member)
    if isinstance(owner, enum.EnumMeta):  # an enum does not let go of a member
        rest = SimpleNamespace(**{m.name: m for m in owner if m.name != name})
        monkeypatch.setattr(
            importlib.import_module(member.module), owner.__name__, rest
        )
    else:
        monkeypatch.delattr(owner, name)


def test_the_list_is_in_force():
    assert check_vec_inf() == seam.SeamReport("0.9.0", "0.9.0", ())
    assert len(MEMBERS) == len(ALL)


@pytest.mark.parametrize("member", ALL, ids=MEMBERS)
def test_a_member_exists(member):
    assert member.problem() is None


@pytest.mark.parametrize("member", ALL, ids=MEMBERS)
def test_a_member_that_is_renamed_is_named(member, monkeypatch):
    take_away(member, monkeypatch)
    (problem,) = seam.inspect_vec_inf(ALL).missing
    if member.path.endswith("__init__"):  # every class has one: object's
        wanted = ", ".join(member.parameters or ())
        assert problem == f"{member.name}(args, kwargs) (wants {wanted})"
    elif member.path.endswith("__annotations__"):  # and the base class's then
        assert problem == f"{member.name}[{member.keys[0]!r}] (missing)"
    else:
        assert problem == f"{member.name} (missing)"


@pytest.mark.parametrize("member", ALL, ids=MEMBERS)
def test_a_module_that_is_renamed_is_named(member):
    gone = seam.Member(f"{member.module}_gone", member.path)
    assert gone.problem() == f"{member.module}_gone.{member.path} (missing)"


@pytest.mark.parametrize(
    "member",
    [m for m in ALL if m.parameters is not None],
    ids=lambda m: m.name,
)
def test_a_parameter_that_is_renamed_is_named(member, monkeypatch):
    def changed(self, other):
        """Take another parameter."""

    monkeypatch.setattr(*owner_of(member), changed)
    wanted = ", ".join(member.parameters)
    missing = seam.inspect_vec_inf(ALL).missing
    assert missing == (f"{member.name}(other) (wants {wanted})",)


@pytest.mark.parametrize(
    "member, key",
    [(member, key) for member in ALL for key in member.keys],
    ids=lambda value: getattr(value, "path", value),
)
def test_a_key_that_is_renamed_is_named(member, key, monkeypatch):
    owner, name = owner_of(member)
    *outer, last = key.split(".")
    level = getattr(owner, name)
    for part in outer:
        level = level[part]
    monkeypatch.delitem(level, last)
    assert f"{member.name}[{key!r}] (missing)" in seam.inspect_vec_inf().missing


# ---------------------------------------------------------------- still called


@pytest.fixture
def called(login, monkeypatch):
    """Return the overridden members that a stock launch calls."""
    found = set()

    def spy(member):
        owner, name = owner_of(member)
        original = getattr(owner, name)

        @functools.wraps(original)
        def record(*args, **kwargs):
            found.add(member.name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, record)

    for member in OVERRIDDEN:
        spy(member)
    options = login.request(vllm_args="--seed=1", env="A=1")
    VecInfClient().launch_model("two-nodes-sized", LaunchOptions(**options))
    assert [call[0] for call in login.calls()] == ["sbatch"]
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_vec_inf_calls_what_is_overridden(called):
    waiting = ("VecInfClient.get_status", "VecInfClient.wait_until_ready")
    at_launch = {m.name for m in OVERRIDDEN if m.path not in waiting}
    assert called == at_launch


def test_a_wait_of_ours_takes_what_vec_infs_takes():
    """By position and by name, with the same defaults."""
    stock = inspect.signature(VecInfClient.wait_until_ready).parameters
    ours = inspect.signature(launcher.MultinodeClient.wait_until_ready).parameters
    assert [(p.name, p.default) for p in stock.values()] == [
        (p.name, p.default) for p in ours.values() if p.kind is not p.KEYWORD_ONLY
    ]


def test_vec_inf_calls_get_status(monkeypatch):
    calls = []

    def status(self, slurm_job_id):
        calls.append(slurm_job_id)
        raise InterruptedError

    monkeypatch.setattr(VecInfClient, "get_status", status)
    with pytest.raises(InterruptedError):
        VecInfClient().wait_until_ready("42")
    assert calls == ["42"]


def test_what_is_overridden_is_marked_so():
    replaced = {
        full_name(base, name)
        for ours, base in SUBCLASSES.items()
        for name, value in vars(ours).items()
        if callable(value) and hasattr(base, name)
    }
    assert replaced == {member.name for member in OVERRIDDEN}


# ---------------------------------------------------------------- all that is used


def used_of_vec_inf(tree):
    """Names of vec-inf that a source file uses, and template keys.

    A file takes a part of vec-inf as ``_x = _vec_inf(module, name, ...)`` and uses it
    as ``_x``, ``_x.y``, ``_x["key"]`` or as a base class, or imports it.
    """
    parts, used = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "vec_inf"
        ):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_taken(node.value):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            parts[target.id] = ".".join(arg.value for arg in node.value.args[:2])
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                used.add(dotted(node, parts))
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"),
                args=[ast.Name(id=part), ast.Constant(value=name), *_],
            ) if (
                part in parts
            ):
                used.add(f"{parts[part]}.{name}")
            case ast.Subscript(
                value=ast.Name(id=part), slice=ast.Constant(value=key)
            ) if (part in parts):
                used.add(f"{parts[part]}[{key}]")
            case ast.ClassDef(bases=[ast.Name(id=part)]) if part in parts:
                used |= used_of_base(node, parts[part])
    # of _x.y.z, the whole alone
    return {
        name for name in used - {""} if not any(o.startswith(f"{name}.") for o in used)
    }


def dotted(node, parts):
    """Full name of an attribute of a part of vec-inf, or nothing."""
    if isinstance(node, ast.Name):
        return parts.get(node.id, "")
    if not isinstance(node, ast.Attribute):
        return ""
    outer = dotted(node.value, parts)
    return f"{outer}.{node.attr}" if outer else ""


def is_taken(node):
    """Tell whether an expression takes a part of vec-inf."""
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_vec_inf"


def used_of_base(node, base):
    """What a subclass calls with ``super()``."""
    return {
        f"{base}.{found.attr}"
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute)
        and isinstance(found.value, ast.Call)
        and getattr(found.value.func, "id", "") == "super"
    }


def source_trees():
    """Every module of the package, parsed."""
    return {
        str(path.relative_to(support.PACKAGE).with_suffix("")): ast.parse(
            path.read_text()
        )
        for path in sorted(support.PACKAGE.rglob("*.py"))
    }


def listed():
    """Every name of the member list, template keys included."""
    keys = {
        f"{member.name}[{key.split('.')[0]}]" for member in ALL for key in member.keys
    }
    return keys | set(MEMBERS)


def test_the_scan_finds_what_is_used():
    source = """
from vec_inf.a import B
_base: Any = _vec_inf("vec_inf.c", "Base", object)
_mod: Any = _vec_inf("vec_inf", "mod", None)
class Ours(_base):
    def f(self):
        super().f()
        _mod.g(_mod["key"], getattr(_mod, "h", 1), _mod.Kind.ONE)
"""
    assert used_of_vec_inf(ast.parse(source)) == {
        "vec_inf.a.B",
        "vec_inf.c.Base.f",
        "vec_inf.mod.g",
        "vec_inf.mod.h",
        "vec_inf.mod.Kind.ONE",
        "vec_inf.mod[key]",
    }


USING = {"launcher", "errors", "cli/common"}


@pytest.mark.parametrize("module", sorted(USING))
def test_everything_used_is_listed(module):
    used = used_of_vec_inf(source_trees()[module])
    assert used
    # an attribute of a listed mapping or class is Python's
    unlisted = {
        name
        for name in used - listed()
        if not any(name.startswith(f"{known}.") for known in listed())
    }
    assert unlisted == set()


def test_only_these_modules_use_vec_inf():
    using = {name for name, tree in source_trees().items() if used_of_vec_inf(tree)}
    assert using == USING


# on the way to what is used, or of the public surface that stays vec-inf's
INDIRECT = {
    "vec_inf.client.api.VecInfClient.__init__",
    "vec_inf.client.api.VecInfClient.get_status",
    "vec_inf.client.api.VecInfClient.shutdown_model",
    "vec_inf.client._slurm_script_generator.SlurmScriptGenerator"
    "._generate_script_content",
    "vec_inf.client.models.StatusResponse.__dataclass_fields__",
    "vec_inf.client.config.ModelConfig.__annotations__",
}


def test_everything_listed_is_used():
    used = set().union(*(used_of_vec_inf(tree) for tree in source_trees().values()))
    whole = {
        known
        for known in MEMBERS
        for name in used
        if name.split("[")[0] == known or name.startswith(f"{known}.")
    }
    replaced = {member.name for member in OVERRIDDEN}
    assert set(MEMBERS) - whole - replaced - INDIRECT == set()


def names_read(tree, subject):
    """Names that a source reads from a subject: ``self``'s attributes, for instance."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == subject
    }


def test_the_attributes_that_are_used_exist(login):
    tree = source_trees()["launcher"]
    stock = ModelLauncher("two-nodes-sized", login.request())
    instances = {
        "MultinodeLauncher": (launcher.MultinodeLauncher, stock),
        "MultinodeScriptGenerator": (
            launcher.MultinodeScriptGenerator,
            SlurmScriptGenerator(stock.params),
        ),
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in instances:
            ours, instance = instances[node.name]
            own = {
                target.attr
                for child in ast.walk(node)
                if isinstance(child, (ast.Assign, ast.AnnAssign))
                for target in (getattr(child, "targets", None) or [child.target])
                if isinstance(target, ast.Attribute)
            }
            replaced = {
                keyword.arg
                for child in ast.walk(node)
                if isinstance(child, ast.Call)
                and getattr(child.func, "attr", "") == "_replaced"
                for keyword in child.keywords
            }
            read = (names_read(node, "self") | replaced) - set(vars(ours))
            missing = {name for name in read if not hasattr(instance, name)}
            assert missing <= own


def test_the_params_that_are_read_exist(login):
    params = ModelLauncher("two-nodes-sized", login.request()).params
    read = set()
    for tree in source_trees().values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Subscript):
                continue
            name = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if name == "params" and isinstance(node.slice, ast.Constant):
                read.add(node.slice.value)
    assert len(read) > 5
    assert read - set(params) == set()


def test_the_catalog_fields_that_are_read_exist():
    fields = {"model_name", "engine", "num_nodes", "gpus_per_node"}
    assert fields - set(ModelConfig.model_fields) == set()
