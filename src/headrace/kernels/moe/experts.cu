// The sparse feed-forward of few tokens in one launch, with what stands around it in a layer: routing, gate and up, down, their weighted sum,
// the residual, and half of the norm that follows. Weights are read once for up to eight tokens of an expert.
//
//   y[t] = residual[t] + sum over the experts e of t: p[t, e] down[e] (act(gate[e] x) (up[e] x)),  x = x[t] * rstd[t]
//   scaled = y * scale,  sums: of y^2, a partial one for each 16 columns
//
// One program a processor. Each routes all tokens for itself, so that there is no launch for it. Then it has an even share of the strips of
// gate and up (8 columns of both, of one entry: an expert and up to eight of its tokens), later 16 columns of the result for all entries. Its
// warps share K; what they found meets in shared memory.
//
// Who wants an entry's inner values for down waits until all of its strips are there; nobody waits for all programs. Memory is not idle
// meanwhile: each warp has a ring of STAGES pieces of weights on their way, in the order in which it will want them, and the first of down
// follow the last of gate and up without a gap.
//
// mma.m16n8k16: 16 rows of weights (gate's 8 and up's that belong to them, or 16 of down), 8 tokens. A warp copies what it will multiply itself,
// so none waits for others' copies. In bfloat16 a lane takes 16 bytes of a row, and K is permuted alike in x; codes lie as packed.cuh says, and
// so do inner values, 128 after 128.
//
// Behind matrix.cuh, early.cuh, activation.cuh, packed.cuh where there are codes (BITS, SETS, ZEROS, FLOATS), experts_shape.cuh,
// experts_routing.cuh, experts_weights.cuh and experts_before.cuh. Given from outside: PROGRAMS, EXPERTS, TOP_K, RENORMALIZE, HIDDEN, INNER,
// TOKENS (at most), KIND, ATTENDED (inputs of attention's last product, if that and the router's are made here, too; or 0), EIGHT (inputs are
// rounded to 1: FP8, 2: int8; 0: as they are), EACH (elements of one scale of those; 0: a row), POWERS.
__device__ __forceinline__ void load_x(u32 *v, const Params &p, const Shared &s, int token, int step, bool rounds) {
  if (ATTENDED) return load_heard(v, s, token, step);
  load_row(v, p.x + (u64)token * HIDDEN + step * 128);
  if (EIGHT) {  // of rows as a norm leaves them
#pragma unroll
    for (int i = 0; i < 16; i++) v[i] = pack(low(v[i]) * s.rstd[token], high(v[i]) * s.rstd[token]);
    if (rounds) round_inputs(v, s.x_unit[token]);
  }
}
__device__ __forceinline__ int place_of(int column) {  // of an inner value, as lanes will read it
#ifdef BITS
  int k = column % 128;
  return column - k + k % 8 / 2 * 32 + k / 16 * 4 + k % 16 / 8 * 2 + k % 2;
#else
  return column;
#endif
}
// Of a strip: four warps, a lane one of each four sums over K (two of gate, the two of up that belong to them).
__device__ __forceinline__ void finish_strip(const Params &p, const Shared &s, const float (*parts)[32][4], int entry, int strip, float unit) {
  int at = threadIdx.x % 128, g = at / 16, pair = s.pair[entry][at / 4 % 4 * 2 + at % 2];
  float sum = 0;
#pragma unroll
  for (int w = 0; w < SHARERS; w++) sum += ((const float *)parts[w])[at];
  sum = wide(narrow(sum * unit * (EIGHT || pair == NONE ? 1 : s.rstd[pair / TOP_K])));
  float up = __shfl_xor_sync(~0u, sum, 2);
  if (at % 4 < 2 && pair != NONE) p.inner[(u64)pair * INNER + place_of(strip * 8 + g)] = narrow(act(sum) * up);
}
__device__ __forceinline__ void units_of(float (&unit)[2], const float *units, int tiles, int expert, int row) {  // of a lane's two rows
#ifdef BITS
  const float *at = units + (u64)expert * tiles * 64 + row * 16 + threadIdx.x % 32 / 4;
  unit[0] = at[0], unit[1] = at[8];
#else
  unit[0] = unit[1] = 1;
#endif
}
__device__ __forceinline__ void load_inner(u32 *v, const Params &p, int pair, int step) {
  const u16 *from = p.inner + (u64)pair * INNER + step * 128;
  int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 4; i++) {
#ifdef BITS
    if (pair != NONE) seen(v + 4 * i, from + t * 32 + i * 8);
#else
    if (pair != NONE) seen(v + 4 * i, from + i * 32 + t * 8);
#endif
    else v[4 * i] = v[4 * i + 1] = v[4 * i + 2] = v[4 * i + 3] = 0;
  }
}
__device__ __forceinline__ void tell(u32 *done, int strips) {  // a thread, for its program: so many more of an entry are there
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(done), "r"(strips) : "memory");
}
__device__ __forceinline__ u32 told(const u32 *done) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(done) : "memory");
  return v;
}
__device__ __forceinline__ void await(const u32 *done, int entry, int entries, int &complete) {  // a warp; complete: entries before this are
  while (entry >= complete) {
    int mine = complete + threadIdx.x % 32;
    u32 missing = __ballot_sync(~0u, mine >= entries || told(done + mine) != STRIPS_1);
    complete += missing ? __ffs(missing) - 1 : 32;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(const __grid_constant__ Params p) {
  Shared &s = *(Shared *)memory;
  Meeting &meeting = *(Meeting *)(memory + BESIDE - sizeof(Meeting));
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  u32 ring = (u32)__cvta_generic_to_shared(memory + BESIDE) + warp * STAGES * STAGE;
  for (int i = thread; i < EXPERTS; i += THREADS) s.members[i] = 0;
  Before before;
  if (ATTENDED) before.ask(p, s, ring, warp, lane);
  __syncthreads();
  wait_for_before();
  u64 launch = *(volatile u64 *)p.met / PROGRAMS + 1;  // whoever is through with gate and up by now, this program is not
  u32 *done = p.done + launch % 2 * MOST_ENTRIES;
  if (blockIdx.x == PROGRAMS - 1) {
    for (int i = thread; i < MOST_ENTRIES; i += THREADS) p.done[(launch + 1) % 2 * MOST_ENTRIES + i] = 0;
  }
  u16 logits[EACH_LANE];
  if (ATTENDED) {
    before.add_output(p, s, meeting.parts[0][0], ring, launch, warp, lane);
    before.route(p, s, launch, warp, lane);
    before.load_logits(logits, p, launch, warp, lane);
  } else {
    load_logits(logits, p, warp, lane);  // on their way together with squares
    add_squares(p, s, warp, lane);
  }
  for (int token = warp; token < p.tokens; token += WARPS) {
    route(s, logits, token, lane);
    if (TOKENS > WARPS) load_logits(logits, p, token + WARPS, lane);
  }
  __syncthreads();
  if (warp == 0) list_entries(s, lane);
  if (thread >= 64 && thread - 64 < p.tokens) s.rstd[thread - 64] = rstd_of(p, s, thread - 64);
  __syncthreads();
  int strips = s.entries * STRIPS_1, first = strips * blockIdx.x / PROGRAMS, count = strips * (blockIdx.x + 1) / PROGRAMS - first, slot = 0;
  Ahead ahead(p, s, ring, first, count);
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) ahead.ask();
  list_pairs(s);
  if (EIGHT && !EACH) {  // the greatest of each row
    for (int token = g; token < (p.tokens + 7) / 8 * 8; token += 8) {
      float peak = 0;
      for (int step = warp; step < STEPS_1; step += WARPS) {
        u32 v[16];
        load_x(v, p, s, min(token, p.tokens - 1), step, false);
        peak = fmaxf(peak, peak_of(v));
      }
      peak = most<1, 2>(peak);
      if (t == 0) s.peak[warp][token] = peak;
    }
    __syncthreads();
    if (thread < p.tokens) {
      float peak = 0;
      for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, s.peak[w][thread]);
      s.x_unit[thread] = unit_of(peak);
    }
  }
  __syncthreads();

  u32 b[DEEP > 2 ? DEEP : 2][16];
  int entry = first / STRIPS_1, strip = first % STRIPS_1, known = -1, said = 0;
  for (int finished = 0, turn = 0; finished < count; finished += BATCH, turn ^= 1) {
    int own = entry, own_strip = strip + warp / 4;  // that this warp finishes a part of
    if (own_strip >= STRIPS_1) own++, own_strip -= STRIPS_1;
    bool finishes = warp / 4 < BATCH && finished + warp / 4 < count;
    float unit = finishes ? unit_at(p.up_unit, p.up_tiles, s.expert[own] & 0xFFF, own_strip) : 1;
    for (int i = 0; i < BATCH && finished + i < count; i++) {
      if (warp < STEPS_1) {
        if (known != entry) {
          int pair = s.pair[entry][g];
          known = entry;
#pragma unroll
          for (int d = 0; d < DEEP; d++)
            if (warp + WARPS * d < STEPS_1) load_x(b[d], p, s, pair == NONE ? 0 : pair / TOP_K, warp + WARPS * d, true);
        }
        float c[4] = {0, 0, 0, 0};
#pragma unroll
        for (int d = 0; d < DEEP; d++)
          if (warp + WARPS * d < STEPS_1) take_step(c, b[d], ahead, ring, slot);
        *(float4 *)meeting.parts[turn][i][warp][lane] = make_float4(c[0], c[1], c[2], c[3]);
      }
      if (++strip == STRIPS_1) strip = 0, entry++;
    }
    __syncthreads();
    int end = ((first + said) / STRIPS_1 + 1) * STRIPS_1 - first;  // of the entry of which strips were finished last
    if (finished >= end) {  // before this turn
      if (thread == 0) tell(done + (first + said) / STRIPS_1, end - said);
      said = end;
    }
    if (finishes) finish_strip(p, s, meeting.parts[turn][warp / 4], own, own_strip, unit);
  }
  __syncthreads();
  let_next_in();
  if (thread == 0) {
    for (int end; said < count; said = end) {
      end = min(((first + said) / STRIPS_1 + 1) * STRIPS_1 - first, count);
      tell(done + (first + said) / STRIPS_1, end - said);
    }
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(p.met) : "memory");
  }
  bool projects = ATTENDED && p.later;
  if (blockIdx.x >= STRIPS_2 && !projects) return;
  int complete = 0;
  if (EIGHT && !EACH) await(done, s.entries - 1, s.entries, complete);
  if (EIGHT && !EACH) {
    for (int pair = warp; pair < p.tokens * TOP_K; pair += WARPS) {
      u32 v[(INNER + 255) / 256][4];
#pragma unroll
      for (int i = 0; i < (INNER + 255) / 256; i++) {
        v[i][0] = v[i][1] = v[i][2] = v[i][3] = 0;
        if (i * 256 + lane * 8 < INNER) seen(v[i], p.inner + (u64)pair * INNER + i * 256 + lane * 8);
      }
      float peak = 0;
#pragma unroll
      for (int i = 0; i < (INNER + 255) / 256 * 4; i++) peak = fmaxf(peak, fmaxf(fabsf(low(v[i / 4][i % 4])), fabsf(high(v[i / 4][i % 4]))));
      peak = most<1, 16>(peak);
      if (lane == 0) s.unit[pair] = unit_of(peak);
    }
    __syncthreads();
  }

  float *own_sums = (float *)meeting.sums + warp * TOKENS * 16;
  for (int column = blockIdx.x; column < STRIPS_2; column += PROGRAMS) {
    for (int i = lane; i < p.tokens * 16; i += 32) own_sums[i] = 0;
    __syncwarp();
    int entry = warp / STEPS_2, step = warp % STEPS_2;
    float unit[2][2];
    auto bring = [&](u32 *v, float (&unit)[2]) {  // for the step that comes
      if (entry >= s.entries) return;
      await(done, entry, s.entries, complete);
      load_inner(v, p, s.pair[entry][g], step);
      units_of(unit, p.down_unit, p.down_tiles, s.expert[entry] & 0xFFF, column);
    };
    auto take = [&](u32 *v, const float (&unit)[2], int now) {
      float c[4] = {0, 0, 0, 0};
      if (EIGHT) {
        int pair = s.pair[now][g];
        round_inputs(v, EACH ? 0 : s.unit[pair == NONE ? 0 : pair]);
      }
      take_step(c, v, ahead, ring, slot);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int pair = s.pair[now][2 * t + e];
        if (pair == NONE) continue;
        float weight = s.weight[pair], *to = own_sums + pair / TOP_K * 16 + g;
        to[0] += c[e] * unit[0] * weight;
        to[8] += c[2 + e] * unit[1] * weight;
      }
      __syncwarp();
    };
    auto next = [&] {
      entry += WARPS / STEPS_2, step += WARPS % STEPS_2;
      if (step >= STEPS_2) step -= STEPS_2, entry++;
    };
    bring(b[0], unit[0]);
    while (entry < s.entries) {
      int now = entry;
      next();
      bring(b[1], unit[1]);
      take(b[0], unit[0], now);
      if (entry >= s.entries) break;
      now = entry;
      next();
      bring(b[0], unit[0]);
      take(b[1], unit[1], now);
    }
    __syncthreads();
    for (int i = thread; i < (p.tokens + 1) / 2 * 32; i += THREADS) {  // whole warps
      int token = i / 16, at = column * 16 + i % 16;
      float total = 0, now = 0;
      if (token < p.tokens) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += meeting.sums[w][token][i % 16];
        u64 to = (u64)token * HIDDEN + at;
        u16 y = narrow(total + (ATTENDED ? s.stream[token][i % 16] : wide(seen(p.residual + to))));
        now = wide(y);
        p.y[to] = y;
        if (!projects) p.scaled[to] = narrow(now * (p.scale_bytes == 4 ? ((const float *)p.scale)[at] : wide(((const u16 *)p.scale)[at])));
      }
      if (projects) {
        u32 pair = __float_as_uint(now) >> 16 | __float_as_uint(__shfl_xor_sync(~0u, now, 1)) & 0xffff0000u;
        if (i % 2 == 0 && token < p.tokens) say(p.handed + token * (HIDDEN / 2) + at / 2, launch, pair);
        continue;
      }
      float squared = sum_of<1, 8>(now * now);
      if (i % 16 == 0 && token < p.tokens) p.sums[column * p.tokens + token] = squared;
    }
    __syncthreads();
  }
  if (projects) {
    __syncthreads();
    project(p, s, meeting, ahead, ring, slot, launch);
  }
}
