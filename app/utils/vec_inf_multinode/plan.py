"""A request and a catalog entry in, a frozen ``LaunchPlan`` out. No I/O, no vec-inf.

Every decision and every submit-time refusal is here: parallelism, engine argv,
environment, what is left out.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Optional

from .errors import (
    ContainerError,
    OwnedArgError,
    ParallelismError,
    PlanError,
    UnsafeValueError,
)
from .settings import MultinodeSettings

ENGINE = "vllm"
CONTAINER_MODULE = "apptainer"

# The first vLLM that has `--nnodes` and its kin.
MIN_VLLM = "0.11.1"

TENSOR = "--tensor-parallel-size"
PIPELINE = "--pipeline-parallel-size"
# vLLM's other factors of the world size. Decode-context and expert parallelism reuse
# the tensor-parallel ranks and take no GPU of their own.
OTHER_AXES = ("--data-parallel-size", "--prefill-context-parallel-size")

OWNED_ARGS = frozenset(
    {
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--headless",
        "--distributed-executor-backend",
        "--host",
        "--port",
        # one value for all ranks cannot be right: vLLM infers them from the node rank
        "--data-parallel-rank",
        "--data-parallel-start-rank",
        "--data-parallel-size-local",
        "--data-parallel-address",
        "--data-parallel-rpc-port",
        "--data-parallel-external-lb",
        "--data-parallel-hybrid-lb",
        "--data-parallel-multi-port-external-lb",
        # would serve on a socket in place of the published address
        "--uds",
        # a file that could hold any of these
        "--config",
    }
)
# A key on the command line is readable by every user of the node.
SECRET_ARGS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
# vLLM refuses it on a headless rank.
HEAD_ARGS = frozenset({"--api-server-count"})
# Short options of vLLM that vec-inf does not map. vLLM's parser completes and glues
# short options too ("-t", "-n3"), so others are refused.
SHORT_OPTIONS = frozenset({"-O", "-ac", "-cc", "-dc", "-ep", "-sc"})
MORE_SHORT_TO_LONG = {"-asc": "--api-server-count"}
# Set per rank, or harmful on more than one node (VLLM_PORT: every node walks the same
# port sequence).
RANK_ENV = frozenset(
    {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "VLLM_PORT"}
)

_ENGINE_KEY = re.compile(r"--?[A-Za-z0-9][A-Za-z0-9_.-]*")
# --name, --name=value, --name value; and -O3, -O{...}, where vLLM takes the value glued
_ENGINE_OPTION = re.compile(
    rf"(?P<key>{_ENGINE_KEY.pattern})(?:(?:\s*=\s*|\s+)(?P<value>.*))?",
    re.DOTALL,
)
_GLUED_OPTION = re.compile(r"(?P<key>-O)(?P<value>[\d{].*)", re.DOTALL)
_ENV_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GRES_TYPE = re.compile(r"[A-Za-z0-9_.-]+")
_MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Site:
    """What the site's vec-inf configuration says.

    Parameters
    ----------
    container_module : str
        Name of the container module, ``apptainer`` for a plan to be possible.
    container_command : tuple of str
        argv that runs something in the image.
    short_to_long : mapping of str to str
        vLLM's short options, as vec-inf maps them.
    """

    container_module: str
    container_command: tuple[str, ...]
    short_to_long: Mapping[str, str]


@dataclass(frozen=True)
class Axis:
    """One parallel size and where it came from (typed, catalog or derived)."""

    option: str
    size: int
    origin: str


@dataclass(frozen=True)
class Parallelism:
    """The parallel sizes of one launch.

    Parameters
    ----------
    nnodes, gpus_per_node : int
        The allocation.
    tensor, pipeline : Axis
        The two axes that are always set.
    others : tuple of Axis
        Further factors of the world size that the request or catalog names.
    note : str
        Why sizes were derived afresh although the catalog has some, or empty.
    """

    nnodes: int
    gpus_per_node: int
    tensor: Axis
    pipeline: Axis
    others: tuple[Axis, ...] = ()
    note: str = ""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Every factor of the world size."""
        return (self.tensor, self.pipeline, *self.others)

    @property
    def world_size(self) -> int:
        """How many GPUs the parallel sizes use."""
        return prod(axis.size for axis in self.axes)


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a multi-node job needs to know, decided.

    Parameters
    ----------
    model_name, model_type : str
        Served name, and vec-inf's type of the model.
    model : str
        What ``vllm serve`` is given: the weights' path or a Hugging Face id.
    weights : str
        Path to bind for the weights, empty for a Hugging Face id.
    parallelism : Parallelism
        Nodes, GPUs and sizes.
    engine_args : tuple of str
        argv items after ``vllm serve MODEL``, the same on every rank.
    head_args : tuple of str
        Further argv items of rank 0.
    env : tuple of (str, str)
        Deployment environment, in order, ranks' own variables left out.
    left_out_env : tuple of str
        Names that were left out of `env`.
    container : tuple of str
        argv that runs something in the image.
    work_dir, log_dir, src_dir, bind : str
        As vec-inf resolved them.
    settings : MultinodeSettings
        The knobs.
    """

    model_name: str
    model_type: str
    model: str
    weights: str
    parallelism: Parallelism
    engine_args: tuple[str, ...]
    head_args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    left_out_env: tuple[str, ...]
    container: tuple[str, ...]
    work_dir: str
    log_dir: str
    src_dir: str
    bind: str
    settings: MultinodeSettings

    @classmethod
    def from_params(
        cls,
        params: Mapping[str, Any],
        parallelism: Parallelism,
        site: Site,
        settings: MultinodeSettings,
    ) -> "LaunchPlan":
        """Make the plan from vec-inf's resolved params.

        Raises
        ------
        PlanError
            As `refuse_unusable` and `engine_argv`.
        """
        refuse_unusable(params, site)
        weights = f"{params['model_weights_parent_dir']}/{params['model_name']}"
        hf_model = params.get("hf_model")
        env = {key: str(value) for key, value in (params.get("env") or {}).items()}
        return cls(
            model_name=str(params["model_name"]),
            model_type=str(params.get("model_type", "LLM")),
            model=str(hf_model or weights),
            weights="" if hf_model else weights,
            parallelism=parallelism,
            engine_args=engine_argv(
                {k: v for k, v in params["engine_args"].items() if k not in HEAD_ARGS}
            ),
            head_args=engine_argv(
                {k: v for k, v in params["engine_args"].items() if k in HEAD_ARGS}
            ),
            env=tuple((k, v) for k, v in env.items() if k not in RANK_ENV),
            left_out_env=tuple(k for k in env if k in RANK_ENV),
            container=site.container_command,
            work_dir=str(params["work_dir"]),
            log_dir=str(params["log_dir"]),
            src_dir=str(params["src_dir"]),
            bind=str(params.get("bind") or ""),
            settings=settings,
        )


def is_multinode_vllm(params: Mapping[str, Any]) -> bool:
    """Tell whether resolved params describe a vLLM server on more than one node.

    Parameters
    ----------
    params : mapping
        vec-inf's resolved params: catalog, site config and request merged.
    """
    return int(params["num_nodes"]) > 1 and (params.get("engine") or ENGINE) == ENGINE


def resolve_route(
    request: Mapping[str, Any], catalog: Optional[Mapping[str, Any]]
) -> dict[str, Any]:
    """Work out ``engine`` and ``num_nodes`` as vec-inf's launcher would.

    Parameters
    ----------
    request : mapping
        Launch options that were given, none of them None.
    catalog : mapping or None
        The model's entry, None for a model that is not in the catalog (vec-inf then
        takes one node and vLLM).
    """
    entry = catalog or {}
    # engine-specific args do not change the engine that vec-inf renders for
    engine = request.get("engine") or entry.get("engine") or ENGINE
    num_nodes = request.get("num_nodes", entry.get("num_nodes", 1))
    return {"engine": engine, "num_nodes": int(num_nodes)}


def split_engine_args(text: str, short_to_long: Mapping[str, str]) -> dict[str, Any]:
    """Read a request's ``vllm_args`` into options and exact values.

    What vec-inf's own reading makes of plain ``--a=1,--flag`` it makes too; besides,
    a value may hold ``=``, and commas inside braces or brackets.

    Raises
    ------
    PlanError
        If an item is not an option.
    """
    options: dict[str, Any] = {}
    for item in split_items(text):
        option = _GLUED_OPTION.match(item) or _ENGINE_OPTION.fullmatch(item)
        if option is None:
            raise PlanError(
                f"vllm_args item {item!r:.80} is not an option; write --name=value, "
                "items separated by commas."
            )
        key, value = option.group("key"), option.group("value")
        options[canonical_option(key, short_to_long)] = True if value is None else value
    return options


def split_items(text: str) -> Iterator[str]:
    """Split at commas that stand outside braces and brackets."""
    item, depth, quote, escaped = "", 0, "", False
    for char in text:
        if char == "," and not depth:
            if item.strip():
                yield item.strip()
            item = ""
            continue
        item += char
        if escaped:
            escaped = False
        elif char == "\\" and quote:
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char == '"' and depth:
            # quotes count inside JSON only: elsewhere they are plain characters
            quote = char
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth = max(0, depth - 1)
    if item.strip():
        yield item.strip()


def canonical_option(key: str, short_to_long: Mapping[str, str]) -> str:
    """Long form of an option, dashes for underscores, as vLLM reads it."""
    key = short_to_long.get(key, MORE_SHORT_TO_LONG.get(key, key))
    name, dot, path = key.partition(".")
    if name.startswith("--"):
        name = "--" + name[2:].replace("_", "-")
    return name + dot + path


def canonical_args(
    engine_args: Mapping[str, Any],
    typed: Mapping[str, Any],
    short_to_long: Mapping[str, str],
) -> dict[str, Any]:
    """Engine args under their long names; what the request typed wins."""
    merged = {
        canonical_option(str(k), short_to_long): v for k, v in engine_args.items()
    }
    merged.update({canonical_option(k, short_to_long): v for k, v in typed.items()})
    return merged


def plan_parallelism(
    params: Mapping[str, Any],
    typed: Mapping[str, Any],
    catalog: Mapping[str, Any],
) -> Parallelism:
    """Decide the parallel sizes and refuse what leaves GPUs idle or lacks some.

    Parameters
    ----------
    params : mapping
        Resolved params, engine args under their long names.
    typed : mapping
        Engine args that the request gave.
    catalog : mapping
        The allocation of the catalog entry (``num_nodes``, ``gpus_per_node``).

    Raises
    ------
    ParallelismError
        If the product of the sizes is not the number of GPUs.
    """
    nnodes, gpus = int(params["num_nodes"]), int(params["gpus_per_node"])
    args = params["engine_args"]
    moved = (nnodes, gpus) != (int(catalog["num_nodes"]), int(catalog["gpus_per_node"]))

    def axis(option: str, derived: Optional[int]) -> Optional[Axis]:
        if option in typed:
            return Axis(option, _size(option, typed[option]), "typed")
        if option in args and not (moved and derived):
            return Axis(option, _size(option, args[option]), "catalog")
        return Axis(option, derived, "derived") if derived else None

    tensor, pipeline = axis(TENSOR, gpus), axis(PIPELINE, nnodes)
    assert tensor and pipeline
    stale = [
        a.option
        for a in (tensor, pipeline)
        if a.origin == "derived" and a.option in args
    ]
    note = (
        f"the request changed the allocation from {catalog['num_nodes']} x "
        f"{catalog['gpus_per_node']} to {nnodes} x {gpus} (nodes x GPUs per node): "
        f"{', '.join(stale)} derived afresh"
        if stale
        else ""
    )
    others = tuple(a for option in OTHER_AXES if (a := axis(option, None)))
    plan = Parallelism(nnodes, gpus, tensor, pipeline, others, note)
    _refuse_mismatch(plan)
    return plan


def _size(option: str, value: Any) -> int:
    try:
        size = int(str(value))
    except ValueError:
        size = 0
    if size < 1:
        raise ParallelismError(
            f"{option}={value} is not a parallel size; give a whole number from 1 "
            "(commas separate vllm_args), or leave it out to have it derived."
        )
    return size


def _refuse_mismatch(plan: Parallelism) -> None:
    """Refuse what vLLM would not notice: it checks only world_size % nnodes."""
    total = plan.nnodes * plan.gpus_per_node
    if plan.world_size == total:
        return
    sizes = ", ".join(f"{a.option} {a.size} ({a.origin})" for a in plan.axes)
    idle = total - plan.world_size
    outcome = (
        f"{idle} GPU(s) would be billed idle"
        if idle > 0
        else f"{-idle} GPU(s) more than the allocation has"
    )
    raise ParallelismError(
        f"Parallel sizes {sizes} use {plan.world_size} GPU(s); the allocation is "
        f"{plan.nnodes} node(s) x {plan.gpus_per_node} GPU(s) = {total}: {outcome}. "
        f"Leave the sizes out to get {TENSOR} {plan.gpus_per_node} and {PIPELINE} "
        f"{plan.nnodes}, or give sizes whose product is {total}."
    )


def refuse_unusable(params: Mapping[str, Any], site: Site) -> None:
    """Refuse what no plan can carry.

    Raises
    ------
    ContainerError
        If the job would not run in Apptainer.
    UnsafeValueError
        If a value holds a line break, NUL or text that is not valid Unicode.
    OwnedArgError
        If an engine arg belongs to the launcher.
    PlanError
        If a name is not one that can be carried.
    """
    _refuse_container(params, site)
    for name, value in _values(params):
        _refuse_unsafe(name, value)
    if not _MODEL_NAME.fullmatch(str(params["model_name"])):
        raise PlanError(
            f"model_name {params['model_name']!r}: only letters, digits, '-', '_' and "
            "'.' can name a job and its files."
        )
    for path in ("log_dir", "work_dir"):
        if re.search(r"[%\\]", str(params.get(path, ""))):
            raise UnsafeValueError(
                f"{path} {str(params[path])!r} holds '%' or a backslash, which Slurm "
                "reads in file names; choose a path without it."
            )
    for key in params.get("env") or {}:
        if not _ENV_KEY.fullmatch(str(key)):
            raise PlanError(f"env name {key!r} is not the name of a variable.")
    for option, value in params["engine_args"].items():
        _refuse_option(option, value)
    if str(params.get("hf_model") or params["model_weights_parent_dir"])[0] == "-":
        raise PlanError("hf_model and model_weights_parent_dir cannot start with '-'.")
    resource_type = str(params.get("resource_type") or "gpu")
    if not _GRES_TYPE.fullmatch(resource_type):
        raise PlanError(f"resource_type {resource_type!r:.80} is not a type of GPU.")
    if int(params["gpus_per_node"]) < 1:
        raise PlanError(
            f"gpus_per_node is {params['gpus_per_node']}; a multi-node job needs at "
            "least one GPU per node."
        )


def _refuse_container(params: Mapping[str, Any], site: Site) -> None:
    if site.container_module != CONTAINER_MODULE:
        raise ContainerError(
            f"The site's container module is {site.container_module!r}; multi-node "
            f"jobs speak {CONTAINER_MODULE} only. Set containerization.module_name to "
            f"{CONTAINER_MODULE} in vec-inf's environment.yaml, or serve on one node."
        )
    if params["venv"] != site.container_module:
        raise ContainerError(
            f"venv is {params['venv']!r}; a multi-node job runs in the container. "
            f"Leave venv out or set it to {site.container_module!r}."
        )


def _values(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every text of the request, with the name to blame."""
    for field, value in params.items():
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield f"{field} name", str(key)
                yield f"{field}[{key}]", argument_text(item)
        else:
            yield field, str(value)


def _refuse_unsafe(name: str, value: str) -> None:
    # the value may be a secret and is not shown; a name may hold the line break itself
    name = name if name.isprintable() else repr(name)
    if len((value + ".").splitlines()) > 1 or "\0" in value:
        raise UnsafeValueError(
            f"{name:.80} holds a line break or NUL; request values are single lines."
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UnsafeValueError(f"{name:.80} is not valid Unicode text.") from None


def _refuse_option(option: str, value: Any) -> None:
    if not _ENGINE_KEY.fullmatch(option):
        raise PlanError(f"vllm_args name {option!r:.80} is not an option of vLLM.")
    if option in (TENSOR, PIPELINE, *OTHER_AXES):
        return
    # vLLM's parser reads --option.key as a key of the option's JSON
    base = option.partition(".")[0]
    if not option.startswith("--") and base not in SHORT_OPTIONS:
        raise PlanError(f"{option} is no short option of vLLM; write the long name.")
    if base in OWNED_ARGS or base.replace("--no-", "--", 1) in OWNED_ARGS:
        raise OwnedArgError(
            f"{option} is for the launcher to set, rank by rank; take it out of "
            "vllm_args."
        )
    if base in SECRET_ARGS and (value is not True or base != option):
        raise OwnedArgError(
            f"{option} on a command line is readable by every user of the node; give "
            f"the key as {SECRET_ARGS[base]} in env."
        )
    for full in sorted({*OWNED_ARGS, *SECRET_ARGS, TENSOR, PIPELINE, *OTHER_AXES}):
        # vLLM's parser completes the beginning of an option
        if full.startswith(base) and base.startswith("--") and full != base:
            raise OwnedArgError(
                f"{option} may stand for {full}; write options of vllm_args in full."
            )


def engine_argv(engine_args: Mapping[str, Any]) -> tuple[str, ...]:
    """Engine args as argv items: exact values, True a bare flag, False left out."""
    argv: list[str] = []
    for option, value in engine_args.items():
        if value is False or value is None:
            continue
        if value is True:
            argv.append(option)
        elif isinstance(value, (list, tuple)):
            argv += [option, *(argument_text(item) for item in value)]
        else:
            argv += _option_with_value(option, argument_text(value))
    return tuple(argv)


def _option_with_value(option: str, text: str) -> list[str]:
    # argparse takes a separate item with a leading dash for the next option
    if text.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", text):
        return [f"{option}={text}"]
    return [option, text]


def argument_text(value: Any) -> str:
    """Text of one value: JSON for structures, plain otherwise."""
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)
