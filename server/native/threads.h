// Runs a loop body on the OpenMP team that torch has in the process already.
//
// A second OpenMP runtime would keep a second team, whose threads spin against the first one's.
// So nothing here is linked against any: the entry points below are GCC's stable ABI, which every
// runtime offers, and the loader binds them to the one that torch has loaded.
#pragma once

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace {

// Calls body(thread, threads) once on each thread of the team; the runtime may give fewer than
// asked for. The body must not throw.
template <class Body>
inline void parallel(int threads, Body&& body) {
    if (threads <= 1) {
        body(0, 1);
        return;
    }
    GOMP_parallel(
        [](void* data) {
            (*static_cast<Body*>(data))(omp_get_thread_num(), omp_get_num_threads());
        },
        const_cast<void*>(static_cast<const void*>(&body)), static_cast<unsigned>(threads), 0);
}

}  // namespace
