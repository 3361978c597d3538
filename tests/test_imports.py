"""Imports point one way: no folder imports what stands on it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "optax_accum"
# What each folder may import, besides itself.
ALLOWED = {
    "_core": {"_checks"},
    "_components": {"_checks", "_core"},
    "_devices": {"_checks", "_core"},
    "_in_call": {"_checks", "_core", "_devices"},
    "_train_step": {"_checks", "_core", "_components", "_devices", "_in_call"},
    "_training": {"_checks", "_core", "_components", "_devices"},
    "testing": {"_checks", "_core", "_components", "_in_call", "_accumulate"},
    "_checks": set(),
}


def imported(file):
    """The folders or modules of the package that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optax_accum"):
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_it_stands_on(folder):
    path = PACKAGE / folder
    for file in path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]:
        found = set(imported(file)) - {folder}
        assert found <= ALLOWED[folder], f"{file.name} imports {found - ALLOWED[folder]}"


def lengths(tree):
    """Name and lines of code of each function, its docstring apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            lines = node.end_lineno - node.lineno + 1
            yield node.name, lines - (first.end_lineno - first.lineno + 1 if docstring else 0)


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.stem)
def test_files_and_functions_fit_on_a_screen(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 300
    for name, lines in lengths(ast.parse(text)):
        assert lines <= 65, f"{name} has {lines} lines"
