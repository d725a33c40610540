"""Triton's launchers that several threads load: `lightnet_kernels.triton_loading`."""

import os
import shutil
import signal
import sysconfig
import threading
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")
from lightnet_kernels import triton_launch, triton_loading
from triton.runtime import build

LAUNCHER = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* arguments) { return PyLong_FromLong(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "lightnet_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit_lightnet_launcher(void) { return PyModule_Create(&module); }
"""
ONE_BY_ONE = hasattr(build, "_load_module_from_path")
BUILDS = shutil.which("gcc") and Path(sysconfig.get_path("include"), "Python.h").exists()


def test_triton_loads_so():
    assert triton_launch
    assert not ONE_BY_ONE or hasattr(build._load_module_from_path, "__wrapped__")
    before = getattr(build, "_load_module_from_path", None)
    triton_loading.load_apart()
    assert getattr(build, "_load_module_from_path", None) is before, "once is enough"


def test_what_was_loaded_does_not_change():
    """A loader that gives one module for all, as Python's does for what it has loaded before."""
    shared = ModuleType("launcher")

    def load(name, path):
        shared.launch = lambda: path
        return shared

    found = [triton_loading.apart(load)("launcher", path) for path in "ab"]
    assert [each.launch() for each in found] == ["a", "b"] and shared not in found


@pytest.mark.skipif(not (ONE_BY_ONE and BUILDS), reason="needs gcc, Python.h and a Triton that builds launchers")
def test_a_launcher_stays_what_it_was(tmp_path, monkeypatch):
    """Also when it, and then another one of its name, has been loaded before. Triton's own loader gives the last one's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    load = lambda number: build.compile_module_from_src(LAUNCHER.replace("NUMBER", str(number)), "lightnet_launcher")  # noqa: E731
    for _ in range(2):
        found = [load(number) for number in (1, 2, 3)]
    assert [each.launch() for each in found] == [1, 2, 3]
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path.__wrapped__)
    theirs = [load(number) for number in (1, 2, 3)]
    if len({id(each) for each in theirs}) == 1:  # else Python or Triton has mended it
        assert [each.launch() for each in theirs] == [3, 3, 3]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_while_another_thread_loads():
    held, done = threading.Event(), threading.Event()

    def hold():
        with triton_loading._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        triton_loading.apart(lambda name, path: ModuleType(name))("a", "b")
        os._exit(0)
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
