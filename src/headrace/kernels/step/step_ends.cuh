// Of the decode step: what follows a product (norm, rotation, cache, gate, residual), and one operator whole.

// --- what follows a product

struct Stream { float first[HALVES], second[HALVES]; };  // the residual: rows t and t + 4 of this warp's tile, sequence g
struct Ahead { float first[HALVES], second[HALVES]; };   // what a tile's end needs: weights of the norm that follows, or cosine and sine

template <bool ADDS> __device__ __forceinline__ void look_ahead(Ahead& a, const Params& p, const Shared& s, const bf16* scale, int phase, int tile, int lane) {
  int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    a.first[h] = a.second[h] = 0.0f;
    if (ADDS) {
      a.first[h] = widen(__ldg(scale + tile * 8 + t));
      a.second[h] = widen(__ldg(scale + tile * 8 + t + 4));
    } else if (phase == QKV_P) {
      const float* at = p.cos_sin + (long long)s.position[g + 8 * h] * D + tile % (D / 8) * 4 + t;
      a.first[h] = __ldg(at);
      a.second[h] = __ldg(at + D / 2);
    }
  }
}

// Scales of the rows of a warp's tile: they come while it is multiplied, past the registers.
__device__ __forceinline__ void fetch_units(Shared& s, int layer, int phase, int tile, int warp, int lane) {
  const float* from = (const float*)s.weights[layer][UNITS + phase];
  if (lane < 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address(&s.units[warp][lane])), "l"(from + row_of(phase, tile, lane)) : "memory");
}

// y = W x done; the warp's lane has rows t and t + 4 for sequence g of one tile.
template <int P> __device__ __forceinline__ void finish(const Params& p, Shared& s, int layer, int tile, int g, int t, int half, float first, float second,
                                                        Stream& stream, const Ahead& ahead, u32 live, int sum_at = 0) {
  int row = g + 8 * half;
  bool here = (live >> row) & 1;
  if constexpr (P == QKV_P) {
    int head = tile / (D / 8), j = tile % (D / 8);
    float rstd = s.rstd[row];
    first *= rstd; second *= rstd;
    if (!here) return;
    if (head < HQ + HK) {
      int d = j * 4 + t;
      float cos = ahead.first[half], sin = ahead.second[half];
      bf16 a = narrow(first * cos - second * sin), b = narrow(second * cos + first * sin);
      bf16* at = handed(p, layer, QKV_AT) + row * WIDTH + head * D + d;
      at[0] = a; at[D / 2] = b;
      if (!KV && head >= HQ && s.slot[row] >= 0) {  // codes are written by those that attend to them: a scale is of a whole head
        at = (bf16*)token_at(p, layer, s.slot[row] / BLOCK, head - HQ, s.slot[row]) + d;
        at[0] = a; at[D / 2] = b;
      }
    } else {
      bf16 a = narrow(first), b = narrow(second);
      bf16* at = handed(p, layer, QKV_AT) + row * WIDTH + head * D + j * 8 + t;
      at[0] = a; at[4] = b;
      if (!KV && s.slot[row] >= 0) {
        at = (bf16*)token_at(p, layer, s.slot[row] / BLOCK, head - HQ, s.slot[row]) + j * 8 + t;
        at[0] = a; at[4] = b;
      }
    }
  } else if constexpr (P == UP_P) {
    float rstd = s.rstd[row];
    first *= rstd; second *= rstd;
    if (here) handed(p, layer, INNER_AT)[row * INNER + tile * 4 + t] = narrow(first / (1.0f + __expf(-first)) * second);
  } else {
    stream.first[half] += first; stream.second[half] += second;
    first = stream.first[half]; second = stream.second[half];
    if (here && sum_at >= 0) {
      bf16* at = handed(p, layer, sum_at) + row * HIDDEN + tile * 8 + t;
      at[0] = narrow(first * ahead.first[half]); at[4] = narrow(second * ahead.second[half]);
    }
    float sum = first * first + second * second;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (t == 0) s.sums[threadIdx.x / 32][row] = sum;
  }
}

// The sums of squares of all programs: each warp of one sequence (and another). ``squares`` was looked at before.
constexpr int SQUARES = (GRID + 31) / 32;
struct Squares { float v[HALVES][SQUARES]; };
__device__ __forceinline__ void look_at_squares(Squares& found, const float* from, int count, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < HALVES; ++h)
#pragma unroll
    for (int i = 0; i < SQUARES; ++i) found.v[h][i] = i * 32 + lane < count ? lookf(from + (i * 32 + lane) * ROWS + warp + 8 * h) : 0.0f;
}
__device__ __forceinline__ void add_squares(Squares& found, const Params& p, Shared& s, const float* from, int warp, int lane) {
  Patience patience;
  bool lacking;
  do {
    lacking = false;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
#pragma unroll
      for (int i = 0; i < SQUARES; ++i)
        if (__float_as_uint(found.v[h][i]) == NOTHING) { found.v[h][i] = lookf(from + (i * 32 + lane) * ROWS + warp + 8 * h); lacking = true; }
    lacking = __any_sync(~0u, lacking);
    if (lacking) patience.spend();
  } while (lacking);
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < SQUARES; ++i) sum += found.v[h][i];
#pragma unroll
    for (int x = 16; x > 0; x /= 2) sum += __shfl_xor_sync(~0u, sum, x);
    if (lane == 0) s.rstd[warp + 8 * h] = rsqrtf(sum / HIDDEN + p.eps);
  }
}

__device__ __forceinline__ void leave_squares(float* to, const Shared& s, int tiles, int lane) {  // the first warp, after a barrier
  if (lane < ROWS) {
    float sum = 0.0f;
    for (int w = 0; w < tiles; ++w) sum += s.sums[w][lane];
    to[blockIdx.x * ROWS + lane] = sum;
  }
}

// Operators without a norm before them add to the residual, the others do not.
__device__ __forceinline__ void end_group(const Params& p, Shared& s, int layer, int phase, int first_tile, int count, Stream& stream, const Ahead& ahead,
                                          u32 live, int warp, int lane) {
  if (ITEM == 1) asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  if (warp < count) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      float first, second;
      whole(s, deals[phase].shift, warp, half, lane, first, second);
      int tile = first_tile + warp, g = lane / 4, t = lane % 4;
      if (ITEM == 1) first *= s.units[warp][t], second *= s.units[warp][t + 4];
      if (phase == QKV_P) finish<QKV_P>(p, s, layer, tile, g, t, half, first, second, stream, ahead, live);
      else if (phase == UP_P) finish<UP_P>(p, s, layer, tile, g, t, half, first, second, stream, ahead, live);
      else finish<DOWN_P>(p, s, layer, tile, g, t, half, first, second, stream, ahead, live,
                          phase == OUT_P ? MIDDLE_AT : layer + 1 < LAYERS ? NEXT_AT : -1);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void product(const Params& p, Shared& s, Ring& ring, int layer, int phase, Stream& stream, u32 live, int warp, int lane) {
  const Deal& d = deals[phase];
  const bool adds = phase == OUT_P || phase == DOWN_P;
  const int first_tile = s.first[phase], tiles = s.tiles[phase], team = warp >> d.shift, source = phase == QKV_P ? layer - 1 : layer;
  const float* squares_at = (const float*)handed(p, source, d.squares_at);
  const bf16* from = handed(p, source, d.x_at) + (warp & ((1 << d.shift) - 1)) * d.slice;
  Ahead ahead;
  if (adds) {
    const bf16* scale = phase == OUT_P ? s.weights[layer][5] : layer + 1 < LAYERS ? s.weights[layer + 1][4] : p.final_norm;
    look_ahead<true>(ahead, p, s, scale, phase, first_tile + min(warp, tiles - 1), lane);
  } else {
    look_ahead<false>(ahead, p, s, nullptr, phase, first_tile + min(warp, tiles - 1), lane);
  }
  if (ITEM == 1) fetch_units(s, layer, phase, first_tile + min(warp, tiles - 1), warp, lane);
  if (phase == QKV_P) prefetch_keys(p, s, layer);
  Squares squares;
  int group = 0, chunk = 0;
#pragma unroll 1
  while (group < tiles) {  // one x at a time: for all tiles, or where it does not fit into registers, for a chunk of a group
    Operand operand;
    load_x(operand, from + chunk * d.kc, d, team < tiles ? live : 0, lane);
    settle_x(operand, from + chunk * d.kc, d, lane);
    if (ITEM == 1) pair_x(operand);
    look_at_squares(squares, squares_at, adds ? 0 : GRID, warp, lane);
#pragma unroll 1
    do {
      int count = min(GROUP_TILES, tiles - group);
#pragma unroll 1
      for (int tile = team; tile < count; tile += WARPS >> d.shift) {
        float acc[4];
        wait_full(ring.full + ring.slot, ring.parity);
        multiply(acc, operand, ring.base + ring.slot * SLOT_BYTES, d, lane);
        __syncwarp();
        refill(ring, s, warp, lane);
        if (++ring.slot == SLOTS) { ring.slot = 0; ring.parity ^= 1; }
        keep_partial(s, acc, chunk > 0, tile, warp, lane);
      }
      if (phase == DOWN_P && group + chunk == 0) forget(p, layer - 1);
      if (++chunk == d.chunks) {
        if (!adds && group == 0) add_squares(squares, p, s, squares_at, warp, lane);
        end_group(p, s, layer, phase, first_tile + group, count, stream, ahead, live, warp, lane);
        chunk = 0;
        group += GROUP_TILES;
        if (ITEM == 1 && group < tiles) fetch_units(s, layer, phase, first_tile + min(group + warp, tiles - 1), warp, lane);
        if (phase == QKV_P && group < tiles) look_ahead<false>(ahead, p, s, nullptr, phase, first_tile + min(group + warp, tiles - 1), lane);
      }
    } while (d.chunks == 1 && group < tiles);
  }
  if (adds && warp == 0) {
    bool last = phase == DOWN_P && layer + 1 == LAYERS;
    leave_squares(last ? final_squares(p) : (float*)handed(p, layer, phase == OUT_P ? MIDDLE_SQUARES_AT : NEXT_SQUARES_AT), s, tiles, lane);
  }
}
