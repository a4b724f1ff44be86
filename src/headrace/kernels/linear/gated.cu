// A gate and what it gates as one product: y = act(x Wᵀ) ⊙ (x Vᵀ) for 65 rows and more, W and V one behind the other in one matrix.
//
// One program a processor, each with every so-manieth tile of ROWS rows and COLUMNS / 2 columns of y. One thread asks the copy engine for
// DEPTH of K at a time of x, W and V into a ring of STAGES; two groups of four warps multiply (wgmma), 64 rows each, over all of K in its
// order: the sums of a row do not depend on the others. The left half of a tile is gate and the right half what it gates, so both meet in
// one thread. While a tile is finished, the first stages of the next are under way.
//
// Behind gated_end.cuh. Given from outside: COLUMNS, STAGES, KIND, and mma(), the instruction for COLUMNS.
extern "C" __global__ void __launch_bounds__(384, 1)
gated(const __grid_constant__ Map x_map, const __grid_constant__ Map w_map, u16 *y, int tokens, int outs, int ins) {
  extern __shared__ unsigned char raw[];
  u32 base = (shared(raw) + 1023) & ~1023u;
  u32 x_at = base, w_at = base + STAGES * X_BYTES, full = w_at + STAGES * W_BYTES, empty = full + 8 * STAGES;
  int group = threadIdx.x / 128, steps = (ins + DEPTH - 1) / DEPTH, down = (tokens + ROWS - 1) / ROWS;
  int tiles = down * ((outs + OUTS - 1) / OUTS);  // those of one column follow each other: they share W in the second-level cache
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) { make(full + 8 * s, 1); make(empty + 8 * s, 2); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int s = 0, phase = 1;
      for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int row = tile % down * ROWS, column = tile / down * OUTS;
        for (int k = 0; k < steps; k++) {
          u32 bar = full + 8 * s, x = x_at + s * X_BYTES, w = w_at + s * W_BYTES;
          wait(empty + 8 * s, phase);
          expect(bar, X_BYTES + W_BYTES);  // what lies beyond a matrix arrives as zeros
          load(w, &w_map, k * DEPTH, column, bar);
          load(w + W_BYTES / 2, &w_map, k * DEPTH, outs + column, bar);
          load(x, &x_map, k * DEPTH, row, bar);
          load(x + X_BYTES / 2, &x_map, k * DEPTH, row + ROWS / 2, bar);
          if (++s == STAGES) { s = 0; phase ^= 1; }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int s = 0, phase = 0, last = 0, thread = threadIdx.x - 128;
    float c[COLUMNS / 2];
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      for (int k = 0; k < steps; k++) {
        wait(full + 8 * s, phase);
        begin();
        u64 x = described(x_at + s * X_BYTES + (group - 1) * (X_BYTES / 2)), w = described(w_at + s * W_BYTES);
#pragma unroll
        for (int i = 0; i < DEPTH / 16; i++) mma(c, x + 2 * i, w + 2 * i, k + i);
        commit();
        if (k) {
          finished<1>();
          if (thread % 128 == 0) arrive(empty + 8 * last);  // it has only been read: nothing is to be released
        }
        last = s;
        if (++s == STAGES) { s = 0; phase ^= 1; }
      }
      finished<0>();
      if (thread % 128 == 0) arrive(empty + 8 * last);
      hold(c);
      finish(c, y, tile % down * ROWS + thread / 32 * 16 + thread % 32 / 4, tile / down * OUTS, tokens, outs);
    }
  }
}
