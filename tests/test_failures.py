"""The known failures: each entry is its own test, by Python and by grep."""

import json
import subprocess
import sys
import time

import pytest
import support

from app.utils.vec_inf_multinode import failures, render
from app.utils.vec_inf_multinode.failures import Failure

KNOWN = failures.load()
LISTS = {"failures": KNOWN.failures, "messages": KNOWN.messages}
ENTRIES = [entry for entries in LISTS.values() for entry in entries]
OF_RANKS = list(KNOWN.of("rank", fatal=True))

# Lines of jobs that were well: from vLLM 0.32's log on the lab or its source, and from
# logs of Slingshot and InfiniBand clusters.
BENIGN = """\
(APIServer pid=817) WARNING 12-01 03:05:14 [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n
(APIServer pid=817) INFO 12-01 03:05:14 [api_utils.py:273] non-default args: {'model_tag': '/models/m', 'port': 18999, 'trust_remote_code': True, 'max_model_len': 256}
(EngineCore pid=287) INFO 12-01 03:05:20 [parallel_state.py:1399] world_size=2 rank=0 local_rank=0 distributed_init_method=tcp://10.77.0.1:29510 backend=nccl
INFO:     10.0.135.38:48284 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request
INFO:     Application startup complete.
WARNING:  Could not find any nv files on this host!
INFO:    underlay of /etc/localtime required more than 50 (71) bind mounts
ConnectionResetError: [Errno 104] Connection reset by peer
[W1201 03:05:20.155 socket.cpp:767] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).
[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
libfabric:1234:1701636928::core:core:ofi_hmem_init():421<warn> Failed to initialize hmem iface FI_HMEM_ROCR: No data available
libfabric:85:1747438790::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list
libfabric:7: Failed to open /dev/cxi0
libfabric:8: could not find libcxi
nid001:177793:177793 [6] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
GENOA-06:4766:4780 [0] NCCL INFO Failed to open libibverbs.so[.1]
nid001:1:1 [0] NCCL INFO NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
nid001:920:1145 [1] NCCL INFO Channel 04/0 : 9[1] -> 10[2] via P2P/IPC/read
srun: cluster configuration lacks support for cpu binding
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
0: slurmstepd-nid001: error: *** STEP 10.0 ON nid001 CANCELLED AT 2026-12-01T02:56:59 ***
slurmstepd-nid001: error: *** JOB 10 ON nid001 CANCELLED AT 2026-12-01T02:56:59 ***
srun: error: nid001: task 0: Exited with exit code 143
(EngineCore pid=287) INFO 12-01 03:05:14 [network_utils.py:248] Port 29500 is already in use, trying port 29501
(APIServer pid=817) WARNING 12-01 03:05:14 [parallel.py:746] Address already in use. Retrying with a new port.
/usr/lib/python3.12/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up at shutdown
""".splitlines()


def grep(pattern, lines):
    """Numbers of the lines that grep -E finds, from 0."""
    done = subprocess.run(
        ["grep", "-n", "-E", "-e", pattern],
        input="\n".join(lines).encode(),
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        timeout=10,
        check=False,
    )
    assert done.returncode < 2, done.stderr
    return {int(line.partition(b":")[0]) - 1 for line in done.stdout.splitlines()}


def python(pattern_of, lines):
    """The same by Python."""
    return {i for i, line in enumerate(lines) if pattern_of.found_in(line)}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_an_entry_matches_its_example_and_no_earlier_one(entry):
    """By Python and by grep, which must read every line alike."""
    kind = "messages" if entry.where == "job" else "failures"
    examples = [other.example for other in LISTS[kind]]
    lines = examples + BENIGN
    found = python(entry, lines)
    assert found == grep(entry.pattern, lines)
    assert entry.example and entry.problem() is None
    own = examples.index(entry.example)
    assert own in found
    assert max(found) < len(examples), f"{entry.id} matches a benign line"
    assert max(found) == own, f"{entry.id} matches the example of a later entry"


def test_names_and_verdicts_tell_entries_apart():
    """`failure.json` has the verdict only."""
    ids = [entry.id for entry in ENTRIES]
    assert len(set(ids)) == len(ids)
    verdicts = [entry.verdict for entry in KNOWN.failures]
    assert len(set(verdicts)) == len(verdicts)
    assert len(OF_RANKS) >= 40


@pytest.mark.parametrize("line", BENIGN)
def test_a_benign_line_matches_nothing(line):
    assert [entry.id for entry in ENTRIES if entry.found_in(line)] == []


# ---------------------------------------------------------------- in the job


def causes(logs, tmp_path):
    """What the batch script's own function says of logs, one line each."""
    batch = (support.PACKAGE / "scripts" / "batch.sh").read_text()
    start = batch.index("llmhub_cause() {")
    function = batch[start : batch.index("\n}\n", start) + 3]
    paths = []
    for number, log in enumerate(logs):
        paths.append(tmp_path / f"{number}.err")
        paths[-1].write_bytes(log)
    script = (
        f"set -u\n{render.failure_block(None)}\n{function}"
        'for log in "$@"; do llmhub_cause "$log" "$log.out" || echo; done\n'
    )
    done = subprocess.run(
        ["/bin/bash", "-c", script, "bash", *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        check=True,
    )
    return done.stdout.split("\n")[:-1]


def test_the_job_finds_every_cause_of_a_rank(tmp_path):
    logs = [entry.example.encode() for entry in OF_RANKS]
    assert causes(logs, tmp_path) == [entry.verdict for entry in OF_RANKS]


def test_the_job_prefers_the_telling_cause(tmp_path):
    """Whatever comes first in the log, and between bytes that are no text."""
    follows, cause = OF_RANKS[-1], next(e for e in OF_RANKS if e.id == "gpu-memory")
    noise = b"\0\xff\xfe \x1b[0;36m"
    backwards = b"\n".join(
        [noise, follows.example.encode(), noise + cause.example.encode(), noise]
    )
    repeated = cause.example.encode() + b"\n" + b"nothing\n" * 9000
    benign = "\n".join(BENIGN).encode()
    found = causes([backwards, repeated, benign, b""], tmp_path)
    assert found == [cause.verdict, cause.verdict, "", ""]


# ---------------------------------------------------------------- a site's own


SITE = """
failures:
  - id: site-licence
    pattern: 'licence server .* is down'
    verdict: the licence server is down
    advice: Ask the service desk.
    example: 'licence server lic01 is down; CUDA out of memory'
"""


def test_a_sites_entries_come_first(tmp_path):
    path = tmp_path / "failures.yaml"
    path.write_text(SITE)
    known = failures.load(str(path))
    assert known.failures[0].id == "site-licence"
    assert known.failures[1:] == KNOWN.failures
    assert known.messages == KNOWN.messages
    assert "'licence server .* is down'" in render.failure_block(str(path))


@pytest.mark.parametrize(
    "pattern", [r"\d+", "(?:a)", "a+?", "[[:alpha:]]", "a{2}", "(", r"[\]]", "a++"]
)
def test_a_pattern_that_grep_reads_otherwise_is_refused(pattern, tmp_path):
    path = tmp_path / "failures.yaml"
    entry = {"id": "odd", "pattern": pattern, "verdict": "v", "advice": "a"}
    path.write_text(json.dumps({"failures": [entry]}))
    with pytest.raises(ValueError, match="^odd: "):
        failures.load(str(path))


@pytest.mark.parametrize(
    "text, words",
    [
        ("failures: [", "no YAML: "),
        ("failures: [{id: a}]", "failures.0.pattern: "),
        ("failure: []", "failure: "),
        (SITE.replace("advice", "advise"), "failures.0.advi"),
        (SITE.replace("Ask the service desk.", '"a\\nb"'), "failures.0.advice"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(text, words, tmp_path):
    path = tmp_path / "failures.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        failures.load(str(path))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_only_what_is_asked_for_is_read():
    """An import, and even a diagnosis' one, costs no look at the data."""
    code = (
        "import json, sys\n"
        "import app.utils.vec_inf_multinode as package\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=support.TREE,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(json.loads(done.stdout))
    for name in ("failures", "diagnose", "nccl", "cli"):
        assert f"app.utils.vec_inf_multinode.{name}" not in loaded


def test_lines_are_judged_one_by_one():
    """A pattern must not find what begins in one line and ends in the next."""
    entry = Failure(id="x", pattern="a[^b]*c", verdict="v", advice="a")
    assert list(failures.matches([entry], ["a", "c"])) == []
    assert list(failures.matches([entry], ["a", "axc", "ac"])) == [(entry, "axc")]


def test_a_long_line_takes_no_time():
    """Search goes with the square of a line's length where a pattern holds ``.*``."""
    line = "cxip_" * 40_000
    entries = [*OF_RANKS, Failure(id="x", pattern="c.*z", verdict="v", advice="a")]
    began = time.process_time()
    assert list(failures.matches(entries, [line, "x"])) == []
    assert time.process_time() - began < 1
