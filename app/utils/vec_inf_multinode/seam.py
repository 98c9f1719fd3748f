"""What this package relies on in vec-inf, as data, and the one check of it.

Nothing of vec-inf is imported when this module loads. The same list drives the check
at import and the contract test that proves vec-inf still has, and still calls, each
member.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Optional

DISTRIBUTION = "vec-inf"
REQUIRED_VERSION = "0.9.0"

_API = "vec_inf.client.api"
_HELPER = "vec_inf.client._helper"
_GENERATOR = "vec_inf.client._slurm_script_generator"
_TEMPLATES = "vec_inf.client._slurm_templates"
_SLURM_VARS = "vec_inf.client._slurm_vars"
_CLIENT_VARS = "vec_inf.client._client_vars"
_UTILS = "vec_inf.client._utils"
_CONFIG = "vec_inf.client.config"
_MODELS = "vec_inf.client.models"
_EXCEPTIONS = "vec_inf.client._exceptions"
_CLI = "vec_inf.cli._cli"


@dataclass(frozen=True)
class Member:
    """One thing of vec-inf that this package relies on.

    Parameters
    ----------
    module : str
        Module that holds it.
    path : str
        Dotted path inside the module.
    parameters : tuple of str, optional
        For a callable: its parameter names, ``self`` left out.
    keys : tuple of str
        For a mapping: keys that must be there, dots for nested ones.
    overridden : bool
        This package replaces it, so vec-inf must still call it.
    """

    module: str
    path: str
    parameters: Optional[tuple[str, ...]] = None
    keys: tuple[str, ...] = ()
    overridden: bool = False

    @property
    def name(self) -> str:
        """Full dotted name."""
        return f"{self.module}.{self.path}"

    def problem(self) -> Optional[str]:
        """Say what is wrong with the installed member, or None."""
        try:
            value: Any = importlib.import_module(self.module)
            for part in self.path.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError):
            return f"{self.name} (missing)"
        except Exception as err:  # vec-inf reads its configuration when it is imported
            return f"{self.name} ({type(err).__name__}: {err})"
        return self._wrong_parameters(value) or self._wrong_keys(value)

    def _wrong_parameters(self, value: Any) -> Optional[str]:
        if self.parameters is None:
            return None
        try:
            found = tuple(p for p in inspect.signature(value).parameters if p != "self")
        except (TypeError, ValueError):
            return f"{self.name} (not callable)"
        if found == self.parameters:
            return None
        return f"{self.name}({', '.join(found)}) (wants {', '.join(self.parameters)})"

    def _wrong_keys(self, value: Any) -> Optional[str]:
        for key in self.keys:
            level = value
            for part in key.split("."):
                if not isinstance(level, Mapping) or part not in level:
                    return f"{self.name}[{key!r}] (missing)"
                level = level[part]
        return None


def _method(
    module: str, path: str, *parameters: str, overridden: bool = False
) -> Member:
    return Member(module, path, parameters=parameters, overridden=overridden)


MEMBERS: tuple[Member, ...] = (
    _method(_API, "VecInfClient.__init__"),
    _method(
        _API, "VecInfClient.launch_model", "model_name", "options", overridden=True
    ),
    _method(_API, "VecInfClient.get_status", "slurm_job_id", overridden=True),
    _method(
        _API,
        "VecInfClient.wait_until_ready",
        "slurm_job_id",
        "timeout_seconds",
        "poll_interval_seconds",
        overridden=True,
    ),
    _method(_HELPER, "ModelLauncher.__init__", "model_name", "kwargs", overridden=True),
    _method(
        _HELPER,
        "ModelLauncher._process_engine_args",
        "arg_string",
        "engine_choice",
        overridden=True,
    ),
    _method(_HELPER, "ModelLauncher._process_env_vars", "env_arg", overridden=True),
    _method(
        _HELPER,
        "ModelLauncher._validate_resource_allocation",
        "params",
        overridden=True,
    ),
    _method(_HELPER, "ModelLauncher._setup_log_files", "params", overridden=True),
    _method(_HELPER, "ModelLauncher._build_launch_command", overridden=True),
    _method(_HELPER, "ModelLauncher.launch", overridden=True),
    _method(_GENERATOR, "SlurmScriptGenerator.__init__", "params", overridden=True),
    _method(_GENERATOR, "SlurmScriptGenerator._generate_shebang", overridden=True),
    _method(_GENERATOR, "SlurmScriptGenerator._generate_server_setup", overridden=True),
    _method(_GENERATOR, "SlurmScriptGenerator._generate_launch_cmd", overridden=True),
    _method(_GENERATOR, "SlurmScriptGenerator._generate_script_content"),
    _method(_GENERATOR, "SlurmScriptGenerator.write_to_log_dir", overridden=True),
    Member(
        _TEMPLATES,
        "SLURM_SCRIPT_TEMPLATE",
        keys=(
            "shebang.multinode",
            "container_setup",
            "bind_path",
            "imports",
            "container_command",
            "server_setup.single_node",
            "find_server_port",
            "write_to_json",
            "launch_cmd.vllm",
        ),
    ),
    Member(_SLURM_VARS, "IMAGE_PATH", keys=("vllm",)),
    Member(_SLURM_VARS, "CONTAINER_MODULE_NAME"),
    Member(_SLURM_VARS, "DEFAULT_ARGS", keys=("log_dir",)),
    Member(
        _CLIENT_VARS,
        "ENGINE_SHORT_TO_LONG_MAP",
        keys=("vllm.-tp", "vllm.-pp", "vllm.-dp", "vllm.-n", "vllm.-r", "vllm.-O"),
    ),
    Member(_CLIENT_VARS, "SLURM_JOB_CONFIG_ARGS", keys=("job-name", "output")),
    Member(_CLIENT_VARS, "SUPPORTED_ENGINES"),
    Member(_CLIENT_VARS, "MODEL_READY_SIGNATURE"),
    _method(_UTILS, "load_config", "config_path"),
    _method(_UTILS, "run_bash_command", "command"),
    Member(_EXCEPTIONS, "SlurmJobError"),
    Member(_EXCEPTIONS, "ServerError"),
    Member(_MODELS, "ModelStatus.FAILED"),
    Member(_MODELS, "ModelStatus.READY"),
    Member(
        _MODELS,
        "StatusResponse.__dataclass_fields__",
        keys=(
            "log_dir",
            "server_status",
            "job_state",
            "raw_output",
            "base_url",
            "failed_reason",
        ),
    ),
    Member(
        _CONFIG,
        "ModelConfig.__annotations__",
        keys=("model_name", "engine", "num_nodes", "gpus_per_node"),
    ),
)

# What only the console script uses; importing it brings click and rich.
CLI_MEMBERS: tuple[Member, ...] = (
    Member(_CLI, "launch"),
    Member(_MODELS, "LaunchOptions"),
    Member(_EXCEPTIONS, "ModelConfigurationError"),
    Member(_EXCEPTIONS, "ModelNotFoundError"),
    _method(_API, "VecInfClient.shutdown_model", "slurm_job_id"),
)


@dataclass(frozen=True)
class SeamReport:
    """What the check found.

    Parameters
    ----------
    installed : str or None
        Installed vec-inf version, None if it is not installed.
    required : str
        The one version that multi-node launches work with.
    missing : tuple of str
        Members that are absent or changed, each with what is wrong.
    """

    installed: Optional[str]
    required: str
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether multi-node launches are possible."""
        return self.installed == self.required and not self.missing

    def message(self) -> str:
        """Text of the refusal: versions, every missing member, what to do."""
        text = (
            f"Multi-node vLLM launches need vec-inf {self.required}, "
            f"found {self.installed or 'none'}; nothing was submitted."
        )
        if self.missing:
            text += " Missing or changed: " + "; ".join(self.missing) + "."
        return text + (
            f" Install {DISTRIBUTION}=={self.required}, or a vec-inf-multinode made "
            "for the installed version. Single-node launches are not affected."
        )


def inspect_vec_inf(members: tuple[Member, ...] = MEMBERS) -> SeamReport:
    """Look at the installed vec-inf now."""
    try:
        installed: Optional[str] = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        installed = None
    problems = (member.problem() for member in members)
    return SeamReport(installed, REQUIRED_VERSION, tuple(p for p in problems if p))
