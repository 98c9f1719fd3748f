"""Compute nodes on which a job's scripts really run, made of stand-ins.

PATH is built from nothing, HOME and every file lie below the directory that a test
gives, each run has a time limit, and what it left running is ended by its id.
"""

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import support
from vec_inf.client import _utils
from vec_inf.client._client_vars import MODEL_READY_SIGNATURE, SRC_DIR

from app.utils.vec_inf_multinode import MultinodeScriptGenerator, MultinodeSettings

STUBS = support.TESTS / "stubs" / "node"
# All that the scripts may use besides bash itself and the stand-ins.
TOOLS = ("awk", "bash", "cat", "cut", "date", "env", "flock", "grep", "jq", "mkdir")
TOOLS += (
    "mv",
    "realpath",
    "rm",
    "sed",
    "sleep",
    "sort",
    "stat",
    "tail",
    "tee",
    "timeout",
)

IMAGE = support.ENVIRONMENT["paths"]["vllm_image_path"]
IMAGE_SITE = "lib/python3.12/site-packages"
MODEL = "two-nodes"
JOB_ID = 4242
NODES = ("nid001", "nid002")
MASTER = "172.28.86.10"
# One more line for each interface: "NAME ADDRESS/LENGTH".
INTERFACES = {
    "nid001": ("lo 127.0.0.1/8", "eth0 10.1.0.10/16", f"hsn0 {MASTER}/21"),
    "nid002": ("lo 127.0.0.1/8", "eth0 10.1.0.11/16", "hsn0 172.28.86.11/21"),
}
SERVE = 'exec "$STUB_PYTHON" -IS "$STUB_DIR/engine.py" "$@"'
STAY = "exec sleep 60"

_ports = itertools.count(1)
_given: set[int] = set()
_lock = threading.Lock()


def free_port() -> int:
    """Return a port that nothing uses and no other run of this process was given."""
    with _lock:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            if port not in _given:
                _given.add(port)
                return port


def rendezvous_base(count: int = 65) -> int:
    """Return the start of a port range below the ephemeral ones, for one run only."""
    # by process, so that two test runs at once do not take each other's locks
    slot = (os.getpid() * 41 + next(_ports)) % (20_000 // count)
    return 10_000 + slot * count


def ip_output(interfaces: tuple[str, ...]) -> str:
    """Print interfaces as ``ip -4 -o addr show`` does."""
    lines = []
    for number, interface in enumerate(interfaces, 1):
        name, address = interface.split()
        lines.append(
            f"{number}: {name}    inet {address} brd 172.28.87.255 scope global "
            f"{name}\\       valid_lft forever preferred_lft forever\n"
        )
    return "".join(lines)


def container_value(value: bytes) -> bytes:
    r"""Return what a variable holds in the container for an ``APPTAINERENV_`` value.

    Apptainer's documented behaviour (its "historic" one, without ``--no-eval``): it
    puts the value between double quotes, a backslash before each double quote in it,
    and lets its shell evaluate that. There ``\\``, ``\$`` and ``\``` stand for the
    second character; a bare ``$`` or backquote would run something, and a backslash
    before a double quote would end the quotes early.
    """
    out, i = bytearray(), 0
    while i < len(value):
        char = value[i : i + 1]
        if char in (b"$", b"`"):
            raise AssertionError(f"Apptainer would evaluate {value!r}")
        if char == b"\\":
            i += 1
            char = value[i : i + 1]
            if char not in (b"\\", b"$", b"`"):
                raise AssertionError(f"a stray backslash in {value!r}")
        out += char
        i += 1
    return bytes(out)


@dataclass
class Call:
    """How a stand-in was called."""

    argv: list[bytes]
    environ: dict[bytes, bytes]
    umask: str

    @property
    def text(self) -> list[str]:
        """The argv as text."""
        return [os.fsdecode(item) for item in self.argv]

    def container_env(self, name: str) -> Optional[str]:
        """Value of a variable in the container, None if it is not set there."""
        for prefix in ("APPTAINERENV_", "SINGULARITYENV_"):
            value = self.environ.get(os.fsencode(prefix + name))
            if value is not None:
                return os.fsdecode(container_value(value))
        return None

    @property
    def binds(self) -> list[str]:
        """What is bound into the container."""
        return os.fsdecode(self.environ.get(b"APPTAINER_BINDPATH", b"")).split(",")


class Node:
    """The machine of one run: PATH, HOME, what the stand-ins say and note.

    Parameters
    ----------
    root : Path
        Directory to make everything in.
    without : tuple of str
        Commands that this machine lacks.
    """

    def __init__(self, root: Path, without: tuple[str, ...] = ()):
        self.root = root
        self.etc, self.log, self.home = root / "etc", root / "log", root / "home"
        for directory in (self.etc, self.log, self.home, root / "tmp"):
            directory.mkdir(parents=True)
        self.path = root / "bin"
        self.path.mkdir()
        for stub in STUBS.iterdir():
            if os.access(stub, os.X_OK) and stub.name not in without:
                self.path.joinpath(stub.name).symlink_to(stub)
        for name in set(TOOLS) - set(without):
            found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
            assert found, f"{name} is needed by the tests"
            self.path.joinpath(name).symlink_to(found)
        for node, interfaces in INTERFACES.items():
            self.say(f"ip.{node}", ip_output(interfaces))
        self.server_port = free_port()
        self.say("server-port", f"{self.server_port}\n")
        self.say("ss", "")
        self.say("squeue", "UNLIMITED\n")
        self.say("srun.json", "{}")
        self.say("http.json", "{}")
        self.install_vllm("0.32.0")

    def say(self, name: str, text: str) -> None:
        """Let a stand-in find this text; replaced in one step, it may be reading."""
        new = self.etc / f".{name}"
        new.write_text(text)
        new.rename(self.etc / name)

    def install_vllm(self, *versions: str, site: str = IMAGE_SITE) -> None:
        """Let the image have these versions of vLLM, and no other."""
        image = self.etc / "image"
        shutil.rmtree(image, ignore_errors=True)
        program = image / "bin" / "vllm"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
        for version in versions:
            image.joinpath(site, f"vllm-{version}.dist-info").mkdir(parents=True)

    def environ(self, nodes: tuple[str, ...] = NODES) -> dict[str, str]:
        """Variables of every process on this machine."""
        return {
            "PATH": str(self.path),
            "HOME": str(self.home),
            "TMPDIR": str(self.root / "tmp"),
            "LC_ALL": "C.UTF-8",
            "STUB_DIR": str(STUBS),
            "STUB_ETC": str(self.etc),
            "STUB_LOG": str(self.log),
            "STUB_PYTHON": sys.executable,
            "STUB_NODES": ",".join(nodes),
            "STUB_GPUS": "0,1,2,3",
            "STUB_NODE": nodes[0],
        }

    def calls(self, name: str, rank: str = "*") -> list[Call]:
        """How a stand-in was called, by one rank or by the batch script."""
        found = []
        for path in sorted(self.log.glob(f"{name}.{rank}.*.argv")):
            environ, umask = path.with_suffix(".env"), path.with_suffix(".umask")
            pairs = environ.read_bytes().split(b"\0")[:-1] if environ.exists() else []
            found.append(
                Call(
                    path.read_bytes().split(b"\0")[:-1],
                    {k: v for k, _, v in (pair.partition(b"=") for pair in pairs)},
                    umask.read_text().strip() if umask.exists() else "",
                )
            )
        return found

    def container(self, rank: int = 0) -> Call:
        """Return the one container of a rank."""
        (call,) = self.calls("apptainer", str(rank))
        return call

    def requests(self) -> list[dict[str, Any]]:
        """Every HTTP request that the engine got."""
        path = self.log / "http.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def processes(self) -> list[int]:
        """Every process that is still there, by the mark in its environment."""
        mark = os.fsencode(f"STUB_ETC={self.etc}\0")
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                with suppress(OSError):
                    if mark in Path(entry.path, "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def end_all(self) -> None:
        """End what is left, each process by its id."""
        for _ in range(20):
            left = self.processes()
            if not left:
                return
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def refused(self) -> str:
        """What stand-ins did not know."""
        path = self.log / "refused"
        return path.read_text() if path.exists() else ""


def resolved_params(root: Path, **changes: Any) -> dict[str, Any]:
    """Return params as vec-inf's launcher leaves them for the script generator."""
    logs = changes.get("log_dir", root / "logs")
    files = f"{logs}/{MODEL}.%j/{MODEL}.%j"
    return {
        "model_name": MODEL,
        "model_family": "family",
        "model_type": "LLM",
        "engine": "vllm",
        "num_nodes": "2",
        "gpus_per_node": "4",
        "cpus_per_task": "16",
        "mem_per_node": "64G",
        "time": "08:00:00",
        "gres": "gpu:4",
        "venv": "apptainer",
        "bind": "",
        "model_weights_parent_dir": str(root / "weights"),
        "work_dir": str(root / "work"),
        "src_dir": SRC_DIR,
        "out_file": f"{files}.out",
        "err_file": f"{files}.err",
        "engine_args": {},
        "env": {},
        **changes,
        "log_dir": str(logs),
    }


def rank_script(batch: str, path: Path) -> Path:
    """Write the rank script that a rendered batch script would write."""
    functions, prepare, _ = batch.partition("\nllmhub_prepare\n")
    assert prepare, "the batch script has no llmhub_prepare"
    run = subprocess.run(
        ["/bin/bash"],
        input=f"{functions}\nPATH=/usr/bin:/bin llmhub_rank_script\n".encode(),
        capture_output=True,
        env={"LC_ALL": "C.UTF-8"},
        timeout=support.TIME_LIMIT,
        check=True,
    )
    path.write_bytes(run.stdout)
    return path


@dataclass(frozen=True, eq=False)
class Case:
    """What a run is given.

    Parameters
    ----------
    params : dict
        What differs from `resolved_params`; Path values lie below the run's directory.
    knobs : dict
        Settings.
    environ : dict
        Host variables; ``{root}`` in a value is the run's directory.
    interfaces : dict
        Node name to interfaces, where they differ from `INTERFACES`.
    engines : dict
        Rank to what its container does, in bash.
    say : dict
        What stand-ins find: file name to text.
    without : tuple of str
        Commands that are missing.
    before : callable, optional
        Called with the run before it starts.
    during : callable, optional
        Called with the run after it has started.
    limit : float
        Seconds that the run may take.
    """

    params: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    engines: Mapping[int, str] = field(default_factory=dict)
    say: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    before: Optional[Callable[[Any], None]] = None
    during: Optional[Callable[[Any], None]] = None
    limit: float = 30

    def start(self, root: Path) -> Any:
        """Return a finished run of this case."""
        raise NotImplementedError


class Run:
    """One run of a script, and what it left.

    Parameters
    ----------
    case : Case
        What it is given.
    root : Path
        Directory to make everything in.
    """

    def __init__(self, case: Case, root: Path):
        self.case, self.root = case, root
        self.node = Node(root, case.without)
        for name, interfaces in case.interfaces.items():
            self.node.say(f"ip.{name}", ip_output(interfaces))
        for rank, engine in case.engines.items():
            self.node.say(f"engine.{rank}", engine + "\n")
        for name, text in case.say.items():
            self.node.say(name, text)
        placed = {
            key: str(root / value) if isinstance(value, Path) else value
            for key, value in case.params.items()
        }
        self.params = resolved_params(root, **placed)
        self.knobs = {"rdzv_port": rendezvous_base(), **case.knobs}
        self.generator = MultinodeScriptGenerator(
            self.params, settings=MultinodeSettings(**self.knobs)
        )
        self.nodes = tuple(
            f"nid{number:03}" for number in range(1, int(self.params["num_nodes"]) + 1)
        )
        self.job_dir = Path(self.params["log_dir"], f"{MODEL}.{JOB_ID}")
        self.job_dir.mkdir(parents=True)
        if os.path.isabs(self.params["work_dir"]):
            Path(self.params["work_dir"]).mkdir(parents=True, exist_ok=True)
        self.notes: dict[str, Any] = {}
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.status: Optional[int] = None
        self.seconds = 0.0

    def host_environ(self) -> dict[str, str]:
        """Variables that the script starts with."""
        given = {
            name: value.replace("{root}", str(self.root))
            for name, value in self.case.environ.items()
        }
        environ = {**self.node.environ(self.nodes), **self.own_environ(), **given}
        return {name: value for name, value in environ.items() if value != "UNSET"}

    def own_environ(self) -> dict[str, str]:
        """Variables of this kind of run."""
        return {}

    def run(self, argv: list[str], out: Path, err: Path, stdin: Any) -> None:
        """Run to the end, or to the time limit."""
        if self.case.before:
            self.case.before(self)
        began = time.monotonic()
        with out.open("wb") as out_file, err.open("wb") as err_file:
            self.process = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=out_file,
                stderr=err_file,
                env=self.host_environ(),
                cwd=self.root,
                start_new_session=True,
            )
        try:
            if self.case.during:
                self.case.during(self)
            self.status = self.process.wait(self.case.limit)
            self.seconds = time.monotonic() - began
            self.settle()
        finally:
            if self.notes.get("left") != []:
                self.process.kill()
                self.node.end_all()
                self.process.wait()
        assert not self.node.refused()

    def settle(self) -> None:
        """Give what writes logs a moment; what then stays is `left`."""
        end = time.monotonic() + 1
        while True:
            self.notes["left"] = self.node.processes()
            if not self.notes["left"] or time.monotonic() > end:
                return
            time.sleep(0.05)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        """Wait for something that this run does."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process is not None and self.process.poll() is None, "it ended"
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.02)

    def read(self, path: str) -> str:
        """Text of a file below the job directory."""
        return self.job_dir.joinpath(path).read_text()


# ---------------------------------------------------------------- one rank


@dataclass(frozen=True, eq=False)
class RankCase(Case):
    """One rank script by itself, as the step starts it.

    Parameters
    ----------
    rank : int
        SLURM_PROCID.
    stdin : bytes or None
        What the batch script says; None keeps stdin open and says nothing.
    edit : dict
        Text of the rank script to replace.
    """

    rank: int = 0
    stdin: Optional[bytes] = b"go\n"
    edit: Mapping[str, str] = field(default_factory=dict)

    def start(self, root: Path) -> "RankRun":
        """Return a finished run of this case."""
        return RankRun(self, root).finish()


class RankRun(Run):
    """A rank script, run."""

    case: RankCase

    def own_environ(self) -> dict[str, str]:
        """What Slurm sets in a step, and what the batch script exports."""
        return {
            "SLURM_JOB_ID": str(JOB_ID),
            "SLURM_PROCID": str(self.case.rank),
            "SLURM_STEP_ID": "0",
            "SLURMD_NODENAME": self.nodes[self.case.rank],
            "CUDA_VISIBLE_DEVICES": "0,1,2,3",
            "LLMHUB_UMASK": "0022",
            "LLMHUB_JOB_DIR": str(self.job_dir),
            "LLMHUB_CACHE_DIR": str(self.root / "work" / "cache"),
            "LLMHUB_ATTEMPT_DIR": str(self.job_dir / "attempt-0"),
            "LLMHUB_MASTER_ADDR": MASTER,
            "LLMHUB_MASTER_PORT": "29500",
            "LLMHUB_SERVER_PORT": "8080",
        }

    def finish(self) -> "RankRun":
        """Run the script."""
        for name in ("attempt-0/started", "ranks"):
            self.job_dir.joinpath(name).mkdir(parents=True)
        text = self.generator._generate_script_content()
        script = rank_script(text, self.root / "rank.sh")
        for old, new in self.case.edit.items():
            content = script.read_text()
            assert old in content
            script.write_text(content.replace(old, new))
        out, err = self.root / "out", self.root / "err"
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb") as stdin, os.fdopen(write_end, "wb") as pipe:
            if self.case.stdin is None:
                self.run([str(self.node.path / "bash"), str(script)], out, err, stdin)
            else:
                pipe.write(self.case.stdin)
                if self.case.stdin != b"go\n":
                    pipe.close()
                else:
                    pipe.flush()
                self.run([str(self.node.path / "bash"), str(script)], out, err, stdin)
        self.out, text = out.read_text(), err.read_text()
        said = re.compile(r"^LLMHUB-SAY (.*)\n", re.M)
        self.said, self.err = said.findall(text), said.sub("", text)
        return self

    @property
    def marker(self) -> Path:
        """The file that says that the rank has started."""
        return self.job_dir / "attempt-0" / "started" / str(self.case.rank)

    @property
    def container(self) -> Call:
        """How the container was started."""
        return self.node.container(self.case.rank)

    @property
    def log(self) -> str:
        """Name of the rank's own files, without the suffix."""
        return f"ranks/rank-{self.case.rank}.{self.nodes[self.case.rank]}"

    def end_line(self) -> dict[str, str]:
        """Return the fields of the rank's last report."""
        (line,) = [x for x in self.err.splitlines() if x.startswith("LLMHUB-END ")]
        return dict(item.split("=", 1) for item in line.split()[1:])


# ---------------------------------------------------------------- a whole job


@dataclass(frozen=True, eq=False)
class JobCase(Case):
    """A whole batch script, as Slurm starts it.

    Parameters
    ----------
    engines : dict
        By default rank 0 serves and rank 1 stays.
    """

    engines: Mapping[int, str] = field(default_factory=lambda: {0: SERVE, 1: STAY})

    def start(self, root: Path) -> "JobRun":
        """Return a finished run of this case."""
        return JobRun(self, root).finish()


class JobRun(Run):
    """A batch script, run."""

    def own_environ(self) -> dict[str, str]:
        """What Slurm sets for a batch script."""
        return {
            "SLURM_JOB_ID": str(JOB_ID),
            "SLURM_JOB_NUM_NODES": str(len(self.nodes)),
            "SLURM_JOB_NODELIST": f"nid[001-{len(self.nodes):03}]",
            "SLURMD_NODENAME": "nid001",
            "SLURM_CPUS_PER_TASK": "16",
        }

    @cached_property
    def script(self) -> Path:
        """The batch script, where vec-inf leaves it."""
        path = self.generator.write_to_log_dir()
        return path.rename(self.job_dir / f"{MODEL}.{JOB_ID}.sbatch")

    def file(self, suffix: str) -> Path:
        """Return one of the job's own files."""
        return self.job_dir / f"{MODEL}.{JOB_ID}.{suffix}"

    def finish(self) -> "JobRun":
        """Run the script."""
        self.file("json").write_text(json.dumps({"env": self.params["env"]}))
        self.run(
            ["/bin/bash", str(self.script)],
            self.file("out"),
            self.file("err"),
            subprocess.DEVNULL,
        )
        return self

    @property
    def out(self) -> str:
        """The job's .out."""
        return self.file("out").read_text()

    @property
    def err(self) -> str:
        """The job's .err."""
        return self.file("err").read_text()

    def lines(self, kind: str) -> list[str]:
        """What the .out has after ``LLMHUB-<kind>: ``."""
        start = f"LLMHUB-{kind}: "
        return [x[len(start) :] for x in self.out.splitlines() if x.startswith(start)]

    def errors(self) -> list[str]:
        """Return what the .err has after ``LLMHUB-ERROR: ``."""
        start = "LLMHUB-ERROR: "
        return [x[len(start) :] for x in self.err.splitlines() if x.startswith(start)]

    def server_status(self) -> Any:
        """Return what vec-inf's own scan of the .err says."""
        return _utils.is_server_running(MODEL, str(JOB_ID), str(self.job_dir))

    def failure(self) -> Optional[dict[str, Any]]:
        """Content of failure.json, None if there is none."""
        path = self.job_dir / "failure.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def master_port(self) -> int:
        """The rendezvous port that the job log names."""
        return int(self.lines("TOPOLOGY")[0].rpartition(":")[2])

    def ready(self) -> bool:
        """Whether the job has said that the server is ready."""
        return MODEL_READY_SIGNATURE in self.err

    def tasks(self) -> list[int]:
        """Process groups of the step's tasks."""
        path = self.node.log / "tasks"
        return [int(x) for x in path.read_text().split()] if path.exists() else []

    def cancel(self, ranks_first: bool = False) -> None:
        """Tell the batch script and every process of the step, as scancel does."""
        assert self.process is not None
        order = [self.process.pid, *self.tasks()]
        for pid in reversed(order) if ranks_first else order:
            with suppress(ProcessLookupError):
                if pid == self.process.pid:
                    os.kill(pid, signal.SIGTERM)
                else:
                    os.killpg(pid, signal.SIGTERM)
            if ranks_first:
                time.sleep(0.2)


def when_ready(run: JobRun) -> None:
    """Wait until the job is ready, note what vec-inf says then, and cancel it."""
    run.wait_for(run.ready)
    run.notes["status"] = run.server_status()
    run.cancel()


@contextmanager
def watch_argv(secret: str) -> Any:
    """Collect every command line on this machine that shows a text."""
    found: set[bytes] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            for entry in os.scandir("/proc"):
                if entry.name.isdigit():
                    with suppress(OSError):
                        argv = Path(entry.path, "cmdline").read_bytes()
                        if secret.encode() in argv:
                            found.add(argv)
            time.sleep(0.002)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
