"""Runs the code blocks of one page, in order. A program of its own, so that each page has a fresh interpreter.

Standard input is JSON: the path of the page and its blocks. The Python blocks are one module, in which ``await`` may
stand outside of functions; a traceback names the line of the page.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import subprocess
import sys
import types
from typing import Any

import psycopg

_LONGEST_COMMAND = 60.0


def main() -> None:
    """Run all blocks; the first that fails ends the program with exit code 1."""
    request = json.load(sys.stdin)
    sys.path[0] = os.getcwd()  # noqa: PTH109 - an entry of sys.path is text
    page = types.ModuleType("page")
    sys.modules["page"] = page
    with asyncio.Runner() as runner:
        for block in request["blocks"]:
            if block["file"]:
                _save(block["file"], block["code"])
            elif block["language"] == "python":
                _python(block, request["path"], page, runner)
            elif block["language"] == "bash":
                _bash(block, request["path"])
            else:
                _sql(block["code"])


def _save(file: str, code: str) -> None:
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)  # noqa: PTH103, PTH120 - a short script
    with open(file, "w", encoding="utf-8") as target:  # noqa: PTH123 - the same
        target.write(code)


def _python(block: dict[str, Any], path: str, page: types.ModuleType, runner: asyncio.Runner) -> None:
    source = "\n" * (block["line"] - 1) + block["code"]
    code = compile(source, path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        function = types.FunctionType(code, page.__dict__)
        runner.run(function())
    else:
        exec(code, page.__dict__)


def _bash(block: dict[str, Any], path: str) -> None:
    sys.stdout.flush()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block["code"]],
        stdin=subprocess.DEVNULL,
        timeout=_LONGEST_COMMAND,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{path}:{block['line']}: exit code {done.returncode} of:\n{block['code']}")


def _sql(code: str) -> None:
    with psycopg.connect(os.environ["EVENTBUS_DSN"], autocommit=True) as connection:
        connection.execute(code.encode())


if __name__ == "__main__":
    main()
