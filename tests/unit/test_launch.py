"""How kernels are started: the bytes that reach the driver. The driver here is a small library that writes down what it
is given; the real one is met by the tests that are marked ``gpu``."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpwave import _core

DRIVER = r"""
#include <string.h>
#include <unistd.h>
static unsigned long offsets[] = {0, 8, 16, 20, 24, 32, 40}, sizes[] = {8, 8, 4, 4, 8, 8, 8};
unsigned char seen[4096];
unsigned long seen_bytes;
unsigned seen_shape[7];
void *seen_stream, *seen_function;
int answer = 0;
void* context = (void*)5;
int cuCtxGetCurrent(void** now) {
    *now = context;
    return 0;
}
int cuCtxSetCurrent(void* now) {
    context = now;
    return 0;
}
int cuFuncGetParamInfo(void* function, unsigned long i, unsigned long* offset, unsigned long* size) {
    if (i >= 7) return 1;
    *offset = offsets[i];
    *size = sizes[i];
    return 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
    if (stream == (void*)3000) usleep(3000);
    unsigned shape[7] = {gx, gy, gz, bx, by, bz, shared};
    memcpy(seen_shape, shape, sizeof shape);
    seen_function = function;
    seen_stream = stream;
    if (parameters || extra[0] != (void*)1 || extra[2] != (void*)2 || extra[4]) return 2;
    seen_bytes = *(unsigned long*)extra[3];
    memcpy(seen, extra[1], seen_bytes);
    return answer;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "driver.so", folder / "driver.c"], check=True)
    return folder / "driver.so"


def make(driver: Path, numbers: int = 5) -> Any:
    return _core.Launch(0x1234, 128, 64, numbers, str(driver))


def told(driver: Path) -> tuple[tuple[int, ...], list[int], int]:
    library = ctypes.CDLL(str(driver))
    size = ctypes.c_ulong.in_dll(library, "seen_bytes").value
    memory = bytes((ctypes.c_ubyte * 4096).in_dll(library, "seen"))[:size]
    shape = list((ctypes.c_uint * 7).in_dll(library, "seen_shape"))
    return struct.unpack("<qqiiqqq", memory), shape, ctypes.c_void_p.in_dll(library, "seen_stream").value or 0


def test_numbers_of_both_widths_stand_where_the_kernel_looks(driver: Path) -> None:
    make(driver).run(77, 3, 2, (1 << 40, (-5, 7), -1, 9))
    numbers, shape, stream = told(driver)
    assert numbers == (1 << 40, -5, 7, -1, 9, 0, 0)  # and two addresses of scratch memory, which there is not
    assert shape == [3, 2, 1, 128, 1, 1, 64]
    assert stream == 77


def test_numbers_go_on_in_steps(driver: Path) -> None:
    make(driver).run(0, 1, 1, (1000, (2000, 3), 4, 5), (256, (512, 0), 0, -1), 3)
    assert told(driver)[0] == (1768, 3536, 3, 4, 2, 0, 0)


def test_what_does_not_fit_is_refused(driver: Path) -> None:
    launch = make(driver)
    launch.run(0, 1, 1, (1, 2, 3, 4, 5))
    for wrong in ((1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 1 << 31, 4, 5), (1, 2, -(1 << 31) - 1, 4, 5)):
        with pytest.raises(ValueError, match="number"):
            launch.run(0, 1, 1, wrong)
    with pytest.raises(TypeError):
        launch.run(0, 1, 1, (1, 2.5, 3, 4, 5))
    with pytest.raises(OverflowError):
        launch.run(0, 1, 1, (1 << 70, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="another shape"):
        launch.run(0, 1, 1, (1, (2, 3), 4, 5), (0, 0, 0, 0), 1)
    assert told(driver)[0] == (1, 2, 3, 4, 5, 0, 0)  # none of those reached it
    with pytest.raises(ValueError, match="takes others"):
        make(driver, 6)
    with pytest.raises(ValueError, match="no CUDA driver"):
        _core.Launch(1, 1, 0, 1, "/nowhere/driver.so")


def test_refusal_of_the_driver_is_an_error(driver: Path) -> None:
    answer = ctypes.c_int.in_dll(ctypes.CDLL(str(driver)), "answer")
    answer.value = 719
    try:
        with pytest.raises(RuntimeError, match="error 719"):
            make(driver).run(0, 1, 1, (1, 2, 3, 4, 5))
    finally:
        answer.value = 0


def test_thread_without_a_context_gets_the_kernels_own(driver: Path) -> None:
    launch = make(driver)
    context = ctypes.c_void_p.in_dll(ctypes.CDLL(str(driver)), "context")
    context.value = None
    with pytest.raises(ValueError, match="no CUDA context"):
        make(driver)
    launch.run(0, 1, 1, (1, 2, 3, 4, 5))
    assert context.value == 5


def test_interpreter_may_end_while_a_thread_waits_for_the_driver(driver: Path) -> None:
    code = f"""
import threading, time
from sharpwave import _core

launch = _core.Launch(1, 128, 0, 5, {str(driver)!r})

def always():
    while True:
        launch.run(3000, 1, 1, (1, 2, 3, 4, 5))

for _ in range(3):
    threading.Thread(target=always, daemon=True).start()
time.sleep(0.05)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
