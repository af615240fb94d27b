// Every kernel file is compiled once per instruction set; the set's name ends its exported names.
#pragma once

#ifndef MURAL_ISA
#error "build.py defines MURAL_ISA: avx2, avx512 or avx512fp16"
#endif

#define MURAL_JOIN_(name, isa) name##_##isa
#define MURAL_JOIN(name, isa) MURAL_JOIN_(name, isa)

// MURAL_KERNEL(mural_gemm)(…) defines mural_gemm_avx512fp16 and the like, in the C ABI.
#define MURAL_KERNEL(name) \
    extern "C" __attribute__((visibility("default"))) void MURAL_JOIN(name, MURAL_ISA)
