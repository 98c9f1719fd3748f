"""What is known to go wrong, from ``failures.yaml``: patterns, verdicts, advice.

Read only when asked for: neither an import nor a single-node launch pays for it.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

# What grep -E and Python read differently: \d, (?:, lazy and possessive repeats,
# [[:alpha:]], a counted repeat (Python takes a lone brace, grep does not)
_NOT_PORTABLE = re.compile(r"\\[A-Za-z0-9]|\(\?|[*+?][*+?]|\[\[[:.=]|\[[^]]*\\|[{}]")
# Characters of a log line that are looked at: a search for a pattern with .* takes time
# with the square of the length, and a log may hold a line of megabytes.
LINE_LIMIT = 4096
_VALUE = re.compile(r"<[a-z ]+>")


class Failure(BaseModel):
    """One known failure.

    Parameters
    ----------
    id : str
        Stable name.
    pattern : str
        Extended regular expression that finds it in a line.
    verdict : str
        The cause, in a few words.
    advice : str
        What to do.
    example : str
        A line that matches.
    where : {'rank', 'slurm', 'job'}
        Whose words they are: a rank's log, Slurm's, or the job's own.
    fatal : bool
        Whether it can be the reason of an end.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", ignored_types=(cached_property,)
    )

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    pattern: str = Field(min_length=1)
    verdict: str = Field(min_length=1)
    advice: str = Field(min_length=1)
    example: str = ""
    where: Literal["rank", "slurm", "job"] = "rank"
    fatal: bool = True

    @field_validator("pattern", "verdict", "advice", "example")
    @classmethod
    def _one_line(cls, text: str) -> str:
        if not text.isprintable():
            raise ValueError("must be one line of text")
        return text

    @cached_property
    def _regex(self) -> "re.Pattern[str]":
        return re.compile(self.pattern)

    def found_in(self, line: str) -> bool:
        """Whether a line shows it."""
        return self._regex.search(line) is not None

    def problem(self) -> Optional[str]:
        """What is wrong with the pattern, None if nothing is."""
        odd = _NOT_PORTABLE.search(self.pattern)
        if odd:
            return f"{self.id}: {odd.group()!r} means something else to grep -E"
        try:
            re.compile(self.pattern)
        except re.error as err:
            return f"{self.id}: {self.pattern!r} is no regular expression: {err}"
        return None


class Known(BaseModel):
    """All known failures, the telling ones first.

    Parameters
    ----------
    failures : tuple of Failure
        What ranks and Slurm say.
    messages : tuple of Failure
        What the job itself says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    failures: tuple[Failure, ...] = ()
    messages: tuple[Failure, ...] = ()

    @field_validator("messages", mode="before")
    @classmethod
    def _with_pattern(cls, messages: Any) -> Any:
        return [message_entry(**message) for message in messages]

    def of(self, where: str, fatal: Optional[bool] = None) -> Iterator[Failure]:
        """Failures that show in one place, in order.

        Parameters
        ----------
        where : str
            ``rank`` or ``slurm``.
        fatal : bool, optional
            Only those that can end a job, or only those that cannot.
        """
        for failure in self.failures:
            if failure.where == where and fatal in (None, failure.fatal):
                yield failure

    def message(self, line: str) -> Optional[Failure]:
        """What is known of a line of the job's own, ``LLMHUB-`` included."""
        return next((m for m in self.messages if m.found_in(line)), None)


def message_entry(message: str, **fields: Any) -> dict[str, Any]:
    """Entry of one of the job's own messages.

    Parameters
    ----------
    message : str
        The message; ``<...>`` stands for a value.
    """
    parts = (re.sub(r"([.()])", r"[\1]", p) for p in _VALUE.split(message))
    return {**fields, "pattern": "^" + ".+".join(parts), "where": "job"}


def matches(
    failures: Iterable[Failure], lines: list[str]
) -> Iterator[tuple[Failure, str]]:
    """Each failure that shows in some lines, in order, with the first such line."""
    lines = [line[:LINE_LIMIT] for line in lines]
    text = "\n".join(lines)
    for failure in failures:
        # a look at the whole is quicker, but may see what spans two lines
        if failure.found_in(text):
            line = next((x for x in lines if failure.found_in(x)), None)
            if line is not None:
                yield failure, line


@lru_cache(maxsize=8)
def load(site: Optional[str] = None) -> Known:
    """Read what is known.

    Parameters
    ----------
    site : str, optional
        A file with a site's own ``failures``, which come before those of the package.

    Raises
    ------
    ValueError
        If the site's file cannot be used.
    """
    shipped = resources.files(__package__).joinpath("failures.yaml")
    known = _parse(shipped.read_text("utf-8"))
    if not site:
        return known
    try:
        own = _parse(Path(site).read_text("utf-8"))
    except OSError as err:
        raise ValueError(f"cannot read it: {err.strerror}") from None
    for problem in filter(None, (failure.problem() for failure in own.failures)):
        raise ValueError(problem)
    return known.model_copy(update={"failures": own.failures + known.failures})


def _parse(text: str) -> Known:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return Known.model_validate(yaml.load(text, Loader=loader) or {})
    except yaml.YAMLError as err:
        raise ValueError(f"no YAML: {' '.join(str(err).split())}") from None
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}") from None
