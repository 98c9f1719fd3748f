"""Multi-node vLLM for vec-inf 0.9.0: one ``srun`` step, no Ray.

vec-inf reads its configuration when it is imported, and this package imports vec-inf:
set the ``VEC_INF_*`` variables first.

Map: `seam` what is relied on in vec-inf; `settings` the knobs; `plan` every decision
and refusal; `render` the script's text; `launcher` the contact with vec-inf;
``scripts/`` the shell that runs on the cluster; `errors` the refusals. After a
launch: `jobdir` reads a job's directory, `failures` what is known to go wrong, `nccl`
NCCL's logs, `slurm` asks Slurm, `diagnose` puts them together; ``cli/`` the commands.
"""

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
