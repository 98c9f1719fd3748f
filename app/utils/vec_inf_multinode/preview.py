"""What a launch would submit, told without submitting: pure, params in, tables out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from .plan import ENGINE, SECRET_ARGS, LaunchPlan, argument_text
from .settings import PREFIX, MultinodeSettings

MASK = "***"
# A shorter value may stand elsewhere in a request by chance.
_TELLING = 8

# vec-inf's params that say where and how a job runs, with what they are called here.
_RESOURCES = {
    "engine": "engine",
    "num_nodes": "nodes",
    "gpus_per_node": "GPUs per node",
    "resource_type": "type of GPU",
    "cpus_per_task": "CPUs per node",
    "mem_per_node": "memory per node",
    "time": "walltime",
    "partition": "partition",
    "account": "account",
    "qos": "QoS",
    "nodelist": "node list",
    "exclude": "excluded nodes",
    "model_weights_parent_dir": "weights below",
    "hf_model": "Hugging Face model",
    "bind": "binds",
    "venv": "runs in",
    "work_dir": "work directory",
    "log_dir": "log directory",
}


@dataclass(frozen=True)
class Setting:
    """One value and where it came from.

    Parameters
    ----------
    name, value : str
        The value, by its name.
    origin : str
        ``typed`` (the request), ``catalog``, ``site`` (vec-inf's configuration),
        ``environment`` or ``derived``.
    """

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Preview:
    """What a launch would submit.

    Parameters
    ----------
    model_name : str
        Name of the model.
    multinode : bool
        Whether the launch is this package's; otherwise it is vec-inf's own.
    reason : str
        Why.
    resources, parallelism, engine_args, env, knobs : tuple of Setting
        What was settled; of the knobs those that differ from their default.
    left_out_env : tuple of str
        Names that the ranks set themselves.
    container : tuple of str
        argv that runs something in the image; empty for vec-inf's own launch.
    script : str
        The batch script.
    """

    model_name: str
    multinode: bool
    reason: str
    resources: tuple[Setting, ...]
    parallelism: tuple[Setting, ...]
    engine_args: tuple[Setting, ...]
    env: tuple[Setting, ...]
    left_out_env: tuple[str, ...]
    knobs: tuple[Setting, ...]
    container: tuple[str, ...]
    script: str


@dataclass(frozen=True)
class Sources:
    """Where values come from.

    Parameters
    ----------
    request : mapping
        Launch options that were given.
    entry : mapping
        What the model's catalog entry says; empty without one.
    site : mapping
        vec-inf's defaults for every model.
    """

    request: Mapping[str, Any]
    entry: Mapping[str, Any]
    site: Mapping[str, Any]

    def of(self, field: str) -> str:
        """Origin of one of vec-inf's params."""
        if self.request.get(field):
            return "typed"
        if field in self.entry:
            return "catalog"
        return "site" if self.site.get(field) else "environment"

    def of_item(self, field: str, name: str, value: Any) -> str:
        """Origin of an item of a param that holds items."""
        items = self.entry.get(field) or {}
        same = name in items and str(items[name]) == str(value)
        return "catalog" if same else "typed"


def masked(params: Mapping[str, Any]) -> dict[str, Any]:
    """Params without a key and without a value of ``env``, wherever they stand."""
    values = {str(value) for value in (params.get("env") or {}).values()} - {""}
    telling = sorted((v for v in values if len(v) >= _TELLING), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, telling)) if telling else r"(?!)")

    def hide(value: Any) -> Any:
        text = argument_text(value)
        return pattern.sub(MASK, text) if pattern.search(text) else value

    hidden = dict(params)
    hidden["env"] = {name: MASK for name in params.get("env") or {}}
    hidden["engine_args"] = {
        option: MASK if option in SECRET_ARGS and value is not True else hide(value)
        for option, value in (params.get("engine_args") or {}).items()
    }
    if params.get("bind"):
        # vec-inf puts a cache directory that env names here
        binds = re.split(r"([,:])", str(params["bind"]))
        hidden["bind"] = hide("".join(MASK if b in values else b for b in binds))
    return hidden


def why(multinode: bool, route: Mapping[str, Any], sources: Sources) -> str:
    """Reason for a route, with the values that decided it."""
    nodes, engine = route["num_nodes"], route["engine"]
    asked = (
        f"{nodes} node{'s' if nodes > 1 else ''} ({sources.of('num_nodes')}), "
        f"engine {engine} ({sources.of('engine')})"
    )
    if multinode:
        return f"{asked}: one srun step over all nodes"
    if engine == ENGINE or nodes == 1:
        return f"{asked}: vec-inf serves one node itself"
    return f"{asked}: vec-inf serves {engine} over several nodes itself"


def resources(params: Mapping[str, Any], sources: Sources) -> tuple[Setting, ...]:
    """The allocation and the places of a job."""
    return tuple(
        Setting(label, str(params[field]), sources.of(field))
        for field, label in _RESOURCES.items()
        if params.get(field)
    )


def parallelism(plan: Optional[LaunchPlan]) -> tuple[Setting, ...]:
    """The parallel sizes and their product."""
    if plan is None:
        return ()
    sizes = [Setting(a.option, str(a.size), a.origin) for a in plan.parallelism.axes]
    world = str(plan.parallelism.world_size)
    return (*sizes, Setting("world size", world, "derived"))


def engine_args(
    params: Mapping[str, Any], sources: Sources, shown: Sequence[Setting]
) -> tuple[Setting, ...]:
    """Engine args, those of `shown` left out."""
    known = {setting.name for setting in shown}
    field = f"{params.get('engine') or ENGINE}_args"
    return tuple(
        Setting(option, argument_text(value), sources.of_item(field, option, value))
        for option, value in params["engine_args"].items()
        if option not in known
    )


def environment(
    params: Mapping[str, Any], shown: Mapping[str, Any], sources: Sources
) -> tuple[Setting, ...]:
    """Names of the deployment's env, with the values that may be shown."""
    return tuple(
        Setting(name, str(shown["env"][name]), sources.of_item("env", name, value))
        for name, value in (params.get("env") or {}).items()
    )


def changed_knobs(settings: MultinodeSettings) -> tuple[Setting, ...]:
    """Knobs that differ from their default."""
    return tuple(
        Setting(PREFIX + name.upper(), str(getattr(settings, name)), "environment")
        for name, field in type(settings).model_fields.items()
        if getattr(settings, name) != field.default
    )
