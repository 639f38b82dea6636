"""What scripts share: errors in one line, options that hold JSON, progress."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

from specjax.errors import InputError, SpecjaxError


def run_command_line(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with what it returns; with 2 and one line on stderr where the input is at fault."""
    try:
        code = main() or 0
    except SpecjaxError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = 130
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print("error: the device ran out of memory; use smaller batches, shorter texts or bfloat16", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stderr.close()
        code = 0
    sys.exit(code)


def json_object(option: str, text: str) -> dict[str, Any]:
    """The object that an option's text is. Raises InputError for any other text, naming the option."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{option} {text!r}: expected a JSON object such as '{{\"enable_thinking\": false}}'")
    return value


class Bar(Progress):
    """Progress on stderr, so that stdout holds results alone: a bar, or a line now and then where that is no terminal.

    Args:
        columns: of the bar.
        every: seconds between lines.
        console: where to show it; by default stderr.
    """

    def __init__(self, *columns: str | ProgressColumn, every: float = 30.0, console: Console | None = None):
        console = console or Console(stderr=True, highlight=False)
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._every, self._told = every, time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if self.console.is_terminal or now - self._told < self._every:
            return
        self._told = now
        task = next(task for task in self.tasks if task.id == task_id)
        total = "" if task.total is None else f"/{task.total:,.0f}"
        parts = (task.description, f"{task.completed:,.0f}{total}", *map(str, task.fields.values()))
        self.console.print(" · ".join(filter(None, parts)), markup=False)
