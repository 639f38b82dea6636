"""What scripts share: errors in one line, options that hold JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax

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
