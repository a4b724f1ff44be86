// Attention of sequences with many queries over paged keys and values (FlashAttention-3, Shah et al. 2024, for Hopper).
//
// A tile is 64 · WGS pairs of a query and a head of one KV head's group. One warp asks the copy engine for its queries and for 128 keys and
// values at a time, the last keys first, into rings of STAGES; WGS groups of four warps have 64 pairs each: scores by wgmma into registers,
// the softmax there, weights from registers into the second product. The groups take turns at multiplying, so that one takes powers while
// another multiplies. Programs fetch tiles by a ticket: the last queries of a sequence, which see most keys, go first, and the KV heads of
// the same queries side by side.
//
// No row looks for its highest score but where it is masked: powers of 2 are relative to a base, the highest of its first tile, until their
// sum grows beyond LARGEST (FlashDecoding++, Hong et al. 2024, has one base for all rows). Then the tile is weighed again with a higher base.
//
// ``lse`` [tokens, heads], if it is given, gets the log of each row's sum of exponentials, as which parts of keys are merged.
//
// Given from outside: DIM, GROUP, WGS, STAGES, and the instructions scores() and weighted().
#define KEYS 128
#define ROWS (64 * WGS)
#define HALVES (DIM / 64)               // rows of 64 elements are what the copy engine swizzles
#define QUERIES (ROWS / GROUP)          // rows beyond QUERIES · GROUP are nobody's
#define Q_BYTES (ROWS * DIM * 2)
#define KV_BYTES (KEYS * DIM * 2)
#define LARGEST 1.0995116e12f           // 2^40: sums of a tile, of values, of tiles stay far below what float32 holds
#define NOTHING __int_as_float(0xff800000)
#define ALL (WGS + 1)                   // named barriers: 1 … WGS are turns, then the one for all groups
struct Item { int token, live, head, tiles, lowest, context, pad0, pad1; };  // token < 0: no more; live: queries; lowest: position of the first

__device__ __forceinline__ void load_heads(u32 to, const Map *map, int column, int head, int token, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
    ::"r"(to), "l"(map), "r"(bar), "r"(column), "r"(head), "r"(token) : "memory");
}
__device__ __forceinline__ void clear(u32 at) { asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory"); }
__device__ __forceinline__ void turn(int name) { asm volatile("bar.sync %0, 256;" ::"r"(name) : "memory"); }
__device__ __forceinline__ void pass(int name) { asm volatile("bar.arrive %0, 256;" ::"r"(name) : "memory"); }
__device__ __forceinline__ u64 by_column(u32 at) {  // as ``described``, across what is summed over; halves of a row lie KEYS rows apart
  return (u64)((at & 0x3FFFF) >> 4) | ((u64)(KEYS * 128 / 16) << 16) | (64ull << 32) | (1ull << 62);
}
__device__ __forceinline__ float power(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Weights of 64 x 128 scores, two rows of which are a thread's, as the second product reads them: powers of 2 relative to ``base``, a row's,
// and their sums. False: a sum is beyond LARGEST or no number, and nothing was added up.
__device__ __forceinline__ bool weigh(u32 (&p)[32], const float (&s)[64], const float (&base)[2], float (&mass)[2], float scale) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    int r = i % 4 / 2;
    float low = power(fmaf(s[i], scale, -base[r])), high = power(fmaf(s[i + 1], scale, -base[r]));
    sum[2 * r] += low; sum[2 * r + 1] += high;
    p[i / 2] = pack(low, high);
  }
  float first = sum[0] + sum[1], second = sum[2] + sum[3];
  if (!__all_sync(~0u, first <= LARGEST && second <= LARGEST)) return false;
  mass[0] += first; mass[1] += second;
  return true;
}

// The same relative to the highest score so far, the new base; what was summed up is lowered to it.
__device__ __forceinline__ void rebase(
    u32 (&p)[32], const float (&s)[64], float (&o)[DIM / 2], float (&base)[2], float (&mass)[2], float scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
    for (int j = 1; j < 16; j++) most = fmaxf(most, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale, base[r]);
    float shift = most == NOTHING ? 0.0f : most, keep = power(base[r] - shift), sum = 0.0f;  // a row that has seen nothing yet
    base[r] = most;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      int i = 4 * j + 2 * r;
      float low = power(fmaf(s[i], scale, -shift)), high = power(fmaf(s[i + 1], scale, -shift));
      sum += low + high;
      p[i / 2] = pack(low, high);
    }
    mass[r] = mass[r] * keep + sum;
#pragma unroll
    for (int i = 2 * r; i < DIM / 2; i += 4) { o[i] *= keep; o[i + 1] *= keep; }
  }
}

// Of a tile whose first key is ``first``, a row sees keys up to limit[r], counted as they lie for this thread.
__device__ __forceinline__ void hide(float (&s)[64], const int (&limit)[2], int first) {
#pragma unroll
  for (int i = 0; i < 64; i++)
    if (first + i / 4 * 8 + i % 2 > limit[i % 4 / 2]) s[i] = NOTHING;
}

// The warp that loads.
__device__ __forceinline__ void produce(const Map *q_map, const Map *k_map, const Map *v_map, const int *table, const int *query_start,
    const int *context_len, u32 *ticket, u32 q_at, u32 k_at, u32 v_at, u32 bars, Item *item, int sequences, int few, int kv_heads,
    int k_block, int k_head, int v_block, int v_head, int table_row, int shift) {
  const u32 item_full = bars, item_empty = bars + 8, q_full = bars + 16, q_empty = bars + 24, k_full = bars + 32, k_empty = k_full + 8 * STAGES,
            v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES;
  int lane = threadIdx.x % 32, box_shift = min(shift, 7), box = 1 << box_shift;
  int chunk = -32, before = 0, total = 0, start = 0, queries = 0, context = 0, count = 0, upto = 0;  // of the 32 sequences at hand
  int at = blockIdx.x, ks = 0, vs = 0, kp = 1, vp = 1, qp = 1, ip = 1;
  for (;;) {
    int tile = at / kv_heads, kv_head = at - tile * kv_heads;
    while (tile >= before + total) {  // tickets only grow
      before += total;
      chunk += 32;
      if (chunk >= sequences) break;
      int sequence = chunk + lane;
      bool there = sequence < sequences;
      start = there ? query_start[sequence] : 0;
      queries = there ? query_start[sequence + 1] - start : 0;
      context = there ? context_len[sequence] : 0;
      count = queries > few ? (queries + QUERIES - 1) / QUERIES : 0;
      upto = count;
      for (int d = 1; d < 32; d *= 2) { int below = __shfl_up_sync(~0u, upto, d); if (lane >= d) upto += below; }
      total = __shfl_sync(~0u, upto, 31);
    }
    wait(item_empty, ip);
    if (chunk >= sequences) {
      if (lane == 0) {
        if (at == before * kv_heads - 1 + (int)gridDim.x) *ticket = 0;  // the last ticket of all: as the next launch wants it
        item->token = -1;
        arrive(item_full);
      }
      return;
    }
    u32 next = lane == 0 ? atomicAdd(ticket, 1) : 0;
    int who = __ffs(__ballot_sync(~0u, before + upto > tile)) - 1;
    int past = before + __shfl_sync(~0u, upto, who);
    int first = (past - 1 - tile) * QUERIES;  // its queries, the last run first
    int begun = __shfl_sync(~0u, start, who), there = __shfl_sync(~0u, queries, who), length = __shfl_sync(~0u, context, who);
    int lowest = length - there + first, end = min(length, lowest + QUERIES), tiles = end > 0 ? (end + KEYS - 1) / KEYS : 0;
    if (lane == 0) {
      item->token = begun + first; item->live = min(QUERIES, there - first); item->head = kv_head * GROUP;
      item->tiles = tiles; item->lowest = lowest; item->context = length;
      arrive(item_full);
    }
    ip ^= 1;
    const int *blocks = table + (long long)(chunk + who) * table_row;
    int held = -1, block = 0;
    auto bring = [&](int n, const Map *map, u32 to, u32 bar, int block_rows, int head_rows) {
      int parts = min(KEYS >> box_shift, (length - n * KEYS + box - 1) >> box_shift);
      if (lane == 0) expect(bar, (parts << box_shift) * DIM * 2);
#pragma unroll 1
      for (int part = 0; part < parts; part++) {
        int key = n * KEYS + (part << box_shift), index = key >> shift;
        if (index / 32 != held) {
          held = index / 32;
          int mine = held * 32 + lane;
          block = mine << shift < length ? blocks[mine] : 0;
        }
        int row = __shfl_sync(~0u, block, index % 32) * block_rows + kv_head * head_rows + (key & ((1 << shift) - 1));
        if (lane == 0) {
#pragma unroll
          for (int h = 0; h < HALVES; h++) load(to + h * (KEYS * 128) + (part << box_shift + 7), map, h * 64, row, bar);
        }
      }
    };
    auto keys = [&](int n) {
      wait(k_empty + 8 * ks, kp);
      bring(n, k_map, k_at + ks * KV_BYTES, k_full + 8 * ks, k_block, k_head);
      if (++ks == STAGES) { ks = 0; kp ^= 1; }
    };
    auto values = [&](int n) {
      wait(v_empty + 8 * vs, vp);
      bring(n, v_map, v_at + vs * KV_BYTES, v_full + 8 * vs, v_block, v_head);
      if (++vs == STAGES) { vs = 0; vp ^= 1; }
    };
    if (tiles) {
      keys(tiles - 1);
      wait(q_empty, qp);
      qp ^= 1;
      if (lane == 0) {
        expect(q_full, QUERIES * GROUP * DIM * 2);  // what lies beyond the last token arrives as zeros
#pragma unroll
        for (int h = 0; h < HALVES; h++) load_heads(q_at + h * (ROWS * 128), q_map, h * 64, kv_head * GROUP, begun + first, q_full);
      }
#pragma unroll 1
      for (int n = tiles - 2; n >= 0; n--) { keys(n); values(n + 1); }
      values(0);
    }
    at = __shfl_sync(~0u, next, 0) + gridDim.x;
  }
}

extern "C" __global__ void __launch_bounds__(128 * (WGS + 1), 1)
prefill(const __grid_constant__ Map q_map, const __grid_constant__ Map k_map, const __grid_constant__ Map v_map, u16 *out, const int *table,
    const int *query_start, const int *context_len, u32 *ticket, float *lse, int tokens, int sequences, int few, int kv_heads, int k_block,
    int k_head, int v_block, int v_head, int table_row, int shift, float scale) {
  extern __shared__ unsigned char raw[];
  u32 base = (shared(raw) + 1023) & ~1023u;
  const u32 q_at = base, k_at = q_at + Q_BYTES, v_at = k_at + STAGES * KV_BYTES, bars = v_at + STAGES * KV_BYTES;
  const u32 item_full = bars, item_empty = bars + 8, q_full = bars + 16, q_empty = bars + 24, k_full = bars + 32, k_empty = k_full + 8 * STAGES,
            v_full = k_empty + 8 * STAGES, v_empty = v_full + 8 * STAGES, item_at = v_empty + 8 * STAGES;
  Item *item = (Item *)(raw + (item_at - shared(raw)));
  for (int i = threadIdx.x; i < (ROWS - QUERIES * GROUP) * 8 * HALVES; i += blockDim.x) {  // nobody's rows: NaN would be slow
    int h = i % HALVES, at = QUERIES * GROUP * 8 + i / HALVES;
    clear(q_at + h * (ROWS * 128) + at * 16);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (threadIdx.x == 0) {
    make(item_full, 1); make(item_empty, 4 * WGS); make(q_full, 1); make(q_empty, 4 * WGS);
    for (int s = 0; s < STAGES; s++) {
      make(k_full + 8 * s, 1); make(k_empty + 8 * s, 4 * WGS);
      make(v_full + 8 * s, 1); make(v_empty + 8 * s, 4 * WGS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int wg = (int)threadIdx.x / 128 - 1;
  if (wg < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 40 : 32));
    if (threadIdx.x < 32)
      produce(&q_map, &k_map, &v_map, table, query_start, context_len, ticket, q_at, k_at, v_at, bars, item, sequences, few, kv_heads,
        k_block, k_head, v_block, v_head, table_row, shift);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 232 : 160));
  int thread = threadIdx.x % 128, lane = thread % 32, t = lane % 4, row = wg * 64 + thread / 32 * 16 + lane / 4;
  const long long stride = (long long)kv_heads * (GROUP * DIM);  // of out, in elements
  for (long long token = query_start[sequences] + blockIdx.x; token < tokens; token += gridDim.x) {  // tokens of no sequence
    for (int i = threadIdx.x - 128; i < stride / 8; i += 128 * WGS) *(uint4 *)(out + token * stride + 8 * i) = make_uint4(0, 0, 0, 0);
    if (lse) for (int i = threadIdx.x - 128; i < kv_heads * GROUP; i += 128 * WGS) lse[token * kv_heads * GROUP + i] = NOTHING;
  }
  const u64 q_rows = described(q_at + wg * 8192);
  int mine = 1 + wg, others = 1 + (wg + 1) % WGS;
  int ks = 0, vs = 0, kp = 0, vp = 0, qp = 0, ip = 0;
  if (wg == WGS - 1) pass(others);
  for (;;) {
    wait(item_full, ip);
    ip ^= 1;
    const int token = item->token, live = item->live, head = item->head, tiles = item->tiles, lowest = item->lowest, context = item->context;
    __syncwarp();
    if (lane == 0) arrive(item_empty);
    if (token < 0) return;
    float s[64], o[DIM / 2], base[2] = {NOTHING, NOTHING}, mass[2] = {0.0f, 0.0f};
    u32 p[32];
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) o[i] = 0.0f;
    auto used = [&](u32 bar) { if (lane == 0) arrive(bar); };
    if (tiles) {
      int n = tiles - 1, whole = max(lowest + wg * 64 / GROUP + 1, 0) / KEYS;  // tiles before this one are seen by every row
      const int limit[2] = {lowest + row / GROUP - 2 * t, lowest + (row + 8) / GROUP - 2 * t};
      if (tiles * KEYS > context) {  // what lies beyond a sequence may be NaN, and NaN · 0 would be, too
        wait(v_full + 8 * vs, vp);
        int from = (context - n * KEYS) * 8, each = KEYS * 8;  // in 16 bytes
        for (int h = 0; h < HALVES; h++)
          for (int i = from + (int)threadIdx.x - 128; i < each; i += 128 * WGS)
            clear(v_at + vs * KV_BYTES + h * (KEYS * 128) + i * 16);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, %1;" ::"n"(ALL), "n"(128 * WGS) : "memory");
      }
      wait(q_full, qp);
      qp ^= 1;
      wait(k_full + 8 * ks, kp);
      begin();
      scores(s, q_rows, described(k_at + ks * KV_BYTES));
      commit();
      finished<0>();
      hold(s);
      used(k_empty + 8 * ks);
      if (++ks == STAGES) { ks = 0; kp ^= 1; }
      if (n == 0) used(q_empty);
      hide(s, limit, n * KEYS);
      rebase(p, s, o, base, mass, scale);
      for (n--; n >= 0; n--) {
        wait(k_full + 8 * ks, kp);
        turn(mine);
        begin();
        scores(s, q_rows, described(k_at + ks * KV_BYTES));
        commit();
        wait(v_full + 8 * vs, vp);
        weighted(o, p, by_column(v_at + vs * KV_BYTES));
        commit();
        pass(others);
        finished<1>();
        hold(s);
        used(k_empty + 8 * ks);
        if (++ks == STAGES) { ks = 0; kp ^= 1; }
        if (n == 0) used(q_empty);
        finished<0>();
        hold(o);
        used(v_empty + 8 * vs);
        if (++vs == STAGES) { vs = 0; vp ^= 1; }
        if (n >= whole) hide(s, limit, n * KEYS);
        if (n >= whole || !weigh(p, s, base, mass, scale)) rebase(p, s, o, base, mass, scale);
      }
      wait(v_full + 8 * vs, vp);
      begin();
      weighted(o, p, by_column(v_at + vs * KV_BYTES));
      commit();
#pragma unroll
      for (int r = 0; r < 2; r++) {
        mass[r] += __shfl_xor_sync(~0u, mass[r], 1);
        mass[r] += __shfl_xor_sync(~0u, mass[r], 2);
      }
      finished<0>();
      hold(o);
      used(v_empty + 8 * vs);
      if (++vs == STAGES) { vs = 0; vp ^= 1; }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float by = mass[r] == 0.0f ? 0.0f : 1.0f / mass[r];
      int pair = row + 8 * r, query = pair / GROUP;
      u16 *to = out + (token + query) * stride + (head + pair % GROUP) * DIM;
      if (lse && t == 0 && query < live && pair < QUERIES * GROUP)  // natural, of the row's scores; base and mass are of powers of 2
        lse[(long long)(token + query) * kv_heads * GROUP + head + pair % GROUP] = (base[r] + log2f(mass[r])) * 0.6931472f;
#pragma unroll
      for (int g = 0; g < DIM / 32; g++) {
        u32 q[4];
#pragma unroll
        for (int j = 0; j < 4; j++) { int i = (g * 4 + j) * 4 + 2 * r; q[j] = pack(o[i] * by, o[i + 1] * by); }
        transpose(q, t);
        if (query < live && pair < QUERIES * GROUP) *(uint4 *)(to + (g * 4 + t) * 8) = make_uint4(q[0], q[1], q[2], q[3]);
      }
    }
  }
}
