"""Multi-node vLLM for vec-inf 0.9.0: one ``srun`` step, no Ray.

vec-inf reads its configuration when it is imported, and this package imports vec-inf:
set the ``VEC_INF_*`` variables first.

Map: `seam` what is relied on in vec-inf; `settings` the knobs; `plan` every decision
and refusal; `render` the script's text; `launcher` the contact with vec-inf;
``scripts/`` the shell that runs on the cluster; `errors` the refusals. `preview` tells
what a launch would submit. After a launch: `jobdir` reads a job's directory, `slurm`
asks Slurm, `watch` says what the job is doing; `failures` is what is known to go wrong,
`nccl` reads NCCL's logs, `diagnose` puts them together. `prompts`, `sending` and
`results` are a batch of prompts. ``cli/`` is the console script.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    ContainerError,
    EnvFileError,
    JobDirectoryError,
    MultinodeError,
    OwnedArgError,
    ParallelismError,
    PlanError,
    SeamError,
    SettingsError,
    SubmitError,
    UnsafeValueError,
    UnsupportedEngineError,
)
from .launcher import (
    MultinodeClient,
    MultinodeLauncher,
    MultinodeScriptGenerator,
    check_vec_inf,
    launch_model,
)
from .plan import is_multinode_vllm
from .seam import SeamReport
from .settings import MultinodeSettings

if TYPE_CHECKING:
    from .preview import Preview
    from .watch import Progress

__all__ = [
    "ContainerError",
    "EnvFileError",
    "JobDirectoryError",
    "MultinodeClient",
    "MultinodeError",
    "MultinodeLauncher",
    "MultinodeScriptGenerator",
    "MultinodeSettings",
    "OwnedArgError",
    "ParallelismError",
    "PlanError",
    "Preview",
    "Progress",
    "SeamError",
    "SeamReport",
    "SettingsError",
    "SubmitError",
    "UnsafeValueError",
    "UnsupportedEngineError",
    "check_vec_inf",
    "is_multinode_vllm",
    "launch_model",
]

# types that a launch does not need, and the modules that they come from
_LATER = {"Preview": "preview", "Progress": "watch"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATER[name]}", __name__), name)
