// The random Hadamard transform through tcgen05.mma kind::f16 with bfloat16 (sm_100a, sm_103a): raw float32 sums.
#include "hadamard.cuh"
#include "tcgen05.cuh"

// PTX ISA, "Instruction descriptor", the table for .kind::f16: bits 4-5 type of D (F32 = 1), 7-9 and 10-12 types of A
// and B (BF16 = 1), 17-22 N / 8, 24-28 M / 16; both operands K-major, nothing negated.
constexpr uint32_t M = 128, N = 16;
constexpr uint32_t INSTRUCTION = 1u << 4 | 1u << 7 | 1u << 10 | (N / 8) << 17 | (M / 16) << 24;
constexpr uint32_t TMEM_COLUMNS = 32;

// Vectors are the rows of A; column j of the matrix is row j of B, K-major.
PORTABLE void store(uint8_t* matrix, uint32_t row, uint32_t k, uint32_t value) {
  matrix[tcgen05::offset(row, 2 * k)] = static_cast<uint8_t>(value);
  matrix[tcgen05::offset(row, 2 * k + 1)] = static_cast<uint8_t>(value >> 8);
}

#ifdef __CUDACC__
__global__ void __launch_bounds__(M) transform(uint32_t first, uint32_t chunks, rht::Tally tally) {
#ifdef __CUDA_ARCH__
  __shared__ alignas(1024) uint8_t a[M * tcgen05::ROW_BYTES];
  __shared__ alignas(1024) uint8_t b[N * tcgen05::ROW_BYTES];
  __shared__ alignas(16) uint64_t barrier;
  __shared__ uint32_t slot;
  const uint32_t thread = threadIdx.x, warp = thread / 32;
  if (warp == 0) tcgen05::allocate<TMEM_COLUMNS>(&slot);
  if (thread == 0) tcgen05::start_barrier(&barrier);
  if (thread < N)
    for (uint32_t k = 0; k < 16; ++k) store(b, thread, k, rht::matrix_entry(k, thread));
  tcgen05::publish();
  __syncthreads();
  tcgen05::after_sync();

  const uint32_t base = slot, tiles = rht::VECTORS / M;
  uint32_t phase = 0;
  for (uint32_t i = blockIdx.x; i < chunks * tiles; i += gridDim.x) {
    const uint32_t chunk = first + i / tiles, vector = i % tiles * M + thread;
    uint32_t x[16];
    for (uint32_t k = 0; k < 16; ++k) {
      x[k] = rht::element_at(chunk, vector, k);
      store(a, thread, k, x[k]);
    }
    tcgen05::publish();
    __syncthreads();
    if (thread == 0) {
      tcgen05::after_sync();
      asm volatile(
          "{\n .reg .pred with_c;\n setp.ne.u32 with_c, %4, 0;\n"
          " tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, with_c;\n}" ::"r"(base),
          "l"(tcgen05::matrix_descriptor(tcgen05::shared_address(a))),
          "l"(tcgen05::matrix_descriptor(tcgen05::shared_address(b))), "r"(INSTRUCTION), "r"(0u)
          : "memory");
      tcgen05::commit(&barrier);
    }
    __syncwarp();
    tcgen05::wait_for(&barrier, phase);
    phase ^= 1;
    uint32_t sums[N];  // all at once: a warp loads together or not at all
    for (uint32_t j = 0; j < N; ++j) sums[j] = tcgen05::load_column(base + (32 * warp << 16) + j);
    rht::Vector expected;
    expected.load(x);
    uint64_t digest = 0;
    for (uint32_t j = 0; j < N; ++j)
      digest += rht::booked(tally, chunk, vector, j, sums[j], rht::rounded(sums[j]), expected.sum(j));
    if (chunk < tally.digested) add_shared(tally.digests + chunk, digest);
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();  // nobody overwrites A or D before all have read
    tcgen05::after_sync();
  }
  __syncthreads();
  if (warp == 0) tcgen05::release<TMEM_COLUMNS>(base);
#endif
}
#else
// What the instruction would read for the first 128 vectors of a chunk.
struct Image {
  uint64_t descriptor_a, descriptor_b;
  uint32_t instruction;
  uint8_t shared[8192];

  void load(uint32_t chunk) {
    constexpr uint32_t A = 0, B = 4096;  // addresses in shared memory
    std::memset(this, 0, sizeof *this);
    descriptor_a = tcgen05::matrix_descriptor(A);
    descriptor_b = tcgen05::matrix_descriptor(B);
    instruction = INSTRUCTION;
    for (uint32_t k = 0; k < 16; ++k) {
      for (uint32_t m = 0; m < M; ++m) store(shared + A, m, k, rht::element_at(chunk, m, k));
      for (uint32_t n = 0; n < N; ++n) store(shared + B, n, k, rht::matrix_entry(k, n));
    }
  }
};
#endif

int main(int argc, char** argv) {
  Report report("rht-tcgen05", argc, argv);
#ifndef __CUDACC__
  std::vector<Image> images(report.number("dump", 0));
  for (size_t i = 0; i < images.size(); ++i) images[i].load(static_cast<uint32_t>(i));
  if (!images.empty()) report.file("images.bin", images);
#endif
  return rht::run(report, [](uint32_t first, uint32_t chunks, rht::Tally tally) {
#ifdef __CUDACC__
    transform<<<1184, M>>>(first, chunks, tally);
    check(cudaGetLastError(), "launching the transform");
    check(cudaDeviceSynchronize(), "the transform");
#else
    rht::simulate(first, chunks, tally);
#endif
  });
}
