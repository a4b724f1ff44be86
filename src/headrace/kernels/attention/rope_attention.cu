// Decode attention of sequences with one query each, in one launch with what stands before it: rotary embedding of q and k, and the write
// of the newest key and value into the paged cache.
//
// Programs go through spans of one line of units, (sequence, KV head, UNIT keys), as kernels/attention/triton_plan.py deals them out; before its keys
// each pair of sequence and KV head has a unit without keys, since beginning and ending one takes time, too. Each warp owns
// KEYS keys of every unit: it copies them into a ring of its own, STAGES units ahead, and attends to them; nobody waits for another warp
// until a pair of sequence and KV head is done with. Keys of earlier steps are asked for before the kernel in front of this one has ended.
//
// NORMED: before they are turned, q and k of each head are divided by the root of their mean square, and multiplied by a weight.
//
// FRESH 0: q has been turned and the newest keys lie in the cache, as beside prompts, where one launch does that for all tokens: what is left
// is attention.
//
// Where the plan finds many sequences, all about as long, each warp has whole pairs to itself instead, and nobody waits for another at all.
// TEAM: warps that share a pair, a program's four or one; UNIT is so many times KEYS keys.
//
// S' = K Q' and O' += V' P': keys, or elements of a value, are the 16 rows of mma.m16n8k16, the heads of a group its 8 columns. So what
// belongs to a head (its peak, its mass, its sums) is in the same lanes throughout: lane (g, t) has heads 2 t and 2 t + 1.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short bf16;

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int HQ = G * HK, HALF = D / 2, STEPS = D / 16;  // STEPS of a product over a head's elements
constexpr int CHUNKS = D / 8, ROW = 2 * D;                // 16 bytes each; bytes
constexpr int SLICE = KEYS * ROW, STAGE = 2 * SLICE, RING = STAGES * STAGE;
constexpr int ENTRIES = BLOCK % KEYS ? KEYS / 8 : 1;      // of the block table, for a warp's keys of a unit
constexpr int PITCH = D + 4;                              // of sums in shared memory: no two lanes of a store in one bank
static_assert(G <= 8 && (D == 64 || D == 128) && KEYS % 16 == 0 && BLOCK % 8 == 0, "shapes this kernel is for");
#define MINUS_INFINITY __int_as_float(0xff800000)

// What a program is to do, as kernels/attention/triton_plan.py lays it out.
struct __align__(16) Record { int begin, end, sequence, head, step, first_0, last_0, first_1, last_1, shared[5], context, alike; };

struct Params {
  bf16* qkv;                   // [rows, HQ + 2 HK, D], rows token_stride apart; not FRESH: only q is read
  bf16* out;                   // [rows, HQ, D]
  bf16* keys;                  // [blocks, HK, BLOCK, D], blocks and heads with strides
  bf16* values;                // the same
  const Record* plan;          // [programs]
  const int* context;          // [rows]; 0: a row of no sequence
  const int* table;            // [rows, table_stride]
  const long long* positions;  // [rows]; this and the next two for FRESH alone
  const long long* slots;      // [rows]; -1: nowhere
  const float* cos_sin;        // [positions, D]
  const bf16* q_norm;          // [D]; this and the next for NORMED alone
  const bf16* k_norm;          // [D]
  float* parts;                // [programs, 2, G, D]
  float* peaks;                // [programs, 2, G]
  int* tickets;                // [programs], zero between launches
  long long block_stride, head_stride;
  int token_stride, table_stride, rows;
  float scale;  // of scores, times log2 e
  float eps;    // of norms
  int early;    // it may begin before the kernel in front has ended
};

struct Shared {
  float sums[WARPS][G][PITCH];
  float peak[WARPS][8], mass[WARPS][8];
  int complete[2];
  int alone;  // whether all other parts of the pair that this program leaves unfinished are there
};
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __device__ const int shared_bytes = WARPS * RING + sizeof(Shared);

// --- instructions

__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float first, float second) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first)); return r; }
__device__ __forceinline__ float exp2_(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
__device__ __forceinline__ float log2_(float v) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
__device__ __forceinline__ u32 transposed(u32 v) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ u64 first_to_go() {  // from the second-level cache: keys are read once, what others read again stays
  u64 r;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r));
  return r;
}
// 16 bytes; of them, ``bytes`` are read, the others zero.
__device__ __forceinline__ void copy_async(u32 to, const void* from, int bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" :: "r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}
__device__ __forceinline__ void store_shared(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" :: "r"(to), "r"(v) : "memory"); }
__device__ __forceinline__ u32 word_at(const bf16* p) { return *reinterpret_cast<const u32*>(p); }
__device__ __forceinline__ void put_word(bf16* p, u32 v) { *reinterpret_cast<u32*>(p) = v; }
template <class T> __device__ __forceinline__ T from_l2(const T* p) { return __ldcg(p); }  // what other programs write
template <class T> __device__ __forceinline__ T given(const T* p) { return __ldg(p); }     // what nobody writes while layers follow each other
__device__ __forceinline__ void keep(int v) { asm volatile("" :: "r"(v) : "memory"); }  // so that it is loaded, into the first-level cache

// --- the line of units

// Step 0 of a pair has no keys. upcoming: the next sequence's context, asked for long before.
struct Place { int sequence, head, step, tiles, context, upcoming; };

template <int TEAM> __device__ __forceinline__ int first_key(const Place& at, int warp) { return (at.step - 1) * TEAM * KEYS + warp * KEYS; }

__device__ __forceinline__ int context_of(const Params& p, int sequence) { return sequence < p.rows ? given(p.context + sequence) : 0; }

template <int TEAM> __device__ __forceinline__ int tiles_of(int context) { return 1 + max((context + TEAM * KEYS - 1) / (TEAM * KEYS), 1); }

template <int TEAM> __device__ __forceinline__ void enter(Place& at, const Params& p, int context) {
  at.context = context;
  at.tiles = tiles_of<TEAM>(context);
  at.upcoming = context_of(p, at.sequence + 1);
}

// To the first unit of the next pair.
template <int TEAM> __device__ __forceinline__ void next_pair(Place& at, const Params& p) {
  at.step = 0;
  if (++at.head < HK) return;
  at.head = 0;
  ++at.sequence;
  enter<TEAM>(at, p, at.upcoming);
}

template <int TEAM> __device__ __forceinline__ void advance(Place& at, const Params& p) {
  if (++at.step == at.tiles) next_pair<TEAM>(at, p);
}

__device__ __forceinline__ long long position_of(const Params& p, int sequence) { return FRESH ? given(p.positions + sequence) : 0; }

// --- keys and values of earlier steps

struct Copies {  // what comes next into the ring
  Place at;
  int left;            // units
  int entry[ENTRIES];  // of the block table
  u64 policy;
};

template <int TEAM> __device__ __forceinline__ void look_up(Copies& c, const Params& p, int warp) {
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    int first = first_key<TEAM>(c.at, warp) + i * 8;
    c.entry[i] = c.left > 0 && first < c.at.context - FRESH ? given(p.table + (long long)c.at.sequence * p.table_stride + first / BLOCK) : 0;
  }
}

template <int TEAM> __device__ __forceinline__ void copy_unit(const Copies& c, const Params& p, u32 to, int warp, int lane) {
  if (c.left > 0) {
    constexpr int ROWS = 32 / CHUNKS, PIECE = ENTRIES == 1 ? KEYS : 8;  // rows a copy of all lanes has; rows that lie in one block
    int first = first_key<TEAM>(c.at, warp), row = lane / CHUNKS, chunk = lane % CHUNKS, left = c.at.context - FRESH - first - row;
    u32 mine = to + row * ROW + ((chunk ^ row) << 4);
#pragma unroll
    for (int piece = 0; piece < ENTRIES; ++piece) {
      long long from = c.entry[piece] * p.block_stride + c.at.head * p.head_stride + (first + piece * PIECE) % BLOCK * D + row * D + chunk * 8;
      const bf16 *key = p.keys + from, *value = p.values + from;
#pragma unroll
      for (int i = 0; i < PIECE / ROWS; ++i) {
        int below = piece * PIECE + i * ROWS, bytes = below < left ? 16 : 0;
        u32 at = (mine ^ ((below & 7) << 4)) + below * ROW;
        copy_async(at, key + i * ROWS * D, bytes, c.policy);
        copy_async(at + SLICE, value + i * ROWS * D, bytes, c.policy);
      }
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// To the next unit that has keys.
__device__ __forceinline__ void settle_copies(Copies& c) {
  if (c.at.step == 0 && c.left > 0) { c.at.step = 1; --c.left; }
}

template <int TEAM> __device__ __forceinline__ void go_on(Copies& c, const Params& p, int warp) {
  if (--c.left > 0) advance<TEAM>(c.at, p);
  settle_copies(c);
  look_up<TEAM>(c, p, warp);
}

// The first units: their places in the block table are looked up at once, not one after the other.
template <int TEAM> __device__ __forceinline__ void find_first(Copies (&first)[STAGES], Copies& c, const Params& p, int warp) {
  settle_copies(c);
  look_up<TEAM>(c, p, warp);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    first[i] = c;
    go_on<TEAM>(c, p, warp);
  }
}

template <int TEAM> __device__ __forceinline__ void copy_first(const Copies (&first)[STAGES], const Params& p, u32 ring, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < STAGES; ++i) copy_unit<TEAM>(first[i], p, ring + i * STAGE, warp, lane);
}

// --- this step's query, key and value

struct Angle { float2 cos, sin; };  // of two elements

struct Angles {
  Angle query[STEPS / 2][2];  // of elements 16 s + 8 h + 2 t and the next
  long long position;         // of the newest key
  long long upcoming;         // the next sequence's position
};

__device__ __forceinline__ Angle angle_at(const float* angles, int element) {
  return {given(reinterpret_cast<const float2*>(angles + element)), given(reinterpret_cast<const float2*>(angles + HALF + element))};
}

__device__ __forceinline__ void load_angles(Angles& a, const Params& p, int sequence, long long position, int lane) {
  if (FRESH) {
    const float* angles = p.cos_sin + position * D;
#pragma unroll
    for (int s = 0; s < STEPS / 2; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) a.query[s][h] = angle_at(angles, 16 * s + 8 * h + 2 * (lane % 4));
  }
  a.position = position;
  a.upcoming = sequence + 1 < p.rows ? position_of(p, sequence + 1) : 0;
}

__device__ __forceinline__ void turn(u32& first, u32& second, const Angle& a) {
  float x = low(first), y = high(first), u = low(second), v = high(second);
  first = pack(x * a.cos.x - u * a.sin.x, y * a.cos.y - v * a.sin.y);
  second = pack(u * a.cos.x + x * a.sin.x, v * a.cos.y + y * a.sin.y);
}

// The weights of norms, as lanes have q and k; what nobody writes.
struct Weights { u32 query[STEPS][2], key[2]; };

__device__ __forceinline__ void load_weights(Weights& w, const Params& p, int lane) {
  if (!NORMED) return;
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) w.query[s][h] = word_at(p.q_norm + 16 * s + 8 * h + 2 * (lane % 4));
#pragma unroll
  for (int i = 0; i < 2; ++i) w.key[i] = word_at(p.k_norm + i * HALF + 2 * lane % HALF);
}

__device__ __forceinline__ float squared(u32 v) { return low(v) * low(v) + high(v) * high(v); }
__device__ __forceinline__ u32 normed(u32 v, u32 weight, float rstd) { return pack(low(v) * rstd * low(weight), high(v) * rstd * high(weight)); }
// ``sum``: this lane's share of a head that so many neighbours have.
template <int LANES> __device__ __forceinline__ float rstd_of(float sum, const Params& p) {
#pragma unroll
  for (int lanes = 1; lanes < LANES; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return rsqrtf(sum / D + p.eps);
}

struct Newest {
  u32 query[STEPS][2];   // of head g, elements 16 s + 8 h + 2 t and the next
  u32 key[2];            // elements 2 lane and the next of each half
  u32 value[D / 64];     // elements 2 (lane + 32 j) and the next
  Angle angle;           // of the key
  long long slot;        // of the cache; -1: nowhere
  bool owned;            // key and value are this warp's to place
};

// ``ends``: this program reaches the pair's last unit.
template <int TEAM>
__device__ __forceinline__ void load_newest(Newest& n, const Angles& a, const Params& p, const Place& at, bool ends, int warp, int lane) {
  const bf16* row = p.qkv + (long long)at.sequence * p.token_stride;
  const bf16* q = row + (at.head * G + lane / 4) * D + 2 * (lane % 4);
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) n.query[s][h] = G == 8 || lane / 4 < G ? word_at(q + 16 * s + 8 * h) : 0;
  n.owned = FRESH && ends && at.context > 0 && (at.context - 1) % (TEAM * KEYS) / KEYS == warp;
  if (n.owned) {
    const bf16* k = row + (HQ + at.head) * D;
    n.key[0] = word_at(k + 2 * lane % HALF);
    n.key[1] = word_at(k + HALF + 2 * lane % HALF);
#pragma unroll
    for (int j = 0; j < D / 64; ++j) n.value[j] = word_at(k + HK * D + 2 * (lane + 32 * j));
    n.slot = given(p.slots + at.sequence);
    n.angle = angle_at(p.cos_sin + a.position * D, 2 * lane % HALF);
  }
}

__device__ __forceinline__ void turn_query(Newest& n, const Angles& a, const Weights& w, const Params& p) {
  if (NORMED) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) sum += squared(n.query[s][0]) + squared(n.query[s][1]);
    float rstd = rstd_of<4>(sum, p);
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) n.query[s][h] = normed(n.query[s][h], w.query[s][h], rstd);
  }
  if (FRESH) {
#pragma unroll
    for (int s = 0; s < STEPS / 2; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) turn(n.query[s][h], n.query[s + STEPS / 2][h], a.query[s][h]);
  }
}

__device__ __forceinline__ u32 word_in(u32 slice, int row, int word) { return slice + row * ROW + (((word / 4) ^ (row & 7)) << 4) + word % 4 * 4; }

// The newest key and value: among the others of this unit, and in the cache.
__device__ __forceinline__ void place_newest(Newest& n, const Params& p, const Place& at, const Weights& w, u32 slice, int lane) {
  int row = (at.context - 1) % KEYS;
  long long to = n.slot / BLOCK * p.block_stride + at.head * p.head_stride + n.slot % BLOCK * D;
  if (NORMED) {
    float rstd = rstd_of<HALF / 2>(squared(n.key[0]) + squared(n.key[1]), p);
#pragma unroll
    for (int i = 0; i < 2; ++i) n.key[i] = normed(n.key[i], w.key[i], rstd);
  }
  turn(n.key[0], n.key[1], n.angle);
  if (HALF == 64 || lane < HALF / 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_shared(word_in(slice, row, lane + i * (HALF / 2)), n.key[i]);
      if (n.slot >= 0) put_word(p.keys + to + i * HALF + 2 * lane, n.key[i]);
    }
  }
#pragma unroll
  for (int j = 0; j < D / 64; ++j) {
    store_shared(word_in(slice + SLICE, row, lane + 32 * j), n.value[j]);
    if (n.slot >= 0) put_word(p.values + to + 2 * (lane + 32 * j), n.value[j]);
  }
}

// --- attention

// Of heads 2 t and 2 t + 1. mass: this lane's share. o[j]: elements 16 j + g of both heads, then 16 j + g + 8.
struct Softmax { float peak[2], mass[2]; float o[STEPS][4]; };

__device__ __forceinline__ void clear(Softmax& a) {
  a.peak[0] = a.peak[1] = MINUS_INFINITY;
  a.mass[0] = a.mass[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < STEPS; ++j) a.o[j][0] = a.o[j][1] = a.o[j][2] = a.o[j][3] = 0.0f;
}

__device__ __forceinline__ float over_keys(float v) {  // the most of all lanes with this one's heads
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 4));
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 8));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 16));
}

__device__ __forceinline__ void attend(Softmax& a, const u32 (&q)[STEPS][2], u32 slice, int first, int context, float scale, int lane) {
  constexpr int TILES = KEYS / 16;
  const u32 key_at = slice + lane % 16 * ROW + (((lane / 16) ^ (lane & 7)) << 4);
  const u32 value_at = slice + SLICE + (lane % 8 + lane / 16 * 8) * ROW + (((lane / 8 % 2) ^ (lane & 7)) << 4);
  float c[TILES][4] = {}, other[TILES][4] = {};  // two sums, so that half as many instructions wait for each other
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 k[4];
      load_matrices(k, (key_at ^ (s << 5)) + m * 16 * ROW);
      mma(s % 2 ? other[m] : c[m], k, q[s][0], q[s][1]);
    }
  float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int key = first + m * 16 + e / 2 * 8 + lane / 4;
      c[m][e] = key < context ? (c[m][e] + other[m][e]) * scale : MINUS_INFINITY;
      most[e % 2] = fmaxf(most[e % 2], c[m][e]);
    }
  float keep[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float peak = fmaxf(a.peak[e], over_keys(most[e]));
    keep[e] = exp2_(a.peak[e] - peak);  // the first key of a slice is one of the sequence: no peak is -inf from here on
    a.peak[e] = peak;
    a.mass[e] *= keep[e];
  }
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      c[m][e] = exp2_(c[m][e] - a.peak[e % 2]);
      a.mass[e % 2] += c[m][e];
    }
#pragma unroll
  for (int j = 0; j < STEPS; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) a.o[j][e] *= keep[e % 2];
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    u32 early = transposed(pack(c[m][0], c[m][1])), late = transposed(pack(c[m][2], c[m][3]));
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      u32 v[4];
      load_transposed(v, (value_at ^ (j << 5)) + m * 16 * ROW);
      mma(a.o[j], v, early, late);
    }
  }
}

// --- results

__device__ __forceinline__ float share(float peak, float most) { return peak == MINUS_INFINITY ? 0.0f : exp2_(peak - most); }

__device__ __forceinline__ void put_result(const Params& p, int sequence, int head, int member, int element, const float4& sum, float by) {
  uint2 both = {pack(sum.x * by, sum.y * by), pack(sum.z * by, sum.w * by)};
  *reinterpret_cast<uint2*>(p.out + ((long long)sequence * HQ + head * G + member) * D + element) = both;
}

__device__ __forceinline__ void add(float4& sum, const float4& part, float by) {
  sum.x += part.x * by; sum.y += part.y * by; sum.z += part.z * by; sum.w += part.w * by;
}

__device__ __forceinline__ int part_of(int program, int first) { return program * 2 + (program == first); }

// A result from ``own``, the part of program ``first``, and those of programs begin to last, in this order.
__device__ __forceinline__ void join_parts(const Params& p, int sequence, int head, int member, int element, const float4& own, float own_peak,
                                           int first, int begin, int last) {
  float most = own_peak;
#pragma unroll 4
  for (int program = begin; program <= last; ++program) most = fmaxf(most, from_l2(p.peaks + part_of(program, first) * G + member));
  float mass = share(own_peak, most);
  float4 sum = {own.x * mass, own.y * mass, own.z * mass, own.w * mass};
#pragma unroll 4
  for (int program = begin; program <= last; ++program) {
    int part = part_of(program, first);
    float by = share(from_l2(p.peaks + part * G + member), most);
    mass += by;
    add(sum, from_l2(reinterpret_cast<const float4*>(p.parts + ((long long)part * G + member) * D + element)), by);
  }
  put_result(p, sequence, head, member, element, sum, mass == 0.0f ? 0.0f : 1.0f / mass);
}

// What the warps found becomes one: the result, or a part of it in place ``part``. ``behind``: up to this program, others have left parts
// of the same pair, if any; they follow this one's.
__device__ __forceinline__ void join_warps(Softmax& a, const Params& p, Shared& s, const Place& at, int part, int behind, int warp, int lane) {
  int g = lane / 4, t = lane % 4, program = blockIdx.x;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int by = 4; by < 32; by *= 2) a.mass[e] += __shfl_xor_sync(~0u, a.mass[e], by);
  __syncthreads();  // everybody has read what the pair before left here
  if (g == 0)
#pragma unroll
    for (int e = 0; e < 2; ++e) { s.peak[warp][2 * t + e] = a.peak[e]; s.mass[warp][2 * t + e] = a.mass[e]; }
#pragma unroll
  for (int j = 0; j < STEPS; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (2 * t + e % 2 < G) s.sums[warp][2 * t + e % 2][16 * j + g + e / 2 * 8] = a.o[j][e];
  __syncthreads();
  for (int i = threadIdx.x; i < G * D / 4; i += THREADS) {
    int member = i / (D / 4), element = i % (D / 4) * 4;
    float most = MINUS_INFINITY, mass = 0.0f;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) most = fmaxf(most, s.peak[w][member]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float by = share(s.peak[w][member], most);
      mass += by * s.mass[w][member];
      add(sum, *reinterpret_cast<const float4*>(&s.sums[w][member][element]), by);
    }
    float by = mass == 0.0f ? 1.0f : 1.0f / mass;
    if (part < 0) {
      put_result(p, at.sequence, at.head, member, element, sum, by);
      continue;
    }
    float4 own = {sum.x * by, sum.y * by, sum.z * by, sum.w * by};
    float peak = most + log2_(mass);
    if (behind > program) {
      join_parts(p, at.sequence, at.head, member, element, own, peak, program, program + 1, behind);
    } else {
      *reinterpret_cast<float4*>(p.parts + ((long long)part * G + member) * D + element) = own;
      if (element == 0) p.peaks[part * G + member] = peak;
    }
  }
}

// The result of a warp that had all keys of a pair: what belongs to a head goes from the lanes that have it to the lanes of a row.
__device__ __forceinline__ void put_alone(Softmax& a, const Params& p, const Place& at, int lane) {
  float by[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) a.mass[e] += __shfl_xor_sync(~0u, a.mass[e], lanes);
    by[e] = a.mass[e] == 0.0f ? 1.0f : 1.0f / a.mass[e];
  }
  bf16* to = p.out + ((long long)at.sequence * HQ + at.head * G + lane / 4) * D + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    u32 early = transposed(pack(a.o[j][0] * by[0], a.o[j][1] * by[1])), late = transposed(pack(a.o[j][2] * by[0], a.o[j][3] * by[1]));
    if (lane / 4 < G) { put_word(to + 16 * j, early); put_word(to + 16 * j + 8, late); }
  }
}

__device__ __forceinline__ int arrive(int* ticket) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
  return before;
}

// The parts of a pair from all programs, once they are there.
__device__ __forceinline__ void join_all(const Params& p, int sequence, int head, int first, int last) {
  for (int i = threadIdx.x; i < G * D / 4; i += THREADS) {
    int member = i / (D / 4), element = i % (D / 4) * 4, part = part_of(first, first);
    float4 own = from_l2(reinterpret_cast<const float4*>(p.parts + ((long long)part * G + member) * D + element));
    join_parts(p, sequence, head, member, element, own, from_l2(p.peaks + part * G + member), first, first + 1, last);
  }
}

// What a warp or a team asks for before its first unit.
template <int TEAM>
__device__ __forceinline__ void ask_first(Copies& copies, Angles& angles, Weights& weights, Newest& following, const Params& p, const Place& at,
                                          long long position, int units, u32 ring, int warp, int lane) {
  Copies first[STAGES];
  const bool ends = at.tiles - at.step <= units;
  copies.at = at;
  copies.left = units;
  copies.policy = first_to_go();
  find_first<TEAM>(first, copies, p, warp);
  if (p.early) copy_first<TEAM>(first, p, ring, warp, lane);
  load_angles(angles, p, at.sequence, position, lane);
  load_weights(weights, p, lane);
  wait_for_before();
  load_newest<TEAM>(following, angles, p, at, ends, warp, lane);
  if (!p.early) copy_first<TEAM>(first, p, ring, warp, lane);  // behind all those keys the query would come late
}

// A program's span of the line.
__device__ __forceinline__ void take_span(const Params& p, const Record& mine, int warp, int lane) {
  constexpr int TEAM = WARPS;
  Shared& s = *reinterpret_cast<Shared*>(memory + WARPS * RING);
  const u32 ring = (u32)__cvta_generic_to_shared(memory) + warp * RING;
  if (mine.begin >= mine.end) {
    wait_for_before();
    return;
  }
  Place at = {mine.sequence, mine.head, mine.step};
  long long position = position_of(p, at.sequence);
  enter<TEAM>(at, p, mine.context);
  const Place begun = at;
  const int begin = mine.begin, end = mine.end;
  Copies copies;
  Angles angles;
  Weights weights;
  Newest newest, following;
  ask_first<TEAM>(copies, angles, weights, following, p, at, position, end - begin, ring, warp, lane);
  u32 offset = 0;
  Softmax sums;
  Place ended = at;
  const bool continues = mine.first_0 <= mine.last_0, leaves = mine.first_1 <= mine.last_1;
  bool owing = false, alone = false;  // the ticket of the pair continued is still to be taken; s.alone
  int arrived = 0;                    // at the pair continued, before this program
  for (int unit = begin; unit < end; ++unit) {
    const bool opens = at.step == 0, last = at.step + 1 == at.tiles, stops = unit + 1 == end;
    if (owing) {  // as early as this, so that who waits for this part alone need not write its own
      __syncthreads();
      if (threadIdx.x == 0) arrived = arrive(p.tickets + mine.first_0);
      owing = false;
    }
    if (opens || unit == begin) {
      newest = following;
      turn_query(newest, angles, weights, p);
      clear(sums);
      int behind = unit + at.tiles - at.step;
      if (behind < end) {  // what the next pair needs is on its way during all of this one
        Place then = at;
        next_pair<TEAM>(then, p);
        if (then.sequence != at.sequence) load_angles(angles, p, then.sequence, angles.upcoming, lane);
        load_newest<TEAM>(following, angles, p, then, then.tiles <= end - behind, warp, lane);
      }
    }
    if (!opens) {
      asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
      __syncwarp();
      if (last && newest.owned) {
        place_newest(newest, p, at, weights, ring + offset, lane);
        __syncwarp();
      }
      int first = first_key<TEAM>(at, warp);
      if (first < at.context) attend(sums, newest.query, ring + offset, first, at.context, p.scale, lane);
      __syncwarp();
      copy_unit<TEAM>(copies, p, ring + offset, warp, lane);
      go_on<TEAM>(copies, p, warp);
      offset = offset + STAGE == RING ? 0 : offset + STAGE;
    }
    ended = at;
    advance<TEAM>(at, p);
    if (last || stops) {
      const bool whole = unit - ended.step >= begin;  // from its first unit on
      if (leaves && stops) {
        if (threadIdx.x == 0) {
          int there;
          asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(p.tickets + mine.first_1) : "memory");
          s.alone = there == mine.last_1 - mine.first_1;
          if (s.alone) p.tickets[mine.first_1] = 0;  // as the next launch wants it
        }
        __syncthreads();
        alone = s.alone;
      }
      join_warps(sums, p, s, ended, whole && last ? -1 : (int)blockIdx.x * 2 + whole, alone ? mine.last_1 : -1, warp, lane);
      owing = continues && !whole;
    }
  }
  // The pair continued and the pair left unfinished: whoever comes last to one adds it up.
  if (!continues && (!leaves || alone)) return;
  __syncthreads();  // parts of all threads before the tickets of one
  if (threadIdx.x == 0) {
    if (owing) arrived = arrive(p.tickets + mine.first_0);
    s.complete[0] = continues && arrived == mine.last_0 - mine.first_0;
    s.complete[1] = leaves && !alone && arrive(p.tickets + mine.first_1) == mine.last_1 - mine.first_1;
    if (s.complete[0]) p.tickets[mine.first_0] = 0;
    if (s.complete[1]) p.tickets[mine.first_1] = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < 2; ++i)
    if (s.complete[i])
      join_all(p, i ? ended.sequence : begun.sequence, i ? ended.head : begun.head, i ? mine.first_1 : mine.first_0, i ? mine.last_1 : mine.last_0);
}

// Whole pairs, as many for each warp of the grid. ``at``: the first of ``pairs``.
__device__ __forceinline__ void take_pairs(const Params& p, Place at, int context, long long position, int pairs, u32 ring, int lane) {
  constexpr int TEAM = 1;
  enter<TEAM>(at, p, context);
  int units = at.tiles;
  for (int i = 1; i < pairs; ++i) units += tiles_of<TEAM>(context_of(p, at.sequence + (at.head + i) / HK));
  Copies copies;
  Angles angles;
  Weights weights;
  Newest newest, following;
  ask_first<TEAM>(copies, angles, weights, following, p, at, position, units, ring, 0, lane);
  u32 offset = 0;
  for (; pairs > 0; --pairs) {
    Softmax sums;
    newest = following;
    turn_query(newest, angles, weights, p);
    clear(sums);
    if (pairs > 1) {
      Place then = at;
      next_pair<TEAM>(then, p);
      if (then.sequence != at.sequence) load_angles(angles, p, then.sequence, angles.upcoming, lane);
      load_newest<TEAM>(following, angles, p, then, true, 0, lane);
    }
    for (at.step = 1; at.step < at.tiles; ++at.step) {
      asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
      __syncwarp();
      if (at.step + 1 == at.tiles && newest.owned) {
        place_newest(newest, p, at, weights, ring + offset, lane);
        __syncwarp();
      }
      int first = first_key<TEAM>(at, 0);
      if (first < at.context) attend(sums, newest.query, ring + offset, first, at.context, p.scale, lane);
      __syncwarp();
      copy_unit<TEAM>(copies, p, ring + offset, 0, lane);
      go_on<TEAM>(copies, p, 0);
      offset = offset + STAGE == RING ? 0 : offset + STAGE;
    }
    put_alone(sums, p, at, lane);
    next_pair<TEAM>(at, p);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) rope_attention(const __grid_constant__ Params p) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Record mine;
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<int4*>(&mine)[i] = given(reinterpret_cast<const int4*>(p.plan + blockIdx.x) + i);
  // Neighbours on the line are on other processors. All is asked for at once, before it is known whether it is wanted.
  const int all = p.rows * HK, each = (all + gridDim.x * WARPS - 1) / (gridDim.x * WARPS);
  const int pair = (blockIdx.x + warp * gridDim.x) * each, pairs = min(each, all - pair);
  const int sequence = min(pair / HK, p.rows - 1), context = given(p.context + sequence);
  const long long position = position_of(p, sequence);
  const int entry = given(p.table + (long long)sequence * p.table_stride);
  if (!mine.alike) {
    take_span(p, mine, warp, lane);
  } else if (pairs > 0) {
    keep(entry);
    take_pairs(p, {sequence, pair % HK, 0}, context, position, pairs, (u32)__cvta_generic_to_shared(memory) + warp * RING, lane);
  } else {
    wait_for_before();
  }
}
