// Text that lies in a message, and what it is compared with.

#pragma once

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <cstring>

namespace mural {

struct Slice {
  const char* begin = nullptr;
  const char* end = nullptr;
  Py_ssize_t size() const { return end - begin; }
};

inline bool is_token(unsigned char c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) return true;
  return c != 0 && std::strchr("!#$%&'*+-.^_`|~", c) != nullptr;
}

inline bool is_field_byte(unsigned char c) { return c == '\t' || (c >= 0x20 && c != 0x7f); }

inline char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

inline bool equals(Slice text, const char* other, Py_ssize_t size) {
  return text.size() == size && std::memcmp(text.begin, other, static_cast<size_t>(size)) == 0;
}

inline bool equals_any_case(Slice text, const char* lower_case, Py_ssize_t size) {
  if (text.size() != size) return false;
  for (Py_ssize_t i = 0; i < size; ++i)
    if (lower(text.begin[i]) != lower_case[i]) return false;
  return true;
}

#define IS(text, literal) equals(text, literal, sizeof(literal) - 1)
#define NAMED(text, literal) equals_any_case(text, literal, sizeof(literal) - 1)

inline const char* find(const char* at, const char* end, const char* what, size_t size) {
  return static_cast<const char*>(memmem(at, static_cast<size_t>(end - at), what, size));
}

#define FIND(at, end, literal) find(at, end, literal, sizeof(literal) - 1)

inline bool is_hex(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

}  // namespace mural
