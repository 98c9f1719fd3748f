"""A plan in, script text out. The only place where a value is quoted."""

import re
import shlex
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Optional

from .plan import MIN_VLLM, RANK_ENV, LaunchPlan

SCRIPTS = "scripts"
_HEREDOC_END = "LLMHUB_END_OF_RANK_SCRIPT"

# What sbatch reads as itself in a #SBATCH line.
_PLAIN_SBATCH_VALUE = re.compile(r"[A-Za-z0-9_./:=,@%+~^\[\]-]*")


def script_text(name: str) -> str:
    """Text of a shipped shell file."""
    return resources.files(__package__).joinpath(SCRIPTS, name).read_text("utf-8")


def assign(name: str, value: object) -> str:
    """One quoted shell assignment."""
    return f"{name}={shlex.quote(str(value))}"


def assign_array(name: str, values: Iterable[object]) -> str:
    """One quoted shell array assignment."""
    return f"{name}=({' '.join(shlex.quote(str(value)) for value in values)})"


def assign_lines(name: str, values: Iterable[object]) -> str:
    """One quoted shell array assignment, a line for each value."""
    lines = "".join(f"    {shlex.quote(str(value))}\n" for value in values)
    return f"{name}=(\n{lines})"


def sbatch_value(value: str) -> str:
    """Quote a value for a ``#SBATCH`` line.

    sbatch splits such lines itself: double quotes keep spaces, a backslash keeps the
    next character, and an unescaped ``#`` starts a comment, in old releases inside
    quotes too.
    """
    if _PLAIN_SBATCH_VALUE.fullmatch(value):
        return value
    return '"' + re.sub(r'(["\\#])', r"\\\1", value) + '"'


def plan_block(plan: LaunchPlan, *, ready_signature: str) -> str:
    """The generated block: every value of the job as quoted assignments."""
    par, knobs = plan.parallelism, plan.settings
    others = " ".join(
        f"{a.option.removeprefix('--').removesuffix('-size')}={a.size}"
        for a in par.others
        if a.size > 1
    )
    origins = f"tp {par.tensor.origin}, pp {par.pipeline.origin}"
    lines = [
        assign("PLAN_MODEL_NAME", plan.model_name),
        assign("PLAN_MODEL_TYPE", plan.model_type),
        assign("PLAN_MODEL", plan.model),
        assign("PLAN_WEIGHTS", plan.weights),
        assign("PLAN_NNODES", par.nnodes),
        assign("PLAN_GPUS_PER_NODE", par.gpus_per_node),
        assign("PLAN_TP", par.tensor.size),
        assign("PLAN_PP", par.pipeline.size),
        assign("PLAN_WORLD_SIZE", par.world_size),
        assign("PLAN_OTHER_AXES", others),
        assign("PLAN_ORIGINS", origins + (f"; {par.note}" if par.note else "")),
        assign_array("PLAN_CONTAINER", plan.container),
        assign_array("PLAN_ENGINE_ARGS", plan.engine_args),
        assign_array("PLAN_HEAD_ARGS", plan.head_args),
        assign_array("PLAN_ENV_NAMES", (name for name, _ in plan.env)),
        assign_array("PLAN_ENV_VALUES", (value for _, value in plan.env)),
        assign_array("PLAN_ENV_LEFT_OUT", plan.left_out_env),
        assign_array("PLAN_RANK_ENV", sorted(RANK_ENV)),
        assign("PLAN_MIN_VLLM", MIN_VLLM),
        assign("PLAN_WORK_DIR", plan.work_dir),
        assign("PLAN_LOG_DIR", plan.log_dir),
        assign("PLAN_SRC_DIR", plan.src_dir),
        assign("PLAN_BIND", plan.bind),
        assign("PLAN_READY_SIGNATURE", ready_signature),
        assign("PLAN_READY_PROBE", knobs.ready_probe),
        assign("PLAN_SERVER_TIMEOUT", knobs.server_timeout),
        assign("PLAN_RANK_START_TIMEOUT", knobs.rank_start_timeout),
        assign("PLAN_HSN_IFACE", knobs.hsn_iface),
        assign("PLAN_NCCL_SOCKET_IFNAME", knobs.nccl_socket_ifname or ""),
        assign("PLAN_RDZV_PORT", knobs.rdzv_port),
        assign("PLAN_PORT_SCAN_MAX", knobs.port_scan_max),
        assign("PLAN_SYMM_MEM", knobs.symm_mem),
        assign("PLAN_STALL_TIMEOUT", knobs.stall_timeout),
        assign("PLAN_IDLE_PROBE", knobs.idle_probe),
        assign("PLAN_MAX_RESTARTS", knobs.max_restarts),
    ]
    return "\n".join(lines)


def failure_block(site: Optional[str]) -> str:
    """What the job looks for in the log of a rank that failed, in order."""
    from . import failures  # not for an import, which would read the data

    known = list(failures.load(site).of("rank", fatal=True))
    return "\n".join(
        [
            assign_lines("LLMHUB_FAILURE_PATTERNS", (f.pattern for f in known)),
            assign_lines("LLMHUB_FAILURE_VERDICTS", (f.verdict for f in known)),
        ]
    )


def server_setup_variables(params: Mapping[str, object]) -> dict[str, object]:
    """Params for vec-inf's own setup text, values replaced by shell references.

    vec-inf pastes params into its templates unquoted; a reference carries the value as
    data instead. `PLAN_SRC_DIR` alone stands outside an assignment and is quoted.
    """
    return {
        **params,
        "work_dir": "${PLAN_WORK_DIR}",
        "log_dir": "${PLAN_LOG_DIR}",
        "model_name": "${PLAN_MODEL_NAME}",
        "src_dir": '"${PLAN_SRC_DIR}"',
    }


def prologue(plan: LaunchPlan, *, ready_signature: str) -> str:
    """Everything up to vec-inf's own setup: values, functions, first checks."""
    block = plan_block(plan, ready_signature=ready_signature)
    common, rank = script_text("common.sh"), script_text("rank.sh")
    return "\n".join(
        [
            "",
            "# shellcheck disable=SC2034 # some values are for the rank script only",
            "# ---- values of this job (generated; data only)",
            block,
            "",
            "# ---- common.sh",
            common,
            "# ---- batch.sh",
            script_text("batch.sh"),
            "# ---- known failures (generated; data only)",
            failure_block(plan.settings.failures),
            "# ---- the rank script, written into the job directory by the job",
            "llmhub_rank_script() {",
            f"    cat <<'{_HEREDOC_END}'",
            "#!/bin/bash",
            block,
            common,
            rank,
            _HEREDOC_END,
            "}",
            "",
            "llmhub_prepare",
        ]
    )


def epilogue() -> str:
    """What follows vec-inf's own setup."""
    return "\n\nllmhub_serve\n"


def submit_command(submit_script: str, script: str, job_dir_prefix: str) -> str:
    """Shell command line that submits a script and prepares its job directory.

    The script's own errors come through descriptor 3: bash itself may complain on
    stderr, of a locale for instance, and vec-inf takes any word there for a failure.
    """
    command = shlex.join(["bash", submit_script, script, job_dir_prefix])
    return f"{command} 3>&2 2>/dev/null"


def release_command(job_id: str) -> str:
    """Shell command line that releases a held job; words on stderr if it failed."""
    return (
        f"words=$(scontrol release {shlex.quote(job_id)} 2>&1) || "
        'printf "%s\\n" "${words:-scontrol ended with status $?}" >&2'
    )
