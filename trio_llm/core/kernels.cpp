// What torch lacks on a CPU, for a few rows at a time: linear layers with packed weights, in int8 or
// float32, attention that reads the pages of the KV memory in place, decoder layers of both in one go, models
// that have nothing else, and the race that draws a token.
//
// core/kernels.py compiles this file at first use and says what the functions at its end do.
// Vectors are the compiler's own (vector_size), so it builds for any CPU; only `dot4` and `fma`
// name instructions.  Parts called inside a parallel region share their loops among its threads
// (orphaned `omp for`, whose end is a barrier).
//
// Every result of a row depends on that row alone, bit for bit: integers are added exactly, and
// floats in an order that neither the number of rows nor that of threads changes.  Build it
// without options that let the compiler reorder (-ffast-math) or fuse as it likes (-ffp-contract).

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
using Word = uint32_t;

namespace {

template <int W> struct Lanes {
    typedef float F __attribute__((vector_size(4 * W), aligned(4)));
    typedef int32_t I __attribute__((vector_size(4 * W), aligned(4)));
    typedef uint32_t U __attribute__((vector_size(4 * W), aligned(4)));
};
using Floats = Lanes<16>::F;
using Ints = Lanes<16>::I;
using Words = Lanes<16>::U;

constexpr int TILE = 16;   // outputs of a linear layer that are computed side by side
constexpr int GROUP = 64;  // inputs that share a scale
constexpr float NEG_INF = -INFINITY;

template <class V> V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }

// a * b + c, fused where the CPU can: never left to the compiler, who would fuse one loop and not another
template <class V> inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
    if constexpr (sizeof(V) == 16) return (V)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#endif
#if defined(__FP_FAST_FMAF)
    for (unsigned i = 0; i < sizeof(V) / sizeof(float); i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

template <int W> float sum(typename Lanes<W>::F v) {
    float parts[W];
    std::memcpy(parts, &v, sizeof v);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

template <int W> float largest(typename Lanes<W>::F v) {
#if defined(__AVX512F__)
    if constexpr (W == 16) return _mm512_reduce_max_ps((__m512)v);
#endif
    float parts[W];
    std::memcpy(parts, &v, sizeof v);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] = parts[i] > parts[i + half] ? parts[i] : parts[i + half];
    return parts[0];
}

// e to the x for x up to 88, to within two units in the last place: 2^n times a polynomial in the
// remainder (coefficients of Cephes' expf).  Below -87 it is 0; NaN stays NaN.
template <int W> typename Lanes<W>::F exp(typename Lanes<W>::F x) {
    using F = typename Lanes<W>::F;
    using I = typename Lanes<W>::I;
    const F shift = F{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    F n = fma(x, F{} + 1.44269504f, shift) - shift;
    F r = fma(n, F{} + 2.12194440e-4f, fma(n, F{} - 0.693359375f, x));
    F p = F{} + 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, F{} + c);
    p = fma(p, r * r, r + 1.0f);
    I power = (__builtin_convertvector(n, I) + 127) << 23;
    F scale;
    std::memcpy(&scale, &power, sizeof scale);
    return x < -87.0f ? F{} : p * scale;
}

// The natural logarithm of a number above 0, to within two units in the last place (Cephes' logf).
Floats log(Floats x) {
    Ints bits;
    std::memcpy(&bits, &x, sizeof bits);
    Floats exponent = __builtin_convertvector((bits >> 23) - 126, Floats);
    bits = (bits & 0x007fffff) | 0x3f000000;
    Floats m;
    std::memcpy(&m, &bits, sizeof m);  // from 0.5 to 1
    const Ints low = m < 0.707106781f;
    m = low ? m + m - 1.0f : m - 1.0f;
    exponent = low ? exponent - 1.0f : exponent;
    Floats p = Floats{} + 7.0376836292e-2f;
    for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                    2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
        p = fma(p, m, Floats{} + c);
    p = fma(m * m, fma(p, m, Floats{} - 0.5f), exponent * -2.12194440e-4f);
    return fma(exponent, Floats{} + 0.693359375f, m + p);
}

float exp(float x) { return exp<1>(Lanes<1>::F{x})[0]; }

// ---- linear layers ----
//
// Weights are packed in tiles of 16 outputs.  In float32 a tile has the 16 weights of an input side by
// side.  In int8 it has groups of 64 inputs, and a weight is scale * (byte - 128), the byte unsigned
// because the dot product instruction of x86 wants one unsigned side.  Rows are then quantised when
// they come: row = scale * int8, a scale for each group.

struct Group {
    float scales[TILE];
    uint8_t weights[GROUP / 4][TILE][4];
};

// acc[i] + the dot product of four unsigned weights and four signed inputs, exactly
inline Ints dot4(Ints acc, const uint8_t (*weights)[4], const int8_t* inputs) {
#if defined(__AVX512VNNI__)
    int32_t four;
    std::memcpy(&four, inputs, 4);
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, _mm512_loadu_si512(weights), _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    // bytes 0 and 2, then 1 and 3, of each four become 16-bit pairs: no sum can saturate
    const auto pair = [](int low, int high) { return _mm256_set1_epi32((high << 16) | (low & 0xffff)); };
    const __m256i even = pair(inputs[0], inputs[2]), odd = pair(inputs[1], inputs[3]);
    const __m256i mask = _mm256_set1_epi32(0x00ff00ff);
    __m256i halves[2];
    std::memcpy(halves, &acc, sizeof acc);
    for (int half = 0; half < 2; half++) {
        const __m256i w = _mm256_loadu_si256((const __m256i*)(weights + 8 * half));
        const __m256i a = _mm256_madd_epi16(_mm256_and_si256(w, mask), even);
        const __m256i b = _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 8), mask), odd);
        halves[half] = _mm256_add_epi32(halves[half], _mm256_add_epi32(a, b));
    }
    std::memcpy(&acc, halves, sizeof acc);
    return acc;
#else
    for (int i = 0; i < TILE; i++)
        for (int j = 0; j < 4; j++) acc[i] += weights[i][j] * inputs[j];
    return acc;
#endif
}

// Quantise up to 64 numbers, the rest of the group being zeros; gives the scale.  A group that
// holds an infinity or a NaN has the scale NaN, which spoils its own row and no other.
float quantize(const float* x, int count, int8_t* q) {
    uint32_t top = 0;  // as bits, NaN is larger than all
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float most;
    std::memcpy(&most, &top, 4);
    if (!(most <= 3.4e38f)) {
        std::memset(q, 0, GROUP);
        return NAN;
    }
    const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
    for (int i = 0; i < count; i++) q[i] = (int8_t)(int32_t)__builtin_rintf(x[i] * inverse);
    std::memset(q + count, 0, GROUP - count);
    return most / 127.0f;
}

// Rows as they are, and quantised: numbers (rows, groups, 64), and for each group its scale and -128
// times its sum, which takes back what the unsigned weights have too much.
struct Rows {
    const float* floats;
    int64_t stride;
    bool quantized;
    int8_t* numbers;
    float* scales;
    int32_t* offsets;
    int64_t groups;

    void quantize_row(int64_t row, int64_t width) const {
        const float* x = floats + row * stride;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t place = row * groups + g, left = width - g * GROUP;
            int8_t* q = numbers + place * GROUP;
            scales[place] = quantize(x + g * GROUP, left < GROUP ? (int)left : GROUP, q);
            int32_t total = 0;
            for (int i = 0; i < GROUP; i++) total += q[i];
            offsets[place] = -128 * total;
        }
    }
};

// Memory that is kept from one call to the next, for the thread that calls.
struct Scratch {
    std::vector<char> memory;
    size_t used = 0;

    void reset(size_t bytes) {
        if (memory.size() < bytes) memory.resize(bytes);
        used = 0;
    }
    template <class T> T* take(int64_t count) {
        T* p = (T*)(memory.data() + used);
        used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};
thread_local Scratch scratch;  // of layers
thread_local Scratch states;   // of what goes through them

int64_t groups_of(int64_t width) { return (width + GROUP - 1) / GROUP; }

size_t rows_bytes(int64_t rows, int64_t width) { return rows * groups_of(width) * (GROUP + 8) + 3 * 64; }

struct Linear {
    const char* tiles;
    const float* bias;  // or null
    int64_t inputs, outputs;
    int64_t step;  // its tiles are every step-th
    int64_t in_floats;

    int64_t tile_bytes() const {
        return in_floats ? inputs * TILE * (int64_t)sizeof(float) : groups_of(inputs) * (int64_t)sizeof(Group);
    }
};

// Room for quantised rows, of whatever layer comes.
struct Room {
    int8_t* numbers;
    float* scales;
    int32_t* offsets;

    Room(int64_t rows, int64_t width) {
        const int64_t places = rows * groups_of(width);
        numbers = scratch.take<int8_t>(places * GROUP);
        scales = scratch.take<float>(places);
        offsets = scratch.take<int32_t>(places);
    }
    Rows rows_for(const Linear& layer, const float* x, int64_t stride) const {
        return {x, stride, !layer.in_floats, numbers, scales, offsets, groups_of(layer.inputs)};
    }
};

enum class Store { PLAIN, ADD, GATED };

// R rows times two neighbouring tiles; `ahead`, what is read next, is fetched meanwhile
template <int R>
void multiply_floats(const Rows& rows, int64_t row, int64_t inputs, const char* left, const char* right,
                     const char* ahead, float (*out)[2 * TILE]) {
    const float* x = rows.floats + row * rows.stride;
    Floats total[R][2] = {};
    for (int64_t k = 0; k < inputs; k++) {
        __builtin_prefetch(ahead + 2 * k * sizeof(Floats));
        __builtin_prefetch(ahead + (2 * k + 1) * sizeof(Floats));
        const Floats weights[2] = {load<Floats>(left + k * sizeof(Floats)), load<Floats>(right + k * sizeof(Floats))};
        for (int r = 0; r < R; r++) {
            const Floats number = Floats{} + x[r * rows.stride + k];
            for (int t = 0; t < 2; t++) total[r][t] = fma(number, weights[t], total[r][t]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < 2; t++) store(out[r] + t * TILE, total[r][t]);
}

template <int R>
void multiply_integers(const Rows& rows, int64_t row, const Group* left, const Group* right, const char* ahead,
                       float (*out)[2 * TILE]) {
    const int64_t groups = rows.groups;
    Floats total[R][2] = {};
    for (int64_t g = 0; g < groups; g++) {
        const int8_t* inputs[R];
        Ints part[R][2];
        for (int r = 0; r < R; r++) {
            const int64_t place = (row + r) * groups + g;
            inputs[r] = rows.numbers + place * GROUP;
            part[r][0] = part[r][1] = Ints{} + rows.offsets[place];
        }
        for (int k = 0; k < GROUP / 4; k++) {
            __builtin_prefetch(ahead);
            __builtin_prefetch(ahead + 64);
            ahead += 128;
            for (int r = 0; r < R; r++) {
                part[r][0] = dot4(part[r][0], left[g].weights[k], inputs[r] + 4 * k);
                part[r][1] = dot4(part[r][1], right[g].weights[k], inputs[r] + 4 * k);
            }
        }
        ahead += 2 * (sizeof(Group) - GROUP * TILE);
        const Floats scales[2] = {load<Floats>(left[g].scales), load<Floats>(right[g].scales)};
        for (int r = 0; r < R; r++)
            for (int t = 0; t < 2; t++)
                total[r][t] = fma(__builtin_convertvector(part[r][t], Floats),
                                  scales[t] * rows.scales[(row + r) * groups + g], total[r][t]);
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < 2; t++) store(out[r] + t * TILE, total[r][t]);
}

// out (rows, width) = rows times layer.  ADD adds it to out.  GATED takes tiles in turn from a gate
// and from what it gates, and gives silu(gate) * gated, half as wide.
template <Store STORE> void linear(const Linear& layer, const Rows& rows, int64_t count, float* out, int64_t stride) {
    constexpr int MOST = 6;  // with two tiles, what fits the registers of AVX-512
    const int64_t tiles = (layer.outputs + TILE - 1) / TILE, pairs = (tiles + 1) / 2;
    // a thread takes neighbouring pairs, a few times over: the next is mostly its own, and no thread waits for long
    const int64_t share = pairs / 16 + 1;
#pragma omp for schedule(dynamic, share)
    for (int64_t pair = 0; pair < pairs; pair++) {
        const int64_t step = layer.step * layer.tile_bytes();
        const char* left = layer.tiles + 2 * pair * step;
        const char* right = 2 * pair + 1 < tiles ? left + step : left;
        const int64_t first = 2 * TILE * pair;
        const int64_t width = layer.outputs - first < 2 * TILE ? layer.outputs - first : 2 * TILE;
        int64_t turns = (count + MOST - 1) / MOST;
        for (int64_t row = 0, num; row < count; row += num) {
            float made[MOST][2 * TILE];
            num = (count - row + turns - 1) / turns;  // alike in all turns: one of few rows would wait for memory only
            turns--;
            const char* ahead = row + num < count ? left : left + 2 * step;
            const auto multiply = [&](auto R) {
                if (layer.in_floats) multiply_floats<R>(rows, row, layer.inputs, left, right, ahead, made);
                else multiply_integers<R>(rows, row, (const Group*)left, (const Group*)right, ahead, made);
            };
            switch (num) {
                case 1: multiply(std::integral_constant<int, 1>{}); break;
                case 2: multiply(std::integral_constant<int, 2>{}); break;
                case 3: multiply(std::integral_constant<int, 3>{}); break;
                case 4: multiply(std::integral_constant<int, 4>{}); break;
                case 5: multiply(std::integral_constant<int, 5>{}); break;
                default: multiply(std::integral_constant<int, 6>{});
            }
            for (int64_t r = 0; r < num; r++) {
                float* to = out + (row + r) * stride;
                if (layer.bias)
                    for (int64_t i = 0; i < width; i++) made[r][i] += layer.bias[first + i];
                if constexpr (STORE == Store::GATED) {
                    const Floats gate = load<Floats>(made[r]), gated = load<Floats>(made[r] + TILE);
                    store(to + TILE * pair, gate / (1.0f + exp<TILE>(-gate)) * gated);
                } else if constexpr (STORE == Store::ADD) {
                    for (int64_t i = 0; i < width; i++) to[first + i] += made[r][i];
                } else {
                    for (int64_t i = 0; i < width; i++) to[first + i] = made[r][i];
                }
            }
        }
    }
}

void quantize_rows(int64_t width, int64_t count, const Rows& rows) {
    if (!rows.quantized) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; row++) rows.quantize_row(row, width);
}

// ---- RMS normalisation ----

float rms_factor(const float* x, int64_t width, float eps) {
    Floats squares{};
    int64_t i = 0;
    for (; i + TILE <= width; i += TILE) {
        const Floats v = load<Floats>(x + i);
        squares = fma(v, v, squares);
    }
    float total = sum<TILE>(squares);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / (float)width + eps);
}

void rms_norm(const float* x, const float* weight, int64_t width, float eps, float* out) {
    const float factor = rms_factor(x, width, eps);
    for (int64_t i = 0; i < width; i++) out[i] = weight[i] * (x[i] * factor);
}

void norm_and_quantize(const float* x, const float* weight, float eps, int64_t width, int64_t count, float* normed,
                       const Rows& rows) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; row++) {
        rms_norm(x + row * width, weight, width, eps, normed + row * width);
        if (rows.quantized) rows.quantize_row(row, width);
    }
}

// ---- attention over pages ----
//
// Keys and values are kept as words of 32 bits: a float, or two neighbouring numbers in bfloat16.
// A page holds a block's tokens of one layer, head by head, so that a head's part is read in one
// stream: keys (block, head, words of dim, token), values (block, head, words of tokens, dim).
// With the tokens of keys side by side their scores are, too, and nothing is added across a vector.

}  // namespace

extern "C" {

struct Pages {
    Word* keys;
    Word* values;
    int64_t num_heads, key_dim, value_dim, block_size;
    int64_t numbers_per_word;
};

// The sequences of a step: for each its first token among the packed, how many there are, their first
// position, and where its block table begins.
struct Spans {
    int64_t count, num_tokens;
    const int64_t *offsets, *lengths, *starts, *tables;
    const int64_t* blocks;
};

// Numbers of the step's tokens: (token, head, dim), each stride in floats.
struct Heads {
    const float* data;
    int64_t token_stride, head_stride;

    const float* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

struct Attention {
    int64_t num_heads;
    float scaling, softcap;  // softcap 0: none
    int64_t window;          // 0: none
    const float* sinks;      // or null
};
}

namespace {

// A word of one float.
struct Single {
    static constexpr int NUMBERS = 1;

    template <int W> static typename Lanes<W>::F dot(typename Lanes<W>::U a, typename Lanes<W>::U b, typename Lanes<W>::F c) {
        using F = typename Lanes<W>::F;
        return fma((F)a, (F)b, c);
    }
    template <int W> static void pack(const typename Lanes<W>::F& numbers, Word* to) { store(to, numbers); }
};

template <int W> struct Twos {
    typedef uint64_t Both __attribute__((vector_size(4 * W)));
    typedef Word Words __attribute__((vector_size(2 * W), aligned(4)));
};

// A word of two bfloat16, the first in the low half.
struct Pair {
    static constexpr int NUMBERS = 2;

    // a.low * b.low + a.high * b.high + c
    template <int W> static typename Lanes<W>::F dot(typename Lanes<W>::U a, typename Lanes<W>::U b, typename Lanes<W>::F c) {
        using F = typename Lanes<W>::F;
#if defined(__AVX512BF16__)
        if constexpr (W == 16) return (F)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#endif
        c = fma((F)(a << 16), (F)(b << 16), c);
        return fma((F)(a & 0xffff0000u), (F)(b & 0xffff0000u), c);
    }
    // to the nearest, ties to even; the numbers become half as many words
    template <int W> static void pack(const typename Lanes<W>::F& numbers, Word* to) {
        typename Lanes<W>::U bits;
        std::memcpy(&bits, &numbers, sizeof bits);
        bits = bits + 0x7fff + ((bits >> 16) & 1);
        bits = numbers != numbers ? typename Lanes<W>::U{} + 0x7fc00000u : bits;
        typename Twos<W>::Both both;
        std::memcpy(&both, &bits, sizeof both);
        both = ((both >> 16) & 0xffff) | ((both >> 32) & 0xffff0000u);
        const auto words = __builtin_convertvector(both, typename Twos<W>::Words);
        store(to, words);
    }
};

uint16_t bfloat16(float number) {
    Word word;
    Pair::pack<2>(Lanes<2>::F{number, 0.0f}, &word);
    return (uint16_t)word;
}

template <class Cell> void write_token(const Pages& pages, int64_t block, int64_t slot, int64_t head, const float* key,
                                       const float* value) {
    const int64_t place = (block * pages.num_heads + head) * pages.block_size / Cell::NUMBERS;
    Word *keys = pages.keys + place * pages.key_dim, *values = pages.values + place * pages.value_dim;
    if constexpr (Cell::NUMBERS == 1) {
        for (int64_t d = 0; d < pages.key_dim; d++) std::memcpy(keys + d * pages.block_size + slot, key + d, sizeof(Word));
        std::memcpy(values + slot * pages.value_dim, value, pages.value_dim * sizeof(Word));
    } else {
        for (int64_t d = 0; d < pages.key_dim; d += 2)
            Pair::pack<2>(Lanes<2>::F{key[d], key[d + 1]}, keys + d / 2 * pages.block_size + slot);
        uint16_t* halves = (uint16_t*)(values + slot / 2 * pages.value_dim) + slot % 2;
        for (int64_t d = 0; d < pages.value_dim; d++) halves[2 * d] = bfloat16(value[d]);
    }
}

void write(const Pages& pages, const Spans& spans, const Heads& keys, const Heads& values) {
    const auto put = pages.numbers_per_word == 1 ? write_token<Single> : write_token<Pair>;
    int64_t s = 0;
#pragma omp for schedule(static)
    for (int64_t token = 0; token < spans.num_tokens; token++) {
        while (token >= spans.offsets[s] + spans.lengths[s]) s++;
        const int64_t position = spans.starts[s] + token - spans.offsets[s], size = pages.block_size;
        const int64_t block = spans.blocks[spans.tables[s] + position / size];
        for (int64_t h = 0; h < pages.num_heads; h++)
            put(pages, block, position % size, h, keys.at(token, h), values.at(token, h));
    }
}

constexpr int CHUNK = 64;     // keys between two looks at the largest score, at most (or one block)
constexpr int MAX_ROWS = 64;  // queries of a tile
constexpr int SIDE = 4;       // vectors that are computed side by side, for up to 6 rows: what fits the registers of AVX-512

// Queries of one sequence and one KV head that walk through the keys together.
struct Tile {
    int64_t rows, key_words, value_dim;
    int64_t positions[MAX_ROWS];
    float top[MAX_ROWS];
    Word* queries;   // (rows, key_words), scaled
    float* scores;   // (rows, keys of a chunk)
    Word* weights;   // (rows, words of a chunk)
    float* sums;     // (rows, value_dim)
    float* mass;     // (rows, W): what lane by lane is summed of the weights
};

// The keys that a tile sees between two looks at the largest score: whole blocks.
struct Chunk {
    int64_t first, keys, blocks, stride;  // stride: keys of a whole chunk
    const Word* key_blocks[CHUNK];
    const Word* value_blocks[CHUNK];
};

// scores of R rows for C vectors of W keys from the t-th on
template <class Cell, int W, int R, int C>
void score(const Tile& tile, const Chunk& chunk, int64_t size, int64_t row, int64_t t) {
    using F = typename Lanes<W>::F;
    using U = typename Lanes<W>::U;
    F total[R][C] = {};
    const Word* keys[C];
    const Word* query = tile.queries + row * tile.key_words;
    for (int c = 0; c < C; c++) keys[c] = chunk.key_blocks[(t + c * W) / size] + (t + c * W) % size;
    for (int64_t d = 0; d < tile.key_words; d++) {
        U key[C];
        for (int c = 0; c < C; c++) key[c] = load<U>(keys[c] + d * size);
        for (int r = 0; r < R; r++) {
            const U number = U{} + query[r * tile.key_words + d];
            for (int c = 0; c < C; c++) total[r][c] = Cell::template dot<W>(number, key[c], total[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(tile.scores + (row + r) * chunk.stride + t + c * W, total[r][c]);
}

// sums of R rows += weights times C vectors of W numbers of the values, from the d-th on
template <class Cell, int W, int R, int C>
void add(const Tile& tile, const Chunk& chunk, int64_t size, int64_t row, int64_t d) {
    using F = typename Lanes<W>::F;
    using U = typename Lanes<W>::U;
    constexpr int NUMBERS = Cell::NUMBERS;
    const int64_t dim = tile.value_dim, stride = chunk.stride / NUMBERS;
    float* sums = tile.sums + row * dim + d;
    F total[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) total[r][c] = load<F>(sums + r * dim + c * W);
    const auto take = [&](const Word* values, const Word* weights, U which) {
        U value[C];
        for (int c = 0; c < C; c++) value[c] = load<U>(values + c * W) & which;
        for (int r = 0; r < R; r++) {
            const U weight = U{} + weights[r * stride];
            for (int c = 0; c < C; c++) total[r][c] = Cell::template dot<W>(weight, value[c], total[r][c]);
        }
    };
    for (int64_t b = 0; b < chunk.blocks; b++) {
        const Word* values = chunk.value_blocks[b] + d;
        const Word* weights = tile.weights + row * stride + b * size / NUMBERS;
        const int64_t left = chunk.keys - b * size, count = left < size ? left : size;
        for (int64_t t = 0; t < count / NUMBERS; t++) take(values + t * dim, weights + t, U{} - 1);
        // what is beyond the last key was never written: it may be a NaN, which no weight of 0 undoes
        if (count % NUMBERS) take(values + count / NUMBERS * dim, weights + count / NUMBERS, U{} + 0xffff);
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(sums + r * dim + c * W, total[r][c]);
}

// Call `with` for all rows and vectors: (rows, vectors, first row, first vector), the first two known when compiling.
template <class Work> void in_tiles(int64_t rows, int64_t vectors, const Work& with) {
    const auto row = [&](auto num, int64_t r) {
        int64_t v = 0;
        for (; v + SIDE <= vectors; v += SIDE) with(num, std::integral_constant<int, SIDE>{}, r, v);
        for (; v < vectors; v++) with(num, std::integral_constant<int, 1>{}, r, v);
    };
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) row(std::integral_constant<int, 6>{}, r);
    for (; r + 3 <= rows; r += 3) row(std::integral_constant<int, 3>{}, r);
    for (; r < rows; r++) row(std::integral_constant<int, 1>{}, r);
}

// Scores of a row become weights: masked, and e to them less the largest so far.  What was summed
// before shrinks by as much as the largest grew.
template <class Cell, int W> void weigh(Tile& tile, const Chunk& chunk, int64_t row, int64_t width, const Attention& how) {
    using F = typename Lanes<W>::F;
    using I = typename Lanes<W>::I;
    float* scores = tile.scores + row * chunk.stride;
    Word* weights = tile.weights + row * chunk.stride / Cell::NUMBERS;
    const int64_t position = tile.positions[row] - chunk.first;
    const int64_t low = how.window ? position - how.window + 1 : 0;
    if (how.softcap != 0)
        for (int64_t t = 0; t < width; t++) scores[t] = std::tanh(scores[t] / how.softcap) * how.softcap;
    F most = F{} + NEG_INF;
    if (position < width - 1 || low > 0) {  // not all of them are seen
        I key{};
        for (int i = 0; i < W; i++) key[i] = i;
        const int32_t last = position < width ? (int32_t)position : (int32_t)width;
        const int32_t begin = low < width ? (int32_t)low : (int32_t)width;
        for (int64_t t = 0; t < width; t += W) {
            const I at = key + (int32_t)t;
            store(scores + t, (at <= last) & (at >= begin) ? load<F>(scores + t) : F{} + NEG_INF);
        }
    }
    for (int64_t t = 0; t < width; t += W) {
        const F score = load<F>(scores + t);
        most = score > most ? score : most;
    }
    const float top = largest<W>(most), before = tile.top[row];
    const float now = top > before ? top : before;
    if (now == NEG_INF) {  // nothing is seen yet
        std::memset(weights, 0, width / Cell::NUMBERS * sizeof(Word));
        return;
    }
    F mass = load<F>(tile.mass + row * W);
    if (now != before) {
        const float shrink = exp(before - now);
        for (int64_t d = 0; d < tile.value_dim; d++) tile.sums[row * tile.value_dim + d] *= shrink;
        mass *= shrink;
        tile.top[row] = now;
    }
    for (int64_t t = 0; t < width; t += W) {
        const F weight = exp<W>(load<F>(scores + t) - now);
        Cell::template pack<W>(weight, weights + t / Cell::NUMBERS);
        mass += weight;
    }
    store(tile.mass + row * W, mass);
}

void fetch(const Word* words, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(words + i);
}

template <class Cell, int W>
void attend_tile(Tile& tile, const Pages& pages, const int64_t* table, int64_t head, const Attention& how, int64_t num_keys) {
    const int64_t size = pages.block_size, per_chunk = size < CHUNK ? CHUNK / size : 1;
    const int64_t key_words = pages.key_dim * size / Cell::NUMBERS, value_words = pages.value_dim * size / Cell::NUMBERS;
    Chunk chunk;
    chunk.stride = per_chunk * size;
    const int64_t low = how.window ? tile.positions[0] - how.window + 1 : 0;
    for (int64_t r = 0; r < tile.rows; r++) tile.top[r] = NEG_INF;
    std::memset(tile.sums, 0, tile.rows * tile.value_dim * sizeof(float));
    std::memset(tile.mass, 0, tile.rows * W * sizeof(float));
    const auto keys_of = [&](int64_t block) { return pages.keys + (table[block] * pages.num_heads + head) * key_words; };
    chunk.first = low > 0 ? low / chunk.stride * chunk.stride : 0;
    for (; chunk.first < num_keys; chunk.first += chunk.stride) {
        chunk.keys = num_keys - chunk.first < chunk.stride ? num_keys - chunk.first : chunk.stride;
        chunk.blocks = (chunk.keys + size - 1) / size;
        for (int64_t b = 0; b < chunk.blocks; b++) {
            const int64_t block = chunk.first / size + b;
            chunk.key_blocks[b] = keys_of(block);
            chunk.value_blocks[b] = pages.values + (table[block] * pages.num_heads + head) * value_words;
            // blocks lie apart, where no hardware looks ahead: the next keys and these values are fetched meanwhile
            if ((block + per_chunk) * size < num_keys) fetch(keys_of(block + per_chunk), key_words);
            fetch(chunk.value_blocks[b], value_words);
        }
        const int64_t width = chunk.blocks * size;
        in_tiles(tile.rows, width / W, [&](auto rows, auto vectors, int64_t row, int64_t vector) {
            score<Cell, W, rows, vectors>(tile, chunk, size, row, vector * W);
        });
        for (int64_t row = 0; row < tile.rows; row++) weigh<Cell, W>(tile, chunk, row, width, how);
        in_tiles(tile.rows, tile.value_dim / W, [&](auto rows, auto vectors, int64_t row, int64_t vector) {
            add<Cell, W, rows, vectors>(tile, chunk, size, row, vector * W);
        });
    }
}

template <class Cell, int W> void attend_with(const Pages& pages, const Spans& spans, const Heads& queries,
                                              const Attention& how, float* out) {
    const int64_t heads_each = how.num_heads / pages.num_heads;
    const int64_t tile_tokens = heads_each < MAX_ROWS ? MAX_ROWS / heads_each : 1;
    int64_t tiles = 0;
    for (int64_t s = 0; s < spans.count; s++) tiles += (spans.lengths[s] + tile_tokens - 1) / tile_tokens;
    const int64_t chunk = pages.block_size < CHUNK ? CHUNK / pages.block_size * pages.block_size : pages.block_size;
    static thread_local std::vector<float> numbers;
    numbers.resize(MAX_ROWS * (pages.key_dim + 2 * chunk + pages.value_dim + W));
    // the last tokens of a sequence see the most: they come first, so that no thread ends with the longest
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tiles * pages.num_heads; task++) {
        int64_t index = task / pages.num_heads, s = 0, in_span;
        const int64_t head = task % pages.num_heads;
        while (index >= (in_span = (spans.lengths[s] + tile_tokens - 1) / tile_tokens)) index -= in_span, s++;
        const int64_t begin = (in_span - 1 - index) * tile_tokens;
        const int64_t end = begin + tile_tokens < spans.lengths[s] ? begin + tile_tokens : spans.lengths[s];
        for (int64_t h = 0; h < heads_each; h += MAX_ROWS) {  // more than one turn only where MAX_ROWS heads share keys
            const int64_t heads = heads_each - h < MAX_ROWS ? heads_each - h : MAX_ROWS;
            Tile tile;
            tile.rows = (end - begin) * heads;
            tile.key_words = pages.key_dim / Cell::NUMBERS;
            tile.value_dim = pages.value_dim;
            tile.scores = numbers.data();
            tile.sums = tile.scores + MAX_ROWS * chunk;
            tile.mass = tile.sums + MAX_ROWS * pages.value_dim;
            tile.weights = (Word*)(tile.mass + MAX_ROWS * W);
            tile.queries = tile.weights + MAX_ROWS * chunk;
            const int64_t first_head = head * heads_each + h;
            for (int64_t r = 0; r < tile.rows; r++) {
                const float* query = queries.at(spans.offsets[s] + begin + r / heads, first_head + r % heads);
                for (int64_t d = 0; d < tile.key_words; d++) {
                    typename Lanes<Cell::NUMBERS>::F scaled;
                    std::memcpy(&scaled, query + d * Cell::NUMBERS, sizeof scaled);
                    Cell::template pack<Cell::NUMBERS>(scaled * how.scaling, tile.queries + r * tile.key_words + d);
                }
                tile.positions[r] = spans.starts[s] + begin + r / heads;
            }
            attend_tile<Cell, W>(tile, pages, spans.blocks + spans.tables[s], head, how, spans.starts[s] + end);
            for (int64_t r = 0; r < tile.rows; r++) {
                const int64_t token = spans.offsets[s] + begin + r / heads, of = first_head + r % heads;
                float factor = 1.0f, mass = sum<W>(load<typename Lanes<W>::F>(tile.mass + r * W));
                if (how.sinks) {  // a score without a value: it takes weight and gives nothing
                    const float now = how.sinks[of] > tile.top[r] ? how.sinks[of] : tile.top[r];
                    factor = exp(tile.top[r] - now);
                    mass = mass * factor + exp(how.sinks[of] - now);
                }
                float* to = out + (token * how.num_heads + of) * pages.value_dim;
                for (int64_t d = 0; d < pages.value_dim; d++) to[d] = tile.sums[r * pages.value_dim + d] * factor / mass;
            }
        }
    }
}

void attend(const Pages& pages, const Spans& spans, const Heads& queries, const Attention& how, float* out) {
    const int64_t both = pages.block_size | pages.value_dim;  // a power of two divides it if it divides both
    if (pages.numbers_per_word == 2) {  // both even
        if (both % 16 == 0) attend_with<Pair, 16>(pages, spans, queries, how, out);
        else attend_with<Pair, 2>(pages, spans, queries, how, out);
    } else {
        if (both % 16 == 0) attend_with<Single, 16>(pages, spans, queries, how, out);
        else if (both % 4 == 0) attend_with<Single, 4>(pages, spans, queries, how, out);
        else attend_with<Single, 1>(pages, spans, queries, how, out);
    }
}

// ---- sampling ----

// A 32-bit integer hash with low bias (Chris Wellons' public-domain "hash-prospector").
Words mix(Words x) {
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x *= 0xD35A2D97u;
    return x ^ (x >> 15);
}

// Exponential noise for vocabulary ids, as core/sampler.py makes it.
Floats exponential(Words ids, const int32_t* key) {
    const Words bits = mix(mix(ids ^ (uint32_t)key[0]) ^ (uint32_t)key[1]) & 0x7fffffffu;
    Floats uniform = (__builtin_convertvector((Ints)bits, Floats) + 0.5f) * 0x1p-31f;
    uniform = uniform > 1.0f - 0x1p-24f ? Floats{} + (1.0f - 0x1p-24f) : uniform;
    const Floats rest = 1.0f - uniform;  // and what that lost in rounding:
    return -(log(rest) + ((1.0f - rest) - uniform) / rest);
}

struct Winner {
    Floats best = Floats{} + INFINITY;
    Ints place{};

    void see(Floats race, Ints at) {
        const Ints better = race < best;
        best = better ? race : best;
        place = better ? at : place;
    }
    int64_t get() const {
        int64_t found = 0;
        for (int i = 1; i < TILE; i++)
            if (best[i] < best[found] || (best[i] == best[found] && place[i] < place[found])) found = i;
        return place[found];
    }
};

// The winner of the race among the candidates of one row that top_p and min_p leave; see core/sampler.py.
int64_t draw(const float* logits, int64_t size, float temperature, float top_p, float min_p, const int32_t* key) {
    static thread_local std::vector<float> memory;
    const int64_t steps = (size + TILE - 1) / TILE;
    memory.resize(2 * steps * TILE);
    float *weights = memory.data(), *race = weights + steps * TILE;
    Floats most = Floats{} + NEG_INF;
    for (int64_t s = 0; s < steps; s++) {
        Floats v = Floats{} + NEG_INF;
        std::memcpy(&v, logits + s * TILE, (s + 1 < steps ? TILE : size - s * TILE) * sizeof(float));
        store(weights + s * TILE, v);
        most = v > most ? v : most;
    }
    const float top = largest<TILE>(most), inverse = 1.0f / temperature;
    Ints lanes{};
    for (int i = 0; i < TILE; i++) lanes[i] = i;
    Floats total{};
    Winner winner;
    for (int64_t s = 0; s < steps; s++) {
        const Ints ids = lanes + (int32_t)(s * TILE);
        const Floats weight = exp<TILE>((load<Floats>(weights + s * TILE) - top) * inverse);
        Floats r = exponential((Words)ids, key) / weight;  // infinite where the weight is 0
        r = weight >= min_p ? r : Floats{} + INFINITY;
        store(weights + s * TILE, weight);
        store(race + s * TILE, r);
        total += weight;
        winner.see(r, ids);
    }
    const float limit = top_p * sum<TILE>(total);
    for (;;) {
        const int64_t place = winner.get();
        if (top_p >= 1.0f) return place;
        // may it stand?  Only if what is likelier, or as likely and before it, has less mass than top_p
        const float own = weights[place];
        const auto ahead = [&](Floats weight, Ints ids) {
            return (weight > own) | ((weight == own) & (ids < (int32_t)place));
        };
        Floats mass{};
        for (int64_t s = 0; s < steps; s++) {
            const Floats weight = load<Floats>(weights + s * TILE);
            mass += ahead(weight, lanes + (int32_t)(s * TILE)) ? weight : Floats{};
        }
        const float before = sum<TILE>(mass);
        if (before < limit || before == 0.0f) return place;
        winner = {};
        for (int64_t s = 0; s < steps; s++) {  // it leaves, with all that come after it
            const Ints ids = lanes + (int32_t)(s * TILE);
            const Floats stays = ahead(load<Floats>(weights + s * TILE), ids) ? load<Floats>(race + s * TILE)
                                                                             : Floats{} + INFINITY;
            store(race + s * TILE, stays);
            winner.see(stays, ids);
        }
    }
}

// The place of a row's largest logit, the first of equals; -1 if it is not finite, or one of the row is not a number.
int64_t best(const float* logits, int64_t size) {
    constexpr int64_t PART = 1024;  // looked through again for the place
    constexpr int SIDE = 4;         // vectors that wait for each other the least
    Ints strange{};
    float top = NEG_INF;
    int64_t place = 0;
    for (int64_t begin = 0; begin < size; begin += PART) {
        const int64_t end = begin + PART < size ? begin + PART : size;
        Floats most[SIDE];
        for (Floats& vector : most) vector = Floats{} + NEG_INF;
        const auto see = [&](Floats logit, Floats& so_far) {
            strange |= logit != logit;
            so_far = logit > so_far ? logit : so_far;
        };
        int64_t i = begin;
        for (; i + SIDE * TILE <= end; i += SIDE * TILE)
            for (int v = 0; v < SIDE; v++) see(load<Floats>(logits + i + v * TILE), most[v]);
        for (; i < end; i++) see(Floats{} + logits[i], most[0]);
        for (int v = 1; v < SIDE; v++) most[0] = most[v] > most[0] ? most[v] : most[0];
        if (const float found = largest<TILE>(most[0]); found > top) top = found, place = begin;
    }
    for (int i = 0; i < TILE; i++)
        if (strange[i]) return -1;
    if (!std::isfinite(top)) return -1;
    while (logits[place] != top) place++;
    return place;
}

}  // namespace

extern "C" {

void trio_llm_best(const float* logits, int64_t size, int64_t count, int64_t* tokens, int threads) {
    // to wake another thread takes longer than a few rows
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (count > 8)
    for (int64_t row = 0; row < count; row++) tokens[row] = best(logits + row * size, size);
}

void trio_llm_draw(const float* logits, int64_t size, int64_t count, const int64_t* rows, const float* temperatures,
                   const float* top_ps, const float* min_ps, const int32_t* keys, int64_t* tokens, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++)
        tokens[i] = draw(logits + rows[i] * size, size, temperatures[i], top_ps[i], min_ps[i], keys + 2 * i);
}

// A decoder layer that norms, attends and adds, then norms, feeds forward and adds.
struct Decoder {
    const float *norm_weights, *next_norm_weights;
    float eps, next_eps;
    Linear projections, output, gate_up, down;  // query, key and value are one
    const float *query_norm, *key_norm;         // of each head, or null
    float head_eps;
    int64_t rotary_dim;
    Attention attention;
    Pages pages;
};

int64_t trio_llm_vector_bytes =
#if defined(__AVX512F__)
    64;
#elif defined(__AVX2__)
    32;
#else
    16;
#endif

// `layer` says where to; its tiles are written.
void trio_llm_pack(const float* weight, const Linear* layer) {
    const int64_t inputs = layer->inputs, outputs = layer->outputs, tiles = (outputs + TILE - 1) / TILE;
    const int64_t groups = groups_of(inputs);
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles; tile++) {
        char* to = (char*)layer->tiles + tile * layer->step * layer->tile_bytes();
        if (layer->in_floats) {
            for (int64_t k = 0; k < inputs; k++)
                for (int i = 0; i < TILE; i++) {
                    const int64_t output = tile * TILE + i;
                    ((float*)to)[k * TILE + i] = output < outputs ? weight[output * inputs + k] : 0.0f;
                }
            continue;
        }
        for (int64_t g = 0; g < groups; g++) {
            Group& group = ((Group*)to)[g];
            const int64_t left = inputs - g * GROUP;
            for (int i = 0; i < TILE; i++) {
                int8_t numbers[GROUP] = {};
                const int64_t output = tile * TILE + i;
                const float* x = weight + output * inputs + g * GROUP;
                group.scales[i] = output < outputs ? quantize(x, left < GROUP ? (int)left : GROUP, numbers) : 0.0f;
                for (int k = 0; k < GROUP; k++) group.weights[k / 4][i][k % 4] = (uint8_t)(numbers[k] + 128);
            }
        }
    }
}

void trio_llm_linear(const Linear* layer, const float* x, int64_t stride, int64_t count, float* out, int threads) {
    scratch.reset(rows_bytes(count, layer->inputs));
    const Rows rows = Room(count, layer->inputs).rows_for(*layer, x, stride);
#pragma omp parallel num_threads(threads)
    {
        quantize_rows(layer->inputs, count, rows);
        linear<Store::PLAIN>(*layer, rows, count, out, layer->outputs);
    }
}

void trio_llm_attend(const Pages* pages, const Spans* spans, const Heads* queries, const Heads* keys, const Heads* values,
                     const Attention* how, float* out, int threads) {
#pragma omp parallel num_threads(threads)
    {
        write(*pages, *spans, *keys, *values);
        attend(*pages, *spans, *queries, *how, out);
    }
}

// Layer after layer, in one parallel region.
void trio_llm_decoders(const Decoder* layers, int64_t num_layers, const Spans* spans, const float* x,
                       const float* cosines, const float* sines, float* out, int threads) {
    const int64_t count = spans->num_tokens, width = layers->projections.inputs;
    int64_t widest = width, most_projected = 0, most_attended = 0, most_inner = 0;
    const auto raise = [](int64_t& most, int64_t to) { most = to > most ? to : most; };
    for (int64_t i = 0; i < num_layers; i++) {
        raise(most_projected, layers[i].projections.outputs);
        raise(most_attended, layers[i].output.inputs);
        raise(most_inner, layers[i].down.inputs);
    }
    raise(widest, most_attended);
    raise(widest, most_inner);
    const int64_t floats = count * (width + most_projected + most_attended + most_inner) + 4 * 16;
    scratch.reset(rows_bytes(count, widest) + floats * sizeof(float));
    const Room room(count, widest);
    float* normed = scratch.take<float>(count * width);
    float* projections = scratch.take<float>(count * most_projected);
    float* mixed = scratch.take<float>(count * most_attended);
    float* gated = scratch.take<float>(count * most_inner);
#pragma omp parallel num_threads(threads)
    for (int64_t i = 0; i < num_layers; i++) {
        const Decoder& layer = layers[i];
        const float* input = i == 0 ? x : out;
        const int64_t inner = layer.down.inputs, attended = layer.output.inputs;
        const int64_t projected = layer.projections.outputs, rotary = layer.rotary_dim;
        const int64_t heads = layer.attention.num_heads, kv_heads = layer.pages.num_heads;
        const int64_t dim = layer.pages.key_dim, value_dim = layer.pages.value_dim;
        const Heads queries{projections, projected, dim}, keys{projections + heads * dim, projected, dim};
        const Heads values{projections + (heads + kv_heads) * dim, projected, value_dim};
        Rows rows = room.rows_for(layer.projections, normed, width);
        norm_and_quantize(input, layer.norm_weights, layer.eps, width, count, normed, rows);
        linear<Store::PLAIN>(layer.projections, rows, count, projections, projected);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < count; token++) {
            const float *cosine = cosines + token * rotary, *sine = sines + token * rotary;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                float* head = projections + token * projected + h * dim;
                const float* norm = h < heads ? layer.query_norm : layer.key_norm;
                if (norm) rms_norm(head, norm, dim, layer.head_eps, head);
                for (int64_t d = 0; d < rotary / 2; d++) {
                    const float low = head[d], high = head[d + rotary / 2];
                    head[d] = low * cosine[d] - high * sine[d];
                    head[d + rotary / 2] = high * cosine[d + rotary / 2] + low * sine[d + rotary / 2];
                }
            }
        }
        write(layer.pages, *spans, keys, values);
        attend(layer.pages, *spans, queries, layer.attention, mixed);
        if (i == 0) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < count; row++)
                std::memcpy(out + row * width, x + row * width, width * sizeof(float));
        }
        rows = room.rows_for(layer.output, mixed, attended);
        quantize_rows(attended, count, rows);
        linear<Store::ADD>(layer.output, rows, count, out, width);
        rows = room.rows_for(layer.gate_up, normed, width);
        norm_and_quantize(out, layer.next_norm_weights, layer.next_eps, width, count, normed, rows);
        linear<Store::GATED>(layer.gate_up, rows, count, gated, inner);
        rows = room.rows_for(layer.down, gated, inner);
        quantize_rows(inner, count, rows);
        linear<Store::ADD>(layer.down, rows, count, out, width);
    }
}

// A model that is nothing but embeddings, such layers, a norm and a head.
struct Model {
    const float* embeddings;
    const Decoder* layers;
    int64_t num_layers, rotary_dim;
    const float *cosines, *sines;  // by position
    const float* norm_weights;
    float eps;
    Linear head;
};

// From the step's token ids to the logits of those tokens that are wanted, as indices among all.
void trio_llm_forward(const Model* model, const Spans* spans, const int64_t* token_ids, const int64_t* wanted,
                      int64_t num_wanted, float* logits, int threads) {
    const int64_t count = spans->num_tokens, width = model->head.inputs, rotary = model->rotary_dim;
    states.reset((2 * count * (width + rotary) + num_wanted * width + 5 * 16) * sizeof(float));
    float* embedded = states.take<float>(count * width);
    float* hidden = states.take<float>(count * width);
    float* cosines = states.take<float>(count * rotary);
    float* sines = states.take<float>(count * rotary);
    float* normed = states.take<float>(num_wanted * width);
    const auto copy = [](float* to, const float* from, int64_t size, int64_t to_row, int64_t from_row) {
        std::memcpy(to + to_row * size, from + from_row * size, size * sizeof(float));
    };
    for (int64_t s = 0, token = 0; s < spans->count; s++)
        for (int64_t i = 0; i < spans->lengths[s]; i++, token++) {
            copy(embedded, model->embeddings, width, token, token_ids[token]);
            copy(cosines, model->cosines, rotary, token, spans->starts[s] + i);
            copy(sines, model->sines, rotary, token, spans->starts[s] + i);
        }
    trio_llm_decoders(model->layers, model->num_layers, spans, embedded, cosines, sines, hidden, threads);
    scratch.reset(rows_bytes(num_wanted, width));
    const Rows rows = Room(num_wanted, width).rows_for(model->head, normed, width);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_wanted; row++)
            rms_norm(hidden + wanted[row] * width, model->norm_weights, width, model->eps, normed + row * width);
        quantize_rows(width, num_wanted, rows);
        linear<Store::PLAIN>(model->head, rows, num_wanted, logits, model->head.outputs);
    }
}
}
