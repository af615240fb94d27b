// What `_scan` has from cut_through.cpp.

#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

namespace mural {

// Whether a piece of a stream is plain events.
PyObject* scan_events(PyObject*, PyObject* argument);

// Of (transport, fd, data).
PyObject* send_now(PyObject*, PyObject* const* args, Py_ssize_t count);

// Put the type into the module; below 0: an error is set.
int add_cut_through(PyObject* module);

}  // namespace mural
