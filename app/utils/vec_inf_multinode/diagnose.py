"""Why a job is as it is: from its directory, and from Slurm while that knows it.

`diagnose` only reads what it is given. `of_job` finds the directory and asks Slurm.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

from . import failures, jobdir, nccl
from . import slurm as slurm_commands
from .errors import JobDirectoryError
from .failures import Failure, Known
from .jobdir import JobDirectory
from .nccl import Transport
from .settings import MultinodeSettings
from .slurm import SlurmFacts

READY, STARTING, FAILED = "ready", "starting", "failed"
STOPPED, UNKNOWN = "stopped", "unknown"
UP, UNREPORTED = "up", "ended with the job"

MAX_LINES = 5
MAX_LENGTH = 300
MAX_EVENTS = 40

_ALIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")
_ENDED = ("FAILED", "COMPLETED")
_CANCELLED = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ \*\*\*")
_REQUEUED = "DUE TO JOB REQUEUE"
_SERVER_UP = "Application startup complete"


@dataclass(frozen=True)
class Line:
    """One line of a log that says something.

    Parameters
    ----------
    text : str
        The line, cut to a bounded length and without control characters.
    failure : str, optional
        Id of the known failure that it shows.
    verdict : str, optional
        What that means.
    """

    text: str
    failure: Optional[str] = None
    verdict: Optional[str] = None


@dataclass(frozen=True)
class Moment:
    """One thing that happened.

    Parameters
    ----------
    time : int
        Seconds since the epoch.
    seconds : int
        Seconds since the first moment.
    text : str
        What happened.
    attempt : str, optional
        In which attempt.
    """

    time: int
    seconds: int
    text: str
    attempt: Optional[str] = None


@dataclass(frozen=True)
class Rank:
    """What became of one rank.

    Parameters
    ----------
    rank : int
        The rank.
    node : str
        Its node.
    end : str
        How it ended, or that it is up.
    status : int, optional
        Exit status, where known.
    lines : tuple of Line
        The telling lines of its logs.
    """

    rank: int
    node: str
    end: str
    status: Optional[int] = None
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class Step:
    """Which nodes the job's step spans.

    Parameters
    ----------
    nodes : int
        Number of nodes.
    spans_all : bool, optional
        Whether these are all of the job's; None if that is not known.
    source : str
        Who says so: ``sacct``, ``scontrol`` or ``ranks``.
    """

    nodes: int
    spans_all: Optional[bool]
    source: str


@dataclass(frozen=True)
class Cause:
    """A known failure that explains an end.

    Parameters
    ----------
    id : str
        Stable name of the failure.
    verdict : str
        The cause in a few words.
    """

    id: str
    verdict: str


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a job.

    Parameters
    ----------
    job_id, model_name, directory : str
        Which job.
    ours : bool
        False for a job of vec-inf's own, which leaves less behind.
    state : {'ready', 'starting', 'failed', 'stopped', 'unknown'}
        What it comes to; ``stopped`` is on request.
    verdict : str
        One line.
    cause : Cause, optional
        The known failure behind it.
    advice : tuple of str
        What to do.
    warnings : tuple of str
        What is odd, though nothing need have failed of it.
    timeline : tuple of Moment
        What happened when.
    attempts : tuple of str
        Directories of the attempts; everything else is of the last one.
    topology : dict
        Sizes, master address, interfaces.
    step : Step, optional
        Which nodes the step spans.
    ranks : tuple of Rank
        The ranks.
    transports : tuple of Transport
        What NCCL chose, by process.
    lines : tuple of Line
        Telling lines of the job's own logs.
    """

    job_id: str
    model_name: str
    directory: str
    ours: bool
    state: str
    verdict: str
    cause: Optional[Cause] = None
    advice: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    timeline: tuple[Moment, ...] = ()
    attempts: tuple[str, ...] = ()
    topology: Mapping[str, Any] = field(default_factory=dict)
    step: Optional[Step] = None
    ranks: tuple[Rank, ...] = ()
    transports: tuple[Transport, ...] = ()
    lines: tuple[Line, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as what JSON can hold."""
        return asdict(self)


def of_job(job_id: str, log_dir: Path) -> Diagnosis:
    """Diagnose a job by its id.

    Parameters
    ----------
    job_id : str
        Slurm's id.
    log_dir : Path
        Where vec-inf keeps its logs; looked at when Slurm has forgotten the job.

    Raises
    ------
    JobDirectoryError
        If the job has no directory there that can be read.
    """
    if not re.fullmatch(r"[0-9]{1,18}", job_id):
        raise JobDirectoryError(f"{job_id!r} is no Slurm job id.")
    out = slurm_commands.show_job(job_id).get("StdOut", "")
    directory = Path(out).parent
    if out and jobdir.readable(directory):
        return of_directory(directory)
    found = jobdir.find(log_dir, job_id)
    if found is None:
        named = f"{directory} cannot be read" if out else "Slurm does not know the job"
        raise JobDirectoryError(
            f"Job {job_id} has no directory here: {named}, and {log_dir} holds no "
            f"<family>/<model>.{job_id}. Name the log directory of its launch, or the "
            "job's own directory."
        )
    return of_directory(found.path)


def of_directory(path: Path) -> Diagnosis:
    """Diagnose a job by its directory, and by Slurm while that knows it.

    Raises
    ------
    JobDirectoryError
        If there is no such directory, or it cannot be read.
    """
    if not jobdir.readable(path):
        raise JobDirectoryError(f"{path} is no directory that you can read.")
    job = JobDirectory(path.resolve())
    known = failures.load(MultinodeSettings.from_environ().failures)
    facts = SlurmFacts()
    if re.fullmatch(r"[0-9]{1,18}", job.job_id):
        # each restart is a step of its own
        facts = slurm_commands.facts(job.job_id, len(job.said("RESTART")))
        if Path(facts.job.get("StdOut", "")).parent.name != job.path.name:
            facts = SlurmFacts()  # ids start again some day: another job's
    return diagnose(job, facts, known)


def diagnose(
    job: JobDirectory,
    slurm: Optional[SlurmFacts] = None,
    known: Optional[Known] = None,
) -> Diagnosis:
    """Say what became of a job.

    Parameters
    ----------
    job : JobDirectory
        The job; files may be missing, cut short or no text at all.
    slurm : SlurmFacts, optional
        What Slurm says.
    known : Known, optional
        Known failures, by default those of the package.
    """
    slurm = slurm or SlurmFacts()
    known = known or failures.load()
    if not job.ours:
        return _foreign(job, slurm, known)
    attempts = job.attempts()
    attempt = attempts[-1] if attempts else None
    failure = job.failure()
    topology = _topology(job)
    planned = _planned_nodes(topology)
    ranks = _ranks(job, attempt, planned, failure, known)
    own_lines = _job_lines(job, attempt, slurm, known)
    state, words = _state(job, attempt, failure, own_lines, slurm)
    if state in (STOPPED, FAILED):
        ranks = tuple(replace(r, end=UNREPORTED) if r.end == UP else r for r in ranks)
    cause = _cause(failure, words, ranks, own_lines, known) if state == FAILED else None
    transports = [t for t in map(nccl.transport, _nccl_logs(job, attempt)) if t]
    return Diagnosis(
        job_id=job.job_id,
        model_name=job.model_name,
        directory=str(job.path),
        ours=True,
        state=state,
        verdict=_verdict(words, failure, cause),
        cause=cause and Cause(cause.id, cause.verdict),
        advice=_advice(cause, ranks, known),
        warnings=(*_warnings(job, known, state), *nccl.warnings(transports)),
        timeline=_timeline(job, attempts, failure, slurm),
        attempts=tuple(path.name for path in attempts),
        topology=topology,
        step=_step(slurm, planned, ranks),
        ranks=ranks,
        transports=tuple(transports),
        lines=own_lines if state in (FAILED, UNKNOWN) else (),
    )


# ---------------------------------------------------------------- the state


def _state(
    job: JobDirectory,
    attempt: Optional[Path],
    failure: Optional[Mapping[str, Any]],
    own_lines: tuple[Line, ...],
    slurm: SlurmFacts,
) -> tuple[str, str]:
    """The state, and one line that says why."""
    slurm_state = slurm.job.get("JobState", "")
    if slurm_state in slurm_commands.WAITING:
        return (
            STARTING,
            f"waiting in the queue ({slurm.job.get('Reason', slurm_state)})",
        )
    message = str((failure or {}).get("message") or "") or _last_error(job)
    if message:
        return FAILED, message
    by_slurm = next((line for line in own_lines if line.failure), None)
    if by_slurm:
        return FAILED, str(by_slurm.verdict)
    if _REQUEUED in job.text("err"):
        return STARTING, "requeued, and not started again yet"
    texts = [event.text for event in job.timeline(attempt)] if attempt else []
    if "stopped" in texts or slurm_state == "CANCELLED" or _was_cancelled(job):
        when = "while it was serving" if "ready" in texts else "before it was ready"
        return STOPPED, f"stopped on request, {when}"
    if slurm_state in _ENDED:
        code = slurm.job.get("ExitCode", "unknown")
        return (
            FAILED,
            f"Slurm says {slurm_state}, exit code {code}; the job left no reason",
        )
    return _going_on(job, texts, slurm_state)


def _going_on(job: JobDirectory, texts: list[str], slurm_state: str) -> tuple[str, str]:
    """The state of a job that has not ended, as far as its directory tells."""
    alive = slurm_state in _ALIVE
    doubt = "" if alive else ", by its directory; Slurm does not know the job"
    if "ready" in texts:
        address = (job.said("READY") or ["the server"])[-1]
        return READY, f"serving: {address}{doubt}"
    up = sum(text.startswith("rank ") for text in texts)
    if not alive:
        return UNKNOWN, f"not ready, {up} rank(s) were up{doubt}"
    if not texts:
        return STARTING, "the job is starting"
    if any(said.startswith("all ") for said in job.said("STAGE-A")):
        return STARTING, "all ranks are up, the engine is loading"
    return STARTING, f"{up} rank(s) are up, waiting for the others"


def _last_error(job: JobDirectory) -> str:
    """The job's own error, where failure.json could not be written."""
    return (job.said("ERROR") or [""])[-1]


def _was_cancelled(job: JobDirectory) -> bool:
    return bool(_CANCELLED.search(job.text("err")))


# ---------------------------------------------------------------- causes


def _cause(
    failure: Optional[Mapping[str, Any]],
    words: str,
    ranks: tuple[Rank, ...],
    own_lines: tuple[Line, ...],
    known: Known,
) -> Optional[Failure]:
    """The most telling known failure behind an end."""
    record = failure or {}
    message = known.message(f"LLMHUB-ERROR: {words}")
    if message and message.verdict == record.get("cause"):
        return message
    blamed = [rank for rank in ranks if rank.rank == record.get("rank")]
    shown = {line.failure for rank in blamed for line in rank.lines}
    if shown <= {None}:
        shown = {line.failure for rank in ranks for line in rank.lines}
    shown |= {line.failure for line in own_lines}
    for entry in known.failures:
        if entry.fatal and (entry.id in shown or entry.verdict == record.get("cause")):
            return entry
    return message


def _verdict(
    words: str, failure: Optional[Mapping[str, Any]], cause: Optional[Failure]
) -> str:
    """One line: what happened, and why."""
    recorded = (failure or {}).get("cause")
    if recorded:
        words = words.removesuffix(f": {recorded}")
    if cause and cause.where != "job" and cause.verdict not in words:
        words = f"{words}: {cause.verdict}"
    return _clean(words)


def _advice(
    cause: Optional[Failure], ranks: tuple[Rank, ...], known: Known
) -> tuple[str, ...]:
    """What to do: about the cause, and about what was said without being one."""
    advice = [cause.advice] if cause else []
    shown = {line.failure for rank in ranks for line in rank.lines}
    for entry in known.of("rank", fatal=False):
        if entry.id in shown:
            advice.append(f"{entry.verdict}: {entry.advice}")
    return tuple(advice)


def _warnings(job: JobDirectory, known: Known, state: str) -> Iterator[str]:
    """The job's own warnings, with what to do."""
    for said in dict.fromkeys(job.said("WARN")[-MAX_LINES:]):
        if said.startswith("budget ") and state != FAILED:
            continue  # the walltime is the shorter one in every short job
        entry = known.message(f"LLMHUB-WARN: {said}")
        yield _clean(f"{said} ({entry.advice})" if entry else said)


# ---------------------------------------------------------------- lines


def _clean(line: str) -> str:
    """A line of a log, fit to be shown."""
    text = jobdir.clean_line(line).strip()
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 1] + "…"


def _telling(entries: Iterable[Failure], lines: list[str]) -> tuple[Line, ...]:
    """The lines that show some failures, each line once, by its most telling one."""
    found: dict[str, Line] = {}
    for entry, line in failures.matches(entries, lines):
        text = _clean(line)
        found.setdefault(text, Line(text, entry.id, entry.verdict))
    return tuple(found.values())[:MAX_LINES]


def _last_lines(text: str) -> tuple[Line, ...]:
    lines = [clean for clean in map(_clean, text.splitlines()[-200:]) if clean]
    return tuple(map(Line, lines[-MAX_LINES:]))


def _job_lines(
    job: JobDirectory, attempt: Optional[Path], slurm: SlurmFacts, known: Known
) -> tuple[Line, ...]:
    """What Slurm has said about an end; failing that, what the job's script has."""
    # the tail of a rank's log is no word of Slurm's
    said = [x for x in job.text("err").splitlines() if not x.startswith("LLMHUB-TAIL")]
    said += job.step_log(attempt).splitlines() if attempt else []
    said.append(f"JobState={slurm.job.get('JobState', '')}")
    found = _telling(known.of("slurm"), said)
    seen = [Line(_clean(line)) for line in job.said("DIAG")[:MAX_LINES]]
    return (*found, *seen) or _last_lines(jobdir.read(job.path / "batch.log"))


# ---------------------------------------------------------------- ranks


def _ranks(
    job: JobDirectory,
    attempt: Optional[Path],
    planned: int,
    failure: Optional[Mapping[str, Any]],
    known: Known,
) -> tuple[Rank, ...]:
    """Every rank of an attempt, with how it ended and what its logs tell."""
    if attempt is None:
        return ()
    found = {number: Rank(number, "", "has not started") for number in range(planned)}
    for event in job.timeline(attempt):
        up = re.fullmatch(r"rank (\d{1,6}) up on (\S+)", event.text)
        if up:
            found[int(up[1])] = Rank(int(up[1]), _clean(up[2]), UP)
    logs = {log.rank: log for log in job.ranks()}
    for log in logs.values():
        if log.rank not in found or not found[log.rank].node:
            found[log.rank] = Rank(log.rank, _clean(log.node), UP)
    failed = {(failure or {}).get("rank")}
    for end in job.ends(attempt):
        found[end.rank] = Rank(
            end.rank, _clean(end.node), _clean(end.words), end.status
        )
        if end.failed:
            failed.add(end.rank)
    nccl_logs = _nccl_logs(job, attempt)
    for number, log in logs.items():
        lines = _rank_lines(log, nccl_logs, number in failed, known)
        found[number] = replace(found[number], lines=lines)
    return tuple(found[number] for number in sorted(found))


def _rank_lines(
    log: jobdir.RankLog, nccl_logs: list[Path], failed: bool, known: Known
) -> tuple[Line, ...]:
    """The telling lines of a rank; failing that, the last ones if it failed."""
    err = jobdir.read(log.err)
    said = err.splitlines() + jobdir.read(log.out).splitlines()
    for path in nccl_logs:
        if path.name.split(".")[0] == log.node.split(".")[0]:
            # the rest of NCCL's log is about the choice of a transport
            said += [x for x in jobdir.read(path).splitlines() if "NCCL WARN" in x]
    found = _telling(known.of("rank"), said)
    return found or (_last_lines(err) if failed else ())


def _planned_nodes(topology: Mapping[str, Any]) -> int:
    words = str(topology.get("nnodes", ""))
    return min(int(words), 10_000) if re.fullmatch("[0-9]{1,9}", words) else 0


def _nccl_logs(job: JobDirectory, attempt: Optional[Path]) -> list[Path]:
    """NCCL's logs of an attempt: the directory keeps those of earlier ones too."""
    events = job.timeline(attempt) if attempt else []
    began = events[0].time if events else 0
    return [path for path in job.nccl_logs()[:4096] if _modified(path) >= began - 60]


# ---------------------------------------------------------------- the rest


def _topology(job: JobDirectory) -> dict[str, Any]:
    """What the job has said about its shape, the last attempt's words."""
    found: dict[str, Any] = {}
    for said in job.said("TOPOLOGY"):
        said = _clean(said)
        if said.startswith("nnodes="):
            found = dict(word.partition("=")[::2] for word in said.split())
        elif said.startswith("iface "):
            name, _, address = said.removeprefix("iface ").partition(" ")
            found.setdefault("interfaces", {})[name] = address
        elif said.startswith(("sizes ", "vllm ")):
            key, _, found[key] = said.partition(" ")
        else:
            key, _, value = said.partition("=")
            found[key] = value
    return found


def _timeline(
    job: JobDirectory,
    attempts: list[Path],
    failure: Optional[Mapping[str, Any]],
    slurm: SlurmFacts,
) -> tuple[Moment, ...]:
    """Everything with a time, from the submission on."""
    moments: list[tuple[int, str, Optional[str]]] = []
    for attempt in attempts:
        last = attempt == attempts[-1]
        for event in job.timeline(attempt):
            if last or not event.text.startswith("rank "):
                moments.append((event.time, _clean(event.text), attempt.name))
    failed_at = (failure or {}).get("time")
    if isinstance(failed_at, int) and 0 < failed_at < 10**10:
        text = _clean(f"failed: {(failure or {}).get('message')}")
        moments.append((failed_at, text, attempts[-1].name if attempts else None))
    submitted = _submitted(job, slurm)
    if submitted and all(submitted <= when + 2 for when, _, _ in moments):
        moments.insert(0, (submitted, "submitted", None))
    begin = moments[0][0] if moments else 0
    kept = moments[:1] + moments[1:][-MAX_EVENTS:]
    return tuple(Moment(when, when - begin, text, name) for when, text, name in kept)


def _submitted(job: JobDirectory, slurm: SlurmFacts) -> Optional[int]:
    """When it was submitted: a requeue changes what Slurm says, a copy the file."""
    times = [_modified(job.file("sbatch"))]
    try:
        asked = datetime.fromisoformat(slurm.job.get("SubmitTime", ""))
        times.append(int(asked.timestamp()))
    except (ValueError, OverflowError, OSError):
        pass
    return min((when for when in times if when > 0), default=None)


def _modified(path: Path) -> int:
    try:
        return int(path.stat().st_mtime)
    except (OSError, ValueError):
        return 0


def _step(slurm: SlurmFacts, planned: int, ranks: tuple[Rank, ...]) -> Optional[Step]:
    """Which nodes the step spans, by the best witness."""
    nodes, source = slurm.step.get("Nodes", ""), slurm.step_source
    if not re.fullmatch("[0-9]{1,9}", nodes):
        seen = {rank.node for rank in ranks if rank.node}
        if not seen:
            return None
        nodes, source = str(len(seen)), "ranks"
    return Step(int(nodes), int(nodes) == planned if planned else None, source)


def _foreign(job: JobDirectory, slurm: SlurmFacts, known: Known) -> Diagnosis:
    """What the ``.err`` of a job of vec-inf's own tells, which is all it leaves."""
    err = job.text("err")
    found = _telling(known.of("rank", fatal=True), err.splitlines())
    ended = _job_lines(job, None, slurm, known)
    by_slurm = [line for line in ended if line.failure]
    alive = slurm.job.get("JobState", "") in _ALIVE
    cause = (*by_slurm, *found)[:1]
    if by_slurm or found and not (alive and _SERVER_UP in err):
        state, words = FAILED, str(cause[0].verdict)
    elif _was_cancelled(job):
        state, words = STOPPED, "stopped on request"
    elif _SERVER_UP in err and alive:
        state, words = READY, "the server is up"
    else:
        state, words = UNKNOWN, "its .err shows no known failure"
    entry = next(
        (e for e in known.failures if cause and e.id == cause[0].failure), None
    )
    return Diagnosis(
        job_id=job.job_id,
        model_name=job.model_name,
        directory=str(job.path),
        ours=False,
        state=state,
        verdict=f"not a multi-node job of this package; {words}",
        cause=Cause(entry.id, entry.verdict) if entry and state == FAILED else None,
        advice=(entry.advice,) if entry and state == FAILED else (),
        timeline=_timeline(job, [], None, slurm),
        lines=(*by_slurm, *found) or _last_lines(err),
    )
