"""What importing brings, and what it says where the extra is not installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def output_of(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_no_language_models():
    assert output_of("import sharpwave, sys; print({'torch', 'sharpwave.llm'} & set(sys.modules))") == "set()"


@pytest.mark.parametrize("name", ["torch", "safetensors"])
def test_without_the_extra_the_error_names_it(name):
    code = f"import sys; sys.modules[{name!r}] = None\n"
    code += "try:\n    import sharpwave.llm.model\nexcept ImportError as error:\n    print(error)"
    assert output_of(code) == f"sharpwave.llm needs {name}; pip install sharpwave[llm]"


def test_each_name_is_listed_and_imported_when_it_is_used():
    code = """
import sys
import sharpwave as sw
from sharpwave.llm import Sampling, Weights
print({"sharpwave.llm.learner", "sharpwave.llm.run", "starlette", "httpx", "transformers"} & set(sys.modules))
for name in sw.llm.__all__:
    assert name in dir(sw.llm), name
    assert getattr(sw.llm, name) is vars(sw.llm)[name], name
assert sw.llm.Sampling is Sampling
from sharpwave.llm import *
print(callable(session_agent), callable(load_model))
try:
    sw.llm.Experimnt
except AttributeError as error:
    print(error)
"""
    said = ["set()", "True True", "module 'sharpwave.llm' has no attribute 'Experimnt'"]
    assert output_of(code).splitlines() == said


def test_the_reference_lists_every_name():
    from sharpwave import llm

    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    section = page.split("## Language models\n")[1].split("\n## ")[0]
    assert set(llm.__all__) - set(re.findall(r"`(\w+)", section)) == set()


def test_the_engine_needs_no_server():
    code = "import sharpwave.llm.generators, sys; print({'starlette', 'uvicorn', 'httpx', 'jinja2'} & set(sys.modules))"
    assert output_of(code) == "set()"


@pytest.mark.parametrize("name", ["starlette", "uvicorn"])
def test_without_the_server_s_packages_the_error_names_the_extra(name):
    code = f"import sys; sys.modules[{name!r}] = None\n"
    code += "try:\n    import sharpwave.llm.session\nexcept ImportError as error:\n    print(error)"
    assert output_of(code) == f"the server needs {name}; pip install sharpwave[llm]"
