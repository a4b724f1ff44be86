// The decode step itself; step_types.cuh says what it is and how it is put together.

// --- the step

template <int P> __device__ __forceinline__ void deal(Shared& s) {
  s.first[P] = (int)((long long)blockIdx.x * Shape<P>::TILES / GRID);
  s.tiles[P] = (int)((long long)(blockIdx.x + 1) * Shape<P>::TILES / GRID) - s.first[P];
}

// The rings and their first weights: all of it is of this launch alone, so that it may begin while the kernel before still runs.
__device__ __forceinline__ void fill_rings(const Params& p, Shared& s, Ring& ring, int warp, int lane) {
  for (int i = threadIdx.x; i < LAYERS * FIELDS; i += THREADS) (&s.weights[0][0])[i] = ((const bf16* const*)p.layers)[i];
  if (threadIdx.x == 0) { deal<0>(s); deal<1>(s); deal<2>(s); deal<3>(s); }
  if (lane < SLOTS) barrier_init(&s.full[warp][lane]);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  ring.base = address(memory) + SHARED_BYTES + warp * SLOTS * SLOT_BYTES;
  ring.full = s.full[warp];
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(ring.policy));
  ring.layer = ring.phase = ring.group = ring.chunk = ring.fill = ring.slot = 0;
  ring.parity = 0;
  ring.tile = warp >> deals[0].shift;
  settle_ring(ring, s, warp);
#pragma unroll 1
  for (int i = 0; i < SLOTS; ++i) {
    refill(ring, s, warp, lane);
  }
}

// The first of what kernels before this one write.
__device__ __forceinline__ void read_rows(const Params& p, Shared& s) {
  int row = threadIdx.x;
  if (row >= ROWS) return;
  s.context[row] = row < p.batch ? max(p.context[row], 0) : 0;
  s.slot[row] = row < p.batch ? (int)p.slots[row] : -1;
  s.position[row] = row < p.batch ? (int)p.positions[row] : 0;
}

// Rows go on from the row before where that writes a key into a block of theirs: such a block is one sequence's alone.
__device__ __forceinline__ void count_drafts(const Params& p, Shared& s) {
  int row = threadIdx.x;
  if (row >= ROWS) return;
  int drafts = 0;
  for (int at = row; at > 0 && s.context[at - 1] > 0 && s.context[at] == s.context[at - 1] + 1; --at, ++drafts) {
    long long block = (s.context[at - 1] - 1) / BLOCK;
    if (p.block_table[at * p.table_stride + block] != p.block_table[(at - 1) * p.table_stride + block]) break;
  }
  s.drafts[row] = drafts;
}

// Items of attention: the shortest span for which every program has one at most, but not less than SPAN keys.
__device__ __forceinline__ void cut_keys(Shared& s) {  // one thread
  int all = 0, items;
  for (int row = 0; row < ROWS; ++row) all += s.context[row];
  int span = max(SPAN, (all * HK / GRID + 127) / 128 * 128);
  for (;; span += 128) {
    items = 0;
    int most = 0;
    for (int row = 0; row < ROWS; ++row) { items += parts_of(s.context[row], span) * HK; most = max(most, s.context[row]); }
    if (items <= GRID || span >= most) break;
  }
  s.span = span;
  s.items = items;
}

__device__ __forceinline__ void embed(const Params& p, Shared& s, Stream& stream, u32 live, int warp, int lane) {
  int first_tile = s.first[DOWN_P], tiles = s.tiles[DOWN_P], g = lane / 4, t = lane % 4;
  if (warp < tiles) {
    int at = (first_tile + warp) * 8 + t;
    Ahead ahead;
    look_ahead<true>(ahead, p, s, s.weights[0][4], DOWN_P, first_tile + warp, lane);
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      int row = g + 8 * half;
      bool here = (live >> row) & 1;
      const bf16* from = p.embedding + (here ? p.token_ids[row] : 0) * HIDDEN + at;
      stream.first[half] = stream.second[half] = 0.0f;
      finish<DOWN_P>(p, s, -1, first_tile + warp, g, t, half, here ? widen(from[0]) : 0.0f, here ? widen(from[4]) : 0.0f, stream, ahead, live, NEXT_AT);
    }
  }
  if (threadIdx.x == THREADS - 1) cut_keys(s);
  __syncthreads();
  if (warp == 0) leave_squares((float*)handed(p, -1, NEXT_SQUARES_AT), s, tiles, lane);
}

__device__ __forceinline__ void last_norm(const Params& p, Shared& s, const Stream& stream, u32 live, int warp, int lane) {
  int first_tile = s.first[DOWN_P], tiles = s.tiles[DOWN_P], g = lane / 4;
  int at = (first_tile + warp) * 8 + lane % 4;
  float scale0 = 0.0f, scale1 = 0.0f;
  if (warp < tiles) { scale0 = widen(__ldg(p.final_norm + at)); scale1 = widen(__ldg(p.final_norm + at + 4)); }
  const float* from = final_squares(p);
  Squares squares;
  look_at_squares(squares, from, GRID, warp, lane);
  add_squares(squares, p, s, from, warp, lane);
  __syncthreads();
  if (warp < tiles)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      int row = g + 8 * half;
      if (row >= p.batch) continue;
      bool here = (live >> row) & 1;
      p.out[row * HIDDEN + at] = here ? narrow(stream.first[half] * s.rstd[row] * scale0) : 0;
      p.out[row * HIDDEN + at + 4] = here ? narrow(stream.second[half] * s.rstd[row] * scale1) : 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ Params p) {
  Shared& s = *(Shared*)memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring;
  Stream stream;
  fill_rings(p, s, ring, warp, lane);
  wait_for_before();
  read_rows(p, s);
  forget_final(p);
  __syncthreads();
  u32 live = 0;
  for (int row = 0; row < ROWS; ++row) live |= (s.context[row] > 0 ? 1u : 0u) << row;
  count_drafts(p, s);
  embed(p, s, stream, live, warp, lane);
#pragma unroll 1
  for (int layer = 0; layer < LAYERS; ++layer)
#pragma unroll 1
    for (int phase = 0; phase < 4; ++phase) {
      if (phase == OUT_P) {
        attention(p, s, layer, warp, lane);
      }
      if (layer == LAYERS - 1 && phase == DOWN_P) let_next_in();  // it waits for this launch's end, but its own weights can come
      product(p, s, ring, layer, phase, stream, live, warp, lane);
    }
  last_norm(p, s, stream, live, warp, lane);
  forget_last(p);
}
