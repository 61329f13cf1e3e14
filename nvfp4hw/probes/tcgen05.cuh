// tcgen05.mma with both operands in shared memory, 128 rows, D in tensor memory (sm_100a, sm_103a).
//
// Layouts, each from the PTX ISA's chapter on tcgen05:
// * "Shared Memory Layout", K-major without swizzle: core matrices of 8 rows x 16 bytes, contiguous.  The two core
//   matrices along K of 32-byte rows lie LEADING bytes apart, groups of 8 rows STRIDE bytes.
// * "Shared memory descriptor": bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16, 46-48 the
//   constant 1, 49-51 base offset 0, 52 relative mode 0, 53-60 the constant 0, 61-63 swizzling 0.
// * "Tensor Memory addressing": lane in bits 31-16, column in bits 15-0; warp w of four reaches lanes 32 w to 32 w + 31.
// * "Data path layout" of D for M = 128: row m in lane m, column n in column n.
#pragma once

#include "report.cuh"

namespace tcgen05 {

constexpr uint32_t ROW_BYTES = 32, LEADING = 128, STRIDE = 256;

// Where byte `byte` of row `row` lies in a matrix of 32-byte rows.
PORTABLE uint32_t offset(uint32_t row, uint32_t byte) {
  return row / 8 * STRIDE + byte / 16 * LEADING + row % 8 * 16 + byte % 16;
}

PORTABLE uint64_t matrix_descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(LEADING >> 4) << 16 |
         static_cast<uint64_t>(STRIDE >> 4) << 32 | 1ull << 46;
}

#ifdef __CUDACC__
#ifdef __CUDA_ARCH__
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// All of a warp: COLUMNS (a power of two, 32 and more) of tensor memory; its address goes to `slot`.
template <uint32_t COLUMNS>
__device__ void allocate(uint32_t* slot) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_address(slot)),
               "r"(COLUMNS)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}

template <uint32_t COLUMNS>
__device__ void release(uint32_t address) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(COLUMNS));
}

// One column of the 32 lanes of a warp, a word a thread.
__device__ __forceinline__ void store_column(uint32_t address, uint32_t word) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t load_column(uint32_t address) {
  uint32_t word;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];\n tcgen05.wait::ld.sync.aligned;"
               : "=r"(word)
               : "r"(address)
               : "memory");
  return word;
}

__device__ __forceinline__ void start_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" ::"r"(
                   shared_address(barrier))
               : "memory");
}

// The issuing thread, or whoever uses what others wrote, after the __syncthreads() that followed their publish().
__device__ __forceinline__ void after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

// Everything written so far, by ordinary stores to shared memory and by tcgen05.st, is there for the MMA that
// another thread issues after the next __syncthreads().
__device__ __forceinline__ void publish() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

// The issuing thread: the barrier completes when the MMA has.
__device__ __forceinline__ void commit(uint64_t* barrier) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   shared_address(barrier))
               : "memory");
}

// All of a warp, together again afterwards; D can be read.
__device__ __forceinline__ void wait_for(uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  __syncwarp();
  after_sync();
}
#endif
#endif

}  // namespace tcgen05
