// The NVFP4 word of tcgen05.mma (sm_100a, sm_103a): kind::mxf4nvf4, scale_vec::4X, M = 128, N = 32, K = 64.
#include "tcgen05.cuh"
#include "tiles.cuh"

// PTX ISA, "Instruction descriptor", the table for .kind::mxf4 and .kind::mxf4nvf4: bits 7-9 and 10-11 the types of A
// and B (E2M1 = 1), 17-22 N / 8, 23 the scale type (UE4M3 = 0), 27-28 M / 128, 31 K (64 = 0); scale ids 0, no
// negation, no transposition, dense.
constexpr uint32_t INSTRUCTION = 1u << 7 | 1u << 10 | (mma::COLUMNS / 8) << 17 | (mma::ROWS / 128) << 27;

// Columns of the tensor memory: C and D, then the scales of A, then those of B.
constexpr uint32_t D_COLUMN = 0, SA_COLUMN = 32, SB_COLUMN = 36, TMEM_COLUMNS = 64;

// PTX ISA, "Scale Factor A ID" and "B ID", scale_vec::4X: four scales in the word of a lane and column, k = 0..15 in
// the lowest byte; row m of A in lane m % 32 of column m / 32, likewise column n of B; and "Block Scaling": the same in
// each of the four partitions of 32 lanes.
PORTABLE uint32_t scale_a(const mma::Tile& tile, uint32_t lane, uint32_t column) {
  return mma::word_at(tile.sa[32 * column + lane % 32]);
}
PORTABLE uint32_t scale_b(const mma::Tile& tile, uint32_t lane) { return mma::word_at(tile.sb[lane % 32]); }

#ifdef __CUDACC__
__global__ void __launch_bounds__(128) multiply(const mma::Tile* tiles, uint32_t* words) {
#ifdef __CUDA_ARCH__
  __shared__ alignas(1024) uint8_t a[mma::ROWS * mma::BYTES];
  __shared__ alignas(1024) uint8_t b[mma::COLUMNS * mma::BYTES];
  __shared__ alignas(16) uint64_t barrier;
  __shared__ uint32_t slot;
  const mma::Tile& tile = tiles[blockIdx.x];
  const uint32_t thread = threadIdx.x, warp = thread / 32;

  if (warp == 0) tcgen05::allocate<TMEM_COLUMNS>(&slot);
  if (thread == 0) tcgen05::start_barrier(&barrier);
  for (uint32_t i = 0; i < mma::BYTES; ++i) {
    a[tcgen05::offset(thread, i)] = tile.a[thread][i];
    if (thread < mma::COLUMNS) b[tcgen05::offset(thread, i)] = tile.b[thread][i];
  }
  tcgen05::publish();
  __syncthreads();
  tcgen05::after_sync();

  const uint32_t base = slot, mine = base + (32 * warp << 16);
  for (uint32_t n = 0; n < mma::COLUMNS; ++n) tcgen05::store_column(mine + D_COLUMN + n, tile.c[thread][n]);
  for (uint32_t i = 0; i < 4; ++i) tcgen05::store_column(mine + SA_COLUMN + i, scale_a(tile, thread, i));
  tcgen05::store_column(mine + SB_COLUMN, scale_b(tile, thread));
  tcgen05::publish();
  __syncthreads();

  if (thread == 0) {
    tcgen05::after_sync();
    asm volatile(
        "{\n .reg .pred with_c;\n setp.ne.u32 with_c, %6, 0;\n"
        " tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%0], %1, %2, %3, [%4], [%5], with_c;\n}"
        ::"r"(base + D_COLUMN),
        "l"(tcgen05::matrix_descriptor(tcgen05::shared_address(a))),
        "l"(tcgen05::matrix_descriptor(tcgen05::shared_address(b))), "r"(INSTRUCTION), "r"(base + SA_COLUMN),
        "r"(base + SB_COLUMN), "r"(1u)
        : "memory");
    tcgen05::commit(&barrier);
  }
  __syncwarp();
  tcgen05::wait_for(&barrier, 0);
  uint32_t* out = words + (static_cast<size_t>(blockIdx.x) * mma::ROWS + thread) * mma::COLUMNS;
  for (uint32_t n = 0; n < mma::COLUMNS; ++n) out[n] = tcgen05::load_column(mine + D_COLUMN + n);
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  if (warp == 0) {
    tcgen05::after_sync();
    tcgen05::release<TMEM_COLUMNS>(base);
  }
#endif
}
#else
// What the instruction would read for one tile.
struct Image {
  uint64_t descriptor_a, descriptor_b;
  uint32_t instruction, d_column, sa_column, sb_column;
  uint8_t shared[8192];
  uint32_t tensor[128][TMEM_COLUMNS];

  void load(const mma::Tile& tile) {
    constexpr uint32_t A = 0, B = 4096;  // addresses in shared memory
    std::memset(this, 0, sizeof *this);
    descriptor_a = tcgen05::matrix_descriptor(A);
    descriptor_b = tcgen05::matrix_descriptor(B);
    instruction = INSTRUCTION;
    d_column = D_COLUMN;
    sa_column = SA_COLUMN;
    sb_column = SB_COLUMN;
    for (uint32_t i = 0; i < mma::BYTES; ++i) {
      for (uint32_t m = 0; m < mma::ROWS; ++m) shared[A + tcgen05::offset(m, i)] = tile.a[m][i];
      for (uint32_t n = 0; n < mma::COLUMNS; ++n) shared[B + tcgen05::offset(n, i)] = tile.b[n][i];
    }
    for (uint32_t lane = 0; lane < 128; ++lane) {
      for (uint32_t n = 0; n < mma::COLUMNS; ++n) tensor[lane][D_COLUMN + n] = tile.c[lane][n];
      for (uint32_t i = 0; i < 4; ++i) tensor[lane][SA_COLUMN + i] = scale_a(tile, lane, i);
      tensor[lane][SB_COLUMN] = scale_b(tile, lane);
    }
  }
};
#endif

int main(int argc, char** argv) {
  Report report("mma-sm100", argc, argv);
  return mma::run(report, [&](const mma::Tile* tiles, int count, uint32_t* words) {
#ifdef __CUDACC__
    multiply<<<count, 128>>>(tiles, words);
    check(cudaGetLastError(), "launching the multiplication");
    check(cudaDeviceSynchronize(), "the multiplication");
#else
    mma::simulate(tiles, count, words);
    if (report.text("dump", "").empty()) return;
    std::vector<Image> images(count);
    for (int i = 0; i < count; ++i) images[i].load(tiles[i]);
    report.file("images.bin", images);
#endif
  });
}
