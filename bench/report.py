"""Raw numbers in, the table of ratios and the plots out."""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, Optional

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- made by make bench -->", "<!-- until here -->"
HEADER = ("what", "ours", "beside", "ratio or difference", "goal", "met")


def spread(values: Iterable[Optional[float]], unit: str = "s") -> str:
    """Median with minimum and maximum; None is a job that was still there."""
    given = [value for value in values if value is not None]
    if not given:
        return "still there when given up"
    low, middle, high = min(given), median(given), max(given)
    scale, unit = (1000, "ms") if unit == "s" and middle < 1 else (1, unit)
    digits = 0 if scale == 1000 else 2
    low, middle, high = (round(value * scale, digits) for value in (low, middle, high))
    return f"{middle:g} {unit} ({low:g} to {high:g})"


def against(
    what: str,
    ours: list[float],
    other: list[float],
    name: str,
    goal: float,
    difference: bool = False,
) -> tuple[str, ...]:
    """One row: a ratio or difference of medians, and whether it meets the goal."""
    value = median(ours) - median(other) if difference else median(ours) / median(other)
    text = f"{value:+.2f} s" if difference else f"{value:.3f} x"
    limit = f"at most {goal:+g} s" if difference else f"at most {goal:g} x"
    beside = f"{name}: {spread(other)}"
    return what, spread(ours), beside, text, limit, "yes" if value <= goal else "no"


def hub_rows(raw: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    """Rows of the hub's process."""
    for key, what, goal in (
        ("single", "`launch_model`, single-node entry, to the sbatch call", 1.10),
        ("multi", "`launch_model`, multi-node entry, to the sbatch call", 1.25),
        ("import", "import of the package", 1.10),
    ):
        yield against(what, raw[key]["ours"], raw[key]["vec-inf"], "vec-inf", goal)


def start_rows(raw: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    """Rows of the containers' start."""
    what = "job start to the last rank's engine, 2 nodes"
    ours = raw["ours"]
    yield against(what, ours, raw["bare"], "bare `srun`", 1.0, difference=True)
    contained = raw["bare, in containers"]
    name = "bare `srun` of the container"
    yield against(what, ours, contained, name, 1.0, difference=True)
    yield against(what, ours, raw["vec-inf"], "vec-inf's script", 0.1)


def column(rows: list[dict[str, Any]], key: str) -> list[Any]:
    """One number of each row."""
    return [row[key] for row in rows]


def serve_rows(raw: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    """Rows of real vLLM."""
    ours, hand = raw["ours"], raw["by hand"]

    def beside(what: str, key: str, goal: float) -> tuple[str, ...]:
        return against(what, column(ours, key), column(hand, key), "by hand", goal)

    yield beside("job start to READY, vLLM 0.32.0, PP=2", "ready", 1.03)
    own, theirs = ([row["ready"] - row["healthy"] for row in r] for r in (ours, hand))
    yield (
        "of that, from `/health` to READY",
        spread(own),
        f"by hand, to one completion: {spread(theirs)}",
        f"{median(own) - median(theirs):+.2f} s",
        "",
        "",
    )
    rate = "tokens_per_second"
    mine, theirs = column(ours, rate), column(hand, rate)
    value = median(mine) / median(theirs)
    noise = (max(theirs) - min(theirs)) / median(theirs)
    yield (
        "tokens a second, 4 clients",
        spread(mine, "/s"),
        f"by hand: {spread(theirs, '/s')}",
        f"{value:.3f} x",
        f"within the noise by hand ({noise:.0%})",
        "yes" if abs(value - 1) <= max(noise, 0.02) else "no",
    )
    yield beside("time to the first token", "first_token_seconds", 1.1)
    faults = column(ours, "fault")
    met = None not in faults and median(faults) <= 5
    yield (
        "kill -9 of rank 1's worker to job over, nodes free",
        spread(faults),
        f"plain design (`srun` of `exec apptainer ...`): {spread(raw['plain'])}",
        "",
        "at most 5 s",
        "yes" if met else "no",
    )


def ray_rows(raw: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    """How far vec-inf's own script comes on this cluster."""
    for where in ("environment", "container"):
        seconds, words = raw[where][-1]
        said = words.replace("|", "/")
        what = f"vec-inf's own script in the {where}, to READY"
        yield what, "", f"{seconds:.0f} s: {said}", "", "", ""


def scale_rows(raw: dict[str, Any]) -> Iterable[tuple[str, ...]]:
    """Rows of jobs of many nodes."""
    for nodes in sorted({row["nodes"] for row in raw["jobs"]}):
        rows = [row for row in raw["jobs"] if row["nodes"] == nodes]
        launched, bare = column(rows, "launched"), column(rows, "bare")
        dead = column(rows, "dead_rank")
        gone = "yes" if None not in dead and median(dead) <= 10 else "no"
        yield (
            f"{nodes} nodes: job start to the last engine",
            spread(launched),
            f"bare `srun` of the container: {spread(bare)}",
            f"{median(launched) - median(bare):+.2f} s",
            "",
            "",
        )
        what = f"{nodes} nodes: kill of one rank's engine to all gone"
        yield what, spread(dead), "", "", "at most 10 s" if nodes == 64 else "", gone
    if not (missing := raw.get("missing")):
        return
    named = f"rank {missing['rank']} on " in missing["reason"]
    yield (
        f"{missing['nodes']} nodes: one rank never starts, budget over to nodes free",
        spread([missing["late"]]),
        "",
        "",
        "the message names it",
        "yes" if named else "no",
    )


ROWS = {
    "hub": hub_rows,
    "start": start_rows,
    "serve": serve_rows,
    "ray": ray_rows,
    "scale": scale_rows,
}


def table(raw: dict[str, Any]) -> str:
    """The table, as Markdown."""
    rows = [HEADER, ("---",) * len(HEADER)]
    for part, make in ROWS.items():
        if part in raw:
            rows += make(raw[part])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def plots(raw: dict[str, Any], place: Path) -> None:
    """Time and file-system calls against nodes; bars of the two-node start."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def save(name: str) -> None:
        pyplot.tight_layout()
        # no date and no random ids: the same numbers make the same file
        pyplot.savefig(place / name, metadata={"Date": None})
        pyplot.close()

    matplotlib.rcParams["svg.hashsalt"] = "vec-inf-multinode"
    if "scale" in raw:
        jobs, calls = raw["scale"]["jobs"], raw["scale"]["calls"]
        nodes = sorted({row["nodes"] for row in jobs})
        _, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4))
        for key, label in (("launched", "this package"), ("bare", "bare srun")):
            middle = [
                median(column([r for r in jobs if r["nodes"] == n], key)) for n in nodes
            ]
            left.plot(nodes, middle, marker="o", label=label)
        left.set(xlabel="nodes", ylabel="job start to last engine, s", ylim=(0, None))
        left.legend()
        counted = [row["nodes"] for row in calls]
        right.plot(counted, column(calls, "start"), marker="o", label="start to ready")
        right.plot(
            counted, column(calls, "serving"), marker="o", label="5 s of serving"
        )
        right.set(xlabel="nodes", ylabel="file-system calls in the job directory")
        right.legend()
        save("scale.svg")
    if "start" in raw:
        names = ("bare", "bare, in containers", "ours", "vec-inf")
        values = [median(raw["start"][name]) for name in names]
        pyplot.figure(figsize=(6, 2.2))
        bars = pyplot.barh(names[::-1], values[::-1])
        pyplot.bar_label(bars, fmt="%.1f s", padding=3)
        pyplot.xlabel("job start to the last engine on two nodes, s")
        save("start.svg")


def write(raw_file: Path, place: Path) -> str:
    """Put the table into the README and write the plots; the table."""
    raw = json.loads(raw_file.read_text())
    text = table(raw)
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{text}{END}{after}", "utf-8")
    plots(raw, place)
    return text
