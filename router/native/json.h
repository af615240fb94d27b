// JSON (RFC 8259), of which only what is asked for is kept.

#pragma once

#include <cstdint>

#include "text.h"

namespace mural {

constexpr int kMaxDepth = 64;

inline bool is_utf8(const unsigned char* at, const unsigned char* end) {
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

}  // namespace mural
