"""What is shipped: the wheel, the two ways into a hub, and papers that are true."""

import email
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import support
import yaml

from app.utils.vec_inf_multinode import MultinodeSettings
from app.utils.vec_inf_multinode.plan import MIN_VLLM
from app.utils.vec_inf_multinode.settings import ALIAS_PREFIX, PREFIX

README = support.TREE / "README.md"
PLACE = "app/utils/vec_inf_multinode"
SCRIPTS = sorted(path.name for path in (support.PACKAGE / "scripts").iterdir())
# pip fetches the build backend when it is not at hand
BUILD_LIMIT = 180

# Runs where the source tree cannot be seen.
HUB = """
import json, sys
from importlib import resources

from app.utils import hub_module, vec_inf_multinode as package

request = json.loads(sys.argv[1])
params = package.MultinodeLauncher("two-nodes", request).params
scripts = resources.files(package.__name__).joinpath("scripts")
print(json.dumps({
    "files": [hub_module.__file__, package.__file__],
    "namespaces": [list(sys.modules[name].__path__) for name in ("app", "app.utils")],
    "seam": package.check_vec_inf().ok,
    "scripts": sorted(path.name for path in scripts.iterdir()),
    "text": package.MultinodeScriptGenerator(params)._generate_script_content(),
}))
"""


def run(argv, limit=60, **options):
    """Run a command; what it printed."""
    done = subprocess.run(
        [str(word) for word in argv],
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*words):
    """Run the test environment's own pip."""
    run([sys.executable, "-m", "pip", *words, "-q"], limit=BUILD_LIMIT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Return the wheel of this tree."""
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", directory, support.TREE)
    (found,) = directory.glob("*.whl")
    return found


@pytest.fixture
def hub(tmp_path):
    """Return a hub's backend: an ``app/`` of its own, without ``__init__.py``."""
    utils = tmp_path / "backend" / "app" / "utils"
    utils.mkdir(parents=True)
    utils.joinpath("hub_module.py").write_text('"""The hub\'s half."""\n')
    return tmp_path / "backend"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    """No test, no ``app/__init__.py``, every module and script, the licence."""
    names = set(zipfile.ZipFile(wheel).namelist())
    info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
    shipped = {
        path.relative_to(support.TREE).as_posix()
        for path in support.PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"{PLACE}/scripts/{name}" for name in SCRIPTS} <= shipped
    meta = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert names == shipped | {f"{info}/{name}" for name in meta}


def test_the_wheel_pins_vec_inf(wheel):
    """The metadata names the one vec-inf, the oldest Python and the licence."""
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith("METADATA"))
    fields = email.message_from_bytes(archive.read(name))
    needs = [need for need in fields.get_all("Requires-Dist") if "extra ==" not in need]
    assert needs == ["vec-inf==0.9.0"]
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Name"] == "vec-inf-multinode"


@pytest.mark.parametrize("way", ["installed", "copied"])
def test_both_halves_of_app_import(way, wheel, hub, login, tmp_path):
    """Beside the hub's ``app/`` or inside it: both import, and a script renders."""
    home = hub
    if way == "installed":
        home = tmp_path / "site"
        pip("install", "--no-deps", "--target", home, wheel)
    else:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(support.PACKAGE, hub / PLACE, ignore=ignore)
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    path = os.pathsep.join(map(str, [hub, home, *libraries]))
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    request = json.dumps(login.request())
    # -S: no .pth file, so not the source tree of an editable install
    out = run(
        [sys.executable, "-S", "-W", "ignore", "-c", HUB, request],
        env=environ,
        cwd=tmp_path,
    )
    found = json.loads(out)
    assert found["files"] == [
        str(hub / "app/utils/hub_module.py"),
        str(home / PLACE / "__init__.py"),
    ]
    assert str(support.TREE) not in str(found["namespaces"])
    assert found["seam"]
    assert found["scripts"] == SCRIPTS
    assert found["text"].startswith("#!/bin/bash\n#SBATCH --job-name=two-nodes-vec-inf")
    for name in ("batch.sh", "common.sh", "rank.sh"):
        assert (support.PACKAGE / "scripts" / name).read_text() in found["text"]


# The README


def table(heading):
    """Cells of the rows of the first table under a heading, without its head."""
    text = README.read_text("utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.M)
    assert len(section) == 2, f"README has {len(section) - 1} headings {heading!r}"
    rows = re.search(r"(?:^\|.*\n)+", section[1], re.M).group().splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_the_readme_lists_every_knob():
    """Names, aliases and defaults of the table are those of the settings."""
    derived = {"nccl_socket_ifname": "derived", "failures": "none"}
    expected = [
        [f"`{PREFIX}{name.upper()}`", derived.get(name, f"`{field.default}`")]
        for name, field in MultinodeSettings.model_fields.items()
    ]
    assert [row[:2] for row in table("Knobs")] == expected
    assert f"`{ALIAS_PREFIX}*`" in README.read_text("utf-8")


def quoted_messages():
    """Patterns of the messages of the table, ``<...>`` standing for any text."""
    cells = [re.fullmatch(r"`LLMHUB-ERROR: (.+)`", row[0]) for row in table("Messages")]
    texts = [cell.group(1) for cell in cells if cell]
    assert len(texts) > 10
    parts = [re.split(r"<[a-z ]+>", text) for text in texts]
    return {
        text: re.compile(".{1,80}?".join(map(re.escape, part)))
        for text, part in zip(texts, parts)
    }


def real_messages():
    """What the scripts can say after ``LLMHUB-ERROR:``, unexpanded."""
    text = "".join((support.PACKAGE / "scripts" / name).read_text() for name in SCRIPTS)
    say = r'(?:llmhub_fail|llmhub_judge|refuse|message=) ?"([^$"][^"\n]*)'
    return set(re.findall(say, text)) | set(re.findall(r'message="(rank [^"]*)', text))


def test_the_readme_quotes_real_messages():
    """Every quoted error is in a script, and every script's error is quoted."""
    quoted, real = quoted_messages(), real_messages()
    invented = [
        text
        for text, pattern in quoted.items()
        if not any(pattern.match(message) for message in real)
    ]
    assert not invented
    missed = [
        message
        for message in real
        if not any(pattern.match(message) for pattern in quoted.values())
    ]
    assert not missed


def test_the_readme_has_the_messages_that_are_known():
    """Each row is an entry of the data, in its order and with its advice."""
    said = re.compile("`(LLMHUB-(?:ERROR|WARN|RESTART): .+)`")
    rows = [(said.fullmatch(row[0]), row[1]) for row in table("Messages")]
    written = [(cell[1], advice) for cell, advice in rows if cell]
    data = yaml.safe_load((support.PACKAGE / "failures.yaml").read_text())
    assert written == [(m["message"], m["advice"]) for m in data["messages"]]


def test_the_readme_names_the_first_vllm():
    """What the cluster must have is what the job looks for."""
    assert f"`--nnodes` ({MIN_VLLM} or newer)" in README.read_text("utf-8")


@pytest.fixture
def versions(monkeypatch):
    """Return the module that knows the versions of vLLM."""
    monkeypatch.syspath_prepend(support.TESTS / "lab")
    return importlib.import_module("lab_vllm")


def test_the_readme_has_the_versions_of_vllm(versions):
    """Its table is that of the recorded facts."""
    assert versions.table() in README.read_text("utf-8")


def test_the_first_vllm_is_the_first_with_every_flag(versions):
    """What the job refuses is what is recorded to have no multi-node flags."""
    rows = {row["version"]: set(row["flags"]) for row in versions.rows()}
    complete = [name for name, flags in rows.items() if flags >= set(versions.FLAGS)]
    assert complete and complete[0] == MIN_VLLM
    assert complete == list(rows)[-len(complete) :]


def test_the_readme_names_real_targets():
    """Every ``make`` target and file that the README names is there."""
    text = README.read_text("utf-8")
    makefile = (support.TREE / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z][a-z-]+)", text)) - {"a"}
    assert targets >= {"demo", "test"}
    assert not [name for name in targets if f"\n{name}:" not in makefile]
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", text)
    assert not [link for link in links if not (support.TREE / link).exists()]


def test_the_changelog_has_this_version():
    """The version of the package stands in the changelog."""
    scope = {}
    exec((support.PACKAGE / "version.py").read_text(), scope)
    changelog = Path(support.TREE / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## \[{re.escape(scope['__version__'])}\]", changelog, re.M)


def test_every_public_name_is_there():
    """Those too that are imported at their first use; and no others."""
    import app.utils.vec_inf_multinode as package

    assert all(getattr(package, name) is not None for name in package.__all__)
    assert not hasattr(package, "Previews")
