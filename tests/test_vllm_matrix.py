"""One version of vLLM, end to end: `make test-vllm VERSION=0.31.0`.

What is found is printed and put into ``bench/results/vllm-versions.json``; a version
that works no longer, or in another shape than is recorded there, is red.
"""

import json
import os
import re
import time

import pytest
import support
from test_faults_vllm import complete, kill, step_log

VERSION = os.environ.get("VLLM_VERSION", "")

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(2700),
    pytest.mark.skipif(not VERSION, reason="make test-vllm VERSION=... names one"),
]

# Stages first: on some CPU builds they do not work, and tensor parallel does.
SHAPES = {"PP=2": {}, "TP=2": {"vllm_args": "-tp=2,-pp=1,--enforce-eager"}}
PATIENCE = 60


@pytest.fixture
def other(lab):
    """Return the module for other versions of vLLM; the environment goes at the end."""
    import lab_vllm

    yield lab_vllm
    lab_vllm.remove(lab, VERSION)


@pytest.fixture
def launch(lab, hub, other):
    """Return a function that launches with the other vLLM in the lab's own image."""
    place = other.build(lab, VERSION)
    jobs = []

    def start(**options):
        # a cache of its own: the lab's holds what the lab's vLLM has found out
        path, cache = f"{place}/venv/bin:/usr/bin:/bin", place / "model-info"
        job = hub.launch(
            # a GB of KV cache: older CPU builds take half of the machine otherwise
            env=f"PATH={path},VLLM_CACHE_ROOT={cache},VLLM_CPU_KVCACHE_SPACE=1",
            bind=str(place),
            model_weights_parent_dir=str(place / "models"),
            time="00:15:00",
            environ={"LLMHUB_MN_MAX_RESTARTS": "1"},
            **options,
        )
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.cancel()
        job.wait_gone()


def test_one_version(lab, hub, other, launch):
    """Ready, a completion, a killed worker, a new step, shut down: or why not."""
    package = other.package(other.build(lab, VERSION) / "venv")
    row = {
        "version": VERSION,
        "how": "run",
        "date": other.today(),
        "torch": other.torch_version(package),
        "flags": other.read_flags(other.sources(package)),
        "works": "no",
        "failed": {},
    }
    for shape, options in SHAPES.items():
        job = launch(**options)
        try:
            row.update(facts(lab, hub, job), works=shape)
            break
        except Exception as err:  # a row is worth having, however it fails
            row["failed"][shape] = reason(job, err)
            print(job.report())
        finally:
            job.cancel()
            job.wait_gone()
    print(json.dumps(row, indent=1))
    expected = other.recorded(VERSION).get("works")
    other.record(row)
    assert row["works"] == expected if expected else row["works"] != "no"


def reason(job, err):
    """What the job itself says of its failure, or what was waited for in vain."""
    found = re.findall(r"^LLMHUB-ERROR: (.*)", job.log("out"), re.M)
    return found[-1] if found else str(err).splitlines()[0]


def facts(lab, hub, job):
    """What happens from the launch to the shutdown."""
    started = time.monotonic()
    url = job.ready(400)["url"]
    found = {"ready_seconds": round(time.monotonic() - started)}
    assert f"LLMHUB-TOPOLOGY: vllm {VERSION}+cpu" in job.log("out")
    assert complete(hub, url) == 200
    found["metrics_missing"] = missing_metrics(hub, url)
    found["ready_line"] = ready_line(job)
    found["killed"] = killed(lab, job)
    if found["killed"]:
        wait_for_second_step(job)
    stopped = time.monotonic()
    assert hub.shutdown(job.number) is True
    job.wait_gone(PATIENCE)
    found["shutdown_seconds"] = round(time.monotonic() - stopped)
    assert "LLMHUB-ERROR" not in job.log("out")
    return found


def wait_for_second_step(job):
    """Wait until the ranks are up once more: the restart after the kill."""
    deadline = time.monotonic() + PATIENCE
    while job.log("out").count("ranks launched") < 2:
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.5)
    assert re.search(r"^LLMHUB-RESTART: 1 of 1: rank \d", job.log("out"), re.M)


def missing_metrics(hub, url):
    """Names in the stall watch's program that this vLLM does not serve."""
    code, text = hub.request("GET", url.replace("/v1", "/metrics"))
    assert code == 200
    watch = (support.PACKAGE / "scripts/batch.sh").read_text()
    (program,) = re.findall(r"awk '\n +/\^vllm:num_(?:.*\n)+? +END", watch)
    return [
        name
        for pattern in re.findall(r"/\^(vllm:\S+?)\[", program)
        for name in alternatives(pattern)
        if not re.search(rf"^{name}[{{ ]", text, re.M)
    ]


def alternatives(pattern):
    """Names that a pattern with one ``(a|b)`` stands for; either does for a cache."""
    head, _, rest = pattern.partition("(")
    inner, _, tail = rest.partition(")")
    names = [head + one + tail for one in inner.split("|")]
    return [pattern] if "cache" in pattern else names


def ready_line(job):
    """Streams of rank 0 that vLLM's own word for ready is on."""
    words = "Application startup complete"
    streams = {"out": "stdout", "err": "stderr"}
    logs = {kind: job.log_dir.glob(f"ranks/rank-0.*.{kind}") for kind in streams}
    return ", ".join(
        streams[kind]
        for kind, paths in logs.items()
        if any(words in path.read_text(errors="replace") for path in paths)
    )


def killed(lab, job):
    """Which rank ends, how and when, after a worker of rank 1 was killed."""
    moment = time.time()
    kill(lab, "nid002", "VLLM::Worker")
    end = r"LLMHUB-END rank=(\d) .* status=(\d+) .* at=([\d.]+) stopping=0"
    while not (ended := re.search(end, step_log(job))):
        if time.time() > moment + PATIENCE:
            return None
        time.sleep(0.2)
    rank, status, at = ended.groups()
    seconds = round(float(at) - moment, 1)
    return {"rank": int(rank), "status": int(status), "seconds": seconds}
