// Sends a stream's plain events on: http/cut_through.py says what it does and when.

#include "cut_through.h"

#include <sys/socket.h>

#include "text.h"

namespace mural {

namespace {

// Whether all of it is whole chunks, each of whole events, none of which may tell the usage.
bool are_plain_events(const char* data, const char* end) {
  if (data == end) return false;
  const char* at = data;
  while (at < end) {
    Py_ssize_t length = 0;
    const char* digits = at;
    for (; at < end && at - digits < 8 && is_hex(*at); ++at)
      length = length * 16 + (*at <= '9' ? *at - '0' : lower(*at) - 'a' + 10);
    if (at == digits || end - at < 2 || at[0] != '\r' || at[1] != '\n') return false;
    at += 2;
    if (length < 2 || end - at < length + 2) return false;
    const char* stop = at + length;
    // An event's end: so nothing that is looked for lies across two chunks.
    const bool ends = stop[-1] == '\n' && (stop[-2] == '\n' || (length > 2 && stop[-2] == '\r' &&
                                                               stop[-3] == '\n'));
    if (!ends || stop[0] != '\r' || stop[1] != '\n') return false;
    at = stop + 2;
  }
  return FIND(data, end, "\"prompt_tokens\":") == nullptr;
}

PyObject* kTakeIn;
PyObject* kDeadline;
PyObject* kNow;
PyObject* kBytesSent;
PyObject* kWrite;
PyObject* kIsClosing;
PyObject* kGetWriteBufferSize;

struct CutThrough {
  PyObject_HEAD
  PyObject* transport;  // where plain events go; the three are null while everything is taken in
  PyObject* counted;
  PyObject* watch;
  double idle_s;
  int fd;  // the transport's socket where bytes may be sent past it, else -1
};

CutThrough* of(PyObject* self) { return reinterpret_cast<CutThrough*>(self); }

// A reference is given up last: its end may call anything.
int cut_through_clear(PyObject* self) {
  CutThrough* it = of(self);
  PyObject* held[] = {it->transport, it->counted, it->watch};
  it->transport = it->counted = it->watch = nullptr;
  for (PyObject* each : held) Py_XDECREF(each);
  return 0;
}

int cut_through_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(of(self)->transport);
  Py_VISIT(of(self)->counted);
  Py_VISIT(of(self)->watch);
  return 0;
}

void cut_through_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  cut_through_clear(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

PyObject* cut_through(PyObject* self, PyObject* arguments) {
  PyObject *transport, *counted, *watch;
  double idle_s;
  int fd;
  if (!PyArg_ParseTuple(arguments, "OiOOd", &transport, &fd, &counted, &watch, &idle_s))
    return nullptr;
  cut_through_clear(self);
  CutThrough* it = of(self);
  it->transport = Py_NewRef(transport);
  it->counted = Py_NewRef(counted);
  it->watch = Py_NewRef(watch);
  it->idle_s = idle_s;
  it->fd = fd;
  Py_RETURN_NONE;
}

PyObject* take_all_in(PyObject* self, PyObject*) {
  cut_through_clear(self);
  Py_RETURN_NONE;
}

// Count a piece, and put off the deadline.
bool note_passage(PyObject* self, CutThrough* it, Py_ssize_t size) {
  PyObject* now = PyObject_GetAttr(it->watch, kNow);
  if (now == nullptr) return false;
  const double moment = PyFloat_AsDouble(now);
  Py_DECREF(now);
  if (moment == -1.0 && PyErr_Occurred()) return false;
  PyObject* deadline = PyFloat_FromDouble(moment + it->idle_s);
  if (deadline == nullptr) return false;
  const int set = PyObject_SetAttr(self, kDeadline, deadline);
  Py_DECREF(deadline);
  if (set < 0) return false;
  PyObject* sent = PyObject_GetAttr(it->counted, kBytesSent);
  if (sent == nullptr) return false;
  const Py_ssize_t before = PyLong_AsSsize_t(sent);
  Py_DECREF(sent);
  if (before == -1 && PyErr_Occurred()) return false;
  PyObject* after = PyLong_FromSsize_t(before + size);
  if (after == nullptr) return false;
  const int counted = PyObject_SetAttr(it->counted, kBytesSent, after);
  Py_DECREF(after);
  return counted == 0;
}

// Whether nothing that was written before waits in the transport, and it is not closing; -1: error.
// Its socket is open then: a transport closes it after its protocol was told (`connection_lost`),
// which ends what is sent here.
int is_idle(PyObject* transport) {
  PyObject* closing = PyObject_CallMethodObjArgs(transport, kIsClosing, nullptr);
  if (closing == nullptr) return -1;
  const int closes = PyObject_IsTrue(closing);
  Py_DECREF(closing);
  if (closes != 0) return closes < 0 ? -1 : 0;
  PyObject* waiting = PyObject_CallMethodObjArgs(transport, kGetWriteBufferSize, nullptr);
  if (waiting == nullptr) return -1;
  const int waits = PyObject_IsTrue(waiting);
  Py_DECREF(waiting);
  return waits < 0 ? -1 : !waits;
}

// Send bytes at once, and by the transport what does not go at once.
PyObject* send_on(PyObject* transport, int fd, PyObject* data, const char* bytes, Py_ssize_t size) {
  Py_ssize_t sent = 0;
  if (fd >= 0) {
    const int idle = is_idle(transport);
    if (idle < 0) return nullptr;
    if (idle) sent = send(fd, bytes, static_cast<size_t>(size), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent == size) Py_RETURN_NONE;
  }
  // An error, too, is the transport's to meet and to tell.
  if (sent <= 0) return PyObject_CallMethodObjArgs(transport, kWrite, data, nullptr);
  PyObject* rest = PyBytes_FromStringAndSize(bytes + sent, size - sent);
  if (rest == nullptr) return nullptr;
  PyObject* done = PyObject_CallMethodObjArgs(transport, kWrite, rest, nullptr);
  Py_DECREF(rest);
  return done;
}

PyObject* data_received(PyObject* self, PyObject* data) {
  CutThrough* it = of(self);
  if (it->transport != nullptr && PyBytes_Check(data)) {
    char* bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(data, &bytes, &size) < 0) return nullptr;
    if (are_plain_events(bytes, bytes + size)) {
      // First: writing may pause the connection, which sets another deadline.
      if (!note_passage(self, it, size)) return nullptr;
      PyObject* transport = Py_NewRef(it->transport);
      PyObject* done = send_on(transport, it->fd, data, bytes, size);
      Py_DECREF(transport);
      return done;
    }
  }
  return PyObject_CallMethodObjArgs(self, kTakeIn, data, nullptr);
}

PyMethodDef cut_through_methods[] = {
    {"data_received", data_received, METH_O, nullptr},
    {"cut_through", cut_through, METH_VARARGS, nullptr},
    {"take_all_in", take_all_in, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot cut_through_slots[] = {
    {Py_tp_methods, cut_through_methods},
    {Py_tp_traverse, reinterpret_cast<void*>(cut_through_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(cut_through_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(cut_through_dealloc)},
    {0, nullptr},
};

PyType_Spec cut_through_spec = {
    "mural_router.http._scan.CutThrough", sizeof(CutThrough), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, cut_through_slots};

}  // namespace

PyObject* scan_events(PyObject*, PyObject* argument) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(argument, &data, &size) < 0) return nullptr;
  return PyBool_FromLong(are_plain_events(data, data + size));
}

PyObject* send_now(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "send_now(transport, fd, data)");
    return nullptr;
  }
  const long fd = PyLong_AsLong(args[1]);
  if (fd == -1 && PyErr_Occurred()) return nullptr;
  char* bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(args[2], &bytes, &size) < 0) return nullptr;
  return send_on(args[0], static_cast<int>(fd), args[2], bytes, size);
}

int add_cut_through(PyObject* module) {
  kTakeIn = PyUnicode_InternFromString("take_in");
  kDeadline = PyUnicode_InternFromString("deadline");
  kNow = PyUnicode_InternFromString("now");
  kBytesSent = PyUnicode_InternFromString("bytes_sent");
  kWrite = PyUnicode_InternFromString("write");
  kIsClosing = PyUnicode_InternFromString("is_closing");
  kGetWriteBufferSize = PyUnicode_InternFromString("get_write_buffer_size");
  if (!kTakeIn || !kDeadline || !kNow || !kBytesSent) return -1;
  if (!kWrite || !kIsClosing || !kGetWriteBufferSize) return -1;
  PyObject* type = PyType_FromModuleAndSpec(module, &cut_through_spec, nullptr);
  if (type == nullptr) return -1;
  const int added = PyModule_AddObjectRef(module, "CutThrough", type);
  Py_DECREF(type);
  return added;
}

}  // namespace mural
