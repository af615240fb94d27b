// Reads the common request and the common answer at one go, for the proxy's express lane.
//
// Nothing is decided here, and nothing is repaired: what is not of the plainest form gives None, and
// is then read by http/head.py and routing/inspect_body.py, which say what a request is. All that is
// accepted here they accept too, and read alike (tests/mural_router/http/test_scan.py).

#include "cut_through.h"
#include "json.h"
#include "text.h"

namespace {

using namespace mural;

constexpr Py_ssize_t kMaxAuthorization = 512;
constexpr Py_ssize_t kMaxModel = 512;
constexpr Py_ssize_t kMaxRequestId = 128;
constexpr int kMaxDigits = 9;
constexpr Py_ssize_t kMaxListOfPrompts = 1 << 20;  // as routing/inspect_body.py counts them
constexpr Py_ssize_t kMaxAnswerHead = 16384;  // much below what http/upstream.py takes

// One header field; `at` is moved behind its CRLF.
bool read_field(const char*& at, const char* end, Slice& name, Slice& value) {
  name.begin = at;
  while (at < end && is_token(static_cast<unsigned char>(*at))) ++at;
  name.end = at;
  if (name.size() == 0 || at == end || *at != ':') return false;
  ++at;
  while (at < end && (*at == ' ' || *at == '\t')) ++at;
  value.begin = at;
  while (at < end && is_field_byte(static_cast<unsigned char>(*at))) ++at;
  value.end = at;
  while (value.end > value.begin && (value.end[-1] == ' ' || value.end[-1] == '\t')) --value.end;
  if (end - at < 2 || at[0] != '\r' || at[1] != '\n') return false;
  at += 2;
  return true;
}

bool read_length(Slice text, Py_ssize_t& length) {
  if (text.size() < 1 || text.size() > 15) return false;
  length = 0;
  for (const char* at = text.begin; at < text.end; ++at) {
    if (*at < '0' || *at > '9') return false;
    length = length * 10 + (*at - '0');
  }
  return true;
}

// A name or an IPv4 address with or without a port; others are read elsewhere.
bool is_plain_host(Slice text) {
  const char* at = text.begin;
  while (at < text.end) {
    const unsigned char c = static_cast<unsigned char>(*at);
    if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
          c == '-' || c == '_'))
      break;
    ++at;
  }
  if (at == text.begin) return false;
  if (at == text.end) return true;
  if (*at++ != ':') return false;
  const Py_ssize_t digits = text.end - at;
  if (digits < 1 || digits > 5) return false;
  for (; at < text.end; ++at)
    if (*at < '0' || *at > '9') return false;
  return true;
}

bool is_json(Slice type) {
  return IS(type, "application/json") || NAMED(type, "application/json; charset=utf-8");
}

// -- bodies ---------------------------------------------------------------------------------------

enum Member : unsigned {
  kModel = 1,
  kStream = 2,
  kMaxTokens = 4,
  kMaxCompletionTokens = 8,
  kPrompt = 16,
  kMessages = 32,
  kN = 64,
  kUser = 128,
  kStreamOptions = 256,
};

struct Body {
  unsigned seen = 0;
  Slice model;  // between its quotes
  bool stream = false;
  bool asks_usage = false;
  long max_tokens = -1;
  long max_completion_tokens = -1;
  Py_ssize_t prompt = 0;
  Py_ssize_t messages = 0;
};

// Of a value that is read: no number begins with more than one 0.
bool read_count(Slice text, long& count) {
  if (text.size() < 1 || text.size() > kMaxDigits) return false;
  count = 0;
  for (const char* at = text.begin; at < text.end; ++at) {
    if (*at < '0' || *at > '9') return false;
    count = count * 10 + (*at - '0');
  }
  return true;
}

unsigned member_of(Slice name) {
  if (IS(name, "model")) return kModel;
  if (IS(name, "stream")) return kStream;
  if (IS(name, "max_tokens")) return kMaxTokens;
  if (IS(name, "max_completion_tokens")) return kMaxCompletionTokens;
  if (IS(name, "prompt")) return kPrompt;
  if (IS(name, "messages")) return kMessages;
  if (IS(name, "n")) return kN;
  if (IS(name, "user")) return kUser;
  if (IS(name, "stream_options")) return kStreamOptions;
  return 0;
}

// An object with include_usage as its one member, true or false.
bool read_stream_options(Json& json, bool& asks_usage) {
  Slice name;
  bool plain;
  if (!json.take('{')) return false;
  json.space();
  if (!json.text(name, plain) || !IS(name, "include_usage")) return false;
  json.space();
  if (!json.take(':')) return false;
  json.space();
  asks_usage = json.word("true", 4);
  if (!asks_usage && !json.word("false", 5)) return false;
  json.space();
  return json.take('}');
}

// A text, a list of token ids, or a list of one prompt: one sequence. Others are counted elsewhere.
bool read_prompt(Json& json) {
  Slice inside;
  bool plain;
  const char* begin = json.at;
  if (json.at == json.end || *json.at != '[') return json.text(inside, plain);
  ++json.at;
  json.space();
  if (json.take(']')) return true;
  const bool of_prompts = json.at < json.end && (*json.at == '"' || *json.at == '[');
  for (;;) {
    if (!json.value(2)) return false;
    json.space();
    if (json.take(']')) break;
    if (of_prompts || !json.take(',')) return false;
    json.space();
  }
  return !of_prompts || json.at - begin <= kMaxListOfPrompts;
}

bool read_member(Json& json, Body& body) {
  Slice name, inside;
  bool plain;
  if (!json.text(name, plain) || !plain) return false;
  json.space();
  if (!json.take(':')) return false;
  json.space();
  const unsigned member = member_of(name);
  if (member & body.seen) return false;
  body.seen |= member;
  Slice whole;
  whole.begin = json.at;
  if (member == kPrompt) {
    if (!read_prompt(json)) return false;
  } else if (member == kModel || member == kUser) {
    if (!json.text(inside, plain)) return false;
    if (member == kModel) {
      if (!plain || inside.size() > kMaxModel) return false;
      for (const char* at = inside.begin; at < inside.end; ++at)
        if (*at < 0x21 || *at > 0x7e) return false;
      body.model = inside;
    }
  } else if (member == kStreamOptions) {
    return read_stream_options(json, body.asks_usage);
  } else if (!json.value(1)) {
    return false;
  }
  whole.end = json.at;
  switch (member) {
    case kPrompt:
      body.prompt = whole.size();
      return true;
    case kMessages:
      body.messages = whole.size();
      return true;
    case kStream:
      body.stream = IS(whole, "true");
      return body.stream || IS(whole, "false");
    case kN:
      return IS(whole, "1");
    case kMaxTokens:
      return read_count(whole, body.max_tokens);
    case kMaxCompletionTokens:
      return read_count(whole, body.max_completion_tokens);
    default:
      return true;
  }
}

bool read_body(const char* at, const char* end, Body& body) {
  Json json{at, end};
  json.space();
  if (!json.take('{')) return false;
  for (;;) {
    json.space();
    if (!read_member(json, body)) return false;
    json.space();
    if (json.take('}')) break;
    if (!json.take(',')) return false;
  }
  json.space();
  if (json.at != end || !(body.seen & kModel)) return false;
  // Members that are looked for must not stand anywhere else, nor those that are put in be there:
  // options that ask for no usage are where a stream's are put in.
  const char* first = FIND(at, end, "\"model\"");
  if (FIND(first + 1, end, "\"model\"") != nullptr) return false;
  if (!body.asks_usage && FIND(at, end, "\"stream_options\"")) return false;
  if (FIND(at, end, "\"cache_salt\"")) return false;
  // What may be a letter of "model" in disguise has the body written anew, even in a prompt.
  if (FIND(at, end, "\\u006")) return false;
  return is_utf8(reinterpret_cast<const unsigned char*>(at),
                 reinterpret_cast<const unsigned char*>(end));
}

// -- whole messages -------------------------------------------------------------------------------

struct Head {
  const char* path = nullptr;
  Py_ssize_t path_size = 0;
  const char* body = nullptr;
  Slice authorization;
  Slice request_id;
  Slice traceparent;
  Slice tracestate;
};

// The value of a field that may be there once.
bool only(Slice& field, Slice value) {
  if (field.begin != nullptr) return false;
  field = value;
  return true;
}

bool is_request_id(Slice text) {
  if (text.size() < 1 || text.size() > kMaxRequestId) return false;
  for (const char* at = text.begin; at < text.end; ++at)
    if (*at < 0x21 || *at > 0x7e) return false;
  return true;
}

bool starts(const char*& at, const char* end, const char* text, Py_ssize_t size) {
  if (end - at < size || std::memcmp(at, text, static_cast<size_t>(size)) != 0) return false;
  at += size;
  return true;
}

#define STARTS(at, end, literal) starts(at, end, literal, sizeof(literal) - 1)

bool read_request(const char* at, const char* end, Py_ssize_t max_head, Py_ssize_t max_fields,
                  Head& head) {
  const char* begin = at;
  const char* line = at;
  if (STARTS(at, end, "POST /v1/completions HTTP/1.1\r\n")) {
    head.path = line + 5, head.path_size = 15;
  } else if (STARTS(at, end, "POST /v1/chat/completions HTTP/1.1\r\n")) {
    head.path = line + 5, head.path_size = 20;
  } else {
    return false;
  }
  bool host = false, type = false;
  Py_ssize_t length = -1, fields = 0;
  for (;;) {
    if (end - at >= 2 && at[0] == '\r' && at[1] == '\n') {
      at += 2;
      break;
    }
    Slice name, value;
    if (++fields > max_fields || !read_field(at, end, name, value)) return false;
    switch (lower(*name.begin)) {
      case 'h':
        if (NAMED(name, "host")) {
          if (host || !is_plain_host(value)) return false;
          host = true;
        }
        break;
      case 'a':
        if (NAMED(name, "authorization")) {
          if (!only(head.authorization, value) || value.size() > kMaxAuthorization) return false;
        }
        break;
      case 'c':
        if (NAMED(name, "content-length")) {
          if (length >= 0 || !read_length(value, length)) return false;
        } else if (NAMED(name, "content-type")) {
          if (type || !is_json(value)) return false;
          type = true;
        } else if (NAMED(name, "connection")) {
          if (!NAMED(value, "keep-alive")) return false;
        } else if (NAMED(name, "content-encoding")) {
          return false;
        }
        break;
      case 'e':
        if (NAMED(name, "expect")) return false;
        break;
      case 't':
        if (NAMED(name, "transfer-encoding")) return false;
        if (NAMED(name, "traceparent") && !only(head.traceparent, value)) return false;
        if (NAMED(name, "tracestate") && !only(head.tracestate, value)) return false;
        break;
      case 'x':
        if (NAMED(name, "x-request-id") && !(only(head.request_id, value) && is_request_id(value)))
          return false;
        break;
      default:
        break;
    }
  }
  head.body = at;
  return host && at - begin <= max_head && length == end - at;
}

PyObject* text_of(Slice ascii) {
  if (ascii.begin == nullptr) {
    Py_INCREF(Py_None);
    return Py_None;
  }
  return PyUnicode_FromStringAndSize(ascii.begin, ascii.size());
}

// The fields for the replica that are passed on as they came, each after a CRLF.
PyObject* passed_on_of(const Head& head) {
  const struct {
    const char* name;
    Py_ssize_t size;
    Slice value;
  } fields[] = {{"\r\ntraceparent: ", 15, head.traceparent},
                {"\r\ntracestate: ", 14, head.tracestate}};
  Py_ssize_t size = 0;
  for (const auto& field : fields)
    if (field.value.begin != nullptr) size += field.size + field.value.size();
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, size);
  if (bytes == nullptr || size == 0) return bytes;
  char* to = PyBytes_AsString(bytes);
  for (const auto& field : fields) {
    if (field.value.begin == nullptr) continue;
    std::memcpy(to, field.name, static_cast<size_t>(field.size));
    to += field.size;
    std::memcpy(to, field.value.begin, static_cast<size_t>(field.value.size()));
    to += field.value.size();
  }
  return bytes;
}

PyObject* scan_request(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "scan_request(data, max_head_bytes, max_fields)");
    return nullptr;
  }
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(args[0], &data, &size) < 0) return nullptr;
  const Py_ssize_t max_head = PyLong_AsSsize_t(args[1]);
  if (max_head == -1 && PyErr_Occurred()) return nullptr;
  const Py_ssize_t max_fields = PyLong_AsSsize_t(args[2]);
  if (max_fields == -1 && PyErr_Occurred()) return nullptr;
  Head head;
  Body body;
  const char* end = data + size;
  if (!read_request(data, end, max_head, max_fields, head) || !read_body(head.body, end, body))
    Py_RETURN_NONE;
  // Path, authorization and model, by lines: none of them has one in it.
  const bool has_key = head.authorization.begin != nullptr;
  const Py_ssize_t key_size = head.path_size + 1 + (has_key ? 1 + head.authorization.size() : 0) +
                              1 + body.model.size();
  PyObject* key = PyBytes_FromStringAndSize(nullptr, key_size);
  PyObject* request_id = key == nullptr ? nullptr : text_of(head.request_id);
  PyObject* passed_on = request_id == nullptr ? nullptr : passed_on_of(head);
  if (passed_on == nullptr) {
    Py_XDECREF(key);
    Py_XDECREF(request_id);
    return nullptr;
  }
  char* to = PyBytes_AsString(key);
  const auto put = [&to](const char* from, Py_ssize_t bytes) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    to += bytes;
  };
  put(head.path, head.path_size);
  put("\n", 1);
  if (has_key) {
    put("=", 1);
    put(head.authorization.begin, head.authorization.size());
  }
  put("\n", 1);
  put(body.model.begin, body.model.size());
  const Py_ssize_t prompt = body.seen & kMessages ? body.messages : body.prompt;
  const long most =
      body.seen & kMaxCompletionTokens ? body.max_completion_tokens : body.max_tokens;
  return Py_BuildValue("(NnlOnnnONN)", key, prompt, most, body.stream ? Py_True : Py_False,
                       static_cast<Py_ssize_t>(head.body - data),
                       static_cast<Py_ssize_t>(body.model.begin - 1 - data),
                       static_cast<Py_ssize_t>(body.model.end + 1 - data),
                       body.asks_usage ? Py_True : Py_False, request_id, passed_on);
}

// Fields of an answer that are of its connection, or the router's to say.
bool is_passed_on(Slice name) {
  switch (lower(*name.begin)) {
    case 'k':
      return !NAMED(name, "keep-alive");
    case 'c':
      return !NAMED(name, "connection");
    case 's':
      return !NAMED(name, "server");
    case 'p':
      return !(NAMED(name, "proxy-authenticate") || NAMED(name, "proxy-authentication-info") ||
               NAMED(name, "proxy-connection"));
    case 't':
      return !(NAMED(name, "te") || NAMED(name, "trailer") || NAMED(name, "transfer-encoding"));
    case 'u':
      return !NAMED(name, "upgrade");
    case 'x': {
      if (name.size() >= 8 && NAMED((Slice{name.begin, name.begin + 8}), "x-mural-")) return false;
      return !NAMED(name, "x-request-id");
    }
    default:
      return true;
  }
}

struct AnswerHead {
  static constexpr Py_ssize_t kMaxPassed = 2048;
  char passed[kMaxPassed];  // the fields that are, each after a CRLF
  Py_ssize_t used = 0;
  Py_ssize_t length = -1;
  bool digest = false;
};

// The head of an answer; `at` is moved behind it.
bool read_answer_head(const char*& at, const char* end, AnswerHead& head) {
  const char* begin = at;
  if (!STARTS(at, end, "HTTP/1.1 200")) return false;
  if (at < end && *at == ' ') {
    while (at < end && is_field_byte(static_cast<unsigned char>(*at))) ++at;
  }
  if (end - at < 2 || at[0] != '\r' || at[1] != '\n') return false;
  at += 2;
  for (;;) {
    if (end - at >= 2 && at[0] == '\r' && at[1] == '\n') {
      at += 2;
      break;
    }
    Slice name, value;
    const char* line = at;
    if (!read_field(at, end, name, value)) return false;
    if (NAMED(name, "content-length")) {
      if (head.length >= 0 || !read_length(value, head.length)) return false;
    } else if (NAMED(name, "transfer-encoding")) {
      return false;
    } else if (NAMED(name, "connection")) {
      if (!NAMED(value, "keep-alive")) return false;
    } else if (NAMED(name, "x-mural-digest")) {
      head.digest = true;
    }
    if (!is_passed_on(name)) continue;
    // As it came, with the line's end before it.
    const Py_ssize_t bytes = at - 2 - line;
    if (head.used + bytes + 2 > AnswerHead::kMaxPassed) return false;
    std::memcpy(head.passed + head.used, "\r\n", 2);
    std::memcpy(head.passed + head.used + 2, line, static_cast<size_t>(bytes));
    head.used += bytes + 2;
  }
  return head.length >= 1 && at - begin <= kMaxAnswerHead;
}

PyObject* scan_answer(PyObject*, PyObject* argument) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(argument, &data, &size) < 0) return nullptr;
  const char* at = data;
  const char* end = data + size;
  AnswerHead head;
  if (!read_answer_head(at, end, head) || head.length != end - at) Py_RETURN_NONE;
  // No "y#": headers of 3.13 compile it to what older versions refuse.
  PyObject* fields = PyBytes_FromStringAndSize(head.passed, head.used);
  if (fields == nullptr) return nullptr;
  return Py_BuildValue("(NnO)", fields, static_cast<Py_ssize_t>(at - data),
                       head.digest ? Py_True : Py_False);
}

// Whether this is all of such a head, and nothing of its body.
PyObject* scan_answer_head(PyObject*, PyObject* argument) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(argument, &data, &size) < 0) return nullptr;
  const char* at = data;
  const char* end = data + size;
  AnswerHead head;
  if (read_answer_head(at, end, head) && at == end) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

PyMethodDef methods[] = {
    {"scan_request", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(scan_request)),
     METH_FASTCALL, nullptr},
    {"scan_answer", scan_answer, METH_O, nullptr},
    {"scan_answer_head", scan_answer_head, METH_O, nullptr},
    {"scan_events", mural::scan_events, METH_O, nullptr},
    {"send_now", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(send_now)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

int fill(PyObject* module) {
  if (mural::add_cut_through(module) < 0) return -1;
  return PyModule_AddStringConstant(module, "SOURCE_DIGEST", MURAL_SOURCE_DIGEST);
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_scan", nullptr, 0, methods,
                          slots,                 nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__scan() { return PyModuleDef_Init(&definition); }
