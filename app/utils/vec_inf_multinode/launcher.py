"""The three subclasses and the hub's one call: the whole contact with vec-inf."""

import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache, partial
from importlib import import_module, resources
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Optional

import yaml

from . import render, seam, slurm
from .errors import (
    EnvFileError,
    PlanError,
    SeamError,
    SlurmJobError,
    SubmitError,
    UnsupportedEngineError,
)
from .plan import (
    ENGINE,
    LaunchPlan,
    Parallelism,
    Site,
    canonical_args,
    is_multinode_vllm,
    plan_parallelism,
    refuse_unusable,
    resolve_route,
    split_engine_args,
)
from .settings import MultinodeSettings

# what a launch does not need is imported where it is used: a hub imports this module
if TYPE_CHECKING:
    from .preview import Preview
    from .watch import Progress

ALL_ENGINES = (ENGINE, "sglang")


def _vec_inf(module: str, name: str, fallback: Any) -> Any:
    """A member of the installed vec-inf; the seam check reports a missing one."""
    try:
        return getattr(import_module(module), name)
    except Exception:
        return fallback


_ModelLauncher: Any = _vec_inf("vec_inf.client._helper", "ModelLauncher", object)
_SlurmScriptGenerator: Any = _vec_inf(
    "vec_inf.client._slurm_script_generator", "SlurmScriptGenerator", object
)
_VecInfClient: Any = _vec_inf("vec_inf.client.api", "VecInfClient", object)
_utils: Any = _vec_inf("vec_inf.client", "_utils", None)
_slurm_vars: Any = _vec_inf("vec_inf.client", "_slurm_vars", None)
_client_vars: Any = _vec_inf("vec_inf.client", "_client_vars", None)
_TEMPLATE: Any = _vec_inf(
    "vec_inf.client._slurm_templates", "SLURM_SCRIPT_TEMPLATE", {}
)
_models: Any = _vec_inf("vec_inf.client", "models", None)
_ServerError: Any = _vec_inf("vec_inf.client._exceptions", "ServerError", RuntimeError)

# States that a job is in again after a requeue, while an old failure.json may remain.
_HEALTHY = ("PENDING", "LAUNCHING", "READY")
# Seconds that a wait goes on while Slurm does not answer.
SILENCE = 120
# Seconds that a server has for /health where this package asks for it.
HEALTH_TIMEOUT = 10

# Called with Slurm's id of a job as soon as it is known.
OnSubmitted = Optional[Callable[[str], None]]

_SEAM = seam.inspect_vec_inf()


def check_vec_inf() -> seam.SeamReport:
    """Report on the vec-inf that was found when this package was imported."""
    return _SEAM


def _require_vec_inf() -> None:
    report = check_vec_inf()
    if not report.ok:
        raise SeamError(report.message())


def _site() -> Site:
    """The site's configuration, as vec-inf loaded it."""
    command = _TEMPLATE["container_command"].format(
        env_str="", image_path=shlex.quote(_slurm_vars.IMAGE_PATH[ENGINE])
    )
    return Site(
        container_module=_slurm_vars.CONTAINER_MODULE_NAME,
        container_command=tuple(shlex.split(command.rstrip(" \\"))),
        short_to_long=_client_vars.ENGINE_SHORT_TO_LONG_MAP[ENGINE],
    )


def _quiet_load_config(loader: Any) -> Callable[..., Any]:
    """vec-inf's own ``load_config``, silent and with another YAML loader.

    A copy over other globals, because filtering warnings is not thread-safe and the
    launch that follows warns for itself.
    """
    function = _utils.load_config
    names = {
        **function.__globals__,
        "warnings": SimpleNamespace(warn=lambda *args, **kwargs: None),
        "yaml": SimpleNamespace(
            safe_load=partial(_load_once, loader), YAMLError=yaml.YAMLError
        ),
    }
    return FunctionType(function.__code__, names, argdefs=function.__defaults__)


def _load_once(loader: Any, stream: Any) -> Any:
    """What a YAML file holds; a hub launches many models from the same catalog."""
    import pickle  # only a launch needs it

    return pickle.loads(_parsed(loader, stream.read()))


@lru_cache(maxsize=8)
def _parsed(loader: Any, text: str) -> bytes:
    import pickle  # a copy for each launch: vec-inf merges catalogs in place

    return pickle.dumps(yaml.load(text, Loader=loader))


def _read_catalog(path: Optional[str]) -> list[Any]:
    """vec-inf's catalog, by the C YAML loader where it can: it is 10 times faster."""
    try:
        return _quiet_load_config(yaml.CSafeLoader)(config_path=path)
    except (AttributeError, yaml.YAMLError, ValueError):
        # no C loader, or text that only vec-inf's own loader takes
        return _quiet_load_config(yaml.SafeLoader)(config_path=path)


def _catalog_entry(
    client: Any, model_name: str, request: Mapping[str, Any]
) -> Optional[Any]:
    """A model's catalog entry, None if it has none."""
    if hasattr(_utils, "load_config"):
        configs = _read_catalog(request.get("config"))
        return next((c for c in configs if c.model_name == model_name), None)
    try:  # another vec-inf: its public call
        return client.get_model_config(model_name)
    except KeyError:
        return None


def _resolve(
    client: Any, model_name: str, request: Mapping[str, Any]
) -> tuple[Optional[Any], dict[str, Any]]:
    """A model's catalog entry, and the engine and node count of a request for it.

    Raises
    ------
    UnsupportedEngineError
        If the request is for several nodes and an engine that nothing serves there.
    Exception
        What vec-inf's own reading of the catalog raises, in its own words. Going on to
        vec-inf then could launch a multi-node entry over Ray.
    SeamError
        If the catalog cannot be read because vec-inf has changed: without it a
        multi-node entry could slip through to Ray.
    """
    engines = tuple(getattr(_client_vars, "SUPPORTED_ENGINES", ALL_ENGINES))
    try:
        entry = _catalog_entry(client, model_name, request)
        catalog = entry and {"engine": entry.engine, "num_nodes": entry.num_nodes}
        route = resolve_route(request, catalog)
    except (AttributeError, ImportError, TypeError):
        if not check_vec_inf().ok:
            raise SeamError(check_vec_inf().message()) from None
        raise
    if route["num_nodes"] > 1 and route["engine"] not in engines:
        raise UnsupportedEngineError(
            f"Engine {route['engine']!r} cannot serve {model_name} over "
            f"{route['num_nodes']} nodes: {', '.join(engines)} can. Ask for one node "
            "or another engine."
        )
    return entry, route


def _request(options: Any) -> dict[str, Any]:
    """Launch options that were given."""
    return {k: v for k, v in vars(options).items() if v is not None} if options else {}


def _given(entry: Optional[Any], multinode: bool) -> dict[str, Any]:
    """What a catalog entry says itself, engine args under the names of the plan."""
    given = entry.model_dump(include=entry.model_fields_set) if entry else {}
    if multinode and given.get(f"{ENGINE}_args"):
        short_to_long = _site().short_to_long
        args = canonical_args(given[f"{ENGINE}_args"], {}, short_to_long)
        given[f"{ENGINE}_args"] = args
    return given


def _dispatch(
    client: Any,
    model_name: str,
    options: Any,
    stock: Callable[[], Any],
    on_submitted: OnSubmitted = None,
) -> Any:
    request = _request(options)
    _, route = _resolve(client, model_name, request)
    if not is_multinode_vllm(route):
        response = stock()
        if on_submitted:
            try:
                on_submitted(response.slurm_job_id)
            except BaseException:
                _cancel(response.slurm_job_id)
                raise
        return response
    return MultinodeLauncher(model_name, request).launch(on_submitted)


def _cancel(job_id: str) -> None:
    _utils.run_bash_command(f"scancel {shlex.quote(job_id)}")


def launch_model(client: Any, model_name: str, options: Any = None) -> Any:
    """Launch a model: multi-node vLLM here, everything else through the client.

    Import this package only after the ``VEC_INF_*`` variables are set: vec-inf reads
    its configuration when it is imported.

    Parameters
    ----------
    client : VecInfClient
        The hub's client; its own ``launch_model`` gets what is not multi-node vLLM,
        with the same `options` object.
    model_name : str
        Name of the model.
    options : LaunchOptions, optional
        Launch options; not changed.

    Returns
    -------
    LaunchResponse
        vec-inf's response.

    Raises
    ------
    MultinodeError
        If a multi-node launch is refused; nothing was submitted.
    """
    stock = partial(client.launch_model, model_name, options=options)
    return _dispatch(client, model_name, options, stock)


def _ask_by_the_whole_name(status: Any) -> None:
    """Ask /health again where vec-inf has asked a host that there is not.

    It replaces every "v1" of the address by "health", of a node's name too.
    """
    import requests

    from .jobdir import JobDirectory

    job = JobDirectory(Path(status.log_dir))
    address = str(job.facts().get("server_address", ""))
    if not job.ours or "v1" not in address.removesuffix("/v1"):
        return
    try:
        health = requests.get(
            f"{address.removesuffix('/v1')}/health", timeout=HEALTH_TIMEOUT
        )
    except requests.RequestException as err:
        status.failed_reason = str(err)
        return
    status.failed_reason = health.status_code
    if health.status_code == 200:
        status.server_status = _models.ModelStatus.READY
        status.base_url, status.failed_reason = address, None


class MultinodeClient(_VecInfClient):
    """vec-inf's client with a ``launch_model`` that routes and the cause of a failure.

    The rest is vec-inf's.
    """

    def launch_model(
        self,
        model_name: str,
        options: Any = None,
        on_submitted: OnSubmitted = None,
    ) -> Any:
        """Launch a model, as the function `launch_model` does.

        `on_submitted` is given Slurm's id as soon as it is known; a multi-node job is
        still held then, so that a caller that dies here leaves nothing running.
        """
        stock = partial(super().launch_model, model_name, options=options)
        return _dispatch(self, model_name, options, stock, on_submitted)

    def get_status(self, slurm_job_id: str) -> Any:
        """Status as vec-inf's, but FAILED with its cause for a job of ours that failed.

        vec-inf alone says UNAVAILABLE, without a reason, once Slurm has ended a job.
        """
        status = super().get_status(slurm_job_id)
        cause = _failure(Path(status.log_dir))
        waiting = str(status.job_state) in slurm.WAITING
        if cause and not waiting and status.server_status not in _HEALTHY:
            status.server_status = _models.ModelStatus.FAILED
            status.failed_reason = cause
        elif status.server_status == "FAILED" and status.job_state == "RUNNING":
            _ask_by_the_whole_name(status)
        return status

    def diagnose(self, slurm_job_id: str, log_dir: Optional[str] = None) -> Any:
        """Say what became of a job, and why.

        Parameters
        ----------
        slurm_job_id : str
            Slurm's id.
        log_dir : str, optional
            Where to look when Slurm has forgotten the job; by default where vec-inf
            keeps its logs.

        Returns
        -------
        diagnose.Diagnosis
            With ``as_dict()``.

        Raises
        ------
        JobDirectoryError
            If the job has no directory there.
        """
        from .diagnose import of_job

        where = Path(log_dir).expanduser() if log_dir else default_log_dir()
        return of_job(str(slurm_job_id), where)

    def get_progress(self, slurm_job_id: str) -> tuple[Any, "Progress"]:
        """Status of a job, and what it is doing.

        Returns
        -------
        StatusResponse, Progress
            The one as `get_status`, the other from the same moment.
        """
        from . import watch
        from .jobdir import JobDirectory

        status = self.get_status(slurm_job_id)
        progress = watch.progress(
            status,
            JobDirectory(Path(status.log_dir)),
            slurm.parse_job(status.raw_output),
            time.time(),
            _client_vars.MODEL_READY_SIGNATURE,
        )
        return status, progress

    def follow(
        self,
        slurm_job_id: str,
        poll_interval_seconds: float = 10,
        silence_seconds: Optional[float] = None,
    ) -> Iterator[tuple[Any, "Progress"]]:
        """Yield what `get_progress` gives, again and again, until the job is over.

        Parameters
        ----------
        slurm_job_id : str
            Slurm's id.
        poll_interval_seconds : float
            Seconds between two looks.
        silence_seconds : float, optional
            Seconds that Slurm may leave unanswered, by default `SILENCE`: its
            controller restarts.

        Raises
        ------
        SlurmJobError
            If Slurm does not know the job, is not there, or does not answer for long.
        """
        from . import watch

        limit = SILENCE if silence_seconds is None else silence_seconds
        answered = time.monotonic()
        while True:
            try:
                status, progress = self.get_progress(slurm_job_id)
            except SlurmJobError as err:
                hopeless = slurm.no_such_job(str(err)) or not slurm.is_installed()
                if hopeless or time.monotonic() - answered > limit:
                    raise
            else:
                answered = time.monotonic()
                yield status, progress
                if progress.stage in watch.OVER:
                    return
            time.sleep(poll_interval_seconds)

    def wait_until_ready(
        self,
        slurm_job_id: str,
        timeout_seconds: float = 1800,
        poll_interval_seconds: float = 10,
        *,
        on_progress: Optional[Callable[["Progress"], Any]] = None,
    ) -> Any:
        """Wait as vec-inf's does, and say what the job is doing.

        The timeout counts from when the job runs, and the wait ends as soon as the job
        does: vec-inf's gives a queued job up, and waits for one that is gone.

        Parameters
        ----------
        slurm_job_id : str
            Slurm's id.
        timeout_seconds : float
            Seconds from when the job runs, or from the call if it runs already.
        poll_interval_seconds : float
            Seconds between two looks.
        on_progress : callable, optional
            Is given a `Progress` at each look.

        Returns
        -------
        StatusResponse
            vec-inf's status, READY.

        Raises
        ------
        ServerError
            If the job fails, ends, or is not ready in time; with the cause.
        SlurmJobError
            As `follow`.
        """
        from . import watch

        deadline: Optional[float] = None
        for status, progress in self.follow(slurm_job_id, poll_interval_seconds):
            if on_progress:
                on_progress(progress)
            if progress.stage == watch.READY:
                return status
            if progress.stage == watch.FAILED:
                raise _ServerError(f"Model failed to start: {progress.detail}")
            if progress.stage == watch.STOPPED:
                raise _ServerError(
                    f"Model was shutdown before it became ready: {progress.detail}"
                )
            if progress.stage == watch.QUEUED:
                deadline = None
            elif deadline is None:
                deadline = time.monotonic() + timeout_seconds
            elif time.monotonic() >= deadline:
                raise _ServerError(
                    "Timed out waiting for model to become ready after "
                    f"{timeout_seconds} seconds; it is {progress.stage}: "
                    f"{progress.detail}"
                )
        raise AssertionError("a wait ends with one of these")

    def preview_model(
        self, model_name: str, options: Any = None, *, show_secrets: bool = False
    ) -> "Preview":
        """Tell what `launch_model` would submit; nothing is submitted or written.

        Parameters
        ----------
        model_name : str
            Name of the model.
        options : LaunchOptions, optional
            Launch options.
        show_secrets : bool
            Show the values of ``env`` too.

        Raises
        ------
        Exception
            What `launch_model` would raise before it submits.
        """
        from . import preview

        request = _request(options)
        entry, route = _resolve(self, model_name, request)
        multinode = is_multinode_vllm(route)
        if multinode:
            launcher: Any = _MultinodePreview(model_name, dict(request))
        else:
            launcher = _StockPreview(model_name, dict(request))
        params = launcher.params
        shown = params if show_secrets else preview.masked(params)
        generator = launcher.generator(shown)
        plan = getattr(generator, "plan", None)
        defaults = launcher.model_config.model_dump()
        sources = preview.Sources(request, _given(entry, multinode), defaults)
        sizes = preview.parallelism(plan)
        return preview.Preview(
            model_name=model_name,
            multinode=multinode,
            reason=preview.why(multinode, route, sources),
            resources=preview.resources(shown, sources),
            parallelism=sizes,
            engine_args=preview.engine_args(shown, sources, sizes),
            env=preview.environment(params, shown, sources),
            left_out_env=plan.left_out_env if plan else (),
            knobs=preview.changed_knobs(launcher.settings) if multinode else (),
            container=plan.container if plan else (),
            script=generator._generate_script_content(),
        )


def default_log_dir() -> Path:
    """Where vec-inf keeps its logs unless a launch says otherwise."""
    return Path(_slurm_vars.DEFAULT_ARGS["log_dir"]).expanduser()


class MultinodeLauncher(_ModelLauncher):
    """Build and submit a multi-node vLLM job; other params take vec-inf's way.

    Parameters
    ----------
    model_name : str
        Name of the model.
    kwargs : dict, optional
        Launch options; a copy is used, vec-inf deletes from what it is given.

    Raises
    ------
    MultinodeError
        If the launch is refused; nothing was submitted.
    """

    def __init__(self, model_name: str, kwargs: Optional[dict[str, Any]] = None):
        _require_vec_inf()
        self.settings = MultinodeSettings.from_environ()
        self.typed_args: dict[str, Any] = {}
        self.parallelism: Optional[Parallelism] = None
        given = {k: v for k, v in (kwargs or {}).items() if k != "engine" or v}
        super().__init__(model_name, given)

    def _process_engine_args(
        self, arg_string: str, engine_choice: str
    ) -> dict[str, Any]:
        """Read typed vLLM args exactly, and keep them: a typed size always wins."""
        if engine_choice != ENGINE:
            return super()._process_engine_args(arg_string, engine_choice)
        self.typed_args = split_engine_args(arg_string, _site().short_to_long)
        return self.typed_args

    def _process_env_vars(self, env_arg: str) -> dict[str, str]:
        """Read ``env`` as vec-inf does, with values that may hold ``=``."""
        env: dict[str, str] = {}
        for number, item in enumerate(env_arg.split(","), 1):
            lines = [item] if "=" in item else _env_file(item, number)
            for line_number, line in enumerate(lines, 1):
                name, equals, value = line.partition("=")
                if equals:
                    env[name.strip()] = value.strip()
                elif line.strip() and not line.lstrip().startswith("#"):
                    # the line may hold a secret
                    self._warn(f"Could not parse line {line_number} of item {number}")
        return env

    def _validate_resource_allocation(self, params: dict[str, Any]) -> None:
        """Refuse, and settle the parallel sizes, before anything is written."""
        if not is_multinode_vllm(params):
            super()._validate_resource_allocation(params)
            return
        if self.engine != ENGINE:
            raise PlanError(
                f"{self.engine}_args are given, but the engine of {self.model_name} is "
                f"{ENGINE}; set engine to {self.engine!r} too, or give {ENGINE}_args."
            )
        site = _site()
        params["engine_args"] = canonical_args(
            params["engine_args"], self.typed_args, site.short_to_long
        )
        refuse_unusable(params, site)
        self.parallelism = plan_parallelism(
            params, self.typed_args, self.model_config.model_dump()
        )
        for option, size in _sizes(self.parallelism).items():
            # last on the command line, where nothing that follows can change it
            params["engine_args"].pop(option, None)
            params["engine_args"][option] = size

    def _build_launch_command(self) -> str:
        """Write the script, and return the command line that submits it."""
        if not is_multinode_vllm(self.params):
            return super()._build_launch_command()
        self.slurm_script_path = MultinodeScriptGenerator(
            self.params, parallelism=self.parallelism, settings=self.settings
        ).write_to_log_dir()
        submit = resources.files(__package__).joinpath(render.SCRIPTS, "submit.sh")
        return render.submit_command(
            str(submit),
            str(self.slurm_script_path),
            f"{self.params['log_dir']}/{self.model_name}",
        )

    def launch(self, on_submitted: OnSubmitted = None) -> Any:
        """Submit the job held, let vec-inf write its files, then release it.

        vec-inf makes the job directory and JSON after sbatch has returned; a job that
        started before would lose its log. `on_submitted` is called with the id before
        the release, for a multi-node job.
        """
        if not is_multinode_vllm(self.params):
            return super().launch()
        try:
            response = super().launch()
            if on_submitted:
                on_submitted(self.slurm_job_id)
            release(self.slurm_job_id)
        except BaseException:
            self._undo()
            raise
        return response

    def _undo(self) -> None:
        """Leave neither a held job nor a script with secrets behind."""
        if self.slurm_job_id:
            _cancel(self.slurm_job_id)
        elif self.slurm_script_path.is_file():
            self.slurm_script_path.unlink()


class _NoDirectory(type(Path())):  # type: ignore[misc]
    """A path that is not made."""

    def mkdir(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class _Preview:
    """A launcher that resolves a request as its base does, and writes nothing."""

    def _setup_log_files(self, params: dict[str, Any]) -> None:
        """vec-inf's own words; the one directory that they make is not made."""
        function = _ModelLauncher._setup_log_files
        names = {**function.__globals__, "Path": _NoDirectory}
        FunctionType(function.__code__, names)(self, params)


class _StockPreview(_Preview, _ModelLauncher):
    """vec-inf's own launch, resolved."""

    def generator(self, params: dict[str, Any]) -> Any:
        """What makes the script from params."""
        return _SlurmScriptGenerator(params)


class _MultinodePreview(_Preview, MultinodeLauncher):
    """A multi-node launch, resolved."""

    def generator(self, params: dict[str, Any]) -> Any:
        """What makes the script from params."""
        return MultinodeScriptGenerator(params, self.parallelism, self.settings)


class MultinodeScriptGenerator(_SlurmScriptGenerator):
    """vec-inf's script generator with the Ray branch replaced.

    Parameters
    ----------
    params : dict
        vec-inf's resolved params.
    parallelism : Parallelism, optional
        The sizes that the launcher settled; by default those in the params, derived
        where they have none.
    settings : MultinodeSettings, optional
        The knobs; by default from the environment.
    """

    def __init__(
        self,
        params: dict[str, Any],
        parallelism: Optional[Parallelism] = None,
        settings: Optional[MultinodeSettings] = None,
    ):
        super().__init__(params)
        self.plan: Optional[LaunchPlan] = None
        if not is_multinode_vllm(params):
            return
        _require_vec_inf()
        site = _site()
        args = canonical_args(params["engine_args"], {}, site.short_to_long)
        resolved = {**params, "engine_args": args}
        parallelism = parallelism or plan_parallelism(resolved, {}, resolved)
        resolved["engine_args"] = {**args, **_sizes(parallelism)}
        self.plan = LaunchPlan.from_params(
            resolved, parallelism, site, settings or MultinodeSettings.from_environ()
        )

    def _generate_shebang(self) -> str:
        """vec-inf's directives, each value quoted for sbatch."""
        if self.plan is None:
            return super()._generate_shebang()
        quoted = {
            field: render.sbatch_value(str(self.params[field]))
            for field in _client_vars.SLURM_JOB_CONFIG_ARGS.values()
            if self.params.get(field)
        }
        with self._replaced(params={**self.params, **quoted}):
            # the log of a requeued job is that of its last attempt: vec-inf's scan of
            # it never forgets a line
            return super()._generate_shebang() + "\n#SBATCH --open-mode=truncate"

    def _generate_server_setup(self) -> str:
        """vec-inf's setup with our values as shell references, and no Ray."""
        if self.plan is None:
            return super()._generate_server_setup()
        with self._replaced(
            params=render.server_setup_variables(self.params),
            is_multinode=False,
            model_weights_path="${PLAN_WEIGHTS}",
            additional_binds="${PLAN_BIND}",
        ):
            setup = super()._generate_server_setup()
        signature = _client_vars.MODEL_READY_SIGNATURE
        return render.prologue(self.plan, ready_signature=signature) + setup

    def _generate_launch_cmd(self) -> str:
        """The step and its watch, in place of ``vllm serve``."""
        if self.plan is None:
            return super()._generate_launch_cmd()
        return render.epilogue()

    def write_to_log_dir(self) -> Path:
        """Write the script under a name of its own, readable by its owner only."""
        if self.plan is None:
            return super().write_to_log_dir()
        stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
        descriptor, path = tempfile.mkstemp(
            dir=self.params["log_dir"],
            prefix=f"launch_{self.plan.model_name}_{stamp}_",
            suffix=".sbatch",
        )
        with open(descriptor, "w", encoding="utf-8") as script:
            script.write(self._generate_script_content())
        return Path(path)

    @contextmanager
    def _replaced(self, **attributes: Any) -> Iterator[None]:
        """Let vec-inf's text be made from other attribute values."""
        saved = {name: getattr(self, name) for name in attributes}
        vars(self).update(attributes)
        try:
            yield
        finally:
            vars(self).update(saved)


def _failure(job_dir: Path) -> Optional[str]:
    """The cause that a job of ours left in its directory, None if there is none."""
    from .jobdir import JobDirectory

    record = JobDirectory(job_dir).failure() or {}
    return f"LLMHUB-ERROR: {record['message']}" if record.get("message") else None


def _sizes(parallelism: Parallelism) -> dict[str, int]:
    return {a.option: a.size for a in (parallelism.tensor, parallelism.pipeline)}


def _env_file(path: str, number: int) -> list[str]:
    try:
        return Path(path.strip()).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise EnvFileError(
            f"Item {number} of env is neither NAME=VALUE nor a readable file "
            f"({getattr(err, 'strerror', None) or err.__class__.__name__}). A value "
            "with a comma goes into an env file, one NAME=VALUE a line."
        ) from None


def release(job_id: str) -> None:
    """Let a held job start."""
    _, stderr = _utils.run_bash_command(render.release_command(job_id))
    if stderr:
        raise SubmitError(
            f"Job {job_id} was queued but could not be released, so it was cancelled: "
            f"{stderr.strip()}"
        )
