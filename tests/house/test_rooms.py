"""The includes and imports between rooms keep to the declared order, and a breach is found."""

from __future__ import annotations

from pathlib import Path

import rooms
from rooms import Known, check, import_graph, include_graph

ROOT = Path(__file__).parents[2]


def tree(folder: Path, **files: str) -> Path:
    """A repository with these files: 'core/base/error.h' is given as core__base__error_h."""
    for name, text in files.items():
        place, _, suffix = name.replace("__", "/").rpartition("_")
        path = folder / f"{place}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def python_tree(folder: Path, **files: str) -> Path:
    tree(folder, **{f"src__sharpwave__{name}": text for name, text in files.items()})
    (folder / "src/sharpwave/__init__.py").touch()
    return folder


def test_this_repository_keeps_to_the_order() -> None:
    assert check([include_graph(ROOT), import_graph(ROOT)]) == []


def test_forbidden_include_is_named_with_file_line_and_cycle(tmp_path: Path) -> None:
    tree(
        tmp_path,
        core__table__table_h='#include "storage/storage.h"\n',
        core__storage__storage_h='#include <cstdint>\n\n#include "table/table.h"\n',
    )
    (problem,) = check([include_graph(tmp_path)], known=())
    assert problem.startswith("core/storage/storage.h:3: storage may not use table (include of table/table.h)")
    assert "it may use base, schema, returns, trajectories, wire." in problem
    assert "cycle: storage -> table -> storage." in problem


def test_rooms_of_one_layer_do_not_see_each_other(tmp_path: Path) -> None:
    tree(tmp_path, core__views__goals_h="#pragma once\n", core__sampling__draw_cpp='#include "views/goals.h"\n')
    (problem,) = check([include_graph(tmp_path)], known=())
    assert problem.startswith("core/sampling/draw.cpp:1: sampling may not use views")
    assert "cycle" not in problem


def test_python_headers_stay_out_of_the_engine(tmp_path: Path) -> None:
    tree(tmp_path, core__base__wait_cpp="#include <Python.h>\n", bindings__bind_h="#include <nanobind/nanobind.h>\n")
    (problem,) = check([include_graph(tmp_path)], known=())
    assert problem.startswith("core/base/wait.cpp:1: base may not use python (include of Python.h)")


def test_include_of_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    tree(tmp_path, core__base__wait_cpp='#include "base/gone.h"\n')
    assert check([include_graph(tmp_path)], known=()) == [
        'core/base/wait.cpp:1: "base/gone.h" is no file of core/ or bindings/'
    ]


def test_forbidden_import_is_found_in_every_form(tmp_path: Path) -> None:
    python_tree(
        tmp_path,
        buffers__replay_py="from ..trajectories.index import Index\n",
        trajectories__index_py=(
            "from typing import TYPE_CHECKING\n"
            "import sharpwave.buffers.replay\n"
            "from sharpwave.buffers import replay\n"
            "from .. import buffers\n"
            "if TYPE_CHECKING:\n"
            "    from ..buffers.replay import ReplayBuffer\n"
            "def late():\n"
            "    from ..buffers import replay\n"
            "import sharpwave\n"
            "from .. import errors\n"
        ),
        errors_py="",
    )
    problems = check([import_graph(tmp_path)], known=())
    start = "src/sharpwave/trajectories/index.py"
    assert [problem.partition(" (")[0] for problem in problems] == [
        *(f"{start}:{line}: trajectories may not use buffers" for line in (2, 3, 4, 6, 8)),
        f"{start}:9: trajectories may not use face",
    ]
    kinds = [problem.partition(" (")[2].partition(" of ")[0] for problem in problems]
    assert kinds == ["import", "import", "import", "import for types", "import in a function", "import"]
    assert "cycle: trajectories -> buffers -> trajectories." in problems[0]


def test_allowed_imports_pass(tmp_path: Path) -> None:
    python_tree(
        tmp_path,
        errors_py="",
        checks_py="from .errors import SchemaError\nimport numpy\nfrom os import errors\n",
        compat__areal__buffer_py="import sharpwave as sw\nfrom ...errors import SchemaError\nfrom .data import x\n",
        compat__areal__data_py="",
        files__journal_py="from .. import _core\n",
    )
    graph = import_graph(tmp_path)
    assert check([graph], known=()) == []
    assert [(str(use).rpartition("/")[2], use.target) for use in graph.uses] == [
        ("checks.py:1", "errors"),
        ("buffer.py:1", "face"),
        ("buffer.py:2", "errors"),
        ("journal.py:1", "engine"),
    ]


def test_known_exception_passes_until_it_is_stale(tmp_path: Path) -> None:
    tree(tmp_path, core__views__goals_h="#pragma once\n", core__sampling__draw_cpp='#include "views/goals.h"\n')
    known = [Known("core/sampling/draw.cpp", "views", "to be moved")]
    assert check([include_graph(tmp_path)], known) == []
    (tmp_path / "core/sampling/draw.cpp").write_text("")
    (problem,) = check([include_graph(tmp_path)], known)
    assert problem.startswith("core/sampling/draw.cpp: does not use views any more")


def test_known_exception_covers_no_second_file(tmp_path: Path) -> None:
    include = '#include "views/goals.h"\n'
    tree(tmp_path, core__views__goals_h="", core__sampling__draw_cpp=include, core__sampling__index_cpp=include)
    (problem,) = check([include_graph(tmp_path)], [Known("core/sampling/draw.cpp", "views", "to be moved")])
    assert problem.startswith("core/sampling/index.cpp:1: sampling may not use views")


def test_new_room_must_be_given_a_layer(tmp_path: Path) -> None:
    tree(tmp_path, core__lanes__lane_h="")
    assert check([include_graph(tmp_path)], known=()) == [
        "core/lanes/lane.h: the room 'lanes' has no layer; give it one in tests/house/rooms.py"
    ]


def test_every_exception_has_a_reason_and_no_room_two_layers() -> None:
    assert all(entry.reason for entry in rooms.KNOWN)
    for order in (rooms.CPP, rooms.PYTHON):
        names = [room for layer in order.layers for room in layer]
        assert len(names) == len(set(names))
