// The random Hadamard transform through mma.sync.m16n8k16 with bfloat16 (sm_80 and later): raw float32 sums.
#include "hadamard.cuh"

#ifdef __CUDACC__
// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".  With g = lane / 4 and t = lane % 4:
// A registers 0..3 hold elements k = 2t, 2t + 1 of rows g and g + 8, then k = 2t + 8, 2t + 9 of the same rows;
// B registers hold rows k = 2t, 2t + 1 and 2t + 8, 2t + 9 of column g; D holds columns 2t, 2t + 1 of rows g, g + 8.
__global__ void transform(uint32_t first, uint32_t chunks, rht::Tally tally) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t warps = gridDim.x * blockDim.x / 32;
  uint32_t b[2][2];
  for (uint32_t half = 0; half < 2; ++half)
    for (uint32_t r = 0; r < 2; ++r)
      b[half][r] = rht::matrix_entry(2 * t + 8 * r, 8 * half + g) |
                   rht::matrix_entry(2 * t + 8 * r + 1, 8 * half + g) << 16;

  const uint32_t tiles = rht::VECTORS / 16;
  for (uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < chunks * tiles; i += warps) {
    const uint32_t chunk = first + i / tiles, top = i % tiles * 16;
    uint32_t a[4];
    for (uint32_t r = 0; r < 4; ++r) {
      const uint32_t random = rht::drawn(chunk, top + g + 8 * (r & 1), t + 4 * (r >> 1));
      a[r] = rht::element(chunk % rht::KINDS, random & 0xFFFF) | rht::element(chunk % rht::KINDS, random >> 16) << 16;
    }
    uint64_t digest = 0;
    float d[2][4];
    for (uint32_t half = 0; half < 2; ++half)
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
          : "=f"(d[half][0]), "=f"(d[half][1]), "=f"(d[half][2]), "=f"(d[half][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[half][0]), "r"(b[half][1]), "f"(0.0f));
    for (uint32_t row = 0; row < 2; ++row) {
      const uint32_t vector = top + g + 8 * row;
      uint32_t x[16];
      for (uint32_t k = 0; k < 16; ++k) x[k] = rht::element_at(chunk, vector, k);
      rht::Vector expected;
      expected.load(x);
      for (uint32_t half = 0; half < 2; ++half)
        for (uint32_t c = 0; c < 2; ++c) {
          const uint32_t j = 8 * half + 2 * t + c, sum = bits_of(d[half][2 * row + c]);
          digest += rht::booked(tally, chunk, vector, j, sum, rht::rounded(sum), expected.sum(j));
        }
    }
    if (chunk < tally.digested) {
      for (int step = 16; step; step /= 2) digest += __shfl_xor_sync(0xFFFFFFFFu, digest, step);
      if (lane == 0) add_shared(tally.digests + chunk, digest);
    }
  }
}
#endif

int main(int argc, char** argv) {
  Report report("rht", argc, argv);
  return rht::run(report, [](uint32_t first, uint32_t chunks, rht::Tally tally) {
#ifdef __CUDACC__
    transform<<<1024, 256>>>(first, chunks, tally);
    check(cudaGetLastError(), "launching the transform");
    check(cudaDeviceSynchronize(), "the transform");
#else
    rht::simulate(first, chunks, tally);
#endif
  });
}
