"""What the tests share: a site's configuration, stand-ins, fresh interpreters."""

import importlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

import yaml

TREE = Path(__file__).resolve().parents[1]
TESTS = TREE / "tests"
PACKAGE = TREE / "app" / "utils" / "vec_inf_multinode"

TIME_LIMIT = 60
# What submit.sh runs besides Slurm's own commands.
LOGIN_TOOLS = ("bash", "mkdir", "sed", "tail")

ENVIRONMENT: dict[str, Any] = {
    "paths": {
        "vllm_image_path": "/images/vllm.sif",
        "sglang_image_path": "/images/sglang.sif",
        "cached_model_config_path": "/no/such/models.yaml",
    },
    "containerization": {
        "module_load_cmd": "module load apptainer",
        "module_name": "apptainer",
    },
    "limits": {"max_gpus_per_node": 8, "max_num_nodes": 16, "max_cpus_per_task": 64},
    "allowed_values": {"qos": [], "partition": [], "resource_type": []},
    "required_args": {},
    "python_version": "python3.12",
    "model_types": ["LLM", "VLM", "Text_Embedding", "Reward_Modeling", "OCR", "Audio"],
    "default_args": {
        "cpus_per_task": "16",
        "mem_per_node": "64G",
        "time": "08:00:00",
        "qos": "",
        "partition": "",
        "resource_type": "",
        "exclude": "",
        "nodelist": "",
        "bind": "",
        "venv": "apptainer",
        "data_type": "auto",
        "log_dir": "~/logs",
        "model_weights_parent_dir": "/model-weights",
    },
}

_ENTRY = {"model_family": "family", "model_type": "LLM", "vocab_size": 1000}
_SIZES = {"--tensor-parallel-size": 4, "--pipeline-parallel-size": 2}

MODELS: dict[str, dict[str, Any]] = {
    "one-node": {**_ENTRY, "gpus_per_node": 1, "num_nodes": 1},
    "one-node-sglang": {
        **_ENTRY,
        "gpus_per_node": 1,
        "num_nodes": 1,
        "engine": "sglang",
    },
    "two-nodes": {**_ENTRY, "gpus_per_node": 4, "num_nodes": 2},
    "two-nodes-sized": {
        **_ENTRY,
        "gpus_per_node": 4,
        "num_nodes": 2,
        "vllm_args": {**_SIZES, "--max-model-len": 32768},
        "sglang_args": dict(_SIZES),
        "env": {"NCCL_DEBUG": "WARN"},
    },
    "two-nodes-sglang": {
        **_ENTRY,
        "gpus_per_node": 4,
        "num_nodes": 2,
        "engine": "sglang",
        "sglang_args": {"--tensor-parallel-size": 8},
    },
}


def write_site(
    directory: Path,
    environment: Mapping[str, Mapping[str, Any]],
    models: Optional[Mapping[str, Any]] = None,
) -> dict[str, str]:
    """Write a vec-inf configuration directory.

    Parameters
    ----------
    directory : Path
        Directory to make.
    environment : mapping
        What differs from `ENVIRONMENT`: section to keys.
    models : mapping, optional
        The whole catalog. By default the catalog is vec-inf's, and there is no
        ``models.yaml``, which vec-inf warns of.

    Returns
    -------
    dict
        The variables that make vec-inf read it.
    """
    directory.mkdir(parents=True)
    sections = dict(ENVIRONMENT)
    for section, keys in environment.items():
        sections[section] = {**ENVIRONMENT[section], **keys}
    if models is not None:
        empty = directory / "no-models.yaml"
        empty.write_text("models: {}\n")
        paths = {**sections["paths"], "cached_model_config_path": str(empty)}
        sections["paths"] = paths
        text = yaml.safe_dump({"models": dict(models)})
        directory.joinpath("models.yaml").write_text(text)
    directory.joinpath("environment.yaml").write_text(yaml.safe_dump(sections))
    return {"VEC_INF_CONFIG_DIR": str(directory)}


def make_weights(directory: Path, names: Iterable[str]) -> None:
    """Let the weights of these models exist, as empty directories."""
    for name in names:
        directory.joinpath(name).mkdir(parents=True)


def link_tools(directory: Path, stubs: Path, tools: Iterable[str]) -> None:
    """Build a PATH directory from nothing: stand-ins, and real tools by name."""
    directory.mkdir(parents=True)
    for stub in stubs.iterdir():
        directory.joinpath(stub.name).symlink_to(stub)
    for name in tools:
        found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        assert found, f"{name} is needed by the tests"
        directory.joinpath(name).symlink_to(found)


def read_calls(path: Path) -> list[list[str]]:
    """Calls that stand-ins logged: NUL after each item, line break after each call."""
    if not path.exists():
        return []
    calls = path.read_text().split("\0\n")
    return [call.split("\0") for call in calls if call]


@dataclass
class Login:
    """A submitting machine on which nothing but three Slurm stand-ins exists.

    Parameters
    ----------
    root : Path
        Directory to make everything in.
    """

    root: Path
    home: Path = field(init=False)
    work: Path = field(init=False)
    logs: Path = field(init=False)
    weights: Path = field(init=False)
    stub_dir: Path = field(init=False)
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        """Make the directories, unless they are there."""
        for name in ("home", "work", "logs", "weights", "stub_dir"):
            setattr(self, name, self.root / name)
            getattr(self, name).mkdir(parents=True, exist_ok=True)
        self.path = self.root / "bin"
        if not self.path.exists():
            link_tools(self.path, TESTS / "stubs" / "login", LOGIN_TOOLS)

    @property
    def environ(self) -> dict[str, str]:
        """Variables of a process on this machine."""
        return {
            "PATH": str(self.path),
            "HOME": str(self.home),
            "STUB_DIR": str(self.stub_dir),
            "LC_ALL": "C.UTF-8",
        }

    def request(self, **more: Any) -> dict[str, Any]:
        """Launch options that keep every file on this machine."""
        places = {
            "model_weights_parent_dir": str(self.weights),
            "work_dir": str(self.work),
            "log_dir": str(self.logs),
        }
        return {**places, **more}

    def calls(self) -> list[list[str]]:
        """Every Slurm command that was run, with its arguments."""
        return read_calls(self.stub_dir / "calls")

    def answer(self, name: str, text: str) -> None:
        """Let a stand-in use other words: ``sbatch.out``, ``scontrol.err``, ..."""
        fresh = self.stub_dir / f"{name}.new"
        fresh.write_text(text + "\n")
        # a stand-in never reads half of it
        fresh.replace(self.stub_dir / name)

    def tree(self) -> dict[str, Optional[str]]:
        """Every file that a launch could have written: text, None for a directory."""
        found: dict[str, Optional[str]] = {}
        for root in (self.home, self.work, self.logs):
            for directory, _, files in os.walk(root):
                found[self._label(directory)] = None
                for path in (os.path.join(directory, name) for name in files):
                    with open(path, encoding="utf-8") as file:
                        found[self._label(path)] = file.read()
        return found

    def _label(self, path: str) -> str:
        return f"{os.path.relpath(path, self.root)} {os.stat(path).st_mode & 0o7777:o}"

    def wipe(self) -> None:
        """Forget every launch."""
        for root in (self.home, self.work, self.logs, self.stub_dir):
            shutil.rmtree(root)
            root.mkdir()


@dataclass(frozen=True)
class Call:
    """One function call in an interpreter that has imported no vec-inf yet.

    Parameters
    ----------
    function : str
        ``module:function`` of a test module; returns what JSON can hold.
    environ : dict
        The whole environment.
    arguments : dict
        Keyword arguments.
    path : tuple of str
        Put in front of ``sys.path``.
    without : tuple of str
        Taken out of ``sys.path``.
    """

    function: str
    environ: dict[str, str]
    arguments: dict[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def run_fresh(calls: Iterable[Call], scratch: Path) -> list[Any]:
    """Run calls, each in a process of its own, at most two at once.

    The processes are forks of one interpreter that has imported vec-inf's
    dependencies, but neither vec-inf nor the package under test.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    plan = scratch / "calls.json"
    plan.write_text(json.dumps([asdict(call) for call in calls]))
    process = subprocess.run(
        [sys.executable, __file__, str(plan)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(scratch.joinpath("results.json").read_text())


def _run_call(call: Mapping[str, Any], result: Path) -> None:
    """Run one call in this process, which is a fork."""
    os.environ.clear()
    os.environ.update(call["environ"])
    kept = [item for item in sys.path if item not in call["without"]]
    sys.path[:] = [*call["path"], *kept]
    importlib.invalidate_caches()
    module, name = call["function"].split(":")
    function = getattr(importlib.import_module(module), name)
    result.write_text(json.dumps(function(**call["arguments"])))


def _main(plan: Path) -> int:
    """Fork a process for each call of a plan; 1 when one of them failed."""
    for name in ("pydantic", "requests", "yaml", "pytest"):
        importlib.import_module(name)
    fast_yaml()
    sys.path[:0] = [str(TREE), str(TESTS)]
    calls = json.loads(plan.read_text())
    results = [plan.with_name(f"result-{i}.json") for i in range(len(calls))]
    running: set[int] = set()
    failed = 0
    for call, result in zip(calls, results):
        result.unlink(missing_ok=True)
        if len(running) == 2:
            failed += _reap(running)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(TIME_LIMIT)
                _run_call(call, result)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        running.add(child)
    while running:
        failed += _reap(running)
    if not failed:
        text = json.dumps([json.loads(result.read_text()) for result in results])
        plan.with_name("results.json").write_text(text)
    return min(failed, 1)


def _reap(running: set[int]) -> int:
    child, status = os.wait()
    running.discard(child)
    return int(status != 0)


def fast_yaml() -> None:
    """Let yaml parse each text once: vec-inf reads its catalog at every launch."""
    parse, fast = yaml.load, getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    known: dict[str, bytes] = {}

    def load(stream: Any, Loader: Any) -> Any:
        text = stream if isinstance(stream, str) else stream.read()
        if text not in known:
            known[text] = pickle.dumps(parse(text, Loader=fast))
        return pickle.loads(known[text])

    yaml.load = load


def selected(request: Any, name: str) -> list[Any]:
    """Values of a parameter in the tests of this module that are going to run."""
    values = [
        item.callspec.params[name]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
        if name in item.callspec.params
    ]
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
