"""What importing brings, and what it says where the extra is not installed."""

import subprocess
import sys

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


def test_the_engine_needs_no_server():
    code = "import sharpwave.llm.generators, sys; print({'starlette', 'uvicorn', 'httpx', 'jinja2'} & set(sys.modules))"
    assert output_of(code) == "set()"


@pytest.mark.parametrize("name", ["starlette", "uvicorn"])
def test_without_the_server_s_packages_the_error_names_the_extra(name):
    code = f"import sys; sys.modules[{name!r}] = None\n"
    code += "try:\n    import sharpwave.llm.session\nexcept ImportError as error:\n    print(error)"
    assert output_of(code) == f"the server needs {name}; pip install sharpwave[llm]"
