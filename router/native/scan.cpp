// Reads the common request and the common answer at one go, for the proxy's express lane.
//
// Nothing is decided here, and nothing is repaired: what is not of the plainest form gives None, and
// is then read by http/head.py and routing/inspect_body.py, which say what a request is. All that is
// accepted here they accept too, and read alike (tests/mural_router/http/test_scan.py).

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <sys/socket.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kMaxDepth = 64;
constexpr Py_ssize_t kMaxAuthorization = 512;
constexpr Py_ssize_t kMaxModel = 512;
constexpr Py_ssize_t kMaxRequestId = 128;
constexpr int kMaxDigits = 9;
constexpr Py_ssize_t kMaxListOfPrompts = 1 << 20;  // as routing/inspect_body.py counts them
constexpr Py_ssize_t kMaxAnswerHead = 16384;  // much below what http/upstream.py takes

struct Slice {
  const char* begin = nullptr;
  const char* end = nullptr;
  Py_ssize_t size() const { return end - begin; }
};

bool is_token(unsigned char c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) return true;
  return c != 0 && std::strchr("!#$%&'*+-.^_`|~", c) != nullptr;
}

bool is_field_byte(unsigned char c) { return c == '\t' || (c >= 0x20 && c != 0x7f); }

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

bool equals(Slice text, const char* other, Py_ssize_t size) {
  return text.size() == size && std::memcmp(text.begin, other, static_cast<size_t>(size)) == 0;
}

bool equals_any_case(Slice text, const char* lower_case, Py_ssize_t size) {
  if (text.size() != size) return false;
  for (Py_ssize_t i = 0; i < size; ++i)
    if (lower(text.begin[i]) != lower_case[i]) return false;
  return true;
}

#define IS(text, literal) equals(text, literal, sizeof(literal) - 1)
#define NAMED(text, literal) equals_any_case(text, literal, sizeof(literal) - 1)

const char* find(const char* at, const char* end, const char* what, size_t size) {
  return static_cast<const char*>(memmem(at, static_cast<size_t>(end - at), what, size));
}

#define FIND(at, end, literal) find(at, end, literal, sizeof(literal) - 1)

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

// -- JSON (RFC 8259) ------------------------------------------------------------------------------

bool is_utf8(const unsigned char* at, const unsigned char* end) {
  while (at < end) {
    const unsigned char c = *at;
    if (c < 0x80) {
      ++at;
      continue;
    }
    int more;
    std::uint32_t code, least;
    if (c >= 0xc2 && c <= 0xdf) {
      more = 1, code = c & 0x1fu, least = 0x80;
    } else if (c >= 0xe0 && c <= 0xef) {
      more = 2, code = c & 0x0fu, least = 0x800;
    } else if (c >= 0xf0 && c <= 0xf4) {
      more = 3, code = c & 0x07u, least = 0x10000;
    } else {
      return false;
    }
    if (end - at <= more) return false;
    for (int i = 1; i <= more; ++i) {
      if ((at[i] & 0xc0) != 0x80) return false;
      code = (code << 6) | (at[i] & 0x3fu);
    }
    if (code < least || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return false;
    at += more + 1;
  }
  return true;
}

bool is_hex(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

struct Json {
  const char* at;
  const char* end;

  void space() {
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n')) ++at;
  }

  bool take(char c) {
    if (at == end || *at != c) return false;
    ++at;
    return true;
  }

  // A text; `plain` tells whether what stands between its quotes is what it says.
  bool text(Slice& inside, bool& plain) {
    if (!take('"')) return false;
    inside.begin = at;
    plain = true;
    while (at < end) {
      const unsigned char c = static_cast<unsigned char>(*at);
      if (c == '"') {
        inside.end = at++;
        return true;
      }
      if (c < 0x20) return false;
      ++at;
      if (c != '\\') continue;
      plain = false;
      if (at == end) return false;
      const char escape = *at++;
      if (escape == 'u') {
        if (end - at < 4) return false;
        for (int i = 0; i < 4; ++i)
          if (!is_hex(at[i])) return false;
        if (lower(at[0]) == 'd' && lower(at[1]) >= '8') {
          // The first half of a pair, and the second after it; else it is no text.
          if (lower(at[1]) >= 'c' || end - at < 10 || at[4] != '\\' || at[5] != 'u') return false;
          for (int i = 6; i < 10; ++i)
            if (!is_hex(at[i])) return false;
          if (lower(at[6]) != 'd' || lower(at[7]) < 'c') return false;
          at += 6;
        }
        at += 4;
      } else if (std::strchr("\"\\/bfnrt", escape) == nullptr || escape == 0) {
        return false;
      }
    }
    return false;
  }

  bool digits() {
    const char* begin = at;
    while (at < end && *at >= '0' && *at <= '9') ++at;
    return at > begin;
  }

  bool number() {
    take('-');
    if (!take('0') && !digits()) return false;
    if (take('.') && !digits()) return false;
    if (at < end && (*at == 'e' || *at == 'E')) {
      ++at;
      if (at < end && (*at == '+' || *at == '-')) ++at;
      if (!digits()) return false;
    }
    return true;
  }

  bool word(const char* text, Py_ssize_t size) {
    if (end - at < size || std::memcmp(at, text, static_cast<size_t>(size)) != 0) return false;
    at += size;
    return true;
  }

  bool value(int depth) {
    if (at == end || depth > kMaxDepth) return false;
    Slice inside;
    bool plain;
    switch (*at) {
      case '"':
        return text(inside, plain);
      case '{':
        ++at;
        space();
        if (take('}')) return true;
        for (;;) {
          if (!text(inside, plain)) return false;
          space();
          if (!take(':')) return false;
          space();
          if (!value(depth + 1)) return false;
          space();
          if (take('}')) return true;
          if (!take(',')) return false;
          space();
        }
      case '[':
        ++at;
        space();
        if (take(']')) return true;
        for (;;) {
          if (!value(depth + 1)) return false;
          space();
          if (take(']')) return true;
          if (!take(',')) return false;
          space();
        }
      case 't':
        return word("true", 4);
      case 'f':
        return word("false", 5);
      case 'n':
        return word("null", 4);
      default:
        return number();
    }
  }
};

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

// -- the functions --------------------------------------------------------------------------------

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

PyObject* scan_events(PyObject*, PyObject* argument) {
  char* data;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(argument, &data, &size) < 0) return nullptr;
  return PyBool_FromLong(are_plain_events(data, data + size));
}

// -- the base of a replica's connection: http/cut_through.py says what it does ---------------------

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

PyMethodDef methods[] = {
    {"scan_request", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(scan_request)),
     METH_FASTCALL, nullptr},
    {"scan_answer", scan_answer, METH_O, nullptr},
    {"scan_answer_head", scan_answer_head, METH_O, nullptr},
    {"scan_events", scan_events, METH_O, nullptr},
    {"send_now", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(send_now)),
     METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

int fill(PyObject* module) {
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
  if (added < 0) return -1;
  return PyModule_AddStringConstant(module, "SOURCE_DIGEST", MURAL_SOURCE_DIGEST);
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(fill)}, {0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_scan", nullptr, 0, methods,
                          slots,                 nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__scan() { return PyModuleDef_Init(&definition); }
