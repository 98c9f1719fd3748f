"""Every refusal of this package, by name.

Each class is also an instance of the error that vec-inf 0.9.0 (or Python) raises in
the same place, so that a hub's existing ``except`` clauses keep catching it.
"""

try:
    from vec_inf.client._exceptions import SlurmJobError
except Exception:  # another vec-inf: the import must not fail, the launch will refuse

    class SlurmJobError(RuntimeError):  # type: ignore[no-redef]
        """Stand-in with vec-inf 0.9.0's base, where vec-inf has no such class."""


class MultinodeError(Exception):
    """Base class of every refusal; its text says what to do next."""


class SeamError(MultinodeError, RuntimeError):
    """The installed vec-inf is not the one that this package was written for."""


class SettingsError(MultinodeError, ValueError):
    """A ``LLMHUB_MN_*`` knob has a value that cannot be used."""


class PlanError(MultinodeError, ValueError):
    """The request cannot become a multi-node job."""


class ParallelismError(PlanError):
    """The parallel sizes do not account for the GPUs of the allocation."""


class ContainerError(PlanError):
    """The site's containerization is not one that the rank script speaks."""


class OwnedArgError(PlanError):
    """An engine argument was given that the launcher sets itself."""


class UnsafeValueError(PlanError):
    """A request value cannot be carried as data, a line break for instance."""


class UnsupportedEngineError(PlanError):
    """Nothing serves this engine over more than one node."""


class EnvFileError(MultinodeError, FileNotFoundError):
    """An item of ``env`` is neither ``NAME=VALUE`` nor a readable file."""


class SubmitError(MultinodeError, SlurmJobError):
    """Slurm took the job but it could not be released."""


class JobDirectoryError(MultinodeError, FileNotFoundError):
    """There is no directory of the job that was asked for."""
