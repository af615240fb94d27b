// What the library tells about itself and about the CPU.
#include <cpuid.h>

#include <cstdint>

#define MURAL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Registers {
    unsigned a, b, c, d;
};

Registers cpuid(unsigned leaf) {
    Registers r{0, 0, 0, 0};
    __get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d);
    return r;
}

bool bit(unsigned value, int index) { return (value >> index) & 1u; }

// What the operating system saves at a task switch; without that the registers must not be used.
std::uint64_t saved_state() {
    if (!bit(cpuid(1).c, 27)) return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<std::uint64_t>(high) << 32) | low;
}

}  // namespace

// Bits: 1 avx2 (with FMA and F16C), 2 avx512 (F, BW, DQ, VL), 4 avx512fp16.
MURAL_EXPORT int mural_isa() {
    const std::uint64_t saved = saved_state();
    const bool ymm = (saved & 0x06) == 0x06;
    const bool zmm = (saved & 0xe6) == 0xe6;
    const Registers one = cpuid(1), seven = cpuid(7);
    const bool avx2 = ymm && bit(seven.b, 5) && bit(one.c, 12) && bit(one.c, 29);
    const bool avx512 = avx2 && zmm && bit(seven.b, 16) && bit(seven.b, 17) &&
                        bit(seven.b, 30) && bit(seven.b, 31);
    const bool fp16 = avx512 && bit(seven.d, 23);
    return (avx2 ? 1 : 0) | (avx512 ? 2 : 0) | (fp16 ? 4 : 0);
}

// Of the sources that this was built from; see source_digest.py.
MURAL_EXPORT const char* mural_source_digest() { return MURAL_SOURCE_DIGEST; }
